"""From what a user names (bundled model, folder, hub id) to a folder on disk."""

import os
import re
from importlib import resources
from pathlib import Path

from carat_jax.checkpoint.errors import CheckpointError
from carat_jax.config import PRESETS

WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
SMALL_FILES = [
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]
_PART = r"[A-Za-z0-9][\w.-]{0,95}"
_HUB_ID = re.compile(f"{_PART}/{_PART}", re.ASCII)
_NAMES = (
    "'tiny' (bundled), a folder with config.json and model.safetensors, or a hub id like "
    "'google/gemma-4-31B-it'"
)


def resolve(name: str | Path, *, weights: bool = True) -> Path:
    """The folder of a model, downloaded if need be (with a progress bar).

    Args:
      name: "tiny" (the bundled model), a folder, or a hub id "owner/name".
      weights: False downloads the small files only.

    Raises:
      FileNotFoundError: none of the three.
      ValueError: not even a name.
      CheckpointError: the hub refused or could not be reached.
    """
    if not isinstance(name, str | os.PathLike):
        raise ValueError(f"a {type(name).__name__} in place of a model's name: give {_NAMES}")
    if name == "tiny":
        return Path(str(resources.files("carat_jax") / "assets" / "tiny"))
    folder = os.path.expanduser(name)
    if name and os.path.isdir(folder):
        return Path(folder)
    if isinstance(name, str) and _HUB_ID.fullmatch(name) and not os.path.lexists(folder):
        return _download(name, SMALL_FILES + WEIGHTS * weights)
    what = "is a file" if os.path.isfile(folder) else "is no folder"
    if str(name).lower() in PRESETS:
        what += f", but the name of a preset, which has no weights (`carat info {name}`: its sizes)"
    raise FileNotFoundError(f"{str(name)!r} {what}: give {_NAMES}")


def _download(repo: str, files: list[str]) -> Path:
    import huggingface_hub  # here, because the import alone takes longer than a small model

    try:
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=files))
    except Exception as error:  # the library raises its own, its HTTP client's and OS errors
        reason = str(error).strip().split("\n")[0] or type(error).__name__
        raise CheckpointError(
            f"{repo!r} is no folder here, and it could not be downloaded ({reason}): check the "
            "name, the network and, for gated models, that you accepted the licence and ran "
            "`hf auth login`"
        ) from error
