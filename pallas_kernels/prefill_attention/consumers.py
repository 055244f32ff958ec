"""The two warpgroups of a block that attend: of a narrow block, of a wide one, what both do."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.prefill_attention.geometry import (
    CONSUMERS,
    KEYS,
    PIECE,
    POSITIONS,
    SLAB,
)
from pallas_kernels.prefill_attention.rings import Block, opaque_zero

# Masked scores must stay far below the running maximum's first value, so that exp2 of their
# difference is 0 in a tile whose keys are all masked.
MASKED_SCORE = -1e38
FIRST_TOP = -1e30
LOG2E = math.log2(math.e)
BY_ROW = plgpu.Layout.WGMMA.reduce(1)


def attend_narrow(block: Block, consumer: jax.Array, out_ref: Any) -> None:
    """Attends for one of the block's heads: all tiles, scores and sums.

    While P of a tile is multiplied by its values, the softmax of the next tile is computed.
    """
    tiles = block.place.tiles
    plgpu.barrier_wait(block.scratch.queries_full)

    def walk(sums):
        def first(scores):
            _wait_for_keys(block, 0)
            _score(block, 0, consumer, scores)
            taken = scores[...]
            _release_keys(block, 0)
            return _softmax(block, 0, taken, _rows(FIRST_TOP))

        def later(i, carry, scores):
            top, total, p = carry
            _score(block, i, consumer, scores)
            _weigh(block, sums, p, i - 1, 0)
            taken = plgpu.wgmma_accumulator_load(scores, wait_n=1)
            _release_keys(block, i)
            new_top, new_p, mass = _softmax(block, i, taken, top)
            scale = jnp.exp2(top - new_top)
            # Without this, and a wait with a branch, the compilers would do all of this only
            # after the product.
            new_top, new_p, mass, scale = lax.optimization_barrier((new_top, new_p, mass, scale))
            pl.when(i + 1 < tiles)(lambda: _wait_for_keys(block, i + 1))
            plgpu.wgmma_wait(0)
            block.values.release(i - 1, 0)
            _rescale(sums, scale)
            # Not earlier: it may take the registers that the product has read until now.
            return new_top, total * scale + mass, new_p.astype(jnp.bfloat16)

        def tile(i, carry):
            return _with_scores(functools.partial(later, i, carry))

        top, p, total = _with_scores(first)
        pl.when(tiles > 1)(lambda: _wait_for_keys(block, 1))
        carry = (top, total, p.astype(jnp.bfloat16))
        _, total, p = lax.fori_loop(1, tiles, tile, carry)
        _weigh(block, sums, p, tiles - 1, 0)
        out = sums[...]
        block.values.release(tiles - 1, 0)
        return out, total

    out, total = _with_sums(block, consumer, walk)
    _write(block, consumer, out, total, out_ref)


def attend_wide(block: Block, consumer: jax.Array, out_ref: Any) -> None:
    """Attends for half the output widths of the block's head.

    A consumer scores every other tile, tile 0 being consumer 0's, and hands P to the other.
    """
    tiles, scratch = block.place.tiles, block.scratch
    other = 1 - consumer
    plgpu.barrier_wait(scratch.queries_full)

    def walk(sums):
        half = _Half(block, consumer, sums)
        steps = tiles - 1 + consumer  # of one tile each, after a first tile of one's own
        carry = (_rows(FIRST_TOP), _rows(0.0))
        carry = lax.fori_loop(0, other, half.own_tile, carry)
        carry = lax.fori_loop(0, steps // 2, half.pair_of_tiles, carry)
        _, total = lax.fori_loop(0, lax.rem(steps, jnp.int32(2)), half.last_tile, carry)
        return sums[...], total

    out, total = _with_sums(block, consumer, walk)

    @pl.when(consumer < tiles)
    def _():
        plgpu.barrier_wait(scratch.p_free.at[consumer])

    scratch.by_row.at[consumer][...] = total
    plgpu.barrier_arrive(scratch.totals_full)
    plgpu.barrier_wait(scratch.totals_full)
    total += plgpu.load(scratch.by_row.at[other], layout=BY_ROW)
    _write(block, consumer, out, total, out_ref)


class _Half(NamedTuple):
    """A consumer of a wide block at its walk. carry: running maxima and sums of its tiles' P."""

    block: Block
    consumer: jax.Array
    sums: Any

    @property
    def other(self) -> jax.Array:
        return 1 - self.consumer

    def pair_of_tiles(self, n, carry):
        """Two tiles, the other's first."""
        return self.own_tile(2 * n + 2 - self.consumer, carry, after_theirs=True)

    def own_tile(self, i, carry, after_theirs=False):
        """A tile that this one scores. The product of the other's before it runs meanwhile."""
        block, consumer, sums = self
        scratch = block.scratch
        score = functools.partial(self._score_tile, i, carry, after_theirs)
        top, total, new_top, p, mass = _with_scores(score)
        p = p.astype(jnp.bfloat16)

        @pl.when(i >= CONSUMERS)
        def _():
            plgpu.barrier_wait(scratch.p_free.at[consumer])

        scratch.p.at[consumer][...] = p
        scratch.by_row.at[consumer][...] = new_top
        plgpu.commit_smem()
        plgpu.barrier_arrive(scratch.p_full.at[consumer])
        scale = jnp.exp2(top - new_top)
        _rescale(sums, scale)
        _weigh(block, sums, p, i, consumer)
        plgpu.wgmma_wait(0)
        block.values.release(i, consumer)
        return new_top, total * scale + mass

    def last_tile(self, _, carry):
        """A tile that the other has scored and none follows."""
        last = self.block.place.tiles - 1
        carry = self._weigh_theirs(last, carry)
        plgpu.wgmma_wait(0)
        self._release_theirs(last)
        return carry

    def _score_tile(self, i, carry, after_theirs, scores):
        block = self.block
        if after_theirs:
            carry = self._weigh_theirs(i - 1, carry)
        _wait_for_keys(block, i)
        _score(block, i, opaque_zero(), scores)
        if after_theirs:
            plgpu.wgmma_wait(block.form.pieces)
            self._release_theirs(i - 1)
        taken = scores[...]
        _release_keys(block, i)
        top, total = carry
        return top, total, *_softmax(block, i, taken, top)

    def _weigh_theirs(self, i, carry):
        """Issues the product of a tile that the other has scored."""
        block, consumer, sums = self
        scratch, (top, total) = block.scratch, carry
        plgpu.barrier_wait(scratch.p_full.at[self.other])
        new_top = plgpu.load(scratch.by_row.at[self.other], layout=BY_ROW)
        scale = jnp.exp2(top - new_top)
        _rescale(sums, scale)
        block.values.wait_full(i, consumer)
        _multiply(block, sums, scratch.p.at[self.other], block.values.slab(i, consumer))
        return new_top, total * scale

    def _release_theirs(self, i):
        self.block.values.release(i, self.consumer)
        plgpu.barrier_arrive(self.block.scratch.p_free.at[self.other])


