"""Attention of a chunk of prompt over what came before it and over itself."""

import jax

from pallas_kernels import dispatch
from pallas_kernels.grouping import check
from pallas_kernels.prefill_attention import mosaic, xla

# Best first, all ops at once: `carat bench prefill --config 31b`, benchmarks/h200, through XLA
# prefill_31b_xla.json (0b3c569), now prefill_31b_cold.json (1d1c24a). Not measured apart.
IMPLEMENTATIONS = {"mosaic": mosaic.prefill_attention, "xla": xla.prefill_attention}


def prefill_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array,
    length: jax.Array,
    *,
    window: int | None = None,
    q_rotated: jax.Array | None = None,
    k_rotated: jax.Array | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention of T queries at positions length … length + T - 1.

    Where the keys sit:
      window=None: key j is at position j (a global cache with the chunk already written).
      window=W: the last T keys are the chunk, the S - T before them the positions just before
        it, oldest first: key j is at position length - (S - T) + j. Negative positions are
        masked. S - T >= W - 1, or the past is not fully in sight of the first query.

    Args:
      q: [B, T, N, H]; compact form as in `global_attention`, and the widths [0, P/2) and
        [H/2, H/2 + P/2), which RoPE turns, are zero: an implementation may skip their products.
        The scale is 1.0.
      k: [B, K, S, H] keys after RoPE; None for the compact form.
      v: [B, K, S, H] values.
      length: int32 [B], positions before the chunk.
      window: W, keys a query sees, itself included; None = all.
      q_rotated, k_rotated: [B, T, N, P] and [B, K, S, P], compact form.
      implementation: one of `IMPLEMENTATIONS`; None takes the best that accepts the inputs.

    Returns:
      [B, T, N, H] in the dtype of v. Softmax and accumulation are float32.

    Raises:
      ValueError: shapes that do not fit, both forms or neither given, unknown implementation.
      Unsupported: the named implementation cannot take these shapes.
    """
    check(q, k, v, length, q_rotated, k_rotated)
    T, S = q.shape[1], v.shape[2]
    if window is not None and (window < 1 or S < T or k is None):
        raise ValueError(
            f"window {window} over {S} keys for {T} queries: a windowed chunk takes "
            "plain keys, at least as many as queries, and a window >= 1"
        )
    return dispatch.run(
        IMPLEMENTATIONS,
        implementation,
        q,
        k,
        v,
        length,
        window=window,
        q_rotated=q_rotated,
        k_rotated=k_rotated,
    )
