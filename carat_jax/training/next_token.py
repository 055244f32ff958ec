"""Predicting the next token: the task of the bundled model's training."""

import functools

import jax
import jax.numpy as jnp
import optax
from flax import struct

from carat_jax.config import GemmaConfig
from carat_jax.model import Params, head, hidden_states
from carat_jax.training.loop import Figures, Task
from carat_jax.training.token_stream import TokenStream, Windows, draw_windows, map_windows


class NextToken(Task):
    """The passes run in config.dtype.

    Attributes:
      stream: what to train on.
      held_out: what to measure on.
      config, batch, window: static; see `TrainingOptions`.
    """

    stream: TokenStream
    held_out: Windows
    config: GemmaConfig = struct.field(pytree_node=False)
    batch: int = struct.field(pytree_node=False)
    window: int = struct.field(pytree_node=False)

    def loss(self, params: Params, key: jax.Array) -> tuple[jax.Array, Figures]:
        """Nats per token."""
        tokens = draw_windows(self.stream, key, self.batch, self.window)
        return _losses(params, self.config, tokens).mean(), {}

    def measure(self, params: Params) -> tuple[jax.Array, Figures]:
        """Nats per token."""
        return held_out_loss(params, self.config, self.held_out), {}


@functools.partial(jax.jit, static_argnames="config")
def window_losses(params: Params, config: GemmaConfig, windows: Windows) -> jax.Array:
    """Sum over each window's real tokens of -log p(token), in nats: float32 [n]."""

    def losses_of(batch: Windows) -> jax.Array:
        losses = _losses(params, config, batch.tokens.astype(jnp.int32))
        real = jnp.arange(losses.shape[1]) < batch.counts[:, None]
        return jnp.where(real, losses, 0.0).sum(axis=1)

    return map_windows(losses_of, windows)


def held_out_loss(params: Params, config: GemmaConfig, windows: Windows) -> jax.Array:
    """Mean nats per token over all windows."""
    return window_losses(params, config, windows).sum() / windows.counts.sum()


def _losses(params: Params, config: GemmaConfig, tokens: jax.Array) -> jax.Array:
    """-log p of each token given those before it: [B, T + 1] -> float32 [B, T]."""
    params = jax.tree.map(lambda p: p.astype(config.dtype), params)
    hidden, _ = hidden_states(params, config, tokens[:, :-1], None)
    logits = head(params, config, hidden)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
