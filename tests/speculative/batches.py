"""Batches of prompts through the small model, with a drafter and without: what came of them."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import small_model

from carat_jax import generate
from carat_jax.config import GemmaConfig
from carat_jax.generate import RUNNING
from carat_jax.kv_state import KVState, RingKV, init_state
from carat_jax.model import Params
from carat_jax.options import GenerateOptions
from carat_jax.speculative import (
    Counts,
    Drafter,
    Exact,
    Rule,
    read_prompt,
    speculate,
    start,
)
from carat_jax.speculative.drafters.scripted import Scripted

CONFIG, V = small_model.CONFIG, small_model.CONFIG.vocab_size
W, R = 16, 64  # of the fixtures and the small model, with rings of the least slack
SIZE = 64  # columns of one call
NEW = 21  # tokens to generate: whole rounds of 4 proposals

IDS = np.random.default_rng(0).integers(0, V, (25, R)).tolist()
# Prompts at and beside the window, three windows, and where the ring wraps within the text.
LENGTHS = [*range(W - 9, W + 10), 3 * W, 1, R - NEW, R - 1, R - 2, R]
PROMPTS = [tuple(ids[:n]) for ids, n in zip(IDS, LENGTHS, strict=True)]
BATCHES = [tuple(PROMPTS[i::7][:4]) for i in range(7)]  # unequal prompts: 3 and 4 of each
BATCHES = [batch if len(batch) == 4 else (*batch, PROMPTS[0]) for batch in BATCHES]


@dataclasses.dataclass(frozen=True)
class Result:
    """What came of a batch; lists are by row."""

    tokens: list[list[int]]
    logprobs: list[np.ndarray]
    top_ids: list[np.ndarray]
    top_logprobs: list[np.ndarray]
    finish: list[int]
    kv: KVState | None
    counted: tuple[Counts, ...] = ()  # of each call

    @property
    def counts(self) -> Counts:
        """Of all calls, which had the same K."""
        return jax.tree.map(lambda *calls: np.sum(calls, axis=0), *self.counted)

    def of_row(self, row: int) -> "Result":
        """Without a cache."""
        texts = ("tokens", "logprobs", "top_ids", "top_logprobs", "finish")
        return Result(**{name: [getattr(self, name)[row]] for name in texts}, kv=None)

    def assert_same_text(self, other: "Result") -> None:
        assert self.tokens == other.tokens
        assert self.finish == other.finish
        for name in ("logprobs", "top_logprobs"):
            for a, b in zip(getattr(self, name), getattr(other, name), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-4)
        for a, b in zip(self.top_ids, other.top_ids, strict=True):
            np.testing.assert_array_equal(a, b)


def options_of(**options) -> GenerateOptions:
    return GenerateOptions(**{"max_new_tokens": NEW, "logprobs": 2} | options)


def begun(
    params: Params, config: GemmaConfig, prompts: tuple, controls: generate.Controls
) -> tuple[generate.Tokens, generate.DecodeState, jax.Array]:
    """The first token, the state and the hidden state behind it."""
    B = len(prompts)
    state = init_state(config, B, 128, slack=0)
    last = jnp.zeros((B, config.hidden_size), jnp.dtype(config.dtype))
    for tokens, new in generate.prefill_pieces(prompts):
        last, state = generate.prefill_chunk(params, config, tokens, state, new, last)
    first, decode = generate.begin(params, config, last, state, controls)
    return first, decode, last


def joined(pieces: list[generate.Tokens], kv: KVState, **more) -> Result:
    """The columns that count, of all pieces."""

    def rows(name: str) -> list[np.ndarray]:
        arrays = [(np.asarray(getattr(p, name)), np.asarray(p.num_tokens)) for p in pieces]
        return [np.concatenate([a[b, : n[b]] for a, n in arrays]) for b in range(len(arrays[0][0]))]

    return Result(
        tokens=[row.tolist() for row in rows("tokens")],
        logprobs=rows("logprobs"),
        top_ids=rows("top_ids"),
        top_logprobs=rows("top_logprobs"),
        finish=np.asarray(pieces[-1].finish).tolist(),
        kv=kv,
        **more,
    )


def controls_of(prompts: tuple, options: GenerateOptions) -> generate.Controls:
    return generate.Controls.of(options, generate.row_keys(3, len(prompts)))


def decoded(prompts: tuple, controls: generate.Controls, config: GemmaConfig = CONFIG) -> Result:
    """The small model without a drafter."""
    params = small_model.params()
    first, decode, _ = begun(params, config, prompts, controls)
    stopped = np.zeros(len(prompts), bool)
    rest, decode = generate.decode(params, config, decode, jnp.int32(SIZE), stopped, size=SIZE)
    return joined([first, rest], decode.kv)


@functools.cache
def plain(prompts: tuple, options: GenerateOptions) -> Result:
    return decoded(prompts, controls_of(prompts, options))


def drafted(
    drafter: Drafter,
    num_proposals: int | tuple[int, ...],
    prompts: tuple,
    controls: generate.Controls,
    *,
    rule: Rule | None = None,
    params: Params | None = None,
    config: GemmaConfig = CONFIG,
) -> Result:
    """With a drafter, in as many calls as it takes; of two rounds each, with several K in turn."""
    params = small_model.params() if params is None else params
    first, decode, last = begun(params, config, prompts, controls)
    drafting = drafter.init(config, len(prompts), 128)
    for tokens, new in generate.prefill_pieces(prompts):
        drafting = read_prompt(drafter, drafting, tokens, new)
    state = start(drafter, drafting, last, decode)
    in_turn = (num_proposals,) if isinstance(num_proposals, int) else num_proposals
    rounds, Ks = jnp.int32(SIZE if len(in_turn) == 1 else 2), itertools.cycle(in_turn)
    pieces, counted, stopped = [first], [], np.zeros(len(prompts), bool)
    while (np.asarray(pieces[-1].finish) == RUNNING).any():
        call = functools.partial(speculate, num_proposals=next(Ks), size=SIZE)
        out, counts, state = call(params, config, drafter, rule or Exact(), state, rounds, stopped)
        pieces.append(out)
        counted.append(counts)
    return joined(pieces, state.decode.kv, counted=tuple(counted))


def knowing(rows: list[list[int]], right) -> Scripted:
    """A drafter that knows these texts; of one shape, so that programs are shared."""
    table = np.zeros((len(rows), 40), np.int32)
    for b, row in enumerate(rows):
        table[b, : len(row)] = row
    return Scripted.of(table, right)


def assert_same_cache(a: KVState, b: KVState, config: GemmaConfig) -> None:
    """Every slot that a later token may read holds the same, up to rounding."""
    np.testing.assert_array_equal(a.length, b.length)
    for x, y in zip(a.layers, b.layers, strict=True):
        for u, v in zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True):
            u, v = np.asarray(u), np.asarray(v)
            for row, n in enumerate(np.asarray(a.length)):
                first = max(0, n - (config.sliding_window - 1)) if isinstance(x, RingKV) else 0
                live = np.arange(first, n) % u.shape[2]
                np.testing.assert_allclose(u[row][:, live], v[row][:, live], atol=1e-4)
