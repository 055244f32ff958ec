"""A product that was left in pieces, for an op that reads it next to add them up."""

import functools
import operator
from collections.abc import Iterable

import jax
from flax import struct
from jax.typing import DTypeLike


class PartialSums(struct.PyTreeNode):
    """Stands for the array that the sum of its parts, rounded, is.

    Attributes:
      parts: float32 [n, ...].
      dtype: of the array.
    """

    parts: jax.Array
    dtype: DTypeLike = struct.field(pytree_node=False)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts.shape[1:]

    @property
    def ndim(self) -> int:
        return self.parts.ndim - 1

    @property
    def size(self) -> int:
        return self.parts[0].size

    def reshape(self, *shape: int) -> "PartialSums":
        return self.replace(parts=self.parts.reshape(self.parts.shape[0], *shape))


def summed(y: jax.Array | PartialSums) -> jax.Array:
    """The array that y stands for."""
    if not isinstance(y, PartialSums):
        return y
    return add_up(y.parts[i] for i in range(y.parts.shape[0])).astype(y.dtype)


def pieces(y: jax.Array | PartialSums) -> jax.Array:
    """[n, ...] whose sum y stands for: an array is one piece, of its own dtype."""
    return y.parts if isinstance(y, PartialSums) else y[None]


def add_up(parts: Iterable[jax.Array]) -> jax.Array:
    """One after another: every op that does it gets the same bits."""
    return functools.reduce(operator.add, parts)
