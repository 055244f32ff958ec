"""expert_inputs in plain JAX: the reference, and the CPU path."""

import jax
import jax.numpy as jnp

from pallas_kernels.residual_norm.xla import norm
from pallas_kernels.skinny_matmul.xla import skinny_matmul


def expert_inputs(
    h: jax.Array, w: jax.Array, scale: jax.Array, router: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.expert_inputs.expert_inputs`."""
    r = norm(h, scale, eps) * h.shape[-1] ** -0.5
    logits = skinny_matmul(r.astype(router.dtype), router, out=jnp.float32)
    return norm(h, w, eps).astype(h.dtype), logits
