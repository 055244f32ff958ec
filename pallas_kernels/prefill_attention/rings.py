"""Rings of key and value tiles in shared memory, and the warpgroup that fills them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.prefill_attention.geometry import (
    KEYS,
    PAIR,
    PIECE,
    POSITIONS,
    Form,
    Place,
    Scratch,
)


class Ring(NamedTuple):
    """Tiles in shared memory, slab by slab; tile i takes the place of tile i - stages."""

    buffer: Any
    full: Any
    free: Any
    cluster: int  # blocks that fill their rings with the same tiles

    @property
    def stages(self) -> int:
        return self.buffer.shape[0]

    @property
    def slabs(self) -> int:
        return self.buffer.shape[1]

    def slab(self, i: jax.Array, slab: Any) -> Any:
        return self.buffer.at[_remainder(i, self.stages), slab]

    def wait_full(self, i: jax.Array, slab: Any) -> None:
        plgpu.barrier_wait(self.full.at[self._barrier(i, slab)])

    def release(self, i: jax.Array, slab: Any) -> None:
        plgpu.barrier_arrive(self.free.at[self._barrier(i, slab)])

    def fill(self, i: jax.Array, slab: Any, source: Any) -> None:
        """Copies to a slab of tile i, once that of tile i - stages is released."""

        @pl.when(i >= self.stages)
        def _():
            plgpu.barrier_wait(self.free.at[self._barrier(i - self.stages, slab)])

        plgpu.copy_gmem_to_smem(
            source,
            self.slab(i, slab),
            self.full.at[self._barrier(i, slab)],
            collective_axes=PAIR if self.cluster > 1 else None,
        )

    def drain(self, tiles: jax.Array) -> None:
        """Waits until the last tiles are released: no barrier may end unobserved."""

        def tile(i, _):
            for slab in range(self.slabs):
                plgpu.barrier_wait(self.free.at[self._barrier(i, slab)])

        lax.fori_loop(jnp.maximum(tiles - self.stages, 0), tiles, tile, None)

    def _barrier(self, i: jax.Array, slab: Any) -> Any:
        stages = self.full.shape[0] // self.slabs  # more than the buffer's in a wide block
        return _remainder(i, stages) * self.slabs + slab


class Block(NamedTuple):
    """What all warpgroups of a block know."""

    form: Form
    place: Place
    scratch: Scratch

    @property
    def keys(self) -> Ring:
        s = self.scratch
        return Ring(s.keys, s.keys_full, s.keys_free, self.form.cluster)

    @property
    def values(self) -> Ring:
        s = self.scratch
        return Ring(s.values, s.values_full, s.values_free, self.form.cluster)


def load(block: Block, q_ref: Any, turned_ref: Any, keys_ref: Any, values_ref: Any) -> None:
    """Copies the queries, then the tiles, in the order in which the consumers ask for them."""
    form, at, scratch = block
    rows = pl.ds(at.position, POSITIONS)
    for head in range(form.heads):
        for piece in range(form.pieces):
            turned = form.turned_piece(piece)
            ref, column = (q_ref, piece) if turned is None else (turned_ref, turned)
            plgpu.copy_gmem_to_smem(
                ref.at[at.b, rows, at.head + head, pl.ds(column * PIECE, PIECE)],
                scratch.queries.at[head, piece],
                scratch.queries_full,
            )

    def fill(i, ring, ref):
        width = ring.buffer.shape[3]
        keys = pl.ds((at.first + i) * KEYS, KEYS)
        for slab in range(ring.slabs):
            widths = pl.ds(slab * width, width)
            ring.fill(i, slab, ref.at[at.b, at.kv_head, keys, widths])

    keys, values = (block.keys, keys_ref), (block.values, values_ref)
    if form.wide or form.compact:

        def tile(i, _):
            for ring in (values, keys) if form.compact else (keys, values):
                fill(i, *ring)
    else:  # scores are a tile ahead of the sums
        fill(0, *keys)

        def tile(i, _):
            pl.when(i + 1 < at.tiles)(lambda: fill(i + 1, *keys))
            fill(i, *values)

    lax.fori_loop(0, at.tiles, tile, None)
    for ring, _ in (keys, values):
        ring.drain(at.tiles)


def opaque_zero() -> jax.Array:
    """An index of which the compiler does not know that it is zero.

    It would keep in registers, throughout a loop, all the addresses that it knows before.
    """
    return lax.optimization_barrier(jnp.int32(0))


def _remainder(i: jax.Array, n: int) -> jax.Array:
    return opaque_zero() if n == 1 else lax.rem(i, jnp.int32(n))
