"""Which proposals stand, and the token after them: rules from the target's logits to a verdict."""

import jax
import jax.numpy as jnp
from flax import struct

from carat_jax import sampling as sample
from carat_jax.sampling import Sampling
from carat_jax.speculative.protocol import Proposal


class Verdict(struct.PyTreeNode):
    """What a round came to.

    Attributes:
      accepted: int32 [B], 0 … K: how many proposals stand, from the first on.
      token: int32 [B], the target's own token after them.
    """

    accepted: jax.Array
    token: jax.Array


class Rule(struct.PyTreeNode):
    """Base class of acceptance rules."""

    def accept(
        self, logits: jax.Array, proposal: Proposal, sampling: Sampling, position: jax.Array
    ) -> Verdict:
        """Judges K proposals.

        Args:
          logits: float32 [B, K + 1, V] of the target, -inf for suppressed tokens: row i is of
            what follows the first i proposals.
          proposal: the K guesses.
          sampling: the options of each row; they apply to the target before the rule.
          position: int32 [B], where the first proposal stands in its sequence.
        """
        raise NotImplementedError


class Exact(Rule):
    """Changes nothing but speed.

    A row at temperature 0 accepts what the target would have chosen. Otherwise, where the
    drafter made a single guess, the target draws with the key that plain decoding uses at that
    position and the guess stands if it is what was drawn: the same tokens as without a drafter.
    Where the drafter drew from a distribution q, the guess x stands with probability
    min(1, p(x) / q(x)), and the first that does not is replaced by a draw from max(p - q, 0),
    normalised (Leviathan et al. 2023, Chen et al. 2023): distributed as without a drafter.
    """

    def accept(
        self, logits: jax.Array, proposal: Proposal, sampling: Sampling, position: jax.Array
    ) -> Verdict:
        """See `Rule.accept`."""
        rows = position[:, None] + jnp.arange(logits.shape[1])
        over_rows = jax.vmap(sample.choose, in_axes=(1, None, 1), out_axes=1)
        own = over_rows(logits, sampling, rows)  # [B, K + 1]
        stands = proposal.tokens == own[:, :-1]
        if proposal.logits is not None and not sampling.greedy:
            drawn, replaced = _against_distribution(logits, proposal, sampling, rows)
            hot = (sampling.temperature > 0)[:, None]
            stands = jnp.where(hot, drawn, stands)
            own = jnp.where(hot, replaced, own)
        return _verdict(stands, own)


def _verdict(stands: jax.Array, own: jax.Array) -> Verdict:
    """From which proposals stand [B, K], and what would follow each number of them [B, K + 1]."""
    accepted = jnp.cumprod(stands.astype(jnp.int32), axis=1).sum(1)
    token = jnp.take_along_axis(own, accepted[:, None], axis=1)[:, 0]
    return Verdict(accepted, token)


def _against_distribution(
    logits: jax.Array, proposal: Proposal, sampling: Sampling, rows: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Which proposals stand [B, K] by the p / q rule, and what replaces each [B, K + 1]."""
    filtered = jax.vmap(sample.filter_logits, in_axes=(1, None), out_axes=1)(logits, sampling)
    p = jax.nn.softmax(filtered, axis=-1)
    q = jax.nn.softmax(proposal.logits, axis=-1)
    # Two draws at each position, apart from those of plain decoding and of the drafter.
    by_row = jax.vmap(jax.vmap(jax.random.fold_in, in_axes=(None, 0)))
    keys = by_row(sampling.keys, rows)
    first, second = (
        jax.vmap(jax.vmap(lambda key, n=n: jax.random.fold_in(key, n)))(keys) for n in (1, 2)
    )
    chance = jax.vmap(jax.vmap(jax.random.uniform))(first[:, :-1])

    def of_token(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, proposal.tokens[..., None], axis=-1)[..., 0]

    stands = chance * of_token(q) < of_token(p[:, :-1])
    residual = jnp.maximum(p[:, :-1] - q, 0.0)
    # q = p leaves nothing, and rejects nothing; rounding must not make it NaN.
    empty = residual.sum(-1, keepdims=True) <= 0
    residual = jnp.where(empty, p[:, :-1], residual)
    rest = jnp.concatenate([residual, p[:, -1:]], axis=1)
    drawn = jax.vmap(jax.vmap(jax.random.categorical))(second, jnp.log(rest))
    return stands, drawn.astype(jnp.int32)
