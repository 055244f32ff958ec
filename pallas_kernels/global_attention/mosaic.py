"""global_attention on Hopper: see `pallas_kernels.split_keys`."""

from typing import Any

import jax

from pallas_kernels.split_keys import split_attention


def global_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array,
    length: jax.Array,
    *,
    q_rotated: jax.Array | None = None,
    k_rotated: jax.Array | None = None,
    reread: bool = False,
    blocks: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """See `pallas_kernels.global_attention.global_attention`, and `split_attention`."""
    return split_attention(
        q,
        k,
        v,
        length,
        q_rotated=q_rotated,
        k_rotated=k_rotated,
        reread=reread,
        blocks=blocks,
        interpret=interpret,
    )
