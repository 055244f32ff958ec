"""combine_experts for a few rows on Hopper: one block a row, in two halves.

One half's warpgroups have the dense MLP's output, the other's the experts'. Each norms its own, as
in `row_norm`; they meet once, for the sum.

Bytes of 26B-A4B at one row, y in four pieces: 45 KB of these, 45 of eight rows, 17 of weights and
result, 0.02 µs at 4.69 TB/s, but 0.9 µs at the 64 bytes a clock that one multiprocessor gets out
of L2. Besides a launch, the sum of a norm, the meeting and a round of stores. Predicted 2.5 µs at
one row, 3 at five (a trip to memory more, for where rows lie), where XLA's kernels (the sum of the
pieces, the weighed sum, two norms, the last sum) are four or so of 1.2 to 1.8 µs. Not timed apart:
with `expert_inputs` a layer takes 6.9 µs less (docs/kernels.md).

Row independence: a row meets no other one; the order of its sums depends on D, k and the number of
pieces, and each product and each sum is rounded.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.lib.mlir.dialects import llvm  # no public name yet
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Unsupported, require_hopper
from pallas_kernels.partial_sums import PartialSums, add_up, pieces
from pallas_kernels.row_norm import MOST_PARTS, Row, check_rows, rounded

BF16 = jnp.bfloat16
MOST_ROWS = 16
MOST_EXPERTS = 16  # of a token: each row's loads are instructions of their own


def combine_experts(
    y: jax.Array | PartialSums,
    w: jax.Array,
    rows: jax.Array,
    place: jax.Array | None,
    share: jax.Array,
    experts_w: jax.Array,
    *,
    eps: float,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.combine_experts.combine_experts`.

    Args:
      interpret: `plgpu.InterpretGPUParams()` runs on a CPU.

    Raises:
      Unsupported: another device, another dtype than bfloat16, D no multiple of 256, above 8,192
        or a row of more than four warpgroups, more than 16 rows or 16 experts of each.
    """
    if interpret is None:
        require_hopper()
    check_rows(rows=rows, y=y, w=w, experts_w=experts_w)
    (M, k), D = share.shape, rows.shape[1]
    if M > MOST_ROWS or k > MOST_EXPERTS:
        raise Unsupported(
            f"{M} rows of {k} experts: takes up to {MOST_ROWS} rows and {MOST_EXPERTS} experts"
        )
    form = Row(D, eps, interpret is not None, sides=2)
    if form.sides * form.parts > MOST_PARTS:
        raise Unsupported(
            f"rows {rows.shape}: takes D whose row has up to {MOST_PARTS // form.sides} warpgroups"
        )
    places = [] if place is None else [place]
    return _launch(form, interpret, pieces(y), w, rows, share, experts_w, *places)


# Under its own jit, so that the many layers of a model trace and lower it once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(
    form: Row,
    interpret: Any,
    y: jax.Array,
    w: jax.Array,
    rows: jax.Array,
    share: jax.Array,
    experts_w: jax.Array,
    *places: jax.Array,
) -> jax.Array:
    (parts, M, D), k = y.shape, share.shape[1]
    times = _rounded_product(form.layout, form.width) if interpret is None else jnp.multiply

    def combine(y_ref, w_ref, rows_ref, share_ref, experts_w_ref, *refs, dense, there, **scratch):
        *place_refs, out_ref = refs
        row, own = lax.axis_index("row"), form.own
        side = lax.div(lax.axis_index("part"), form.parts)

        @pl.when(side == 0)
        def _():
            weight = form.load(w_ref.at[own])
            y = rounded(add_up(form.load(y_ref.at[i, row, own]) for i in range(parts)))
            dense[own] = rounded(form.norm(y, weight, 0, **scratch))
            plgpu.barrier_arrive(there)

        @pl.when(side == 1)
        def _():
            weight = form.load(experts_w_ref.at[own])
            shares = [share_ref[row, i] for i in range(k)]
            at = [place_refs[0][row, i] if place_refs else row * k + i for i in range(k)]
            rows = [form.load(rows_ref.at[i, own]) for i in at]
            m = add_up(times(x, share) for x, share in zip(rows, shares, strict=True))
            m = rounded(form.norm(rounded(m), weight, 1, **scratch))
            plgpu.barrier_wait(there)
            out_ref[row, own] = (form.load(dense.at[own]) + m).astype(BF16)

    return plgpu.kernel(
        combine,
        out_type=jax.ShapeDtypeStruct((M, D), BF16),
        grid=(M,),
        grid_names=("row",),
        num_threads=form.sides * form.parts,
        thread_name="part",
        scratch_types={
            "dense": plgpu.SMEM((D,), jnp.float32),
            "there": plgpu.Barrier(num_arrivals=form.parts),
            **form.scratch(),
        },
        interpret=interpret,
    )(y, w, rows, share, experts_w, *places)


def _rounded_product(layout: plgpu.Layout, width: int) -> Any:
    """product(x [width] of `layout`, scalar), rounded.

    Of two products that are added, ptxas else leaves one or the other unrounded.
    """
    like = plgpu.ShapeDtypeStruct((width,), jnp.float32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.Layout.WG_SPLAT(())), return_type=like)
    def product(ctx, x, factor):
        factor = factor.registers.item()

        def times(value, _):
            return llvm.inline_asm(value.type, [value, factor], "mul.rn.f32 $0, $1, $2;", "=f,f,f")

        return x.foreach(times, create_array=True)

    return product
