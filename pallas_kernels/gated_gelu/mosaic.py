"""gated_gelu for a few rows on Hopper: adds up the pieces of a product in passing.

The point is not speed but that it rounds where the contract says. XLA leaves out a rounding where
it fuses, and may fuse otherwise for other numbers of rows: then verifying would not give the bits
of decoding.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.dispatch import Unsupported, require_hopper
from pallas_kernels.partial_sums import PartialSums, add_up, pieces

BF16 = jnp.bfloat16
MOST_ROWS = 64
COLUMNS = 256  # of a piece of work


def gated_gelu(y: jax.Array | PartialSums, *, interpret: Any = None) -> jax.Array:
    """See `pallas_kernels.gated_gelu.gated_gelu`.

    Args:
      interpret: `plgpu.InterpretGPUParams()` runs on a CPU.

    Raises:
      Unsupported: another device, another dtype than bfloat16, F no multiple of 64 or below 256,
        more than 64 rows.
    """
    if interpret is None:
        require_hopper()
    F = y.shape[-1]
    M = y.size // (2 * F)
    if y.dtype != BF16:
        raise Unsupported(f"y is {y.dtype}, this takes bfloat16")
    if F % 64 or F < COLUMNS or M > MOST_ROWS:
        raise Unsupported(
            f"y {y.shape}: takes up to {MOST_ROWS} rows, F a multiple of 64 from {COLUMNS} on"
        )
    out = _launch(interpret, pieces(y).reshape(-1, M, 2, F))
    return out.reshape(*y.shape[:-2], F)


# Under its own jit, so that the many layers of a model trace and lower it once.
@functools.partial(jax.jit, static_argnums=0)
def _launch(interpret: Any, y: jax.Array) -> jax.Array:
    parts, M, _, F = y.shape
    layout = plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=COLUMNS // 128)

    def rounded(x):
        return x.astype(BF16).astype(jnp.float32)

    def add_up_and_activate(y_ref, out_ref):
        # Where F is not a multiple, the last two pieces overlap, and both write the same there.
        first = jnp.minimum(lax.axis_index("piece") * COLUMNS, F - COLUMNS)
        row, columns = lax.axis_index("row"), pl.ds(first, COLUMNS)

        def load(part, half):
            piece = y_ref.at[part, row, half, columns]
            return plgpu.load(piece, layout=layout).astype(jnp.float32)

        gate, up = (rounded(add_up(load(part, half) for part in range(parts))) for half in (0, 1))
        out_ref[row, columns] = (jax.nn.gelu(gate, approximate=True) * up).astype(BF16)

    return plgpu.kernel(
        add_up_and_activate,
        out_type=jax.ShapeDtypeStruct((M, F), BF16),
        grid=(M, pl.cdiv(F, COLUMNS)),
        grid_names=("row", "piece"),
        interpret=interpret,
    )(y)
