"""What a mixture is given of the residual: rows for the experts, logits of the router."""

import jax

from pallas_kernels import dispatch
from pallas_kernels.expert_inputs import mosaic, xla
from pallas_kernels.partial_sums import PartialSums

# Best first, together with `combine_experts`: `carat bench decode --config 26b-a4b`, cut to
# twelve layers, benchmarks/h200, "mixture" in kernels_31b.json (1a4af0c, 76ce904).
IMPLEMENTATIONS = {"mosaic": mosaic.expert_inputs, "xla": xla.expert_inputs}


def expert_inputs(
    h: jax.Array,
    w: jax.Array,
    scale: jax.Array,
    router: jax.Array,
    *,
    eps: float,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array | PartialSums]:
    """Norms the residual h twice, and multiplies one of the two by the router.

    With norm as in `residual_norm`:

      x = norm(h, w)
      logits = (norm(h, scale) / sqrt(D)) · router

    x is rounded to the dtype of h, and what the router is multiplied by to that of the router,
    once. The product accumulates in float32; float32 operands keep full precision.

    Args:
      h: [M, D].
      w: [D].
      scale: [D], of the router's norm.
      router: [D, E].
      eps: added to the mean square.
      implementation: one of `IMPLEMENTATIONS`; None takes the best that accepts the inputs.

    Returns:
      x [M, D] like h, and the logits float32 [M, E], perhaps in pieces.

    Raises:
      ValueError: shapes that do not fit, an unknown implementation.
      Unsupported: the named implementation cannot take these shapes, this dtype or the device.
    """
    D = h.shape[-1]
    if h.ndim != 2 or w.shape != (D,) or scale.shape != (D,):
        raise ValueError(f"h {h.shape} must be [M, D], w {w.shape} and scale {scale.shape} [D]")
    if router.ndim != 2 or len(router) != D:
        raise ValueError(f"router {router.shape} must be [D, E], D = {D}")
    return dispatch.run(IMPLEMENTATIONS, implementation, h, w, scale, router, eps=eps)
