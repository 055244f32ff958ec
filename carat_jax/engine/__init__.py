"""Continuous batching: many generations at once, submitted whenever they come."""

from carat_jax.engine.engine import Engine, QueueFull
from carat_jax.engine.request import Cancelled, Request

__all__ = ["Cancelled", "Engine", "QueueFull", "Request"]
