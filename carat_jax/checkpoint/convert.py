"""A checkpoint in another form: merged, transposed and cast once, so that loading only reads."""

import dataclasses
import json
import os
import shutil
import tempfile
from pathlib import Path

from jax.sharding import Mesh

from carat_jax.checkpoint import orbax_store
from carat_jax.checkpoint.loading import load_stored
from carat_jax.config import GemmaConfig

COPIED = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "chat_template.jinja",
)


def convert(
    source: str | Path,
    destination: str | Path,
    *,
    dtype: str | None = None,
    mesh: Mesh | None = None,
    progress: bool = True,
) -> None:
    """Writes a folder that `load` takes: Orbax weights, config.json, and the tokenizer's files.

    The folder appears when it is complete, and not at all after an error.

    Args:
      source: a checkpoint folder, as for `load_params`.
      destination: a folder that does not exist, or is empty.
      dtype: "bfloat16" or "float32"; None = what the source's config.json says.
      mesh: devices that hold the weights together meanwhile, and write each its own; what is
        written can be loaded onto any number.
      progress: show a bar on a terminal or in a notebook.

    Raises:
      FileExistsError: the destination is a file, or has something in it.
      FileNotFoundError, ConfigError, CheckpointError: as from reading the source.
    """
    source = Path(os.path.expanduser(source))
    destination = Path(os.path.abspath(os.path.expanduser(destination)))
    if destination.exists() and not (destination.is_dir() and not any(destination.iterdir())):
        raise FileExistsError(f"{destination} exists and is not an empty folder: choose another")
    config = GemmaConfig.from_json(source)
    if dtype is not None:
        config = dataclasses.replace(config, dtype=dtype)
    params = load_stored(source, config, mesh=mesh, progress=progress)
    parent = destination.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, prefix=f".{destination.name}.") as temporary:
        made = Path(temporary) / "checkpoint"
        made.mkdir()
        orbax_store.save(made, params)
        text = json.dumps(config.to_dict(), indent=2) + "\n"
        (made / "config.json").write_text(text, encoding="utf-8")
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, made / name)
        made.replace(destination)  # on the same file system, so all or nothing
