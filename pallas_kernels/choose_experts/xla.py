"""choose_experts in plain JAX: the reference, and the CPU path."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.partial_sums import PartialSums, summed


def choose_experts(
    logits: jax.Array | PartialSums, scale: jax.Array, *, k: int
) -> tuple[jax.Array, jax.Array]:
    """See `pallas_kernels.choose_experts.choose_experts`."""
    logits = summed(logits)
    # Of all E, not the first of the k: `lax.top_k` may put a NaN last.
    largest = lax.stop_gradient(logits.max(-1, keepdims=True))
    chosen, index = lax.top_k(logits, k)
    share = jnp.exp(chosen - largest)
    share = share / share.sum(-1, keepdims=True)
    return index, share * scale.astype(jnp.float32)[index]
