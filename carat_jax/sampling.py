"""From logits to tokens. Everything is per row, so that rows of a batch may differ.

The order is temperature, top-k, top-p, min-p, each over what the one before kept, as in Hugging
Face transformers. All four come down to one threshold on the logits, found from one sort.
"""

import jax
import jax.numpy as jnp
from flax import struct


class Sampling(struct.PyTreeNode):
    """How each row of a batch chooses its tokens.

    Attributes:
      temperature: float32 [B]; a row at 0 takes the most likely token.
      top_k: int32 [B], 0 = all.
      top_p: float32 [B] in (0, 1].
      min_p: float32 [B] in [0, 1].
      keys: PRNG keys [B]. The draw at a position depends on the row's key and the position only.
      greedy: static; every row is at temperature 0, and nothing else is computed.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    keys: jax.Array
    greedy: bool = struct.field(pytree_node=False)


def suppress(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Logits [B, ..., V], with -inf at each row's ids int32 [B, n]; ids beyond V are skipped."""
    return jax.vmap(lambda row, never: row.at[..., never].set(-jnp.inf, mode="drop"))(logits, ids)


def filter_logits(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Logits of the distribution that is sampled: tempered, and -inf where a token is cut.

    Ties at a threshold are kept together. Rows at temperature 0 are tempered as at 1.

    Args:
      logits: float32 [B, V], after the soft cap; -inf for suppressed tokens.
    """
    V = logits.shape[-1]
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    # From the largest down, so that no temperature is small enough to overflow.
    z = (logits - logits.max(axis=-1, keepdims=True)) / temperature[:, None]
    ordered = -jnp.sort(-z, axis=-1)  # descending
    k = jnp.where(sampling.top_k > 0, jnp.minimum(sampling.top_k, V), V)
    kth = jnp.take_along_axis(ordered, k[:, None] - 1, axis=-1)
    p = jax.nn.softmax(jnp.where(ordered >= kth, ordered, -jnp.inf), axis=-1)
    # A token stays while the mass before it is short of top_p: the one that crosses stays too.
    before = jnp.cumsum(p, axis=-1) - p
    last = jnp.maximum(jnp.sum(before < sampling.top_p[:, None], axis=-1), 1) - 1
    pth = jnp.take_along_axis(ordered, last[:, None], axis=-1)
    pth = jnp.where(sampling.top_p[:, None] < 1, pth, -jnp.inf)
    mth = ordered[:, :1] + jnp.log(sampling.min_p)[:, None]
    return jnp.where(z >= jnp.maximum(jnp.maximum(kth, pth), mth), z, -jnp.inf)


def choose(logits: jax.Array, sampling: Sampling, position: jax.Array) -> jax.Array:
    """The next token of each row, int32 [B].

    Args:
      logits: float32 [B, V], as for `filter_logits`.
      position: int32 [B], where the token will stand in its sequence.
    """
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    if sampling.greedy:
        return best
    keys = jax.vmap(jax.random.fold_in)(sampling.keys, position)
    drawn = jax.vmap(jax.random.categorical)(keys, filter_logits(logits, sampling))
    return jnp.where(sampling.temperature > 0, drawn.astype(jnp.int32), best)


def logprobs(
    logits: jax.Array, tokens: jax.Array, k: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probabilities under the model itself (after the soft cap, before any option).

    Args:
      logits: float32 [B, V].
      tokens: int32 [B].
      k: how many of the most likely tokens to name besides.

    Returns:
      of the tokens [B]; ids of the k most likely [B, k]; and theirs [B, k].
    """
    normaliser = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    own = jnp.take_along_axis(logits, tokens[:, None], axis=-1) - normaliser
    top, ids = jax.lax.top_k(logits, k)
    return own[:, 0], ids, top - normaliser
