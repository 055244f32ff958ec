"""What stands between the two products of a gated MLP."""

import jax

from pallas_kernels import dispatch
from pallas_kernels.gated_gelu import mosaic, xla
from pallas_kernels.partial_sums import PartialSums

# Best first, all ops at once: `carat bench decode --config 31b`, benchmarks/h200, through XLA
# decode_31b_xla.json (f7b777c), by kernels decode_31b.json (dfe5ad5). Not measured apart.
IMPLEMENTATIONS = {"mosaic": mosaic.gated_gelu, "xla": xla.gated_gelu}


def gated_gelu(
    y: jax.Array | PartialSums,
    *,
    implementation: str | None = None,
) -> jax.Array:
    """gelu(gate) · up, with the tanh form of GELU.

    Args:
      y: [..., 2, F] gate, then up.
      implementation: one of `IMPLEMENTATIONS`; None takes the best that accepts the inputs.

    Returns:
      [..., F] in the dtype of y, computed in float32.

    Raises:
      ValueError: y without two halves, an unknown implementation.
      Unsupported: the named implementation cannot take this shape, this dtype or the device.
    """
    if y.ndim < 2 or y.shape[-2] != 2:
        raise ValueError(f"y {y.shape} must be [..., 2, F]")
    return dispatch.run(IMPLEMENTATIONS, implementation, y)
