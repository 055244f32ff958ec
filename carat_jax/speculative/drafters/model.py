"""A smaller Gemma 4 as drafter, with a KV state of its own."""

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from carat_jax import sharding
from carat_jax.config import ConfigError, GemmaConfig
from carat_jax.kv_state import KVState, init_state
from carat_jax.model import Params, head, hidden_states
from carat_jax.speculative.protocol import Drafter, Proposal, Target


class ModelState(struct.PyTreeNode):
    """The drafter's past.

    Attributes:
      kv: sure up to the last token but one; `length` is set anew in each round.
      newest: int32 [B, 2], the last two tokens of each sequence.
    """

    kv: KVState
    newest: jax.Array


class Model(Drafter):
    """Guesses what a smaller model would say.

    A round takes K steps of that model. The first feeds two tokens: of the last round, the guess
    that was made last has never been fed, and where all stood it belongs to the past now.

    Attributes:
      params, config: the smaller model (config is static).
      temperature: static. 0: the guesses are its most likely tokens. Above: it draws them, and
        says from which distribution, so that `Exact` accepts them by their probabilities.

    Raises:
      ValueError: from the constructor, a temperature that is negative or not finite.
    """

    params: Params
    config: GemmaConfig = struct.field(pytree_node=False)
    temperature: float = struct.field(pytree_node=False, default=0.0)

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature = {self.temperature}: it must be at least 0 and finite")

    def init(self, config: GemmaConfig, batch: int, max_context: int) -> ModelState:
        """An empty state.

        Raises:
          ConfigError: another vocabulary than the target's, or a max_context that is beyond the
            drafter.
        """
        check_vocabulary(self.config, config)
        # The default slack of its rings takes as many guesses as those of the target.
        return ModelState(
            init_state(self.config, batch, max_context, mesh=sharding.mesh_of(self.params)),
            jnp.zeros((batch, 2), jnp.int32),
        )

    def prefill(self, state: ModelState, tokens: jax.Array, new: jax.Array) -> ModelState:
        """See `Drafter.prefill`."""
        _, kv = hidden_states(self.params, self.config, tokens, state.kv, new=new)
        return self.observe(state.replace(kv=kv), tokens, new)

    def propose(
        self, state: ModelState, target: Target, num_proposals: int, keys: jax.Array
    ) -> tuple[Proposal, ModelState]:
        """See `Drafter.propose`."""

        def feed(kv: KVState, tokens: jax.Array, i: jax.Array | int) -> tuple[KVState, Proposal]:
            hidden, kv = hidden_states(self.params, self.config, tokens, kv)
            return kv, self._guess(hidden[:, -1], keys, i)

        def step(carry: tuple, i: jax.Array) -> tuple[tuple, Proposal]:
            kv, token = carry
            kv, guess = feed(kv, token[:, None], i)
            return (kv, guess.tokens), guess

        kv = state.kv.replace(length=target.kv.length - 1)
        kv, first = feed(kv, state.newest, 0)
        (kv, _), rest = lax.scan(step, (kv, first.tokens), jnp.arange(1, num_proposals))
        proposal = jax.tree.map(
            lambda one, more: jnp.concatenate([one[:, None], more.swapaxes(0, 1)], axis=1),
            first,
            rest,
        )
        return proposal, state.replace(kv=kv)

    def observe(self, state: ModelState, tokens: jax.Array, new: jax.Array) -> ModelState:
        """See `Drafter.observe`."""
        known = jnp.concatenate([state.newest, tokens], axis=1)
        newest = jnp.take_along_axis(known, new[:, None] + jnp.arange(2), axis=1)
        return state.replace(newest=newest)

    def _guess(self, hidden: jax.Array, keys: jax.Array, i: jax.Array | int) -> Proposal:
        """The i-th guess of a round from hidden [B, D]: a `Proposal` without the axis of K."""
        logits = head(self.params, self.config, hidden)
        if not self.temperature:
            return Proposal(jnp.argmax(logits, axis=-1).astype(jnp.int32))
        # From the largest down, so that no temperature is small enough to overflow.
        logits = (logits - logits.max(axis=-1, keepdims=True)) / self.temperature
        own = jax.vmap(jax.random.fold_in, in_axes=(0, None))(keys, i)
        drawn = jax.vmap(jax.random.categorical)(own, logits)
        return Proposal(drawn.astype(jnp.int32), logits)


def check_vocabulary(drafter: GemmaConfig, target: GemmaConfig) -> None:
    """Raises ConfigError unless the two models have the same number of ids."""
    if drafter.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the drafter's vocab_size {drafter.vocab_size:,} is not the target's vocab_size "
            f"{target.vocab_size:,}: use a drafter with the same tokenizer"
        )
