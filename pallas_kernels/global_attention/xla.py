"""global_attention as grouped matrix products: the reference, and the CPU path."""

import jax
import jax.numpy as jnp

from pallas_kernels.grouping import attend, from_rows, mask_rows, product, to_rows


def global_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array,
    length: jax.Array,
    *,
    q_rotated: jax.Array | None = None,
    k_rotated: jax.Array | None = None,
    reread: bool = False,
) -> jax.Array:
    """See `pallas_kernels.global_attention.global_attention`; caching is XLA's."""
    del reread
    T, (_, K, S, _) = q.shape[1], v.shape
    position = length[:, None] + jnp.arange(T)  # [B, T]
    mask = jnp.arange(S) <= position[:, :, None]  # [B, T, S]
    scores = product("bkmh,bksh->bkms", to_rows(q, K), v if k is None else k)
    if k_rotated is not None:
        scores += product("bkmp,bksp->bkms", to_rows(q_rotated, K), k_rotated)
    return from_rows(attend(scores, mask_rows(mask, q.shape[2] // K), v), T)
