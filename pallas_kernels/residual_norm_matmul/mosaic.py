"""residual_norm_matmul of one row on Hopper: a product whose blocks norm the row themselves.

Apart, device memory idles while the one block of a norm runs, and again until a product's first
tiles arrive. Here one warpgroup of each block asks for all but one of the tiles that its ring
holds while the others norm the row, each block for itself, into shared memory; then it multiplies.
Only the first block writes the residual. Predicted to save 3 to 5 µs a norm, it saves 2.4 by the
wall time of a step of 31B, and about 1 by the profiler's period of a layer, which has two.

For 31B a block reads 97 KB out of L2 to do so, 65 of them the three pieces of y: 13 MB in all.
A further row would be another 10 MB, so that with a few it would take longer than a norm by
itself: more rows than one are left to the two ops. Their bits are the same, for the norm is
`row_norm`'s and the product `streamed_product`'s.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Unsupported, thread_blocks
from pallas_kernels.partial_sums import PartialSums, pieces
from pallas_kernels.read_once import SEMANTICS
from pallas_kernels.row_copies import TILED
from pallas_kernels.row_norm import Row, check_rows
from pallas_kernels.streamed_product.geometry import STEP, Cut
from pallas_kernels.streamed_product.stream import TILE_BYTES, Stream, check_matrix, height_of
from pallas_kernels.thread_stores import as_int32, store

HEIGHT = height_of(1)  # of the tiles with the row
MOST_WARPGROUPS = 8  # of a block
MEMORY = 220 * 1024  # bytes of shared memory: the row, and the ring with what is left


def residual_norm_matmul(
    h: jax.Array | None,
    y: jax.Array | PartialSums,
    w: jax.Array | None,
    next_w: jax.Array,
    matrix: jax.Array,
    *,
    eps: float,
    out: DTypeLike,
    scale: jax.Array | None = None,
    blocks: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array | PartialSums]:
    """See `pallas_kernels.residual_norm_matmul.residual_norm_matmul`.

    Args:
      blocks: at most so many at a time, for `interpret`, which needs it; None on a GPU, where it
        is the number of multiprocessors.
      interpret: `plgpu.InterpretGPUParams()` runs on a CPU.

    Raises:
      ValueError: `interpret` without blocks, or blocks without it.
      Unsupported: another device or dtype, D no multiple of 256, a multiple of 2,048 or above
        8,192, F no multiple of 128, a small matrix, more than one row.
    """
    interpreted = interpret is not None
    cores = thread_blocks(blocks, interpret)
    check_rows(h=h, y=y, w=w, next_w=next_w)
    check_matrix(y.dtype, matrix, False, interpreted)
    if y.shape[0] != 1:
        raise Unsupported(f"y {y.shape} has {y.shape[0]} rows: takes one")
    form = Row(y.shape[-1], eps, interpreted)
    if form.parts + 1 > MOST_WARPGROUPS:
        raise Unsupported(f"y {y.shape}: its norm leaves no warpgroup for the product")
    D, F = matrix.shape
    stages = (MEMORY - HEIGHT * D * 2) // TILE_BYTES
    product = Stream(Cut.of(D, F, cores), 1, jnp.dtype(out), False, stages, interpreted)
    scales = [] if scale is None else [scale]
    h, parts = _launch(form, product, interpret, h, pieces(y), w, next_w, *scales, matrix)
    return h, product.result(parts)


# Under its own jit, so that the many layers of a model trace and lower it once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _launch(
    form: Row, product: Stream, interpret: Any, *inputs: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    steps = form.width // STEP  # of a warpgroup
    store_row = _store_row_interpreted if product.interpreted else _store_row(form.layout)

    def norm_and_multiply(
        h_ref, y_ref, w_ref, next_ref, *refs, x_tiles, normed, w_ring, full, **scratch
    ):
        *scale_refs, matrix_ref, new_ref, out_ref = refs
        part = lax.axis_index("part")

        @pl.when(part < form.parts)
        def _():
            h, x = form.add_and_norm(0, h_ref, y_ref, w_ref, next_ref, scale_refs, **scratch)
            store_row(x, x_tiles.at[pl.ds(part * steps, steps)])
            plgpu.commit_smem()
            plgpu.barrier_arrive(normed)

            @pl.when(lax.axis_index("block") == 0)
            def _():
                new_ref[0, form.own] = h

        @pl.when(part == form.parts)
        def _():
            def load(i):
                product.copy(i, matrix_ref, w_ring, full)

            product.fill(load)
            plgpu.barrier_wait(normed)
            product.multiply(load, lambda slot, step: x_tiles.at[step], out_ref, w_ring, full)

    return plgpu.kernel(
        norm_and_multiply,
        out_type=(jax.ShapeDtypeStruct((1, form.D), jnp.bfloat16), product.out_type),
        grid=(product.cut.blocks,),
        grid_names=("block",),
        num_threads=form.parts + 1,
        thread_name="part",
        scratch_types={
            "x_tiles": plgpu.SMEM((form.D // STEP, HEIGHT, STEP), jnp.bfloat16, transforms=TILED),
            "normed": plgpu.Barrier(num_arrivals=form.parts),
            **product.scratch(copies=1),
            **form.scratch(),
        },
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=SEMANTICS),
    )(*inputs)


def _store_row_interpreted(x: jax.Array, tiles: Any) -> None:
    tiles[:, 0, :] = x.reshape(-1, STEP)


def _store_row(layout: plgpu.Layout) -> Any:
    """store_row(x [width], tiles [width / STEP, HEIGHT, STEP] of shared memory): x as their rows 0.

    A row r of a swizzled tile has its 16-byte chunks at their place XOR r, so row 0 lies as it
    is. The other rows are left as they are found: each is a row of the product of its own, which
    is not stored.
    """

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType(TILED)))
    def store_row(ctx, x, tiles):
        start = mgpu.utils.memref_ptr(tiles)

        @x.foreach
        def _(value, index):
            (i,) = as_int32(index)
            step, size = (mgpu.utils.c(n, i.type) for n in (STEP, HEIGHT * STEP))
            tile, width = arith.divui(i, step), arith.remui(i, step)
            store(value, start, arith.addi(arith.muli(tile, size), width))

    return store_row
