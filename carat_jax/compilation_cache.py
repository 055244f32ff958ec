"""Compiled functions kept on disk, so that the next process starts without compiling."""

import contextlib
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
    A user without a home folder goes without.
    """
    if jax.config.jax_compilation_cache_dir is None:
        with contextlib.suppress(RuntimeError):  # Path.home() found none
            jax.config.update("jax_compilation_cache_dir", str(default_folder()))
