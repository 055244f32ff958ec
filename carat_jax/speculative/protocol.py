"""What a drafter is: four pure functions around a pytree, of which two have a default.

A drafter guesses the next K tokens; the target model checks them all in one pass. Guesses change
speed, never the output (`acceptance.py` says which rules keep that).
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from carat_jax import display
from carat_jax.config import GemmaConfig
from carat_jax.kv_state import KVState
from carat_jax.model import Params


class Target(struct.PyTreeNode):
    """The model being accelerated, at the start of a round.

    Attributes:
      params, config: the model (config is static).
      kv: its state: every token of the sequences but the last. Not to be written.
      token: int32 [B], the last token of each sequence: chosen, not fed to the model yet.
      hidden: [B, D], the model's hidden state under its final norm, at the position whose logits
        chose `token`.
    """

    params: Params
    config: GemmaConfig = struct.field(pytree_node=False)
    kv: KVState
    token: jax.Array
    hidden: jax.Array


class Proposal(struct.PyTreeNode):
    """K guesses for each row.

    Attributes:
      tokens: int32 [B, K].
      logits: float32 [B, K, V] of the distribution that each was drawn from; None where each
        is a point: the drafter's single guess.
    """

    tokens: jax.Array
    logits: jax.Array | None = None


class Drafter(struct.PyTreeNode):
    """Base class. Weights and tables are fields (pytree leaves); what changes is the state.

    Every method is traced into the jitted loop, so all shapes are static and rows stay apart.
    `max_proposals` is the largest K it can serve.
    """

    max_proposals: ClassVar[int] = 15

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**{"repr": False} | kwargs)  # that of a dataclass shows arrays

    def __repr__(self) -> str:
        """The class, sizes of what it holds and plain settings; a configuration is left out."""
        shown = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.metadata.get("pytree_node", True):
                shown.append(f"{field.name}={display.held(value)}")
            elif isinstance(value, bool | int | float | str | None):
                shown.append(f"{field.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"

    def init(self, config: GemmaConfig, batch: int, max_context: int) -> Any:
        """The state before a batch of prompts, a pytree (None = stateless).

        Every leaf has the batch as its first axis: an engine moves rows from batch to batch.

        Args:
          config: of the target.
          batch: rows.
          max_context: tokens that a sequence may come to; guesses may lie beyond.
        """
        del config, batch, max_context

    def prefill(self, state: Any, tokens: jax.Array, new: jax.Array) -> Any:
        """Reads a chunk of the prompts: int32 [B, T], of which the first `new` [B] are real."""
        del tokens, new
        return state

    def propose(
        self, state: Any, target: Target, num_proposals: int, keys: jax.Array
    ) -> tuple[Proposal, Any]:
        """Guesses the `num_proposals` tokens after `target.token`.

        Args:
          state: as `init`, `prefill`, `observe` or the last `propose` left it.
          target: see there. `target.kv.length` says how much of the past is certain: tokens that
            were proposed and rejected are gone.
          num_proposals: K, static.
          keys: PRNG keys [B], fresh in every round, for drafters that draw.

        Returns:
          Proposal of exactly K tokens a row, and the state after it.
        """
        raise NotImplementedError(f"{type(self).__name__} has no `propose`")

    def observe(self, state: Any, tokens: jax.Array, new: jax.Array) -> Any:
        """Reads what was emitted: the first token after the prompt, then each round's.

        Args:
          state: as `propose` left it.
          tokens: int32 [B, T], accepted proposals and the target's own token after them.
          new: int32 [B], how many of them are real.
        """
        del tokens, new
        return state


def proposed(
    drafter: Drafter, state: Any, target: Target, num_proposals: int, keys: jax.Array
) -> tuple[Proposal, Any]:
    """What `drafter.propose` returns for these arguments.

    Raises:
      ValueError: it is anything but a Proposal of so many tokens, and a state.
    """
    made, name = drafter.propose(state, target, num_proposals, keys), type(drafter).__name__
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], Proposal)):
        came = type(made).__name__
        if isinstance(made, tuple):
            came = f"({', '.join(type(part).__name__ for part in made)})"
        raise ValueError(
            f"{name}.propose returned {came}: it must return (Proposal, the drafter's state)"
        )
    tokens, (B,), K = made[0].tokens, target.token.shape, num_proposals
    dtype = getattr(tokens, "dtype", None)
    if dtype is None or tokens.shape != (B, K) or not jnp.issubdtype(dtype, jnp.integer):
        came = type(tokens).__name__ if dtype is None else display.array(tokens)
        raise ValueError(
            f"{name}.propose gave {came} as tokens: asked for num_proposals = {K} in {B} rows, "
            f"it must give int32[{B}, {K}]"
        )
    return made
