"""The training loop: AdamW on the batches of a task, with the learning rate led by the clock."""

import dataclasses
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax import lax

from carat_jax.model import Params
from carat_jax.training.checkpoints import Checkpoints
from pallas_kernels.prefill_attention.xla import KEY_BLOCK

Figures = dict[str, Any]  # what is logged besides the loss: arrays by name

_STEPS_PER_CALL = 10
_WARM_UP = 0.02  # of the time
_HELD_OUT_EVERY = 0.05  # of the time
_POINT_EVERY = 0.005  # of the time


class Task(struct.PyTreeNode):
    """Base class of what can be learned: a pytree that holds its data, and two pure functions."""

    def loss(self, params: Params, key: jax.Array) -> tuple[jax.Array, Figures]:
        """The mean loss over a batch drawn with `key`, to be differentiated; and figures."""
        raise NotImplementedError

    def measure(self, params: Params) -> tuple[jax.Array, Figures]:
        """The loss on held-out data, by which the best parameters are chosen; and figures."""
        raise NotImplementedError


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
    step: jax.Array


@dataclass(frozen=True)
class Point:
    """A point of the curve: means over the batches since the point before.

    Attributes:
      step, seconds: so far.
      loss: in training.
      held_out_loss: None where it was not measured.
      figures, held_out_figures: the task's own, as lists of numbers.
    """

    step: int
    seconds: float
    loss: float
    held_out_loss: float | None = None
    figures: Figures = dataclasses.field(default_factory=dict)
    held_out_figures: Figures = dataclasses.field(default_factory=dict)


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
    task: Task,
    options: TrainingOptions,
    report: Callable[[float, Point], None],
    *,
    checkpoints: Checkpoints | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Trained:
    """Trains float32 params for options.seconds.

    Args:
      params: the start, see `initial_params`; donated.
      task: what to learn; measured every twentieth of the time.
      options: how.
      report: called with (share of the time gone, newest point) some hundred times.
      checkpoints: where to go on from, if there is something, and to save to; None = nowhere. The
        seconds of a run that was broken off count.
      clock: seconds. The learning rate and what is measured when follow from nothing else.
    """
    state = start(params, options)
    before = clock()
    step = _jit_steps.lower(state, task, 0.0, options=options, steps=_STEPS_PER_CALL).compile()
    measured, figures = jax.device_get(measure(task, state.params))
    compile_seconds = clock() - before

    best = _host_copy(state.params)
    curve = [Point(0, 0.0, float(measured), float(measured), {}, _lists(figures))]
    seconds = 0.0
    if checkpoints is not None:
        arrays, notes = {"state": _host_copy(state), "best": best}, None
        if (found := checkpoints.restore(arrays)) is not None:
            arrays, notes = found
            state, best = jax.device_put(arrays["state"]), arrays["best"]
            curve, seconds = [Point(**point) for point in notes["curve"]], notes["seconds"]
    lowest = min(point.held_out_loss for point in curve if point.held_out_loss is not None)

    saved, since = seconds, []
    began = clock() - seconds
    while seconds < options.seconds:
        gone_before = seconds / options.seconds
        state, means = step(state, task, gone_before)
        since.append(jax.device_get(means))
        seconds = clock() - began
        gone = min(1.0, seconds / options.seconds)
        held_out = {}
        if math.floor(gone / _HELD_OUT_EVERY) > math.floor(gone_before / _HELD_OUT_EVERY):
            measured, figures = jax.device_get(measure(task, state.params))
            held_out = {"held_out_loss": float(measured), "held_out_figures": _lists(figures)}
            if measured < lowest:
                best, lowest = _host_copy(state.params), float(measured)
        due = checkpoints is not None and seconds - saved >= checkpoints.every
        if held_out or due or gone - curve[-1].seconds / options.seconds > _POINT_EVERY:
            loss, figures = jax.tree.map(lambda *x: np.mean(np.float64(x), axis=0), *since)
            point = Point(
                int(state.step), seconds, float(loss), figures=_lists(figures), **held_out
            )
            curve.append(point)
            since.clear()
            report(gone, point)
        if due:
            arrays = {"state": _host_copy(state), "best": best}
            notes = {"curve": [dataclasses.asdict(p) for p in curve], "seconds": seconds}
            checkpoints.save(int(state.step), arrays, notes)
            saved = seconds
    return Trained(best, curve, int(state.step), seconds, compile_seconds)


def start(params: Params, options: TrainingOptions) -> TrainState:
    """The state before the first step."""
    return TrainState(
        params=params,
        moments=_optimizer(options).init(params),
        step=jnp.zeros((), jnp.int32),
    )


def train_steps(
    state: TrainState,
    task: Task,
    gone: float | jax.Array,
    *,
    options: TrainingOptions,
    steps: int,
) -> tuple[TrainState, tuple[jax.Array, Figures]]:
    """`steps` steps at the learning rate of the share `gone` of the time.

    Returns:
      The state, and the means of the task's loss and figures.
    """
    rate = options.learning_rate * _schedule(gone)

    def body(state: TrainState, _: None) -> tuple[TrainState, tuple[jax.Array, Figures]]:
        key = jax.random.fold_in(jax.random.key(options.seed), state.step)
        results, gradient = jax.value_and_grad(task.loss, has_aux=True)(state.params, key)
        update, moments = _optimizer(options).update(gradient, state.moments, state.params)
        params = jax.tree.map(lambda p, u: p - rate * u, state.params, update)
        return state.replace(params=params, moments=moments, step=state.step + 1), results

    state, results = lax.scan(body, state, length=steps)
    return state, jax.tree.map(lambda x: x.mean(axis=0), results)


# Of the module, so that a second run of the same shapes in one process compiles nothing.
_jit_steps = jax.jit(train_steps, static_argnames=("options", "steps"), donate_argnames="state")


@jax.jit
def measure(task: Task, params: Params) -> tuple[jax.Array, Figures]:
    """`Task.measure` under jit."""
    return task.measure(params)


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


def _host_copy(tree: Any) -> Any:
    return jax.tree.map(np.array, tree)  # device_get may share the buffer, which is donated next


def _lists(figures: Figures) -> Figures:
    return jax.tree.map(lambda x: np.asarray(x).tolist(), figures)
