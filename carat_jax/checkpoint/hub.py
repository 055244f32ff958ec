"""From what a user names (bundled model, folder, hub id) to a folder on disk."""

import re
from importlib import resources
from pathlib import Path

from carat_jax.checkpoint.safetensors_file import CheckpointError

FILES = ["*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json",
         "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]  # fmt: skip


def resolve(name: str | Path) -> Path:
    """The folder of a model, downloaded if need be (with a progress bar).

    Args:
      name: "tiny" (the bundled model), a folder, or a hub id "owner/name".

    Raises:
      FileNotFoundError: none of the three.
      CheckpointError: the hub refused or could not be reached.
    """
    if str(name) == "tiny":
        return Path(str(resources.files("carat_jax") / "assets" / "tiny"))
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(name)) or folder.is_absolute():
        raise FileNotFoundError(
            f"{str(name)!r} is no folder: give 'tiny' (bundled), a folder with config.json and "
            "model.safetensors, or a hub id like 'google/gemma-4-31B-it'"
        )
    return _download(str(name))


def _download(repo: str) -> Path:
    import huggingface_hub  # here, because the import alone takes longer than a small model

    try:
        return Path(huggingface_hub.snapshot_download(repo, allow_patterns=FILES))
    except Exception as error:  # the library raises its own, requests' and OS errors
        reason = str(error).strip().split("\n")[0]
        raise CheckpointError(
            f"could not download {repo!r} ({reason}): check the name, the network and, for gated "
            "models, that you accepted the licence and ran `hf auth login`"
        ) from error
