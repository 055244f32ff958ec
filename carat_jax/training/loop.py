"""The training loop: AdamW on random windows, with the learning rate led by the clock."""

import functools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import lax

from carat_jax.config import GemmaConfig
from carat_jax.model import Params, head, hidden_states
from carat_jax.training.token_stream import TokenStream, Windows, draw_windows
from pallas_kernels.prefill_attention.xla import KEY_BLOCK

_STEPS_PER_CALL = 10
_WARM_UP = 0.02  # of the time
_HELD_OUT_EVERY = 0.05  # of the time
_HELD_OUT_WINDOWS = 64  # measured on the way; the final figure is over all of them
_HELD_OUT_BATCH = 8


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train.

    Attributes:
      seconds: of training, compilation not counted; the learning rate reaches zero at their end.
      batch, window: sequences of a step, and their length in tokens.
      learning_rate: at its peak.
      weight_decay: of matrices; a step shrinks them by learning rate × this.
      seed: of initial weights and of what is drawn.

    Raises:
      ValueError: from the constructor, for a value out of its range.
    """

    seconds: float
    batch: int
    window: int
    learning_rate: float = 3e-3
    weight_decay: float = 0.4
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("seconds", "batch", "learning_rate"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} = {getattr(self, name)}: it must be positive")
        if not 1 <= self.window <= KEY_BLOCK:
            raise ValueError(
                f"window = {self.window}: it must be from 1 to {KEY_BLOCK}, because attention over "
                "more keys than that has no gradient"
            )


class TrainState(struct.PyTreeNode):
    """params are float32; step counts batches."""

    params: Params
    moments: optax.OptState
    key: jax.Array
    step: jax.Array


@dataclass(frozen=True)
class Point:
    """A point of the curve: the mean training loss since the point before (nats per token)."""

    step: int
    seconds: float
    loss: float
    held_out_loss: float | None = None


@dataclass(frozen=True)
class Trained:
    """params are those of the lowest held-out loss on the way, in float32."""

    params: Params
    curve: list[Point]
    steps: int
    seconds: float
    compile_seconds: float


def train(
    params: Params,
    config: GemmaConfig,
    options: TrainingOptions,
    stream: TokenStream,
    held_out: Windows,
    report: Callable[[float, Point], None],
) -> Trained:
    """Trains float32 params for options.seconds; the passes run in config.dtype.

    Args:
      params: the start, see `initial_params`; donated.
      config: of the model.
      options: how.
      stream: what to train on.
      held_out: what to measure on, every twentieth of the time.
      report: called with (share of the time gone, newest point) some hundred times.
    """
    state = start(params, options)
    began = time.perf_counter()
    some = _spread(held_out, _HELD_OUT_WINDOWS)
    call = functools.partial(train_steps, config=config, options=options, steps=_STEPS_PER_CALL)
    step = jax.jit(call, donate_argnums=0).lower(state, stream, 0.0).compile()
    measured = float(held_out_loss(state.params, config, some))
    compile_seconds = time.perf_counter() - began

    best, lowest = _host_copy(state.params), measured
    curve = [Point(0, 0.0, measured, measured)]
    losses: list[float] = []
    began = time.perf_counter()
    gone = 0.0
    while gone < 1.0:
        state, loss = step(state, stream, gone)
        losses.append(float(loss))
        gone_before, gone = gone, min(1.0, (time.perf_counter() - began) / options.seconds)
        measured = None
        if math.floor(gone / _HELD_OUT_EVERY) > math.floor(gone_before / _HELD_OUT_EVERY):
            measured = float(held_out_loss(state.params, config, some))
            if measured < lowest:
                best, lowest = _host_copy(state.params), measured
        if measured is not None or gone - curve[-1].seconds / options.seconds > 0.005:
            seconds = time.perf_counter() - began
            curve.append(Point(int(state.step), seconds, float(np.mean(losses)), measured))
            losses.clear()
            report(gone, curve[-1])
    seconds = time.perf_counter() - began
    return Trained(best, curve, int(state.step), seconds, compile_seconds)


def start(params: Params, options: TrainingOptions) -> TrainState:
    """The state before the first step."""
    return TrainState(
        params=params,
        moments=_optimizer(options).init(params),
        key=jax.random.key(options.seed),
        step=jnp.zeros((), jnp.int32),
    )


def train_steps(
    state: TrainState,
    stream: TokenStream,
    gone: float | jax.Array,
    *,
    config: GemmaConfig,
    options: TrainingOptions,
    steps: int,
) -> tuple[TrainState, jax.Array]:
    """`steps` steps at the learning rate of the share `gone` of the time; their mean loss."""
    rate = options.learning_rate * _schedule(gone)

    def body(state: TrainState, _: None) -> tuple[TrainState, jax.Array]:
        key = jax.random.fold_in(state.key, state.step)
        tokens = draw_windows(stream, key, options.batch, options.window)
        loss, gradient = jax.value_and_grad(_mean_loss)(state.params, config, tokens)
        update, moments = _optimizer(options).update(gradient, state.moments, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, update)
        return state.replace(params=params, moments=moments, step=state.step + 1), loss

    state, losses = lax.scan(body, state, length=steps)
    return state, losses.mean()


@functools.partial(jax.jit, static_argnames="config")
def window_losses(params: Params, config: GemmaConfig, windows: Windows) -> jax.Array:
    """Sum over each window's real tokens of -log p(token), in nats: float32 [n]."""
    n = len(windows.counts)
    batch = min(_HELD_OUT_BATCH, n)

    def batches(x: jax.Array) -> jax.Array:
        padded = jnp.pad(x, [(0, -n % batch)] + [(0, 0)] * (x.ndim - 1))
        return padded.reshape(-1, batch, *x.shape[1:])

    def losses_of(batch: Windows) -> jax.Array:
        losses = _losses(params, config, batch.tokens.astype(jnp.int32))
        real = jnp.arange(losses.shape[1]) < batch.counts[:, None]
        return jnp.where(real, losses, 0.0).sum(axis=1)

    return lax.map(losses_of, jax.tree.map(batches, windows)).reshape(-1)[:n]


