"""skinny_matmul for Hopper, as a Pallas Mosaic GPU kernel, for bfloat16.

One block to a multiprocessor streams its share of the matrix through a ring of buffers in shared
memory, and the rows beside it (`streamed_product`).

31B's gate and up are 462 MB a layer, 98.6 µs at 4.69 TB/s; on 8 rows that is 7.4 GFLOP, nothing
to the matrix units. Predicted: floor + 3 µs for start and tail. Measured on an H200 within a
decode step: 105 µs (XLA's kernel 101), down 53.7 (53.1 with its sum), query/key/value 40.7 (40.5),
output 22.5 (22.1). The stream is what holds it up: docs/kernels.md. So it is not there for speed.
These times are of a step of one row whose products were all this op's. Since then those after a
residual sum (gate and up, query/key/value) are `residual_norm_matmul`'s there.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

from pallas_kernels.dispatch import Unsupported, thread_blocks
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.read_once import SEMANTICS
from pallas_kernels.row_copies import RowCopies
from pallas_kernels.streamed_product.geometry import COLUMNS, STEP, Cut
from pallas_kernels.streamed_product.stream import Stream, check_matrix, height_of

MOST_ROWS = 64
RING = 200 * 1024  # bytes of shared memory


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
      blocks: at most so many at a time, for `interpret`, which needs it; None on a GPU, where it
        is the number of multiprocessors.
      interpret: `plgpu.InterpretGPUParams()` runs on a CPU.

    Raises:
      ValueError: `interpret` without blocks, or blocks without it.
      Unsupported: another device or dtype, D or F no multiple of 64 or 128, a small matrix, more
        than 64 rows.
    """
    interpreted = interpret is not None
    cores = thread_blocks(blocks, interpret)
    check_matrix(x.dtype, w, transposed, interpreted)
    (M, D), F = x.shape, w.shape[0 if transposed else 1]
    if not 1 <= M <= MOST_ROWS:
        raise Unsupported(f"x {x.shape} has {M} rows: takes 1 to {MOST_ROWS} rows")
    if interpreted:  # a GPU's copies fill up with zeros themselves
        x = jnp.pad(x, ((0, height_of(M) - M), (0, 0)))
    stages = RING // ((height_of(M) + COLUMNS) * STEP * 2)
    stream = Stream(Cut.of(D, F, cores), M, jnp.dtype(out), transposed, stages, interpreted)
    return stream.result(_launch(stream, interpret, x, w))


# Under its own jit, so that the many layers of a model trace and lower it once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(stream: Stream, interpret: Any, x: jax.Array, w: jax.Array) -> jax.Array:
    rows = RowCopies(len(x), stream.height, STEP)

    def multiply_tiles(x_ref, w_ref, out_ref, *, x_ring, w_ring, full):
        def load(i):
            slot, step = stream.copy(i, w_ref, w_ring, full)
            rows.copy(x_ref.at[:, pl.ds(step * STEP, STEP)], x_ring, slot, full.at[slot])

        stream.fill(load)
        tiles = rows.tiles(x_ring)
        stream.multiply(load, lambda slot, step: tiles.at[slot], out_ref, w_ring, full)

    return plgpu.kernel(
        multiply_tiles,
        out_type=stream.out_type,
        grid=(stream.cut.blocks,),
        grid_names=("block",),
        scratch_types={
            "x_ring": rows.buffers(stream.stages),
            **stream.scratch(copies=1 + rows.requests),
        },
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(lowering_semantics=SEMANTICS),
    )(rows.source(x), w)
