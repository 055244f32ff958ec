"""Prompt lookup: what followed the newest tokens when they last occurred. No weights at all."""

import jax
import jax.numpy as jnp
from flax import struct

from carat_jax.config import GemmaConfig
from carat_jax.speculative.protocol import Drafter, Proposal, Target


class History(struct.PyTreeNode):
    """Every token seen so far.

    Attributes:
      tokens: int32 [B, max_context].
      count: int32 [B], how many of them are there.
    """

    tokens: jax.Array
    count: jax.Array


class Ngram(Drafter):
    """Copies from the prompt and from what was generated.

    Of the places where the last `max_ngram` tokens stood before it takes the newest; where there
    is none, one less token must agree, and so on down to `min_ngram`. A copy that arrives at the
    end of the text goes on with its own beginning (after "a b a b", "a b a b" again). Where
    nothing agrees, the last token is repeated.

    Attributes:
      max_ngram, min_ngram: static.

    Raises:
      ValueError: from the constructor, unless 1 <= min_ngram <= max_ngram.
    """

    max_ngram: int = struct.field(pytree_node=False, default=3)
    min_ngram: int = struct.field(pytree_node=False, default=1)

    def __post_init__(self) -> None:
        if not 1 <= self.min_ngram <= self.max_ngram:
            raise ValueError(
                f"min_ngram {self.min_ngram}, max_ngram {self.max_ngram}: "
                "give 1 <= min_ngram <= max_ngram"
            )

    def init(self, config: GemmaConfig, batch: int, max_context: int) -> History:
        """An empty history."""
        return History(
            jnp.zeros((batch, max_context), jnp.int32),
            jnp.zeros((batch,), jnp.int32),
        )

    def prefill(self, state: History, tokens: jax.Array, new: jax.Array) -> History:
        """See `Drafter.prefill`."""
        return self.observe(state, tokens, new)

    def propose(
        self, state: History, target: Target, num_proposals: int, keys: jax.Array
    ) -> tuple[Proposal, History]:
        """See `Drafter.propose`."""
        end = state.count[:, None]
        found, source = self._source(state)
        source = jnp.where(found, source, state.count - 1)[:, None]
        # Guess i copies a token `period` before the end, or one that was guessed that much before.
        period = jnp.maximum(end - source, 1)
        index = jnp.maximum(source + jnp.arange(num_proposals) % period, 0)
        return Proposal(jnp.take_along_axis(state.tokens, index, axis=1)), state

    def observe(self, state: History, tokens: jax.Array, new: jax.Array) -> History:
        """Appends; what a full history cannot take is dropped."""
        C = state.tokens.shape[1]
        t = jnp.arange(tokens.shape[1])
        place = jnp.where(t < new[:, None], state.count[:, None] + t, C)
        rows = jnp.arange(tokens.shape[0])[:, None]
        return History(
            state.tokens.at[rows, place].set(tokens, mode="drop"),
            jnp.minimum(state.count + new, C),
        )

    def _source(self, state: History) -> tuple[jax.Array, jax.Array]:
        """Whether the newest tokens stood somewhere before, and the index after that place: [B]."""
        h, count = state.tokens, state.count
        C, most = h.shape[1], self.max_ngram
        # agreeing[b, j]: how many tokens up to and with j agree with as many at the end. Where a
        # pattern would begin before the text, -1 and -2 agree with nothing.
        padded = jnp.pad(h, ((0, 0), (most, 0)), constant_values=-1)
        going, agreeing = jnp.ones(h.shape, bool), jnp.zeros(h.shape, jnp.int32)
        for i in range(most):
            last = (count - 1 - i)[:, None]
            token = jnp.take_along_axis(h, jnp.maximum(last, 0), axis=1)
            going &= padded[:, most - i : most - i + C] == jnp.where(last >= 0, token, -2)
            agreeing += going
        j = jnp.arange(C)
        before = (j < count[:, None] - 1) & (agreeing >= self.min_ngram)
        best = jnp.argmax(jnp.where(before, agreeing * C + j, -1), axis=1)
        return before.any(axis=1), best.astype(jnp.int32) + 1
