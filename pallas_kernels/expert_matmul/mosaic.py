"""expert_matmul for Hopper, as a Pallas Mosaic GPU kernel, for bfloat16.

One block for each tile of rows and slice of columns: it streams its slice of the matrix through
a ring of buffers in shared memory, beside the rows. The columns lie on wgmma's 64-wide side and
the rows on its narrow one (8 wide in decode), so that few rows waste no work.

Decode of the 26B-A4B shape, one token: 8 experts of 3 · 2816 · 704 weights are 95 MB a layer, 20
µs at 4.69 TB/s, two thirds of them gated. On 8 rows, 7 of them idle, that is 0.8 GFLOP, under 2
µs. Predicted: 15 µs gated (88 blocks on 132 SMs, each with a full ring in flight) and 8 µs plain
(352 short blocks, three to an SM). Measured on an H200: 28 µs for both kernels, 42 with what
lies between them and the next layer; with 16 tokens 225 of a floor of 214.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Unsupported, require_hopper
from pallas_kernels.expert_matmul.tiles import Tiles, cut, tile_height
from pallas_kernels.row_copies import TILED

STEP = 64  # of D, in one stage of the ring: a row of it is as wide as the swizzle, 128 bytes
COLUMNS = 64  # of a slice: what wgmma computes at once


def expert_matmul(
    x: jax.Array,
    w: jax.Array,
    index: jax.Array,
    *,
    absent: bool = False,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> jax.Array:
    """See `pallas_kernels.expert_matmul.expert_matmul`.

    A row's bits depend on nothing else: the order in which wgmma adds up is that of D.

    Args:
      interpret: runs the kernel in the interpreter, on any device.

    Raises:
      Unsupported: not a Hopper GPU, another dtype than bfloat16, D or F no multiple of 64.
    """
    if interpret is None:
        require_hopper()
    if x.dtype != jnp.bfloat16:
        raise Unsupported(f"x and w are {x.dtype}, this takes bfloat16")
    n, (E, D, *_, F) = len(index), w.shape
    if D % STEP or F % COLUMNS:
        raise Unsupported(f"w {w.shape}: D must be a multiple of {STEP} and F of {COLUMNS}")
    height = tile_height(n, E)
    tiles = cut(index, height, E, absent)
    shared = len(x) == 1 and n <= height
    if not shared:
        x = jnp.broadcast_to(x, (n, D))
    if not shared or interpret is not None:  # a GPU's copies fill up one row with zeros themselves
        x = jnp.pad(x, ((0, -len(x) % height), (0, 0)))
    stages = _stages(D, height, w.ndim == 4)
    return _launch(x, w, index, tiles, height, stages, shared, interpret)[:n]


def _stages(D: int, height: int, gated: bool) -> int:
    """Depth of the ring: one block to an SM when it is gated, three when it is not."""
    stage = (height + COLUMNS * (1 + gated)) * STEP * 2
    return (200 if gated else 72) * 1024 // stage


# Under its own jit, so that the many layers of a model trace and lower it once.
@functools.partial(jax.jit, static_argnums=(4, 5, 6, 7))
def _launch(
    x: jax.Array,
    w: jax.Array,
    index: jax.Array,
    tiles: Tiles,
    height: int,
    stages: int,
    shared: bool,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """Of n rows, filled up to a multiple of the height.

    Args:
      shared: x has one row, alone in the only block of rows; each tile is that row's.
    """
    n, (_, D, *_, F), gated = -(-len(index) // height) * height, w.shape, w.ndim == 4

    def body(x_ref, w_ref, index_ref, first_ref, count_ref, out_ref, out_smem):
        tile, part = lax.axis_index("tile"), lax.axis_index("slice")
        first, count = first_ref[tile], count_ref[tile]

        @pl.when(count > 0)
        def _():
            block = lax.div(first, jnp.int32(height))
            matrix = w_ref.at[index_ref[first]]
            matrices = [matrix.at[:, 0], matrix.at[:, 1]] if gated else [matrix]

            def multiply(*sums):
                def step(_, x_smem, *w_smem):
                    for total, columns in zip(sums, w_smem, strict=True):
                        plgpu.wgmma(total, _transposed(columns), _transposed(x_smem))
                    plgpu.wgmma_wait(len(sums))  # for those of the step before

                plgpu.emit_pipeline(
                    step,
                    grid=(D // STEP,),
                    in_specs=[
                        _streamed((height, STEP), lambda i: (block, i)),
                        *[_streamed((STEP, COLUMNS), lambda i: (i, part))] * len(sums),
                    ],
                    max_concurrent_steps=stages,
                )(x_ref, *matrices)
                return [total[...] for total in sums]

            sums = [plgpu.ACC((COLUMNS, height), jnp.float32)] * len(matrices)
            y, *up = pl.run_scoped(multiply, *sums)
            if gated:
                y = jax.nn.gelu(y, approximate=True) * up[0]
            _transposed(out_smem)[...] = y.astype(out_ref.dtype)
            plgpu.commit_smem()
            columns = pl.ds(part * COLUMNS, COLUMNS)
            start = first if shared else block * height
            _store_rows(out_smem, out_ref.at[:, columns], start, first, count)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((n, F), x.dtype),
        scratch_types=[plgpu.SMEM((height, COLUMNS), x.dtype)],
        grid=(len(tiles.first), F // COLUMNS),
        grid_names=("tile", "slice"),
        interpret=interpret,
    )(x, w, index, tiles.first, tiles.count)


def _transposed(ref):
    return ref.transpose((1, 0))


def _streamed(shape, index_map) -> plgpu.BlockSpec:
    """A block of the ring, handed back once the products of the step after it are under way."""
    return plgpu.BlockSpec(shape, index_map, transforms=TILED, delay_release=1)


def _store_rows(smem, out, start, first, count) -> None:
    """Copies rows [first, first + count) of `out`, of which `smem` holds those from `start` on.

    A copy needs a static number of rows: so one for each power of two that `count` contains.
    """
    size = smem.shape[0]
    while size:
        here = lax.bitwise_and(count, jnp.int32(size))

        @pl.when(here > 0)
        def _(size=size, first=first):
            rows = smem.at[pl.ds(first - start, size)]
            plgpu.copy_smem_to_gmem(rows, out.at[pl.ds(first, size)])

        first, size = first + here, size // 2
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
