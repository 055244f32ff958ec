"""Speculative decoding of tokens that are known beforehand: what would the target have chosen?"""

import jax
import jax.numpy as jnp

from carat_jax.sampling import Sampling
from carat_jax.speculative import Exact, Proposal, Rule, Verdict


class Following(Rule):
    """Keeps to known tokens: a guess stands if it is the known one, which is emitted otherwise.

    Rounds are those of `Exact` where the target would choose these tokens. What it would choose is
    left in `Generation.top_logprobs`.

    Attributes:
      continuation: int32 [n], the tokens after the prompt.
      prompt: int32 [], how many ids that has.
    """

    continuation: jax.Array
    prompt: jax.Array

    def accept(
        self, logits: jax.Array, proposal: Proposal, sampling: Sampling, position: jax.Array
    ) -> Verdict:
        """See `Rule.accept`. Raises ValueError for tokens that are drawn."""
        if not sampling.greedy:
            raise ValueError("Following is for greedy decoding: temperature must be 0")
        index = (position - self.prompt)[:, None] + jnp.arange(logits.shape[1])
        known = jnp.take(self.continuation, index, mode="clip")
        sure = jax.nn.one_hot(known, logits.shape[-1])
        return Exact().accept(sure, proposal, sampling, position)
