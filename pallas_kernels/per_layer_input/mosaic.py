"""per_layer_input for a few rows on Hopper, in two launches, with a tile of a matrix a block.

Both matrices are cut into tiles of 256 by 64, which a block asks for first of all and multiplies
by on plain arithmetic units: a row times so few weights gives wgmma nothing to do.

1. A block has a tile of the gate. It norms its rows for itself, as in `row_norm`, and
   leaves its 256 widths' share of the product: a piece, float32. One block more copies the
   layer's own input, for which the second launch would else wait twice: for the place, and for
   what is there.
2. A block has 64 columns of the projection. It adds up the pieces in their order, and activates.

Bytes of E4B at one row: 1.3 MB of each matrix out of device memory, 0.3 µs at 4.69 TB/s. Besides,
each of 40 blocks reads 82 KB in the first launch (72 of them the seven pieces of y) and 11 KB in
the second, out of L2: 0.7 and 0.1 µs at the 64 bytes a clock that a multiprocessor gets. The rest
is latency: a launch, a round of loads, the sum of a norm or an activation, a product of 0.25 µs,
a round of stores. Predicted 3 and 2.5 µs; not timed apart from a step: one of E4B at one row is
0.34 ms shorter, with loops within CUDA graphs, which came meanwhile.

Row independence: a row meets no other one, and the order of its sums depends on D alone.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Unsupported, thread_blocks
from pallas_kernels.partial_sums import PartialSums, add_up, pieces
from pallas_kernels.row_norm import Row, check_rows, rounded
from pallas_kernels.tile_product import COLUMNS, each_row, groups_of_rows, product

BF16 = jnp.bfloat16
MOST_ROWS = 16
DEPTH = 256  # of a tile, and P
VECTOR = plgpu.Layout.WG_STRIDED((DEPTH,), vec_size=2)


def per_layer_input(
    h: jax.Array,
    y: jax.Array | PartialSums,
    w: jax.Array,
    gate: jax.Array,
    inputs: jax.Array,
    projection: jax.Array,
    *,
    layer: int,
    eps: float,
    blocks: int | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.per_layer_input.per_layer_input`.

    Args:
      blocks: at most so many at a time, for `interpret`, which needs it; None on a GPU, where it
        is the number of multiprocessors.
      interpret: `plgpu.InterpretGPUParams()` runs on a CPU.

    Raises:
      ValueError: `interpret` without blocks, or blocks without it.
      Unsupported: another device, another dtype than bfloat16, D no multiple of 256 or above
        8,192, P other than 256, more than 16 rows.
    """
    cores = thread_blocks(blocks, interpret)
    check_rows(h=h, y=y, w=w)
    if len(h) > MOST_ROWS:
        raise Unsupported(f"h {h.shape} has {len(h)} rows: takes up to {MOST_ROWS}")
    if gate.shape[-1] != DEPTH:
        raise Unsupported(f"gate {gate.shape}: takes P = {DEPTH}")
    layers = jnp.full((1,), layer, jnp.int32)
    return _launch(eps, cores, interpret, h, pieces(y), w, gate, inputs, projection, layers)


# Under its own jit, so that the many layers of a model trace and lower it once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _launch(
    eps: float,
    cores: int,
    interpret: Any,
    h: jax.Array,
    y: jax.Array,
    w: jax.Array,
    gate: jax.Array,
    inputs: jax.Array,
    projection: jax.Array,
    layer: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    add = _add_and_multiply(Row(h.shape[-1], eps, interpret is not None), cores, interpret)
    new, own, parts = add(h, y, w, gate, inputs, layer)
    return new, _activate_and_multiply(cores, interpret)(parts, own, projection)


