"""What is static about a call, and which keys belong to which block of the grid."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.row_copies import RowCopies

TILE = 64  # keys; the M of a matrix instruction
CHUNK = 128  # widths that one copy brings; 16 KiB with 64 keys
ROWS = (8, 16, 32, 40)  # query rows that one product may have; more are cut into blocks
MOST_BUFFERED_ROWS = 16  # of which the next item's are loaded meanwhile
SHARED_BYTES = 221 * 1024  # of the 227 KiB of a block; the rest: barriers, sums over a warpgroup


@dataclass(frozen=True)
class Shape:
    """Everything static about a call.

    Attributes:
      B, T, K, G, H: as in `pallas_kernels`.
      P: rotated widths of a compact cache; 0 = plain keys.
      slots: capacity of the cache.
      window: of a ring; None = a global cache.
      blocks: thread blocks, at most one for each multiprocessor: they wait for each other.
      interpreted: for the interpreter, which has no counter in global memory: two launches.
      reread: keys and values may stay in L2.
    """

    B: int
    T: int
    K: int
    G: int
    H: int
    P: int
    slots: int
    window: int | None
    blocks: int
    interpreted: bool
    reread: bool = False

    @property
    def rows(self) -> int:
        """Query rows of a product, padded."""
        return next(r for r in ROWS if r * self.row_blocks >= self.G * self.T)

    @property
    def row_blocks(self) -> int:
        """Products for a KV head; each of them reads its keys and values."""
        return -(-self.G * self.T // ROWS[-1])

    @property
    def given_rows(self) -> int:
        """Query rows of a product that lie in global memory: without those that fill it up."""
        return self.rows if self.interpreted or self.row_blocks > 1 else self.G * self.T

    def query_copies(self, width: int) -> RowCopies:
        """How the queries of a product get to shared memory."""
        return RowCopies(self.given_rows, self.rows, width)

    @property
    def groups(self) -> int:
        return self.B * self.K * self.row_blocks

    @property
    def splits(self) -> int:
        """Splits of a sequence's keys, at most; of a global cache, whatever B, T and capacity."""
        most = max(self.blocks // self.K, 1)
        return most if self.window is None else min(most, self.slots // TILE)

    @property
    def sizes(self) -> int:
        """Sizes of splits that one call may need."""
        return 1 if self.window is not None else 2

    @property
    def key_chunks(self) -> int:
        """Copies of a tile that only scores need."""
        return self.P // CHUNK if self.P else self.H // CHUNK

    @property
    def value_chunks(self) -> int:
        return self.H // CHUNK

    @property
    def chunks(self) -> int:
        return self.key_chunks + self.value_chunks

    @property
    def query_buffers(self) -> int:
        return 2 if self.rows <= MOST_BUFFERED_ROWS else 1

    @property
    def buffers(self) -> int:
        """Chunks of tiles in shared memory.

        The values of a tile stay until its last product, so little is on its way meanwhile unless
        there is room for two tiles.
        """
        widths = self.query_buffers * (self.H + self.P) + TILE
        free = SHARED_BYTES - 2 * self.rows * widths - 4 * self.rows
        return min(free // (2 * TILE * CHUNK), 2 * self.chunks + 2, 12)


def items(s: Shape) -> int:
    """Items of each block."""
    return -(-s.sizes * s.groups * s.splits // s.blocks)


def item(s: Shape, length_ref: Any, n: jax.Array) -> tuple[Any, Any, Any, Any]:
    """(group, split, first tile, tiles) of this block's n-th item; it may have no tiles.

    A group is a sequence's KV head (and block of rows); splits s.splits and up are those of the
    second size.
    """
    index = lax.axis_index("block") + n * s.blocks
    each = s.groups * s.splits
    size, index = lax.div(index, each), lax.rem(index, each)
    group = lax.div(index, s.splits)
    # Turned from group to group, so that a block does not get the same split of each.
    split = lax.rem(index + 7 * group, s.splits)
    if s.window is not None:
        first = lax.div(split * (s.slots // TILE), s.splits)
        count = lax.div((split + 1) * (s.slots // TILE), s.splits) - first
        return group, split, first, jnp.where(size == 0, count, 0)
    length = length_ref[lax.div(group, s.K * s.row_blocks)]
    last = length + s.T - 1
    own, other = tiles_per_split(s, length), tiles_per_split(s, last)
    tiles = jnp.where(size == 0, own, other)
    first = split * tiles
    count = jnp.clip(lax.div(last, TILE) + 1 - first, 0, tiles)
    used = (size == 0) | ((size == 1) & (own != other))
    return group, split + size * s.splits, first, jnp.where(used, count, 0)


def tiles_per_split(s: Shape, position: jax.Array) -> jax.Array:
    """Tiles of a split, for the query at this position of a global cache."""
    return lax.div(position, TILE * s.splits) + 1


def mask(s: Shape, length: jax.Array, group: jax.Array, layout: Any) -> Any:
    """Of the scores of a tile, given its number: which [key, row] a query sees."""
    shape = (TILE, s.rows)
    key = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=layout)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=layout)
    row = row + lax.rem(group, s.row_blocks) * s.rows
    t = lax.div(row, jnp.int32(s.G))
    if s.window is None:
        limit = length + t - key
        return lambda tile: tile * TILE <= limit
    R, last = s.slots, length + s.T - 1
    newer = s.T - 1 - t  # positions of this call after the query's
    newest_slot = lax.rem(last, jnp.int32(R))

    def seen(tile):
        distance = newest_slot - key - tile * TILE  # from the newest position back to the key's
        distance = jnp.where(distance < 0, distance + R, distance)
        return (distance >= newer) & (distance < s.window + newer) & (distance <= last)

    return seen


def splits_of_row(s: Shape, length: jax.Array, t: jax.Array) -> tuple[Any, Any]:
    """The first split of the query at length + t, and how many it has."""
    if s.window is not None:
        return jnp.int32(0), jnp.int32(s.splits)
    tiles = tiles_per_split(s, length + t)
    start = jnp.where(tiles == tiles_per_split(s, length), 0, s.splits)
    return start, lax.div(length + t, TILE * tiles) + 1
