"""expert_inputs for a few rows on Hopper, in one launch, with a tile of the router a block.

The router is cut into tiles of 128 by 64, which a block asks for first of all. Meanwhile it norms
its rows for itself, as in `row_norm`; it leaves its 128 widths' share of the product, a piece. One
block more norms the rows for the experts: so none waits for the weights of two norms.

Bytes of 26B-A4B at one row: 721 KB of the router and 22 of h, x and the norms, 0.16 µs at 4.69
TB/s; 22 pieces of 128 logits are 11 KB. Each of 44 blocks reads 11 KB of h and scale out of L2, 0.1
µs at the 64 bytes a clock that a multiprocessor gets, and its tile, 16 KB, out of device memory. On
64 products a thread that is all latency: a launch, a round of loads, the sum of a norm, a product,
a round of stores. Predicted 2.5 µs at one row, 3 at five (each of 5 groups of 45 blocks has a
row), where XLA's kernels (two norms, a product in parts and their sum) are five or so of 1.2 to 3
µs. Not timed apart: with `combine_experts` a layer takes 6.9 µs less (docs/kernels.md).

Row independence: a row meets no other one, and the order of its sums depends on D alone.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Unsupported, thread_blocks
from pallas_kernels.partial_sums import PartialSums
from pallas_kernels.row_norm import Row, check_rows, rounded
from pallas_kernels.tile_product import COLUMNS, each_row, groups_of_rows, product

BF16 = jnp.bfloat16
MOST_ROWS = 16
DEPTH = 128  # of a tile: half of what a warpgroup's widths are a multiple of
BLOCKS = 2  # to a multiprocessor: a block is small, and waits most of its time


def expert_inputs(
    h: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    router: jax.Array,
    *,
    eps: float,
    blocks: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, PartialSums]:
    """See `pallas_kernels.expert_inputs.expert_inputs`; the logits are in D / 128 pieces.

    Args:
      blocks: the multiprocessors, for `interpret`, which needs it; None on a GPU.
      interpret: `plgpu.InterpretGPUParams()` runs on a CPU.

    Raises:
      ValueError: `interpret` without blocks, or blocks without it.
      Unsupported: another device, another dtype than bfloat16, D no multiple of 256 or above
        8,192, E no multiple of 64, more than 16 rows.
    """
    cores = thread_blocks(blocks, interpret)
    check_rows(h=h, w=w, scale=scale, router=router)
    if len(h) > MOST_ROWS:
        raise Unsupported(f"h {h.shape} has {len(h)} rows: takes up to {MOST_ROWS}")
    if not router.size or router.shape[1] % COLUMNS:
        raise Unsupported(f"router {router.shape}: takes E a multiple of {COLUMNS}")
    x, parts = _launch(eps, cores, interpret, h, w, scale, router)
    return x, PartialSums(parts, jnp.dtype(jnp.float32))


# Under its own jit, so that the many layers of a model trace and lower it once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _launch(
    eps: float,
    cores: int,
    interpret: Any,
    h: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    router: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    (M, D), E = h.shape, router.shape[1]
    form = Row(D, eps, interpret is not None)
    across = E // COLUMNS
    tiles = D // DEPTH * across

    def norm_and_multiply(
        h_ref, w_ref, scale_ref, router_ref, x_ref, parts_ref, *, normed, matrix, full, **scratch
    ):
        part, tile = lax.axis_index("part"), lax.axis_index("tile")
        step, columns = lax.div(tile, across), pl.ds(lax.rem(tile, across) * COLUMNS, COLUMNS)
        place = step * DEPTH  # of the tile's widths, which all are one warpgroup's
        owner, inner = lax.div(place, form.width), lax.rem(place, form.width)

        def norm(i, row, weight_ref):
            h, weight = form.load(h_ref.at[row, form.own]), form.load(weight_ref.at[form.own])
            return form.norm(h, weight, lax.rem(i, 2), **scratch)

        def multiply(i, row):
            r = norm(i, row, scale_ref) * D**-0.5

            @pl.when(part == owner)
            def _():
                normed[...] = rounded(r)
                pl.when(i == 0)(lambda: plgpu.barrier_wait(full))
                parts_ref[step, row, columns] = product(normed.at[pl.ds(inner, DEPTH)], matrix)

        @pl.when(tile < tiles)
        def _():
            @pl.when(part == owner)
            def _():
                widths = pl.ds(place, DEPTH)
                plgpu.copy_gmem_to_smem(router_ref.at[widths, columns], matrix, full)
                plgpu.commit_smem()  # a barrier, lest ptxas ask for the tile after the row

            each_row(M, multiply)

        @pl.when(tile == tiles)
        def _():
            def write(i, row):
                x_ref[row, form.own] = norm(i, row, w_ref).astype(BF16)

            each_row(M, write)

    return plgpu.kernel(
        norm_and_multiply,
        out_type=(
            jax.ShapeDtypeStruct((M, D), BF16),
            jax.ShapeDtypeStruct((D // DEPTH, M, E), jnp.float32),
        ),
        grid=(groups_of_rows(M, tiles + 1, BLOCKS * cores), tiles + 1),
        grid_names=("group", "tile"),
        num_threads=form.parts,
        thread_name="part",
        scratch_types={
            "normed": plgpu.SMEM((form.width,), jnp.float32),
            "matrix": plgpu.SMEM((DEPTH, COLUMNS), BF16),
            "full": plgpu.Barrier(),
            **form.scratch(),
        },
        interpret=interpret,
    )(h, w, scale, router)
