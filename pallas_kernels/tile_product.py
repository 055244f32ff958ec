"""A row times a tile of a small matrix on plain arithmetic units, by blocks that have one each.

A row times so few weights gives wgmma nothing to do.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

COLUMNS = 64  # of a tile
# Of a tile: a warp reads two rows of it at once, each thread four columns in 8 bytes.
TILE = plgpu.Layout.TILED(
    plgpu.Tiling(((8, COLUMNS), (2, COLUMNS), (4,))),
    warp_dims=(-5,),
    lane_dims=(-3, -2),
    vector_dim=-1,
)


def groups_of_rows(M: int, tiles: int, blocks: int) -> int:
    """How many groups M rows are dealt out to: as many as run at once, at least one.

    Args:
      tiles: of the matrix; a group has a block for each.
      blocks: that run at a time.
    """
    return min(M, max(1, blocks // tiles))


def each_row(M: int, do: Callable[[Any, Any], None]) -> None:
    """do(i, row) for the rows of the block's group (the grid's axis "group"), one after another."""
    groups = lax.axis_size("group")

    def one(i, _):
        row = lax.axis_index("group") + i * groups
        pl.when(row < M)(lambda: do(i, row))
        return 0

    lax.fori_loop(0, -(-M // groups), one, 0)


def product(x_ref: Any, matrix_ref: Any) -> jax.Array:
    """float32 [COLUMNS], x [depth] · matrix [depth, COLUMNS], by one warpgroup of a block: several
    at once would share the scratch memory of `jnp.sum`.

    Products of two bfloat16 numbers are exact in float32: only sums round, in a fixed order.

    Args:
      x_ref: float32, in shared memory.
      matrix_ref: bfloat16, in shared memory; depth is a multiple of 8.
    """
    x = plgpu.load(x_ref, layout=TILE.reduce(1))
    x = plgpu.layout_cast(lax.broadcast_in_dim(x, matrix_ref.shape, (0,)), TILE)
    matrix = plgpu.load(matrix_ref, layout=TILE, optimized=False)
    return jnp.sum(x * matrix.astype(jnp.float32), axis=0)
