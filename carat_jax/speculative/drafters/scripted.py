"""A drafter that knows the answer, and is wrong on purpose: for tests and for timing."""

import numbers
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from carat_jax.config import GemmaConfig
from carat_jax.speculative.protocol import Drafter, Proposal, Target


class Scripted(Drafter):
    """Proposes a known continuation with mistakes; `Scripted.of` makes one.

    Attributes:
      continuation: int32 [B, n], what plain decoding emits after each prompt, from the first
        token on. Past its end the last token is repeated.
      right: float32 [max_proposals], how probable it is that the i-th proposal of a round is
        right, whatever the others are. A wrong one is the id after the right one.
    """

    continuation: jax.Array
    right: jax.Array

    @classmethod
    def of(cls, continuation: jax.Array, right: int | Sequence[float]) -> "Scripted":
        """For this continuation [B, n].

        Args:
          continuation: ids, the first token after the prompt included.
          right: k: the first k proposals of a round are right and all others wrong (0: none is
            right; the number of proposals or more: all are). Or the probability of each.

        Raises:
          ValueError: a continuation that is not [B, n], a k below 0, more probabilities than
            proposals, or one outside [0, 1].
        """
        if continuation.ndim != 2 or not continuation.shape[1]:
            raise ValueError(f"continuation {continuation.shape} must be [B, n], n at least 1")
        most = cls.max_proposals
        if isinstance(right, numbers.Integral):
            if right < 0:
                raise ValueError(f"right = {right}: it must be at least 0")
            chances = (np.arange(most) < right).astype(np.float32)
        else:
            chances = np.zeros(most, np.float32)
            if len(right) > most or not all(0 <= p <= 1 for p in right):
                raise ValueError(f"right = {right}: give up to {most} probabilities in [0, 1]")
            chances[: len(right)] = right
        return cls(jnp.asarray(continuation, jnp.int32), jnp.asarray(chances))

    def init(self, config: GemmaConfig, batch: int, max_context: int) -> jax.Array:
        """The state: int32 [B], how many tokens were emitted."""
        if self.continuation.shape[0] != batch:
            raise ValueError(
                f"continuation {self.continuation.shape} [B, n] is not for {batch} prompts"
            )
        return jnp.zeros((batch,), jnp.int32)

    def propose(
        self, state: jax.Array, target: Target, num_proposals: int, keys: jax.Array
    ) -> tuple[Proposal, jax.Array]:
        """See `Drafter.propose`."""
        n = self.continuation.shape[1]
        index = jnp.minimum(state[:, None] + jnp.arange(num_proposals), n - 1)
        known = jnp.take_along_axis(self.continuation, index, axis=1)
        chance = jax.vmap(lambda key: jax.random.uniform(key, (num_proposals,)))(keys)
        right = chance < self.right[:num_proposals]
        wrong = (known + 1) % target.config.vocab_size
        return Proposal(jnp.where(right, known, wrong)), state

    def observe(self, state: jax.Array, tokens: jax.Array, new: jax.Array) -> jax.Array:
        """See `Drafter.observe`."""
        return state + new
