"""Decode and verify attention on Hopper: the key axis split over the whole GPU.

One kernel serves rings and global caches. Keys are cut into tiles of 64; a *split* is a run of
tiles. Persistent blocks walk the (sequence, KV head, split) items: one warpgroup streams tiles
into shared memory by TMA, the other computes with the keys on the M side of the matrix units,
scores = K·Qᵀ and outᵀ = Vᵀ·P, so that few query rows still fill them, and a tile of a compact
cache serves both products. Then all blocks meet at a counter, and the splits of each query row
are merged in the order of the keys, in float32.

Row independence: where a split begins depends on positions alone, every row has its own running
maximum and sum, and masked keys leave a row untouched to the bit. So a row's output is the same for
every T and every batch. The splits of a growing cache have `tiles_per_split` tiles, which changes
with the position; the rows of one call that fall on both sides of a change (16 positions can
meet only one) are computed with either size and merged with their own.

Bytes: every live key and value once (floor: 4.69 TB/s on an H200). FLOPs: 4·G·T·H a key, some 60
to 250 TFLOP/s at the floor with G·T = 8…32 rows, which the matrix units hide under the copies.
On top come about 6 µs: launch, first copy, partial results, counter, merge.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import l2_prefetch
from pallas_kernels.dispatch import Unsupported, require_hopper

TILE = 64  # keys; the M of a matrix instruction
CHUNK = 128  # widths that one copy brings; 16 KiB with 64 keys
ROWS = (8, 16, 32)  # query rows that one product may have; more are cut into blocks
PREFETCH = 20 * 1024 * 1024  # bytes of what is read next, asked for while the splits are merged
SHARED_BYTES = 220 * 1024  # of the 227 KiB that a block may use; the rest is for barriers
COMPUTE, COPY = 0, 1  # warpgroups
# A masked score is lower than the start of the running maximum, so that its weight is exactly 0.
MASKED, LOWEST = -2e30, -1e30
LOG2_E = math.log2(math.e)
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


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

    @property
    def rows(self) -> int:
        """Query rows of a product, padded."""
        return next((r for r in ROWS if r >= self.G * self.T), ROWS[-1])

    @property
    def row_blocks(self) -> int:
        return -(-self.G * self.T // self.rows)

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
        return 2 if self.rows < ROWS[-1] else 1

    @property
    def buffers(self) -> int:
        """Chunks of tiles in shared memory."""
        widths = self.query_buffers * (self.H + self.P) + TILE + self.H
        free = SHARED_BYTES - 2 * self.rows * widths - 4 * self.rows
        return min(free // (2 * TILE * CHUNK), 2 * self.chunks + 2, 12)


def split_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array,
    length: jax.Array,
    *,
    q_rotated: jax.Array | None = None,
    k_rotated: jax.Array | None = None,
    window: int | None = None,
    prefetch: jax.Array | None = None,
    blocks: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`ring_attention` (with a window) or `global_attention` (without), which see.

    Args:
      blocks: thread blocks; None = the multiprocessors of the device.
      interpret: `plgpu.InterpretGPUParams()` runs on a CPU.

    Raises:
      Unsupported: another device or dtype, H not 256 or 512, P not 128, slots not a multiple
        of 64.
    """
    cores = blocks if interpret is not None else require_hopper()
    B, T, N, H = q.shape
    K, slots = v.shape[1:3]
    P = 0 if k_rotated is None else k_rotated.shape[3]
    dtypes = {x.dtype for x in (q, k, v, q_rotated, k_rotated) if x is not None}
    if dtypes != {jnp.dtype(jnp.bfloat16)}:
        raise Unsupported(f"takes bfloat16 only, not {', '.join(sorted(map(str, dtypes)))}")
    if H not in (256, 512) or P not in (0, CHUNK) or slots % TILE:
        raise Unsupported(
            f"head width {H} must be 256 or 512, rotated widths {P} of a compact cache {CHUNK}, "
            f"slots {slots} a multiple of {TILE}"
        )
    shape = Shape(
        B, T, K, N // K, H, P, slots, window, blocks or cores, interpreted=interpret is not None
    )
    queries = [_rows(x, shape) for x in (q, q_rotated) if x is not None]
    caches = [x for x in (k, k_rotated, v) if x is not None]
    extra = [] if prefetch is None or interpret is not None else [prefetch]
    return _launch(shape, interpret, length.astype(jnp.int32), queries, caches, extra)


