"""combine_experts in plain JAX: the reference, and the CPU path."""

import jax
import jax.numpy as jnp

from pallas_kernels.partial_sums import PartialSums, summed
from pallas_kernels.residual_norm.xla import norm


def combine_experts(
    y: jax.Array | PartialSums,
    w: jax.Array,
    rows: jax.Array,
    place: jax.Array | None,
    share: jax.Array,
    experts_w: jax.Array,
    *,
    eps: float,
) -> jax.Array:
    """See `pallas_kernels.combine_experts.combine_experts`."""
    y = summed(y)
    m = weighed(rows, place, share).astype(y.dtype)
    return norm(y, w, eps).astype(y.dtype) + norm(m, experts_w, eps).astype(y.dtype)


def weighed(rows: jax.Array, place: jax.Array | None, share: jax.Array) -> jax.Array:
    """float32 [M, D], the sum of a token's rows by their shares; see `combine_experts`."""
    if place is not None:
        rows = rows[place.reshape(-1)]
    rows = rows.astype(jnp.float32).reshape(*share.shape, rows.shape[1])
    return (rows * share[..., None]).sum(1)
