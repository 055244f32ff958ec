"""Checkpoints: safetensors and Orbax folders to parameters, and hub ids to folders."""

from carat_jax.checkpoint.hub import resolve
from carat_jax.checkpoint.loading import load_params
from carat_jax.checkpoint.safetensors_file import CheckpointError

__all__ = ["CheckpointError", "load_params", "resolve"]
