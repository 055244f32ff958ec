"""Copies of rows, whatever their number, from global memory to tiles in shared memory.

TMA brings zeros for rows beyond the end of an array. But Mosaic describes the array to it as whole
tiles of 8 rows, or as one tile with fewer, and refuses more than 8 rows that are no multiple of 8.
Those are copied here in pieces: rows that lie one behind the other in shared memory, for which the
array need not be described in tiles.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TALL, WIDE = 8, 64  # of a tile
# How a matrix lies in shared memory wherever wgmma is to read it.
TILED = (plgpu.TilingTransform((TALL, WIDE)), plgpu.SwizzleTransform(128))


@dataclasses.dataclass(frozen=True)
class RowCopies:
    """Copies of [rows, width], a part of an array in global memory, to [height, width] of tiles.

    Attributes:
      rows: of the array; there may be fewer than height.
      height: a multiple of 8.
      width: a multiple of 64.
    """

    rows: int
    height: int
    width: int

    @property
    def in_pieces(self) -> bool:
        """Whether Mosaic refuses the array's rows in tiles."""
        return self.rows > TALL and self.rows % TALL != 0

    @property
    def requests(self) -> int:
        """Copies that one call of `copy` asks for: what its barrier has to count."""
        return self.height // self._piece if self.in_pieces else 1

    @property
    def _piece(self) -> int:
        """Rows of a piece; where a row of tiles is one tile, all rows lie together."""
        return self.height if self.width == WIDE else TALL

    def source(self, x: jax.Array) -> jax.Array:
        """[..., rows, width] as `copy` takes it; the bytes are the same."""
        if not self.in_pieces or self.width == WIDE:
            return x
        return x.reshape(*x.shape[:-1], x.shape[-1] // WIDE, WIDE)

    def buffers(self, count: int) -> Any:
        """The type of `count` places for copies in shared memory."""
        tiles = plgpu.SMEM((count, self.height, self.width), jnp.bfloat16, transforms=TILED)
        if not self.in_pieces:
            return tiles
        piece = (self._piece, WIDE)
        shape = (count, self.height // self._piece, self.width // WIDE, *piece)
        # Two views of the same bytes: both begin where the union does.
        return plgpu.RefUnion(tiles, plgpu.SMEM(shape, jnp.bfloat16, transforms=TILED[1:]))

    def tiles(self, buffers: Any) -> Any:
        """[count, height, width] of what `buffers` is the type of."""
        return buffers[0] if self.in_pieces else buffers

    def copy(self, source: Any, buffers: Any, slot: Any, barrier: Any) -> None:
        """Asks for a copy to one of the buffers, with zeros for the rows that there are not.

        Args:
          source: a reference to [rows, width] of global memory (of what `source` returns).
          buffers: of the type that `buffers` gives.
          slot: which of them; traced, int32.
          barrier: arrived at `requests` times, when all rows are there.
        """

        def part(first: int, count: int) -> Any:
            # A part may end beyond the array. Mosaic checks the bounds of static indices only, so
            # this one is made from what is traced.
            return source.at[pl.ds(slot * 0 + first, count)]

        if not self.in_pieces:
            plgpu.copy_gmem_to_smem(part(0, self.height), buffers.at[slot], barrier)
            return
        pieces = buffers[1].at[slot]
        for i in range(self.requests):
            piece = pieces.at[i, 0] if self.width == WIDE else pieces.at[i].transpose((1, 0, 2))
            plgpu.copy_gmem_to_smem(part(i * self._piece, self._piece), piece, barrier)