def _add_and_multiply(form: Row, cores: int, interpret: Any) -> Callable[..., Any]:
    """(h, y, w, gate, inputs, layer) -> h [M, D], own input [M, P], pieces [D / DEPTH, M, P]."""
    across = DEPTH // COLUMNS
    tiles = form.D // DEPTH * across

    def body(
        h_ref, y_ref, w_ref, gate_ref, inputs_ref, layer_ref, new_ref, own_ref, out_ref,
        *, x, matrix, full, **scratch,
    ):  # fmt: skip
        part, tile = lax.axis_index("part"), lax.axis_index("tile")
        step, columns = lax.div(tile, across), pl.ds(lax.rem(tile, across) * COLUMNS, COLUMNS)
        place = step * DEPTH  # of the tile's widths, which all are one warpgroup's
        owner, inner = lax.div(place, form.width), lax.rem(place, form.width)

        def add_and_multiply(i, row):
            h = form.add(row, h_ref, y_ref, w_ref, lax.rem(i, 2), **scratch)

            @pl.when(part == owner)
            def _():
                @pl.when((columns.start == 0) & (inner == 0))
                def _():
                    new_ref[row, form.own] = h.astype(BF16)

                x[...] = h
                pl.when(i == 0)(lambda: plgpu.barrier_wait(full))
                out_ref[step, row, columns] = product(x.at[pl.ds(inner, DEPTH)], matrix)

        @pl.when(tile < tiles)
        def _():
            @pl.when(part == owner)
            def _():
                rows = pl.ds(place, DEPTH)
                plgpu.copy_gmem_to_smem(gate_ref.at[rows, columns], matrix, full)

            each_row(len(h_ref), add_and_multiply)

        @pl.when((tile == tiles) & (part == 0))
        def _():
            def copy(i, row):
                own_ref[row] = plgpu.load(inputs_ref.at[row, layer_ref[0]], layout=VECTOR)

            each_row(len(h_ref), copy)

    def call(h, *others):
        M, D = h.shape
        return plgpu.kernel(
            body,
            out_type=(
                jax.ShapeDtypeStruct((M, D), BF16),
                jax.ShapeDtypeStruct((M, DEPTH), BF16),
                jax.ShapeDtypeStruct((D // DEPTH, M, DEPTH), jnp.float32),
            ),
            grid=(groups_of_rows(M, tiles + 1, cores), tiles + 1),
            grid_names=("group", "tile"),
            num_threads=form.parts,
            thread_name="part",
            scratch_types={**_scratch(form.width), **form.scratch()},
            interpret=interpret,
        )(h, *others)

    return call


def _activate_and_multiply(cores: int, interpret: Any) -> Callable[..., jax.Array]:
    """(pieces [n, M, P], own input [M, P], projection) -> [M, D]."""

    def body(pieces_ref, own_ref, projection_ref, out_ref, *, x, matrix, full):
        columns = pl.ds(lax.axis_index("tile") * COLUMNS, COLUMNS)
        plgpu.copy_gmem_to_smem(projection_ref.at[:, columns], matrix, full)
        plgpu.commit_smem()  # a barrier, else ptxas asks for the tile when the pieces have come

        def load(ref):
            return plgpu.load(ref, layout=VECTOR).astype(jnp.float32)

        def activate_and_multiply(i, row):
            own = load(own_ref.at[row])
            g = rounded(add_up(load(pieces_ref.at[p, row]) for p in range(len(pieces_ref))))
            x[...] = rounded(jax.nn.gelu(g, approximate=True) * own)
            pl.when(i == 0)(lambda: plgpu.barrier_wait(full))
            out_ref[row, columns] = product(x, matrix).astype(BF16)

        each_row(len(own_ref), activate_and_multiply)

    def call(parts, own, projection):
        M, D = len(own), projection.shape[-1]
        return plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((M, D), BF16),
            grid=(groups_of_rows(M, D // COLUMNS, cores), D // COLUMNS),
            grid_names=("group", "tile"),
            scratch_types=_scratch(DEPTH),
            interpret=interpret,
        )(parts, own, projection)

    return call


def _scratch(width: int) -> dict[str, Any]:
    """What a tile is multiplied by, the tile, and the barrier at which it arrives."""
    return {
        "x": plgpu.SMEM((width,), jnp.float32),
        "matrix": plgpu.SMEM((DEPTH, COLUMNS), BF16),
        "full": plgpu.Barrier(),
    }