def _rows(q: jax.Array, s: Shape) -> jax.Array:
    """[B, T, N, width] -> [groups, rows, width]: row t·G + g of KV head k, padded with zeros."""
    width = q.shape[-1]
    q = q.reshape(s.B, s.T, s.K, s.G, width).transpose(0, 2, 1, 3, 4)
    q = q.reshape(s.B, s.K, s.T * s.G, width)
    q = jnp.pad(q, ((0, 0), (0, 0), (0, s.row_blocks * s.rows - s.T * s.G), (0, 0)))
    return q.reshape(s.groups, s.rows, width)


# Under its own jit, so that the many layers of a model trace and lower it once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(
    s: Shape,
    interpret: Any,
    length: jax.Array,
    queries: list[jax.Array],
    caches: list[jax.Array],
    extra: list[jax.Array],
) -> jax.Array:
    out = jax.ShapeDtypeStruct((s.B, s.T, s.K * s.G, s.H), jnp.bfloat16)
    splits = s.sizes * s.splits
    partial = jax.ShapeDtypeStruct((s.groups, splits, s.rows, s.H), jnp.bfloat16)
    # log2 of a split's sum of weights, by which its result counts
    mass = jax.ShapeDtypeStruct((s.groups, splits, s.rows), jnp.float32)

    def shared(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=SWIZZLED)

    scratch = {
        "q_buffer": shared(s.query_buffers, s.rows, s.H),
        "q_rotated_buffer": shared(s.query_buffers, s.rows, max(s.P, 64)),
        "tiles": shared(s.buffers, TILE, CHUNK),
        "p_buffer": shared(s.rows, TILE),
        "out_buffer": shared(s.value_chunks, s.rows, CHUNK),
        "mass_buffer": plgpu.SMEM((s.rows,), jnp.float32),
        "full": plgpu.Barrier(num_barriers=s.buffers),
        "free": plgpu.Barrier(num_barriers=s.buffers),
        "q_full": plgpu.Barrier(num_barriers=s.query_buffers, num_arrivals=len(queries)),
        "q_free": plgpu.Barrier(num_barriers=s.query_buffers),
    }
    kernel = functools.partial(
        plgpu.kernel,
        grid=(s.blocks,),
        grid_names=("block",),
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(reduction_scratch_bytes=4096, approx_math=True),
    )

    def attend(counter_ref, length_ref, *refs, **scratch):
        q_refs, refs = refs[: len(queries)], refs[len(queries) :]
        cache_refs, refs = refs[: len(caches)], refs[len(caches) :]
        extra_refs, refs = refs[: len(extra)], refs[len(extra) :]
        *out_ref, partial_ref, mass_ref = refs
        warpgroup = lax.axis_index("warpgroup")

        def prefetch():
            for ref, array in zip(extra_refs, extra, strict=True):
                l2_prefetch.prefetch(ref, array, s.blocks, PREFETCH)

        @pl.when(warpgroup == COPY)
        def _():
            _copy(s, length_ref, q_refs, cache_refs, **scratch)

        @pl.when(warpgroup == COMPUTE)
        def _():
            _compute(s, length_ref, partial_ref, mass_ref, prefetch, **scratch)
            if not s.interpreted:
                _meet(s, counter_ref)
                _merge(s, length_ref, partial_ref, mass_ref, out_ref[0])
                _leave(s, counter_ref)

    def merge(length_ref, partial_ref, mass_ref, out_ref):
        _merge(s, length_ref, partial_ref, mass_ref, out_ref)

    # Zero before and after every call, so that the kernel is a function of its arguments.
    counter = jnp.zeros((1,), jnp.int32)
    outputs = (partial, mass) if s.interpreted else (out, partial, mass)
    results = kernel(
        attend,
        out_type=outputs,
        scratch_types=scratch,
        num_threads=2,
        thread_name="warpgroup",
    )(counter, length, *queries, *caches, *extra)
    if not s.interpreted:
        return results[0]
    return kernel(merge, out_type=out)(length, *results)


# --- which keys belong to an item -------------------------------------------------------------