def held_out_loss(params: Params, config: GemmaConfig, windows: Windows) -> jax.Array:
    """Mean nats per token over all windows."""
    return window_losses(params, config, windows).sum() / windows.counts.sum()


def _mean_loss(params: Params, config: GemmaConfig, tokens: jax.Array) -> jax.Array:
    return _losses(params, config, tokens).mean()


def _losses(params: Params, config: GemmaConfig, tokens: jax.Array) -> jax.Array:
    """-log p of each token given those before it: [B, T + 1] -> float32 [B, T]."""
    params = jax.tree.map(lambda p: p.astype(config.dtype), params)
    hidden, _ = hidden_states(params, config, tokens[:, :-1], None)
    logits = head(params, config, hidden)
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])


def _optimizer(options: TrainingOptions) -> optax.GradientTransformation:
    """AdamW up to the learning rate, which the clock gives."""

    def matrices(params: Params) -> Params:
        return jax.tree.map(lambda p: p.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.scale_by_adam(b1=0.9, b2=0.95),
        optax.add_decayed_weights(options.weight_decay, mask=matrices),
    )


def _schedule(gone: float | jax.Array) -> jax.Array:
    """Linear warm-up from a tenth, then half a cosine to zero."""
    warm_up = jnp.minimum(0.1 + 0.9 * gone / _WARM_UP, 1.0)
    return warm_up * 0.5 * (1.0 + jnp.cos(jnp.pi * gone))


def _spread(windows: Windows, count: int) -> Windows:
    """At most `count` of the windows, evenly spread."""
    n = len(windows.counts)
    index = np.linspace(0, n - 1, min(n, count)).round().astype(int)
    return jax.tree.map(lambda x: x[index], windows)


def _host_copy(params: Params) -> Params:
    return jax.tree.map(np.array, params)  # device_get may share the buffer, which is donated next
