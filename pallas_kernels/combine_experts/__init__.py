"""The end of a mixture layer: what the dense MLP and the experts made of a token, in one."""

import jax
import jax.numpy as jnp

from pallas_kernels import dispatch
from pallas_kernels.combine_experts import mosaic, xla
from pallas_kernels.partial_sums import PartialSums

# Best first, together with `expert_inputs`: `carat bench decode --config 26b-a4b`, cut to
# twelve layers, benchmarks/h200, "mixture" in kernels_31b.json (1a4af0c, 76ce904).
IMPLEMENTATIONS = {"mosaic": mosaic.combine_experts, "xla": xla.combine_experts}


def combine_experts(
    y: jax.Array | PartialSums,
    w: jax.Array,
    rows: jax.Array,
    place: jax.Array | None,
    share: jax.Array,
    experts_w: jax.Array,
    *,
    eps: float,
    implementation: str | None = None,
) -> jax.Array:
    """Adds the normed outputs of the dense MLP, y, and of the experts that a token visits.

    With norm as in `residual_norm`:

      m[t] = sum over i of share[t, i] · rows[place[t, i]]
      result = norm(y, w) + norm(m, experts_w)

    m is summed in float32 in the order of i; it, both norms and the result are rounded to the dtype
    of y.

    Args:
      y: [M, D].
      w: [D], of the norm of y.
      rows: [M · k, D], of the experts, in any order.
      place: int32 [M, k], in [0, M · k); None: a token's rows lie together, in the order of tokens.
      share: float32 [M, k].
      experts_w: [D], of the norm of m.
      eps: added to the mean square.
      implementation: one of `IMPLEMENTATIONS`; None takes the best that accepts the inputs.

    Returns:
      [M, D], in the dtype of y.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown implementation.
      Unsupported: the named implementation cannot take these shapes, this dtype or the device.
    """
    D = y.shape[-1]
    if y.ndim != 2 or w.shape != (D,) or experts_w.shape != (D,):
        raise ValueError(
            f"y {y.shape} must be [M, D], w {w.shape} and experts_w {experts_w.shape} [D]"
        )
    M = y.shape[0]
    if share.ndim != 2 or len(share) != M or share.dtype != jnp.float32:
        raise ValueError(f"share {share.shape} {share.dtype} must be float32 [M, k], M = {M}")
    if rows.shape != (share.size, D):
        raise ValueError(f"rows {rows.shape} must be [M · k, D] = {(share.size, D)}")
    if place is not None and (place.shape != share.shape or place.dtype != jnp.int32):
        raise ValueError(f"place {place.shape} {place.dtype} must be int32 {share.shape}")
    return dispatch.run(
        IMPLEMENTATIONS, implementation, y, w, rows, place, share, experts_w, eps=eps
    )
