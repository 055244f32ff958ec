"""ring_attention as two grouped matrix products: the reference, and the CPU path."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouping import attend, from_rows, mask_rows, product, to_rows


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    length: jax.Array,
    *,
    window: int,
    reread: bool = False,
) -> jax.Array:
    """See `pallas_kernels.ring_attention.ring_attention`; caching is XLA's."""
    del reread
    T, (_, K, R, _) = q.shape[1], v.shape
    last = (length + T - 1)[:, None]  # [B, 1] newest position in the ring
    slot_position = last - (last - jnp.arange(R)) % R  # [B, R]
    age = (length[:, None] + jnp.arange(T))[:, :, None] - slot_position[:, None]  # [B, T, R]
    mask = (age >= 0) & (age < window) & (slot_position >= 0)[:, None]
    rows = to_rows(q, K)
    scores = product("bkmh,bkrh->bkmr", rows, k)
    return from_rows(attend(scores, mask_rows(mask, q.shape[2] // K), v), T)
