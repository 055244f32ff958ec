"""Compiled functions kept on disk, so that the next process starts without compiling."""

import os
from pathlib import Path

import jax


def default_folder() -> Path:
    """The user's cache folder: $XDG_CACHE_HOME or ~/.cache, then carat-jax/xla."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "carat-jax" / "xla"


def enable() -> None:
    """Turns on JAX's persistent compilation cache, unless the user has chosen a folder already.

    XLA's autotuning results are kept with it, so that two processes run the same kernels.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(default_folder()))