def _with_scores(body: Any) -> Any:
    return pl.run_scoped(body, plgpu.ACC((POSITIONS, KEYS), jnp.float32))


def _with_sums(block: Block, consumer: jax.Array, body: Any) -> Any:
    """Runs `body` with accumulators [positions, 256] that are zero.

    The interpreter cannot write to accumulators: there they are shared memory.
    """
    if not block.form.interpreted:
        return pl.run_scoped(body, plgpu.ACC((POSITIONS, SLAB), jnp.float32))
    sums = block.scratch.sums.at[consumer]
    sums[...] = jnp.zeros((POSITIONS, SLAB), jnp.float32)
    return body(sums)


def _rows(value: float) -> jax.Array:
    return plgpu.layout_cast(jnp.full((POSITIONS,), value, jnp.float32), BY_ROW)


def _wait_for_keys(block: Block, i: Any) -> None:
    """Waits for all that the scores of tile i are made of: in the compact form values, too."""
    for ring in (block.values, block.keys) if block.form.compact else (block.keys,):
        for slab in range(ring.slabs):
            ring.wait_full(i, slab)


def _release_keys(block: Block, i: Any) -> None:
    for slab in range(block.keys.slabs):
        block.keys.release(i, slab)


def _score(block: Block, i: Any, head: Any, scores: Any) -> None:
    """Issues scores += Q·Kᵀ for tile i, a product for each piece of the widths."""
    form = block.form
    for piece in range(form.pieces):
        turned = form.turned_piece(piece)
        ring = block.values if form.compact and turned is None else block.keys
        column = piece if turned is None else turned
        slab, column = divmod(column * PIECE, SLAB)
        keys = ring.slab(i, slab).at[:, pl.ds(column, PIECE)]
        plgpu.wgmma(scores, block.scratch.queries.at[head, piece], keys.transpose((1, 0)))


