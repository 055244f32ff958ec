"""skinny_matmul for Hopper, as a Pallas Mosaic GPU kernel, for bfloat16.

One block to a multiprocessor streams its share of the matrix (`geometry.Cut`) through a ring of
buffers in shared memory, beside the rows. The columns lie on wgmma's 64-wide side and the rows
on its narrow one (8 wide in decode), so that few rows waste no work.

31B's gate and up are 462 MB a layer, 98.6 µs at 4.69 TB/s; on 8 rows that is 7.4 GFLOP, nothing
to the matrix units. Predicted: floor + 3 µs for start and tail. Measured on an H200 within a
decode step: 105 µs (XLA's kernel 101), down 53.7 (53.1 with its sum), query/key/value 40.7 (40.5),
output 22.5 (22.1). The stream is what holds it up: docs/kernels.md. So it is not there for speed.

Row independence: where a block begins depends on D, F and the device alone, and wgmma adds up in
the order of D. So a row's bits are the same for any number of rows that it takes.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Unsupported, require_hopper
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.skinny_matmul.geometry import COLUMNS, STEP, Cut
from pallas_kernels.thread_stores import as_int32, store, where_below

MOST_ROWS = 64
LEAST_WEIGHTS = 2**21  # below, a launch is all there is to it
RING = 200 * 1024  # bytes of shared memory
SWIZZLED = (plgpu.TilingTransform((8, STEP)), plgpu.SwizzleTransform(128))


def skinny_matmul(
    x: jax.Array,
    w: jax.Array,
    *,
    out: DTypeLike,
    transposed: bool = False,
    blocks: int | None = None,
    interpret: Any = None,
) -> jax.Array | PartialSums:
    """See `pallas_kernels.skinny_matmul.skinny_matmul`; the result may be in pieces.

    Args:
      blocks: thread blocks; None = the multiprocessors of the device.
      interpret: `plgpu.InterpretGPUParams()` runs on a CPU.

    Raises:
      Unsupported: another device or dtype, D or F no multiple of 64 or 128, a small matrix, more
        than 64 rows.
    """
    cores = blocks if interpret is not None else require_hopper()
    (M, D), F = x.shape, w.shape[0 if transposed else 1]
    if x.dtype != jnp.bfloat16 or w.dtype != jnp.bfloat16:
        raise Unsupported(f"x is {x.dtype} and w {w.dtype}, this takes bfloat16")
    if D % STEP or F % COLUMNS or M > MOST_ROWS:
        raise Unsupported(
            f"x {x.shape}, F {F}: takes up to {MOST_ROWS} rows, D a multiple of {STEP} and F of "
            f"{COLUMNS}"
        )
    if w.size < LEAST_WEIGHTS and interpret is None:
        raise Unsupported(f"w {w.shape} has fewer than {LEAST_WEIGHTS} weights")
    cut = Cut.of(D, F, cores)
    if M > 8 or interpret is not None:  # fewer rows are filled up with zeros by the copy itself
        x = jnp.pad(x, ((0, -M % 8), (0, 0)))
    dtype = jnp.dtype(out) if cut.parts == 1 else jnp.dtype(jnp.float32)
    parts = _launch(cut, M, dtype, transposed, interpret, x, w)
    return parts[0] if cut.parts == 1 else PartialSums(parts, jnp.dtype(out))


# Under its own jit, so that the many layers of a model trace and lower it once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3, 4))
def _launch(
    cut: Cut,
    M: int,
    dtype: Any,
    transposed: bool,
    interpret: Any,
    x: jax.Array,
    w: jax.Array,
) -> jax.Array:
    height = -(-M // 8) * 8
    tile = (COLUMNS, STEP) if transposed else (STEP, COLUMNS)
    stages = RING // ((height + COLUMNS) * STEP * 2)

    def multiply_tiles(x_ref, w_ref, out_ref, x_ring, w_ring, full):
        block = lax.axis_index("block")
        count = cut.count(block)

        def load(i):
            slot = lax.rem(i, jnp.int32(stages))
            column, step = cut.place(block, i)
            rows, widths = pl.ds(block * 0, height), pl.ds(step * STEP, STEP)
            columns = pl.ds(column * COLUMNS, COLUMNS)
            w_tile = w_ref.at[columns, widths] if transposed else w_ref.at[widths, columns]
            plgpu.copy_gmem_to_smem(x_ref.at[rows, widths], x_ring.at[slot], full.at[slot])
            plgpu.copy_gmem_to_smem(w_tile, w_ring.at[slot], full.at[slot])

        def load_if(i):
            pl.when(i < count)(lambda: load(i))

        for i in range(stages - 1):
            load_if(jnp.int32(i))

        def multiply(begin, end, total):
            def step(i, _):
                slot = lax.rem(i, jnp.int32(stages))
                plgpu.barrier_wait(full.at[slot])
                columns = w_ring.at[slot] if transposed else _transposed(w_ring.at[slot])
                plgpu.wgmma(total, columns, _transposed(x_ring.at[slot]))
                plgpu.wgmma_wait(1)  # the product before has read its buffers
                load_if(i + stages - 1)
                return 0

            lax.fori_loop(begin, end, step, 0)
            return total[...]

        def store(value, part, column):
            rows = out_ref.at[part, :, pl.ds(column * COLUMNS, COLUMNS)]
            if interpret is None:
                _store_transposed(value.astype(dtype), rows)
            else:
                rows[...] = value.astype(dtype).T[:M]

        def tile(begin):
            column, step = cut.place(block, begin)
            end = jnp.minimum(begin + cut.steps - step, count)
            y = pl.run_scoped(
                functools.partial(multiply, begin, end), plgpu.ACC((COLUMNS, height), jnp.float32)
            )
            part, parts = cut.part(block, column)
            store(y, part, column)
            for missing in range(1, cut.parts):

                @pl.when((part == 0) & (missing >= parts))
                def _(missing=missing):
                    zeros = plgpu.layout_cast(jnp.zeros_like(y), plgpu.Layout.WGMMA)
                    store(zeros, missing, column)

            return end

        lax.while_loop(lambda begin: begin < count, tile, jnp.int32(0))

    return plgpu.kernel(
        multiply_tiles,
        out_type=jax.ShapeDtypeStruct((cut.parts, M, cut.tiles * COLUMNS), dtype),
        grid=(cut.blocks,),
        grid_names=("block",),
        scratch_types=(
            plgpu.SMEM((stages, height, STEP), x.dtype, transforms=SWIZZLED),
            plgpu.SMEM((stages, *tile), w.dtype, transforms=SWIZZLED),
            plgpu.Barrier(num_barriers=stages, num_arrivals=2),
        ),
        interpret=interpret,
    )(x, w)


def _transposed(ref):
    return ref.transpose((1, 0))


@plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
def _store_transposed(ctx, y, out):
    """Writes y [columns, height] to out [M, columns] in global memory, without its rows from M."""
    (rows, _), (stride, _) = out.type.shape, ir.MemRefType(out.type).get_strides_and_offset()[0]
    start = mgpu.utils.memref_ptr(out)

    @y.foreach
    def _(value, index):
        column, row = as_int32(index)
        offset = arith.addi(arith.muli(row, mgpu.utils.c(stride, row.type)), column)
        with where_below(row, rows):
            store(value, start, offset)
