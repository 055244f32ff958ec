"""residual_norm for a few rows on Hopper: one block a row.

A row of 5,376 is some 60 KB of reads and writes: all latency.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Unsupported, require_hopper
from pallas_kernels.partial_sums import PartialSums, add_up

MOST_ROWS = 64
MOST_PARTS = 8  # warpgroups of a row
WARPS = 4  # of a warpgroup


def residual_norm(
    h: jax.Array,
    y: jax.Array | PartialSums,
    w: jax.Array,
    next_w: jax.Array,
    *,
    eps: float,
    scale: jax.Array | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.residual_norm.residual_norm`.

    Args:
      interpret: `plgpu.InterpretGPUParams()` runs on a CPU.

    Raises:
      Unsupported: another device, another dtype than bfloat16, D no multiple of 256 or above
        8,192, more than 64 rows.
    """
    if interpret is None:
        require_hopper()
    D = h.shape[-1]
    M = h.size // D
    for name, x in (("h", h), ("y", y), ("w", w), ("next_w", next_w)):
        if x.dtype != jnp.bfloat16:
            raise Unsupported(f"{name} is {x.dtype}, this takes bfloat16")
    if D % 256 or D > 8192 or M > MOST_ROWS:
        raise Unsupported(f"{M} rows of {D}: takes up to {MOST_ROWS} rows, D % 256 == 0 <= 8192")
    parts = y.parts if isinstance(y, PartialSums) else y[None]
    scales = [] if scale is None else [scale]
    out = _launch(eps, interpret, h.reshape(M, D), parts.reshape(-1, M, D), w, next_w, *scales)
    return tuple(x.reshape(h.shape) for x in out)


# Under its own jit, so that the many layers of a model trace and lower it once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(
    eps: float,
    interpret: Any,
    h: jax.Array,
    y: jax.Array,
    w: jax.Array,
    next_w: jax.Array,
    *scales: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    (M, D), pieces = h.shape, y.shape[0]
    parts = max(p for p in range(1, MOST_PARTS + 1) if D % (256 * p) == 0)
    width = D // parts
    vector = next(v for v in (8, 4, 2) if width % (128 * v) == 0)
    layout = plgpu.Layout.WG_STRIDED((width,), vec_size=vector)
    sum_up = _sum_of_a_warpgroup(layout) if interpret is None else lambda x, _: jnp.sum(x)

    def add_and_norm(h_ref, y_ref, w_ref, next_ref, *refs):
        *scale_refs, out_ref, normed_ref, sums, warp_sums, meet = refs
        row, part = lax.axis_index("row"), lax.axis_index("part")
        own = pl.ds(part * width, width)

        def load(ref):
            return plgpu.load(ref, layout=layout).astype(jnp.float32)

        def norm(x, w, which):
            total = sum_up(x * x, warp_sums.at[part])
            if parts > 1:  # every warpgroup adds up the sums of all, in the same order
                sums[which, part] = total
                plgpu.barrier_arrive(meet.at[which])
                plgpu.barrier_wait(meet.at[which])
                total = sum(sums[which, i] for i in range(parts))
            return x * lax.rsqrt(total / D + eps) * w

        def rounded(x):
            return x.astype(jnp.bfloat16).astype(jnp.float32)

        y = rounded(add_up(load(y_ref.at[i, row, own]) for i in range(pieces)))
        h = load(h_ref.at[row, own])
        w, next_w = load(w_ref.at[own]), load(next_ref.at[own])
        h = rounded(h + rounded(norm(y, w, 0)))
        for ref in scale_refs:
            h = rounded(h * ref[0].astype(jnp.float32))
        out_ref[row, own] = h.astype(jnp.bfloat16)
        normed_ref[row, own] = norm(h, next_w, 1).astype(jnp.bfloat16)

    like = jax.ShapeDtypeStruct((M, D), h.dtype)
    return plgpu.kernel(
        add_and_norm,
        out_type=(like, like),
        grid=(M,),
        grid_names=("row",),
        num_threads=parts,
        thread_name="part",
        scratch_types=(
            plgpu.SMEM((2, parts), jnp.float32),
            plgpu.SMEM((parts, WARPS), jnp.float32),
            plgpu.Barrier(num_barriers=2, num_arrivals=parts),
        ),
        interpret=interpret,
    )(h, y, w, next_w, *scales)


def _sum_of_a_warpgroup(layout: Any) -> Any:
    """sum_up(x of `layout`, scratch [WARPS] of shared memory) -> scalar.

    `jnp.sum` gives all warpgroups of a block the same scratch memory, and no warning: one reads
    what another has written.
    """
    scalar = plgpu.ShapeDtypeStruct((), jnp.float32, layout=plgpu.Layout.WG_SPLAT(()))

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()), return_type=scalar)
    def sum_up(ctx, x, scratch):
        return x.reduce("add", 0, scratch)

    return sum_up