def _softmax(block: Block, i: Any, scores: jax.Array, top: jax.Array) -> tuple[Any, Any, Any]:
    """Returns the new running maximum (of scores · log2 e), P and its sums."""
    scores = _masked(block, i, scores)
    top = jnp.maximum(top, scores.max(axis=1) * LOG2E)
    p = jnp.exp2(scores * LOG2E - lax.broadcast_in_dim(top, scores.shape, [0]))
    return top, p, p.sum(axis=1)


def _masked(block: Block, i: Any, scores: jax.Array) -> jax.Array:
    """Scores with MASKED_SCORE where a query does not see a key of tile i."""
    form, at, _ = block
    key = (at.first + i) * KEYS

    def mask(scores):
        row, column = (
            plgpu.broadcasted_iota(jnp.int32, scores.shape, axis, layout=plgpu.Layout.WGMMA)
            for axis in (0, 1)
        )
        # Bounds of a row rather than row - column: those differences would be kept in 32
        # registers, for the few tiles that need them.
        own = row + (at.own - key)
        seen = column <= own
        if form.window is not None:
            seen &= column >= jnp.maximum(own - (form.window - 1), at.oldest - key)
        return jnp.where(seen, scores, MASKED_SCORE)

    border = key + (KEYS - 1) > at.own
    if form.window is not None:
        border |= key < jnp.maximum(at.own + (POSITIONS - form.window), at.oldest)
    return lax.cond(border, mask, lambda scores: scores, scores)


def _weigh(block: Block, sums: Any, p: jax.Array, i: Any, slab: Any) -> None:
    """Issues the product of P of a tile that this consumer has scored."""
    if not block.form.compact:  # else the values have been waited for as keys
        block.values.wait_full(i, slab)
    _multiply(block, sums, p, block.values.slab(i, slab))


def _multiply(block: Block, sums: Any, p: Any, values: Any) -> None:
    """Issues sums += P·values. P is in registers or in shared memory."""
    if block.form.interpreted:  # which takes P neither in registers nor for such sums
        sums[...] += p[...].astype(jnp.float32) @ values[...].astype(jnp.float32)
        plgpu.commit_smem()  # this has read through another proxy than the next copy writes
    else:
        plgpu.wgmma(sums, p, values)


def _rescale(sums: Any, scale: jax.Array) -> None:
    sums[...] = sums[...] * lax.broadcast_in_dim(scale, (POSITIONS, SLAB), [0])


def _write(
    block: Block, consumer: jax.Array, out: jax.Array, total: jax.Array, out_ref: Any
) -> None:
    """Writes sums / total where the queries were. A row that sees no key becomes zeros."""
    form, at, scratch = block
    scale = lax.broadcast_in_dim(1 / jnp.maximum(total, 1e-30), (POSITIONS, SLAB), [0])
    scratch.output.at[consumer][...] = (out * scale).astype(jnp.bfloat16)
    plgpu.commit_smem()
    head, slab = (at.head, consumer) if form.wide else (at.head + consumer, 0)
    rows, widths = pl.ds(at.position, POSITIONS), pl.ds(slab * SLAB, SLAB)
    target = out_ref.at[at.b, rows, head, widths]
    plgpu.copy_smem_to_gmem(scratch.output.at[consumer], target)
    plgpu.wait_smem_to_gmem(0)
