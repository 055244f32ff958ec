"""Rows cut into tiles: neighbours with the same matrix, which share one read of it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Tiles(NamedTuple):
    """Where each of C tiles lies; C follows from shapes alone, so some may be empty.

    A tile never crosses a multiple of its height, so it lies within one aligned block of rows.

    Attributes:
      first: int32 [C], a tile's first row; any row where the tile is empty.
      count: int32 [C], its rows; 0 = an empty tile.
      of_row: int32 [n], the tile that holds each row.
    """

    first: jax.Array | np.ndarray
    count: jax.Array | np.ndarray
    of_row: jax.Array | np.ndarray


def tile_height(n: int, E: int) -> int:
    """Rows of a tile, for n rows over E matrices: one height for decode, one for prefill."""
    return 8 if n <= 8 * E else 64


def cut(index: jax.Array, height: int, E: int, absent: bool = False) -> Tiles:
    """Cuts rows at every change of `index` int32 [n], and at every multiple of `height`.

    Equal values must lie together. Up to `height` rows, each is a tile of its own: the k experts
    of one token differ, and to find that out would take a kernel.

    Args:
      absent: rows may have the index E; their tiles are empty.
    """
    tiles = _cut(index, height, E + absent)
    if not absent:
        return tiles
    return tiles._replace(count=jnp.where(index[tiles.first] < E, tiles.count, 0))


def _cut(index: jax.Array, height: int, E: int) -> Tiles:
    n = len(index)
    row = np.arange(n, dtype=np.int32)
    if n <= height:  # constants, for which no kernel runs
        return Tiles(row, np.ones_like(row), row)
    blocks = jnp.pad(index, (0, -n % height), constant_values=-1).reshape(-1, height)
    same = blocks[:, :, None] == blocks[:, None, :]
    place = jnp.argmax(same, -1).reshape(-1)[:n]  # of the first such row in the block
    starts = place == row % height
    count = jnp.where(starts, same.sum(-1).reshape(-1)[:n], 0)
    most = E + len(blocks) - 1
    if n <= most:
        return Tiles(row, count, row - row % height + place)
    first = jnp.sort(jnp.where(starts, row, n))[:most]
    count = count.at[first].get(mode="fill", fill_value=0)
    return Tiles(jnp.minimum(first, n - 1), count, jnp.cumsum(starts) - 1)
