"""Which proposals stand, and the token after them: rules from the target's logits to a verdict."""

import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import struct
from jax.scipy.special import entr

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
        raise NotImplementedError(f"{type(self).__name__} has no `accept`")


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
        own = _own(logits, sampling, position)
        stands = proposal.tokens == own[:, :-1]
        if proposal.logits is not None and not sampling.greedy:
            drawn, replaced = _against_distribution(logits, proposal, sampling, position)
            hot = (sampling.temperature > 0)[:, None]
            stands = jnp.where(hot, drawn, stands)
            own = jnp.where(hot, replaced, own)
        return _verdict(stands, own)


class Typical(Rule):
    """Accepts what the target finds plausible. Lossy: the output is not that of plain decoding.

    A guess x stands where p(x) > min(epsilon, delta * exp(-entropy(p))), nats, in the target's
    distribution p under all options: the less sure the target is, the less it asks for (typical
    acceptance of Medusa, Cai et al. 2024). At temperature 0, p is the target's own distribution,
    untempered and uncut. The token after the guesses is chosen by the target, as in plain decoding.

    Attributes:
      epsilon: the probability that always suffices, in [0, 1].
      delta: of exp(-entropy), at least 0; 0 accepts everything that is possible.

    Raises:
      ValueError: from the constructor, a number out of its range.
    """

    epsilon: float | jax.Array = 0.09
    delta: float | jax.Array = 0.3

    def __post_init__(self) -> None:
        for name, high in (("epsilon", 1.0), ("delta", float("inf"))):
            value = getattr(self, name)
            if isinstance(value, numbers.Real) and not 0 <= value <= high:
                raise ValueError(f"{name} = {value}: it must be in [0, {high:g}]")

    def accept(
        self, logits: jax.Array, proposal: Proposal, sampling: Sampling, position: jax.Array
    ) -> Verdict:
        """See `Rule.accept`."""
        p = _distribution(logits[:, :-1], sampling)
        enough = jnp.minimum(self.epsilon, self.delta * jnp.exp(-entr(p).sum(-1)))
        stands = _of_token(p, proposal.tokens) > enough
        return _verdict(stands, _own(logits, sampling, position))


class Forced(Rule):
    """Accepts by chance, whatever the target says, at the cost of `Exact` with single guesses.

    For measuring speed at a stated acceptance without trained weights: the output is meaningless.

    Attributes:
      probabilities: float32 [K], how probable it is that the i-th guess of a round stands, given
        that those before it do. The draw depends on the row's key and the position only.
    """

    probabilities: jax.Array

    @classmethod
    def at_rates(cls, rates: Sequence[float]) -> "Forced":
        """From acceptance as it is measured: in which share of the rounds the i-th guess stands.

        Raises:
          ValueError: rates that are not in [0, 1], or grow.
        """
        before = [1.0, *rates][:-1]
        if not all(0 <= rate <= last for rate, last in zip(rates, before, strict=True)):
            raise ValueError(f"rates {list(rates)}: each must be in [0, 1], none above the last")
        given = [r / last if last else 0.0 for r, last in zip(rates, before, strict=True)]
        return cls(jnp.asarray(given, jnp.float32))

    def accept(
        self, logits: jax.Array, proposal: Proposal, sampling: Sampling, position: jax.Array
    ) -> Verdict:
        """See `Rule.accept`. Raises ValueError for another number of guesses."""
        K = proposal.tokens.shape[1]
        if self.probabilities.shape != (K,):
            raise ValueError(
                f"probabilities {self.probabilities.shape} must be [K] = [{K}], one for each guess"
            )
        stands = _chance(sampling, position, K) < self.probabilities
        return _verdict(stands, _own(logits, sampling, position))


def _own(logits: jax.Array, sampling: Sampling, position: jax.Array) -> jax.Array:
    """What plain decoding would choose after each number of guesses, [B, K + 1]."""
    rows = position[:, None] + jnp.arange(logits.shape[1])
    return jax.vmap(sample.choose, in_axes=(1, None, 1), out_axes=1)(logits, sampling, rows)


def _distribution(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Probabilities [B, n, V] under all options; at temperature 0 those of the logits alone."""
    if sampling.greedy:
        return jax.nn.softmax(logits, axis=-1)
    filtered = jax.vmap(sample.filter_logits, in_axes=(1, None), out_axes=1)(logits, sampling)
    hot = (sampling.temperature > 0)[:, None, None]
    return jax.nn.softmax(jnp.where(hot, filtered, logits), axis=-1)


def drafting_keys(sampling: Sampling, position: jax.Array) -> jax.Array:
    """Keys [B] for a drafter in the round after the token at `position` [B].

    That token was drawn with the same row's key at the same position: were it the very key, the
    guesses would hang on the token, and no longer have the distribution that they are said to have.
    """
    return _keys(sampling, position, 1, _DRAFTING)[:, 0]


# Draws for these purposes have keys of their own, apart from those of plain decoding.
_DRAFTING, _ACCEPTANCE, _REPLACEMENT = range(3)


def _keys(sampling: Sampling, position: jax.Array, n: int, purpose: int) -> jax.Array:
    """Keys [B, n] for n positions from `position` [B] on."""

    def key(row: jax.Array, place: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(row, place), purpose)

    rows = position[:, None] + jnp.arange(n)
    return jax.vmap(jax.vmap(key, in_axes=(None, 0)))(sampling.keys, rows)


def _chance(sampling: Sampling, position: jax.Array, n: int) -> jax.Array:
    """Uniform in [0, 1), [B, n]."""
    return jax.vmap(jax.vmap(jax.random.uniform))(_keys(sampling, position, n, _ACCEPTANCE))


def _of_token(x: jax.Array, tokens: jax.Array) -> jax.Array:
    """x [B, n, V] at tokens [B, n]."""
    return jnp.take_along_axis(x, tokens[..., None], axis=-1)[..., 0]


def _verdict(stands: jax.Array, own: jax.Array) -> Verdict:
    """From which proposals stand [B, K], and what would follow each number of them [B, K + 1]."""
    accepted = jnp.cumprod(stands.astype(jnp.int32), axis=1).sum(1)
    token = jnp.take_along_axis(own, accepted[:, None], axis=1)[:, 0]
    return Verdict(accepted, token)


def _against_distribution(
    logits: jax.Array, proposal: Proposal, sampling: Sampling, position: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Which proposals stand [B, K] by the p / q rule, and what replaces each [B, K + 1]."""
    n = logits.shape[1]
    p = _distribution(logits, sampling)
    q = jax.nn.softmax(proposal.logits, axis=-1)
    chance = _chance(sampling, position, n - 1)
    stands = chance * _of_token(q, proposal.tokens) < _of_token(p[:, :-1], proposal.tokens)
    residual = jnp.maximum(p[:, :-1] - q, 0.0)
    # q = p leaves nothing and rejects nothing, q = NaN rejects everything: then a draw from p.
    some = residual.sum(-1, keepdims=True) > 0
    rest = jnp.concatenate([jnp.where(some, residual, p[:, :-1]), p[:, -1:]], axis=1)
    keys = _keys(sampling, position, n, _REPLACEMENT)
    drawn = jax.vmap(jax.vmap(jax.random.categorical))(keys, jnp.log(rest))
    return stands, drawn.astype(jnp.int32)