def _items(s: Shape) -> int:
    """Items of each block."""
    return -(-s.sizes * s.groups * s.splits // s.blocks)


def _item(s: Shape, length_ref: Any, n: jax.Array) -> tuple[Any, Any, Any, Any]:
    """(group, split, first tile, tiles) of this block's n-th item; it may have no tiles.

    A group is a sequence's KV head (and block of rows); splits s.splits and up are those of the
    second size.
    """
    index = lax.axis_index("block") + n * s.blocks
    each = s.groups * s.splits
    size, index = index // each, lax.rem(index, each)
    group = index // s.splits
    # Turned from group to group, so that a block does not get the same split of each.
    split = lax.rem(index + 7 * group, s.splits)
    if s.window is not None:
        first = split * (s.slots // TILE) // s.splits
        count = (split + 1) * (s.slots // TILE) // s.splits - first
        return group, split, first, jnp.where(size == 0, count, 0)
    length = length_ref[group // (s.K * s.row_blocks)]
    last = length + s.T - 1
    own, other = _tiles_per_split(s, length), _tiles_per_split(s, last)
    tiles = jnp.where(size == 0, own, other)
    first = split * tiles
    count = jnp.clip(last // TILE + 1 - first, 0, tiles)
    used = (size == 0) | ((size == 1) & (own != other))
    return group, split + size * s.splits, first, jnp.where(used, count, 0)


def _tiles_per_split(s: Shape, position: jax.Array) -> jax.Array:
    """Tiles of a split, for the query at this position of a global cache."""
    return position // TILE // s.splits + 1


def _mask(s: Shape, length: jax.Array, group: jax.Array, layout: Any) -> Any:
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


# --- the two warpgroups -----------------------------------------------------------------------


def _copy(s: Shape, length_ref, q_refs, cache_refs, *, tiles, full, free, q_full, q_free, **rest):
    """Streams the queries and tiles of this block's items into shared memory, in order."""
    *key_ref, value_ref = cache_refs
    buffers = (rest["q_buffer"], rest["q_rotated_buffer"])

    def tile_chunk(group, tile, chunk):
        b, k = group // (s.K * s.row_blocks), lax.rem(group // s.row_blocks, s.K)
        ref = key_ref[0] if chunk < s.key_chunks else value_ref
        start = (chunk if chunk < s.key_chunks else chunk - s.key_chunks) * CHUNK
        return ref.at[b, k, pl.ds(tile * TILE, TILE), pl.ds(start, CHUNK)]

    def item(n, counts):
        copied, loaded = counts
        group, _, first, count = _item(s, length_ref, n)

        @pl.when(count > 0)
        def _():
            slot = lax.rem(loaded, s.query_buffers)

            @pl.when(loaded >= s.query_buffers)
            def _():
                plgpu.barrier_wait(q_free.at[slot])

            for ref, buffer in zip(q_refs, buffers, strict=False):
                plgpu.copy_gmem_to_smem(ref.at[group], buffer.at[slot], q_full.at[slot])

        def tile(i, _):
            for chunk in range(s.chunks):
                number = (copied + i) * s.chunks + chunk
                slot = lax.rem(number, s.buffers)

                @pl.when(number >= s.buffers)
                def _(slot=slot):
                    plgpu.barrier_wait(free.at[slot])

                source = tile_chunk(group, first + i, chunk)
                plgpu.copy_gmem_to_smem(source, tiles.at[slot], full.at[slot])
            return 0

        lax.fori_loop(0, count, tile, 0)
        return copied + count, loaded + (count > 0).astype(jnp.int32)

    lax.fori_loop(0, _items(s), item, (jnp.int32(0), jnp.int32(0)))


def _compute(
    s: Shape, length_ref, partial_ref, mass_ref, prefetch, *, tiles, full, free, q_free, **scratch
):
    """Attends to the tiles of each item; writes its normalised result and its mass.

    What is read next is prefetched once the tiles of the first item are here.
    """
    layout = plgpu.Layout.WGMMA
    out_buffer, mass_buffer = scratch["out_buffer"], scratch["mass_buffer"]
    totals = _totals(s, length_ref) if s.interpreted else None

    def item(n, counts):
        computed, loaded = counts
        group, split, first, count = _item(s, length_ref, n)

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
            plgpu.barrier_wait(scratch["q_full"].at[slot])
            length = length_ref[group // (s.K * s.row_blocks)]
            seen = _mask(s, length, group, layout)

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
            pl.when(n == 0)(prefetch)
            release(q_free, loaded, s.query_buffers, totals and totals[1])
            total = sums.sum(axis=0)
            mass_buffer[...] = jnp.where(total > 0, top + jnp.log2(total), LOWEST)
            scale = jnp.where(total > 0, 1 / total, 0.0)
            for c, x in enumerate(out):
                x = x * lax.broadcast_in_dim(scale, x.shape, [1])
                out_buffer.at[c].transpose((1, 0))[...] = x.astype(jnp.bfloat16)
            plgpu.commit_smem()
            for c in range(s.value_chunks):
                target = partial_ref.at[group, split, :, pl.ds(c * CHUNK, CHUNK)]
                plgpu.copy_smem_to_gmem(out_buffer.at[c], target)
            plgpu.copy_smem_to_gmem(mass_buffer, mass_ref.at[group, split])
            plgpu.wait_smem_to_gmem(0)

        pl.when((n == 0) & (count == 0))(prefetch)
        return computed + count, loaded + (count > 0).astype(jnp.int32)

    lax.fori_loop(0, _items(s), item, (jnp.int32(0), jnp.int32(0)))


def _query_chunks(s: Shape, slot, *, q_buffer, q_rotated_buffer, **_) -> list[Any]:
    """What each chunk of a tile is multiplied with for the scores; None = nothing."""
    own = [q_buffer.at[slot, :, pl.ds(c * CHUNK, CHUNK)] for c in range(s.value_chunks)]
    if s.P:
        return [q_rotated_buffer.at[slot], *own]
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
        count = _item(s, length_ref, n)[3]
        return totals[0] + count, totals[1] + (count > 0).astype(jnp.int32)

    return lax.fori_loop(0, _items(s), add, (jnp.int32(0), jnp.int32(0)))


# --- the merge --------------------------------------------------------------------------------


def _merge(s: Shape, length_ref, partial_ref, mass_ref, out_ref):
    """Merges the splits of this block's share of the query rows, in the order of the keys."""
    N = s.K * s.G
    count = s.B * s.T * N
    vector = plgpu.Layout.WG_STRIDED((s.H,), vec_size=s.H // 128)
    together = min(s.splits, 33)  # read at once, to pay the latency once

    def row(n, _):
        index = lax.axis_index("block") + n * s.blocks

        @pl.when(index < count)
        def _():
            b, rest = index // (s.T * N), lax.rem(index, s.T * N)
            t, head = rest // N, lax.rem(rest, N)
            k, r = head // s.G, t * s.G + lax.rem(head, s.G)
            group = (b * s.K + k) * s.row_blocks + r // s.rows
            start, splits = _splits_of_row(s, length_ref[b], t)

            def some(i, carry):
                top, total, out = carry
                js = [i * together + j for j in range(together)]
                # Beyond the last split, the last is read again and weighs nothing.
                at = [start + jnp.minimum(j, splits - 1) for j in js]
                masses = [mass_ref[group, a, lax.rem(r, s.rows)] for a in at]
                parts = [
                    plgpu.load(partial_ref.at[group, a, lax.rem(r, s.rows)], layout=vector)
                    for a in at
                ]
                masses = [jnp.where(j < splits, m, MASKED) for j, m in zip(js, masses, strict=True)]
                new_top = functools.reduce(jnp.maximum, masses, top)
                weights = [jnp.exp2(m - new_top) for m in masses]
                shrink = jnp.exp2(top - new_top)
                total, out = total * shrink, out * shrink
                for w, part in zip(weights, parts, strict=True):
                    total += w
                    out += part.astype(jnp.float32) * w
                return new_top, total, out

            zeros = plgpu.layout_cast(jnp.zeros((s.H,), jnp.float32), vector)
            begin = (jnp.float32(LOWEST), jnp.float32(0.0), zeros)
            _, total, out = lax.fori_loop(0, (splits + together - 1) // together, some, begin)
            out_ref[b, t, head] = (out / total).astype(jnp.bfloat16)

        return 0

    lax.fori_loop(0, -(-count // s.blocks), row, 0)


def _splits_of_row(s: Shape, length: jax.Array, t: jax.Array) -> tuple[Any, Any]:
    """The first split of the query at length + t, and how many it has."""
    if s.window is not None:
        return jnp.int32(0), jnp.int32(s.splits)
    tiles = _tiles_per_split(s, length + t)
    start = jnp.where(tiles == _tiles_per_split(s, length), 0, s.splits)
    return start, (length + t) // TILE // tiles + 1


def _meet(s: Shape, counter_ref) -> None:
    """Returns when the results of all blocks can be read."""
    _count(s, counter_ref)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(ctx, counter):
        pointer = mgpu.utils.memref_ptr(counter)
        semaphore = mgpu.utils.SemaphoreRef(pointer)
        semaphore.wait(s.blocks, decrement=False, memory_scope="gpu")

    wait(counter_ref)


def _leave(s: Shape, counter_ref) -> None:
    """The last block to leave finds the counter at its end, where it wraps to zero."""
    _count(s, counter_ref)


def _count(s: Shape, counter_ref) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def count(ctx, counter):
        mgpu.utils.warpgroup_barrier()
        mgpu.utils.inline_ptx(
            "red.release.gpu.global.inc.u32 [$0], $1;",
            mgpu.utils.memref_ptr(counter),
            mgpu.utils.c(2 * s.blocks - 1, mgpu.utils.ir.IntegerType.get_signless(32)),
            predicate=mgpu.utils.single_thread_predicate(mgpu.utils.ThreadSubset.WARPGROUP),
            has_side_effects=True,
        )

    count(counter_ref)
