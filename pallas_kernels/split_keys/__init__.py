"""Decode and verify attention on Hopper: the key axis split over the whole GPU.

One kernel serves rings and global caches. Keys are cut into tiles of 64; a *split* is a run of
tiles. Persistent blocks walk the (sequence, KV head, split) items: one warpgroup streams tiles
into shared memory by TMA, the other computes with the keys on the M side of the matrix units,
scores = K·Qᵀ and outᵀ = Vᵀ·P, so that few query rows still fill them, and a tile of a compact
cache serves both products. Then the blocks meet at a counter, and a warpgroup for each query row
merges its splits in the order of the keys, in float32.

A product takes up to 40 query rows of a KV head. More (global layers of 31B from 6 positions on,
of 12B from 3) are cut into blocks of rows, each of which reads the keys and values again.

Row independence: where a split begins depends on positions alone, every row has its own running
maximum and sum, and masked keys leave a row untouched to the bit. So a row's output is the same for
every T and every batch. The splits of a growing cache have `tiles_per_split` tiles, which changes
with the position; the rows of one call that fall on both sides of a change (16 positions can
meet only one) are computed with either size and merged with their own.

Bytes: every live key and value once (floor: 4.69 TB/s on an H200). FLOPs: 4·G·T·H a key, some 60
to 300 TFLOP/s at the floor with G·T = 8…40 rows, which the matrix units hide under the copies.
On top come launch, first copy, partial results, counter and merge: at T = 1 about 6 µs for a ring,
for a global cache 8 at 6,005 keys and 18 at 131,072.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Unsupported, thread_blocks
from pallas_kernels.read_once import SEMANTICS
from pallas_kernels.row_copies import TILED, RowCopies
from pallas_kernels.split_keys.geometry import CHUNK, ROWS, TILE, Shape
from pallas_kernels.split_keys.merge import arrive, merge_splits
from pallas_kernels.split_keys.warpgroups import attend, copy_tiles

COMPUTE, COPY = 0, 1  # warpgroups


def split_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array,
    length: jax.Array,
    *,
    q_rotated: jax.Array | None = None,
    k_rotated: jax.Array | None = None,
    window: int | None = None,
    reread: bool = False,
    blocks: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """`ring_attention` (with a window) or `global_attention` (without), which see.

    Args:
      blocks: at most so many at a time, for `interpret`, which needs it; None on a GPU, where it
        is the number of multiprocessors.
      interpret: `plgpu.InterpretGPUParams()` runs on a CPU.

    Raises:
      ValueError: `interpret` without blocks, or blocks without it.
      Unsupported: another device or dtype, H not 256 or 512, P not 128, slots not a multiple
        of 64.
    """
    cores = thread_blocks(blocks, interpret)
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
    interpreted = interpret is not None
    shape = Shape(B, T, K, N // K, H, P, slots, window, cores, interpreted, reread)
    queries = [by_group(x, shape) for x in (q, q_rotated) if x is not None]
    caches = [x for x in (k, k_rotated, v) if x is not None]
    return _launch(shape, interpret, length.astype(jnp.int32), queries, caches)


def by_group(q: jax.Array, s: Shape) -> jax.Array:
    """[B, T, N, width] -> [groups, rows, width]: row t·G + g of KV head k.

    On a GPU the copies to shared memory add what a tile has beyond T·G rows. Blocks of rows are
    filled up with zeros here, and so is what the interpreter is given.
    """
    width = q.shape[-1]
    q = q.reshape(s.B, s.T, s.K, s.G, width).transpose(0, 2, 1, 3, 4)
    q = q.reshape(s.B, s.K, s.T * s.G, width)
    if missing := s.row_blocks * s.given_rows - s.T * s.G:
        q = jnp.pad(q, ((0, 0), (0, 0), (0, missing), (0, 0)))
    return q.reshape(s.groups, s.given_rows, width)


# Under its own jit, so that the many layers of a model trace and lower it once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(
    s: Shape,
    interpret: Any,
    length: jax.Array,
    queries: list[jax.Array],
    caches: list[jax.Array],
) -> jax.Array:
    out = jax.ShapeDtypeStruct((s.B, s.T, s.K * s.G, s.H), jnp.bfloat16)
    splits = s.sizes * s.splits
    partial = jax.ShapeDtypeStruct((s.groups, splits, s.rows, s.H), jnp.bfloat16)
    # log2 of a split's sum of weights, by which its result counts
    mass = jax.ShapeDtypeStruct((s.groups, splits, s.rows), jnp.float32)

    def shared(*shape: int) -> Any:
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=TILED)

    copies = [s.query_copies(q.shape[-1]) for q in queries]
    requests = sum(c.requests for c in copies)
    scratch = {
        "q_buffer": s.query_copies(s.H).buffers(s.query_buffers),  # then their result
        "tiles": shared(s.buffers, TILE, CHUNK),
        "p_buffer": shared(s.rows, TILE),
        "mass_buffer": plgpu.SMEM((s.rows,), jnp.float32),
        "full": plgpu.Barrier(num_barriers=s.buffers),
        "free": plgpu.Barrier(num_barriers=s.buffers),
        "q_full": plgpu.Barrier(num_barriers=s.query_buffers, num_arrivals=requests),
        "q_free": plgpu.Barrier(num_barriers=s.query_buffers),
    }
    if s.P:
        scratch["q_rotated_buffer"] = s.query_copies(s.P).buffers(s.query_buffers)
    kernel = functools.partial(
        plgpu.kernel,
        grid=(s.blocks,),
        grid_names=("block",),
        interpret=interpret,
        num_threads=2,
        thread_name="warpgroup",
        # Room for the most rows at once: a maximum in two goes costs two barriers more a tile.
        compiler_params=plgpu.CompilerParams(
            reduction_scratch_bytes=128 * ROWS[-1],
            approx_math=True,
            lowering_semantics=SEMANTICS,
        ),
    )

    def block(counter_ref, length_ref, *refs, **scratch):
        q_refs, refs = refs[: len(queries)], refs[len(queries) :]
        cache_refs, refs = refs[: len(caches)], refs[len(caches) :]
        *out_ref, partial_ref, mass_ref = refs
        warpgroup = lax.axis_index("warpgroup")

        @pl.when(warpgroup == COPY)
        def _():
            copy_tiles(s, length_ref, q_refs, cache_refs, **scratch)

        @pl.when(warpgroup == COMPUTE)
        def _():
            attend(s, length_ref, partial_ref, mass_ref, **scratch)
            if not s.interpreted:
                arrive(s, counter_ref)

        if not s.interpreted:
            merge_splits(s, length_ref, partial_ref, mass_ref, out_ref[0], counter_ref)

    # Zero before and after every call, so that the kernel is a function of its arguments.
    counter = jnp.zeros((1,), jnp.int32)
    outputs = (partial, mass) if s.interpreted else (out, partial, mass)
    results = kernel(block, out_type=outputs, scratch_types=scratch)(
        counter, length, *map(RowCopies.source, copies, queries), *caches
    )
    if not s.interpreted:
        return results[0]
    merge = functools.partial(merge_splits, s)
    return kernel(merge, out_type=out)(length, *results)
