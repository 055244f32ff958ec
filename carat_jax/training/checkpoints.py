"""The newest state of a training run, kept through Orbax: a killed run goes on from it."""

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import orbax.checkpoint as ocp


class Checkpoints:
    """A folder of checkpoints of one run. Writing goes on behind the training.

    A checkpoint counts when it is complete, and the one before stays until then, so whenever a run
    dies, no more than what came after its last checkpoint is lost.

    Attributes:
      folder: for whatever else the run keeps until its end.
      every: seconds between two checkpoints.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any], every: float = 30.0) -> None:
        """Opens or makes the folder.

        Args:
          folder: of this run alone.
          settings: what the run is told, as JSON values; the same for all who go on with it.
          every: seconds.

        Raises:
          ValueError: `every` is not positive, or the folder is of a run with other settings.
        """
        if not every > 0:
            raise ValueError(f"{every} seconds between checkpoints: it must be positive")
        self.folder, self.every = folder, every
        folder.mkdir(parents=True, exist_ok=True)
        _settle(folder, json.loads(json.dumps(settings)))
        self._manager = ocp.CheckpointManager(
            (folder / "steps").resolve(), options=ocp.CheckpointManagerOptions(max_to_keep=1)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._manager.close()

    def save(self, step: int, arrays: Any, notes: Mapping[str, Any]) -> None:
        """Begins to write a checkpoint.

        Args:
          step: larger than the last one.
          arrays: a pytree of NumPy arrays, which nobody changes any more.
          notes: JSON values.
        """
        arguments = {"arrays": ocp.args.StandardSave(arrays), "notes": ocp.args.JsonSave(notes)}
        self._manager.save(step, args=ocp.args.Composite(**arguments))

    def restore(self, like: Any) -> tuple[Any, dict[str, Any]] | None:
        """The newest checkpoint's arrays (structure, shapes and dtypes of `like`) and notes."""
        step = self._manager.latest_step()
        if step is None:
            return None
        arguments = {"arrays": ocp.args.StandardRestore(like), "notes": ocp.args.JsonRestore()}
        found = self._manager.restore(step, args=ocp.args.Composite(**arguments))
        return found.arrays, found.notes

    def discard(self) -> None:
        """Removes the folder: the run has come to its end."""
        self._manager.close()
        shutil.rmtree(self.folder)


def _settle(folder: Path, settings: dict[str, Any]) -> None:
    """Writes the settings down, or holds them against those that are written."""
    file = folder / "settings.json"
    if not file.is_file():
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, file)
        return
    other = json.loads(file.read_text(encoding="utf-8"))
    names = sorted(settings.keys() | other.keys())
    differing = [
        f"{name} = {other.get(name)!r}, not {settings.get(name)!r}"
        for name in names
        if other.get(name) != settings.get(name)
    ]
    if differing:
        raise ValueError(
            f"{folder} is of a run with {'; '.join(differing)}. Go on with its settings, remove "
            "the folder, or choose another --out"
        )
