"""ring_attention on Hopper: see `pallas_kernels.split_keys`."""

from typing import Any

import jax

from pallas_kernels.split_keys import split_attention


def ring_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    length: jax.Array,
    *,
    window: int,
    reread: bool = False,
    blocks: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.ring_attention.ring_attention`, and `split_attention`."""
    return split_attention(
        q, k, v, length, window=window, reread=reread, blocks=blocks, interpret=interpret
    )
