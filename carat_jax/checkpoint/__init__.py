"""Checkpoints: safetensors and Orbax folders to parameters, and hub ids to folders."""

from carat_jax.checkpoint.convert import convert
from carat_jax.checkpoint.errors import CheckpointError
from carat_jax.checkpoint.hub import resolve
from carat_jax.checkpoint.loading import load_params

__all__ = ["CheckpointError", "convert", "load_params", "resolve"]
