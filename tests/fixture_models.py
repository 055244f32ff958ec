"""The stored models with the outputs that Hugging Face transformers gave for them."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from carat_jax.attention import Step
from carat_jax.checkpoint.loading import load_params
from carat_jax.config import GemmaConfig
from carat_jax.kv_state import KVState, init_state
from carat_jax.model import Gemma4, Params, forward, head

FOLDER = Path(__file__).parent / "fixtures"
NAMES = ("dense_31b_like", "e2b_like", "moe_26b_like")
# How far float32 logits may be from the stored float32 ones. The stored ones differ from float64
# by 5e-5, 5e-4 and 3.2e-4; XLA on CPU stays within 1e-4, 1.2e-3 and 4e-4 of them.
LOGITS = {"dense_31b_like": 2e-4, "e2b_like": 2.5e-3, "moe_26b_like": 1e-3}

# Prompt lengths at and beside the multiples of the window (16), the chunk (30) and the ring (64),
# all in one batch: few programs are compiled, and tests share them.
LENGTHS = (1, 15, 16, 17, 29, 30, 31, 32, 33, 47, 48, 49, 50, 63, 64, 65)
CHUNK = 30

step = jax.jit(
    forward,
    static_argnames=("config", "implementation"),
    donate_argnames="state",
)


# Session scope brings the tests of one model together, across files: when they are dealt out to
# several processes, most land where its programs have been compiled already.
def quick_for(*quick: str) -> pytest.MarkDecorator:
    """Each model, where one is enough most of the time: the others are `slow`."""
    marks = {name: [] if name in quick else pytest.mark.slow for name in NAMES}
    named = [pytest.param(name, marks=marks[name]) for name in NAMES]
    return pytest.mark.parametrize("name", named, scope="session")


each_model = pytest.mark.parametrize("name", NAMES, scope="session")


@functools.partial(jax.jit, static_argnames="config")
def record(
    params: Params, config: GemmaConfig, tokens: jax.Array
) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """A pass without a state: hidden, logits, and what the modules record on the way.

    The batch axis is there (B = 1), in the router's records it is one with the positions.
    """
    where = Step.of(config, None, tokens, None, None)
    (hidden, _), recorded = Gemma4(config).apply(
        {"params": params}, tokens, None, where, mutable=["intermediates"]
    )
    return hidden, head(params, config, hidden), recorded["intermediates"]


@dataclasses.dataclass(frozen=True)
class Model:
    """A stored model.

    Attributes:
      raw, tensors: `config.json` and the safetensors file as they are.
      config, params: as loaded.
      ids: int32 [90], prompt and greedy continuation.
      expected: the arrays of `expected.npz`; positions come first in those of `ids`.
      tolerance: "logits_abs" and "hidden_abs" of `meta.json`.
    """

    name: str
    raw: dict[str, Any]
    tensors: dict[str, np.ndarray]
    config: GemmaConfig
    params: Params
    ids: np.ndarray
    expected: dict[str, np.ndarray]
    tolerance: dict[str, float]


@functools.cache
def model(name: str) -> Model:
    folder = FOLDER / name
    raw, meta = (json.loads((folder / f"{x}.json").read_text()) for x in ("config", "meta"))
    config = GemmaConfig.from_json(folder)
    with np.load(folder / "expected.npz") as stored:
        expected = dict(stored)
    return Model(
        name=name,
        raw=raw,
        tensors=load_file(folder / "model.safetensors"),
        config=config,
        params=load_params(folder, config, progress=False),
        ids=np.concatenate([expected["prompt_ids"], expected["continuation_ids"]]),
        expected=expected,
        tolerance=meta["suggested_tolerance"],
    )


def empty(m: Model, batch: int) -> KVState:
    """Room for 128 positions. The rings have 64 slots for the window of 16, so they wrap."""
    return init_state(m.config, batch, 128, slack=0)


def feed(
    m: Model, state: KVState, ids: np.ndarray, until: np.ndarray, T: int, padding: int = 0
) -> Iterator[tuple[np.ndarray, np.ndarray, KVState]]:
    """Feeds each row of ids [B, any] from its length up to `until` [B], T tokens a step.

    Yields the positions [B, T] of a step, -1 for padding (tokens of id `padding`, also in rows that
    have come to their end), the logits [B, T, V] and the state after it.
    """
    until = np.asarray(until)
    while ((length := np.asarray(state.length)) < until).any():
        position = length[:, None] + np.arange(T)
        real = position < until[:, None]
        index = np.minimum(position, ids.shape[1] - 1)
        tokens = np.where(real, np.take_along_axis(ids, index, axis=1), padding)
        new = jnp.asarray(real.sum(axis=1), jnp.int32)
        logits, state = step(m.params, m.config, jnp.asarray(tokens, jnp.int32), state, new=new)
        yield np.where(real, position, -1), np.asarray(logits), state


def run(
    m: Model, ids: np.ndarray, until: np.ndarray, T: int, state: KVState, padding: int = 0
) -> tuple[np.ndarray, KVState]:
    """Logits [B, positions, V] of what `feed` feeds, NaN elsewhere, and the state at the end."""
    out = np.full((*ids.shape, m.config.vocab_size), np.nan, np.float32)
    for position, logits, after in feed(m, state, ids, until, T, padding):
        b, t = np.nonzero(position >= 0)
        out[b, position[b, t]] = logits[b, t]
        state = after
    return out, state
