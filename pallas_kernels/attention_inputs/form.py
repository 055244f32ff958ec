"""What attention reads, and in which of its two forms."""

from typing import NamedTuple

import jax


class AttentionInputs(NamedTuple):
    """Queries and keys as `ring_attention`, `global_attention` and `prefill_attention` take them.

    Attributes:
      q: [B, T, N, H].
      q_rotated: [B, T, N, P] in the compact form, else None.
      k, v, k_rotated: the caches [B, K, S, width] with the new positions in them, or, where none
        were given, the new positions alone [B, K, T, width]; None where the layer has none.
    """

    q: jax.Array
    q_rotated: jax.Array | None = None
    k: jax.Array | None = None
    v: jax.Array | None = None
    k_rotated: jax.Array | None = None


def is_compact(own: int, k_norm: jax.Array | None) -> bool:
    """Whether keys are kept as their values and the widths that turn.

    Args:
      own: 2 for a layer with keys and values, 1 where they share a projection, 0 where both are
        another layer's: then its k_norm tells.
    """
    return own == 1 or (own == 0 and k_norm is not None)
