"""The two warpgroups of a block: one copies tiles of keys and values, the other attends to them."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.read_once import copy_once
from pallas_kernels.split_keys.geometry import CHUNK, TILE, Shape, item, items, mask

# A masked score is lower than the start of the running maximum, so that its weight is exactly 0.
MASKED, LOWEST = -2e30, -1e30
LOG2_E = math.log2(math.e)


def copy_tiles(
    s: Shape, length_ref, q_refs, cache_refs, *, tiles, full, free, q_full, q_free, **rest
):
    """Streams the queries and tiles of this block's items into shared memory, in order."""
    copy = functools.partial(copy_once, interpreted=s.interpreted)
    if s.reread:
        copy = plgpu.copy_gmem_to_smem
    *key_ref, value_ref = cache_refs
    buffers = [(s.query_copies(s.H), rest["q_buffer"])]
    if s.P:
        buffers.append((s.query_copies(s.P), rest["q_rotated_buffer"]))

    def tile_chunk(group, tile, chunk):
        head = lax.div(group, s.row_blocks)
        b, k = lax.div(head, s.K), lax.rem(head, s.K)
        ref = key_ref[0] if chunk < s.key_chunks else value_ref
        start = (chunk if chunk < s.key_chunks else chunk - s.key_chunks) * CHUNK
        return ref.at[b, k, pl.ds(tile * TILE, TILE), pl.ds(start, CHUNK)]

    def step(n, counts):
        copied, loaded = counts
        group, _, first, count = item(s, length_ref, n)

        # The only place for queries stays taken until the result before this has left. The first
        # tile does not wait for that.
        queries_first = (loaded == 0) | (s.query_buffers > 1)

        def load_queries():
            slot = lax.rem(loaded, s.query_buffers)

            @pl.when(loaded >= s.query_buffers)
            def _():
                plgpu.barrier_wait(q_free.at[slot])

            for ref, (rows, buffer) in zip(q_refs, buffers, strict=True):
                rows.copy(ref.at[group], buffer, slot, q_full.at[slot])

        pl.when((count > 0) & queries_first)(load_queries)

        def tile(i, _):
            for chunk in range(s.chunks):
                number = (copied + i) * s.chunks + chunk
                slot = lax.rem(number, s.buffers)

                @pl.when(number >= s.buffers)
                def _(slot=slot):
                    plgpu.barrier_wait(free.at[slot])

                source = tile_chunk(group, first + i, chunk)
                copy(source, tiles.at[slot], full.at[slot])

            pl.when((i == 0) & ~queries_first)(load_queries)
            return 0

        lax.fori_loop(0, count, tile, 0)
        return copied + count, loaded + (count > 0).astype(jnp.int32)

    lax.fori_loop(0, items(s), step, (jnp.int32(0), jnp.int32(0)))


def attend(s: Shape, length_ref, partial_ref, mass_ref, *, tiles, full, free, q_free, **scratch):
    """Attends to the tiles of each item; writes its normalised result and its mass.

    A result takes the place of its queries in shared memory, which leaves more to the tiles.
    """
    layout = plgpu.Layout.WGMMA
    q_buffer = s.query_copies(s.H).tiles(scratch["q_buffer"])
    mass_buffer = scratch["mass_buffer"]
    totals = _totals(s, length_ref) if s.interpreted else None

    def step(n, counts):
        computed, loaded = counts
        group, split, first, count = item(s, length_ref, n)

        def release(barrier, number, buffers, total):
            arrive = functools.partial(plgpu.barrier_arrive, barrier.at[lax.rem(number, buffers)])
            if totals is None:
                arrive()
            else:  # the interpreter wants every arrival to be waited for
                pl.when(number + buffers < total)(arrive)

        def release_chunk(i, chunk):
            number = (computed + i) * s.chunks + chunk
            release(free, number, s.buffers, totals and totals[0] * s.chunks)

        @pl.when(count > 0)
        def _():
            slot = lax.rem(loaded, s.query_buffers)
            length = length_ref[lax.div(group, s.K * s.row_blocks)]
            seen = mask(s, length, group, layout)
            plgpu.barrier_wait(scratch["q_full"].at[slot])

            def tile(i, carry):
                def buffer(chunk):
                    return lax.rem((computed + i) * s.chunks + chunk, s.buffers)

                return _tile(
                    s,
                    carry,
                    seen(first + i),
                    tiles=[tiles.at[buffer(c)] for c in range(s.chunks)],
                    wait=[full.at[buffer(c)] for c in range(s.chunks)],
                    release=functools.partial(release_chunk, i),
                    queries=_query_chunks(s, slot, **scratch),
                    p_buffer=scratch["p_buffer"],
                )

            def fill(shape, value, of=layout):
                return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), of)

            start = (
                fill((s.rows,), LOWEST, layout.reduce(0)),
                fill((TILE, s.rows), 0.0),
                [fill((CHUNK, s.rows), 0.0) for _ in range(s.value_chunks)],
            )
            top, sums, out = lax.fori_loop(0, count, tile, start)
            total = sums.sum(axis=0)
            mass_buffer[...] = jnp.where(total > 0, top + jnp.log2(total), LOWEST)
            scale = jnp.where(total > 0, 1 / total, 0.0)
            for c, x in enumerate(out):
                x = x * lax.broadcast_in_dim(scale, x.shape, [1])
                place = q_buffer.at[slot, :, pl.ds(c * CHUNK, CHUNK)]
                place.transpose((1, 0))[...] = x.astype(jnp.bfloat16)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(q_buffer.at[slot], partial_ref.at[group, split])
            plgpu.copy_smem_to_gmem(mass_buffer, mass_ref.at[group, split])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            release(q_free, loaded, s.query_buffers, totals and totals[1])

        return computed + count, loaded + (count > 0).astype(jnp.int32)

    lax.fori_loop(0, items(s), step, (jnp.int32(0), jnp.int32(0)))
    plgpu.wait_smem_to_gmem(0)  # until others could read them


