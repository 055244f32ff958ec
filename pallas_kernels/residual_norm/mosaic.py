"""residual_norm for a few rows on Hopper: one block a row.

A row of 5,376 is some 60 KB of reads and writes: all latency.
"""

import functools
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Unsupported, require_hopper
from pallas_kernels.partial_sums import PartialSums, pieces
from pallas_kernels.row_norm import Row, check_rows

MOST_ROWS = 64


def residual_norm(
    h: jax.Array | None,
    y: jax.Array | PartialSums,
    w: jax.Array | None,
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
    check_rows(h=h, y=y, w=w, next_w=next_w)
    D = y.shape[-1]
    M = y.size // D
    if M > MOST_ROWS:
        raise Unsupported(f"y {y.shape} has {M} rows: takes up to {MOST_ROWS}")
    scales = [] if scale is None else [scale]
    rows = h if h is None else h.reshape(M, D)
    out = _launch(eps, interpret, rows, pieces(y).reshape(-1, M, D), w, next_w, *scales)
    return tuple(x.reshape(y.shape) for x in out)


# Under its own jit, so that the many layers of a model trace and lower it once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _launch(
    eps: float,
    interpret: Any,
    h: jax.Array | None,
    y: jax.Array,
    w: jax.Array | None,
    next_w: jax.Array,
    *scales: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    M, D = y.shape[1:]
    form = Row(D, eps, interpreted=interpret is not None)

    def add_and_norm(h_ref, y_ref, w_ref, next_ref, *refs, **scratch):
        *scale_refs, out_ref, normed_ref = refs
        row = lax.axis_index("row")
        out_ref[row, form.own], normed_ref[row, form.own] = form.add_and_norm(
            row, h_ref, y_ref, w_ref, next_ref, scale_refs, **scratch
        )

    like = jax.ShapeDtypeStruct((M, D), next_w.dtype)
    return plgpu.kernel(
        add_and_norm,
        out_type=(like, like),
        grid=(M,),
        grid_names=("row",),
        num_threads=form.parts,
        thread_name="part",
        scratch_types=form.scratch(),
        interpret=interpret,
    )(h, y, w, next_w, *scales)