def _query_chunks(s: Shape, slot, *, q_buffer, q_rotated_buffer=None, **_) -> list[Any]:
    """What each chunk of a tile is multiplied with for the scores; None = nothing."""
    tiles = s.query_copies(s.H).tiles(q_buffer)
    own = [tiles.at[slot, :, pl.ds(c * CHUNK, CHUNK)] for c in range(s.value_chunks)]
    if s.P:
        return [s.query_copies(s.P).tiles(q_rotated_buffer).at[slot], *own]
    return own + [None] * s.value_chunks


def _tile(s: Shape, carry, seen, *, tiles, wait, release, queries, p_buffer):
    """One step of the running softmax over 64 keys."""
    top, sums, out = carry

    def score(accumulator):
        for tile, full, query in zip(tiles, wait, queries, strict=True):
            if query is not None:
                plgpu.barrier_wait(full)
                plgpu.wgmma(accumulator, tile, query.transpose((1, 0)))
        return accumulator[...]

    scores = pl.run_scoped(score, plgpu.ACC((TILE, s.rows), jnp.float32))
    for chunk in range(s.key_chunks):
        release(chunk)
    scores = jnp.where(seen, scores * LOG2_E, MASKED)
    new_top = jnp.maximum(top, scores.max(axis=0))
    shrink = jnp.exp2(top - new_top)
    p = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [1]))
    # Summed over the keys once, after the last tile.
    sums = sums * lax.broadcast_in_dim(shrink, sums.shape, [1]) + p
    p_buffer.transpose((1, 0))[...] = p.astype(jnp.bfloat16)
    plgpu.commit_smem()
    out = [x * lax.broadcast_in_dim(shrink, x.shape, [1]) for x in out]
    for chunk, query in enumerate(queries):
        if query is None:
            plgpu.barrier_wait(wait[chunk])
    values = [tile.transpose((1, 0)) for tile in tiles[s.key_chunks :]]
    p_t = p_buffer.transpose((1, 0))

    def weigh(accumulators):
        for accumulator, value in zip(accumulators, values, strict=True):
            plgpu.wgmma(accumulator, value, p_t)
        for c in range(s.value_chunks):  # hand each chunk back as soon as its product is done
            plgpu.wgmma_wait(s.value_chunks - 1 - c)
            release(s.key_chunks + c)

    if not s.interpreted:
        return new_top, sums, pl.run_state(weigh)([plgpu.ACC.init(x) for x in out])

    def weigh_one(value, accumulator):  # the interpreter knows neither run_state nor wgmma_wait
        plgpu.wgmma(accumulator, value, p_t)
        return accumulator[...]

    accumulator = plgpu.ACC((CHUNK, s.rows), jnp.float32)
    out = [
        x + pl.run_scoped(functools.partial(weigh_one, value), accumulator)
        for x, value in zip(out, values, strict=True)
    ]
    for c in range(s.value_chunks):
        release(s.key_chunks + c)
    return new_top, sums, out


def _totals(s: Shape, length_ref) -> tuple[jax.Array, jax.Array]:
    """Tiles and non-empty items of this block."""

    def add(n, totals):
        count = item(s, length_ref, n)[3]
        return totals[0] + count, totals[1] + (count > 0).astype(jnp.int32)

    return lax.fori_loop(0, items(s), add, (jnp.int32(0), jnp.int32(0)))
