"""Prefill and decode as jitted functions over plain pytrees.

A generation is `prefill_chunk` over pieces of the prompt, `begin` for the first token, then
`decode` for the rest, many tokens a call. `generate_tokens` is the three of them in one jit.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from carat_jax import device_loops, sampling, sharding
from carat_jax.config import GemmaConfig
from carat_jax.kv_state import KVState, init_state, round_up
from carat_jax.model import Params, head, hidden_states
from carat_jax.options import GenerateOptions
from carat_jax.sampling import Sampling

PREFILL_CHUNKS = (64, 256, 1024, 2048)  # static sizes that prompts are cut and padded into
PREFILL_TOKENS = 4096  # at most this many tokens of all rows together in a chunk
MIN_CAPACITY = 4096  # global slots; at the floor 31B reads them in 45 µs of a 13 ms step
DECODE_STEPS = 64  # columns that callers of `decode` give it: one compilation for all of them

NO_TOKEN = np.iinfo(np.int32).max  # an id that no vocabulary has

RUNNING, STOP, LENGTH, NON_FINITE = range(4)  # DecodeState.finish


class Controls(struct.PyTreeNode):
    """GenerateOptions as the jitted functions take them: numbers traced, structure static.

    Attributes:
      sampling: how each row chooses.
      limit: int32 [B], tokens a row may generate.
      stop_ids, suppressed: int32 [B, n]; ids beyond the vocabulary are padding.
      num_logprobs: static; None = no log-probabilities, else how many alternatives.
    """

    sampling: Sampling
    limit: jax.Array
    stop_ids: jax.Array
    suppressed: jax.Array
    num_logprobs: int | None = struct.field(pytree_node=False)

    @classmethod
    def of(cls, options: GenerateOptions, keys: jax.Array) -> "Controls":
        """For a batch with these PRNG keys [B]."""
        B = keys.shape[0]

        def row(value: float, dtype: Any) -> jax.Array:
            return jnp.full((B,), value, dtype)

        return cls(
            sampling=Sampling(
                temperature=row(options.temperature, jnp.float32),
                top_k=row(options.top_k, jnp.int32),
                top_p=row(options.top_p, jnp.float32),
                min_p=row(options.min_p, jnp.float32),
                keys=keys,
                greedy=options.temperature == 0,
            ),
            limit=row(options.max_new_tokens, jnp.int32),
            stop_ids=_padded_ids(options.stop_token_ids, B),
            suppressed=_padded_ids(options.suppress_tokens, B),
            num_logprobs=options.num_logprobs,
        )


class DecodeState(struct.PyTreeNode):
    """A batch in the middle of generating.

    Attributes:
      kv: the past, without `token`.
      token: int32 [B], chosen last and not fed yet.
      generated: int32 [B], tokens chosen so far.
      finish: int32 [B], RUNNING, or why the row ended.
      controls: the options.
    """

    kv: KVState
    token: jax.Array
    generated: jax.Array
    finish: jax.Array
    controls: Controls


class Tokens(struct.PyTreeNode):
    """What was generated: n columns, of which row b uses the first num_tokens[b].

    Attributes:
      tokens: int32 [B, n]; the stop id included.
      num_tokens: int32 [B].
      finish: int32 [B]: RUNNING (only between calls of `decode`), STOP, LENGTH or NON_FINITE
        (NaN or Inf in the logits of the token after the last one given).
      logprobs: float32 [B, n] of the tokens; None unless asked for.
      top_ids, top_logprobs: [B, n, k], the most likely tokens; None unless asked for.
    """

    tokens: jax.Array
    num_tokens: jax.Array
    finish: jax.Array
    logprobs: jax.Array | None = None
    top_ids: jax.Array | None = None
    top_logprobs: jax.Array | None = None


def row_keys(seed: int | tuple[int, ...], batch: int) -> jax.Array:
    """PRNG keys [batch]: streams of one seed, or the first stream of each of several.

    Raises:
      ValueError: a number of seeds other than `batch`.
    """
    if isinstance(seed, tuple):
        if len(seed) != batch:
            raise ValueError(f"{len(seed)} seeds for {batch} prompts: give one, or one for each")
        return jnp.stack([jax.random.fold_in(jax.random.key(int(s)), 0) for s in seed])
    return _streams(jax.random.key(int(seed)), batch)


def capacity(tokens: int, max_context: int) -> int:
    """Slots of the global caches for sequences of this many tokens: few sizes, few compilations."""
    slots = MIN_CAPACITY
    while slots < tokens:
        slots *= 2
    return min(slots, max_context)


def prefill_plan(longest: int, batch: int, chunks: tuple[int, ...] = PREFILL_CHUNKS) -> list[int]:
    """Chunk sizes that cover a prompt of `longest` tokens, the last one padded."""
    plan: list[int] = []
    while longest > 0:
        plan.append(chunk_size(longest, batch, chunks))
        longest -= plan[-1]
    return plan


def chunk_size(rest: int, batch: int, chunks: tuple[int, ...] = PREFILL_CHUNKS) -> int:
    """The largest chunk of which `rest` tokens fill more than half: padding never doubles work.

    Rows of a batch are prefilled together, so many rows take smaller chunks.
    """
    return max(
        (s for s in chunks if 2 * rest > s and s * batch <= PREFILL_TOKENS), default=chunks[0]
    )


def prefill_pieces(
    prompts: Sequence[Sequence[int]], chunks: tuple[int, ...] = PREFILL_CHUNKS
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cuts prompts by `prefill_plan` into what `prefill_chunk` takes, one after another.

    Yields:
      tokens int32 [B, size], right-padded, and new int32 [B], how many of them are real.
    """
    lengths = np.array([len(ids) for ids in prompts], np.int32)
    start = 0
    for size in prefill_plan(int(lengths.max()), len(prompts), chunks):
        tokens = np.zeros((len(prompts), size), np.int32)
        for row, ids in enumerate(prompts):
            piece = ids[start : start + size]
            tokens[row, : len(piece)] = piece
        yield tokens, np.clip(lengths - start, 0, size)
        start += size


@functools.partial(jax.jit, static_argnames="config", donate_argnames=("state", "last"))
def prefill_chunk(
    params: Params,
    config: GemmaConfig,
    tokens: jax.Array,
    state: KVState,
    new: jax.Array,
    last: jax.Array,
) -> tuple[jax.Array, KVState]:
    """Feeds a chunk of prompt; no logits.

    Args:
      params, config: the model.
      tokens: int32 [B, T], right-padded.
      state: donated.
      new: int32 [B], how many of the T are real; a row may have none.
      last: [B, D], donated: what the chunk before returned, or zeros.

    Returns:
      hidden [B, D] at each row's newest token, and the state.
    """
    return _prefill(params, config, tokens, state, new, last)


def begin(
    params: Params, config: GemmaConfig, last: jax.Array, state: KVState, controls: Controls
) -> tuple[Tokens, DecodeState]:
    """The first token, from the hidden state at the prompt's end: Tokens with one column."""
    # The caches are not needed, so they stay outside of the jit.
    first, after = _begin_jit(params, config, last, state.replace(layers=()), controls)
    return first, after.replace(kv=state)


@functools.partial(device_loops.jit, static_argnames=("config", "size"), donate_argnames="state")
def decode(
    params: Params,
    config: GemmaConfig,
    state: DecodeState,
    steps: jax.Array,
    stopped: jax.Array,
    *,
    size: int,
) -> tuple[Tokens, DecodeState]:
    """Up to `steps` more tokens, fewer where every row ends before.

    Args:
      params, config: the model.
      state: donated.
      steps: int32, at most size; traced, so any number shares one compilation.
      stopped: bool [B], rows that the caller ends now (a stop string, say).
      size: static, columns of the result.
    """
    finish = jnp.where(stopped & (state.finish == RUNNING), STOP, state.finish)
    return _decode(params, config, state.replace(finish=finish), jnp.minimum(steps, size), size)


def generate_tokens(
    params: Params,
    config: GemmaConfig,
    tokens: jax.Array,
    lengths: jax.Array,
    key: jax.Array,
    options: GenerateOptions,
) -> Tokens:
    """A whole generation as one jitted function, which may be called inside another jit.

    The result's shape is known beforehand, so unused columns hold the pad id. Text (stop
    strings) is the caller's business; numbers among the options are traced, so that only
    max_new_tokens, logprobs, the number of ids and greedy-or-not compile anew.

    Args:
      params, config: the model.
      tokens: int32 [B, T] prompts, right-padded.
      lengths: int32 [B], real tokens of each row, at least 1.
      key: a PRNG key; row b uses fold_in(key, b).
      options: `seed` and `stop` are not used.

    Returns:
      Tokens with max_new_tokens columns.

    Raises:
      ValueError: shapes that do not fit; and where the values are known (outside a jit), ids
        out of the vocabulary or lengths out of [1, T].
      ConfigError: T + max_new_tokens beyond the model's max_position_embeddings.
    """
    # Not jnp.asarray: it would wrap an id beyond int32 into the vocabulary.
    tokens, lengths = (x if isinstance(x, jax.Array) else np.asarray(x) for x in (tokens, lengths))
    _check_prompts(config, tokens, lengths)
    if options.stop:
        raise ValueError("stop strings need a tokenizer: use Gemma.generate, or stop_token_ids")
    options.check_vocabulary(config.vocab_size)
    controls = Controls.of(options, _streams(key, tokens.shape[0]))
    return _generate_tokens(
        params, config, tokens, lengths, controls, max_new_tokens=options.max_new_tokens
    )


@functools.partial(jax.jit, static_argnames=("config", "max_new_tokens"))
def _generate_tokens(
    params: Params,
    config: GemmaConfig,
    tokens: jax.Array,
    lengths: jax.Array,
    controls: Controls,
    *,
    max_new_tokens: int,
) -> Tokens:
    B, T = tokens.shape
    state = init_state(config, B, T + max_new_tokens, mesh=sharding.mesh_of(params))
    chunk = chunk_size(T, B)
    chunks = -(-T // chunk)
    tokens = jnp.pad(tokens, ((0, 0), (0, chunks * chunk - T)))

    def feed(i, carry):
        last, state = carry
        piece = lax.dynamic_slice_in_dim(tokens, i * chunk, chunk, axis=1)
        new = jnp.clip(lengths - i * chunk, 0, chunk)
        return _prefill(params, config, piece, state, new, last)

    last = jnp.zeros((B, config.hidden_size), jnp.dtype(config.dtype))
    last, state = lax.fori_loop(0, chunks, feed, (last, state))
    first, state = _begin(params, config, last, state, controls)
    # One column to spare, since JAX cannot index an axis without any.
    rest, state = _decode(params, config, state, max_new_tokens - 1, max_new_tokens)
    used = jnp.arange(max_new_tokens) < state.generated[:, None]

    def join(name: str, unused: int | float) -> jax.Array | None:
        a, b = getattr(first, name), getattr(rest, name)
        if a is None:
            return None
        columns = jnp.concatenate([a, b[:, :-1]], axis=1)
        return jnp.where(used.reshape(*used.shape, *[1] * (a.ndim - 2)), columns, unused)

    return Tokens(
        tokens=join("tokens", config.pad_token_id),
        num_tokens=state.generated,
        finish=state.finish,
        logprobs=join("logprobs", 0.0),
        top_ids=join("top_ids", config.pad_token_id),
        top_logprobs=join("top_logprobs", 0.0),
    )


def _prefill(
    params: Params,
    config: GemmaConfig,
    tokens: jax.Array,
    state: KVState,
    new: jax.Array,
    last: jax.Array,
) -> tuple[jax.Array, KVState]:
    hidden, state = hidden_states(params, config, tokens, state, new=new)
    newest = jnp.take_along_axis(hidden, jnp.maximum(new - 1, 0)[:, None, None], axis=1)[:, 0]
    return jnp.where((new > 0)[:, None], newest, last), state


def _begin(
    params: Params, config: GemmaConfig, last: jax.Array, state: KVState, controls: Controls
) -> tuple[Tokens, DecodeState]:
    B = last.shape[0]
    zeros = jnp.zeros((B,), jnp.int32)
    start = DecodeState(kv=state, token=zeros, generated=zeros, finish=zeros, controls=controls)
    column, after = _choose(params, config, last, start)
    tokens = jax.tree.map(lambda x: x[:, None], column)
    return Tokens(num_tokens=after.generated, finish=after.finish, **tokens), after


_begin_jit = jax.jit(_begin, static_argnames="config")


def _decode(
    params: Params, config: GemmaConfig, state: DecodeState, steps: jax.Array | int, size: int
) -> tuple[Tokens, DecodeState]:
    before = state.generated
    column = jax.eval_shape(lambda s: columns(s, jnp.zeros_like(s.token), None), state)
    buffers = jax.tree.map(lambda c: jnp.zeros((c.shape[0], size, *c.shape[1:]), c.dtype), column)

    def running(carry):
        i, state, _ = carry
        return (i < steps) & jnp.any(state.finish == RUNNING)

    def step(carry):
        i, state, buffers = carry
        new = (state.finish == RUNNING).astype(jnp.int32)
        hidden, kv = hidden_states(params, config, state.token[:, None], state.kv, new=new)
        column, state = _choose(params, config, hidden[:, 0], state.replace(kv=kv))
        buffers = jax.tree.map(lambda b, c: b.at[:, i].set(c, mode="drop"), buffers, column)
        return i + 1, state, buffers

    _, state, buffers = lax.while_loop(running, step, (jnp.int32(0), state, buffers))
    count = state.generated - before
    return Tokens(num_tokens=count, finish=state.finish, **buffers), state


def _choose(
    params: Params, config: GemmaConfig, hidden: jax.Array, state: DecodeState
) -> tuple[dict[str, jax.Array], DecodeState]:
    """One token for each running row from hidden [B, D]; what it leaves behind, and the state."""
    logits = head(params, config, hidden)
    controls = state.controls
    allowed = sampling.suppress(logits, controls.suppressed)
    token = sampling.choose(allowed, controls.sampling, state.kv.length)
    finite = jnp.isfinite(logits).all(-1)
    running = state.finish == RUNNING
    generated = state.generated + (running & finite)
    stop = (token[:, None] == controls.stop_ids).any(-1)
    why = jnp.where(generated >= controls.limit, LENGTH, RUNNING)
    why = jnp.where(stop, STOP, why)
    why = jnp.where(finite, why, NON_FINITE)
    column = columns(state, token, logits)
    finish = jnp.where(running, why, state.finish)
    return column, state.replace(token=token, generated=generated, finish=finish)


def columns(state: DecodeState, token: jax.Array, logits: jax.Array | None) -> dict:
    """The fields of `Tokens` for one step, without the column axis."""
    k = state.controls.num_logprobs
    if k is None:
        return {"tokens": token}
    if logits is None:
        logits = jnp.zeros((token.shape[0], max(k, 1)), jnp.float32)  # only shapes are wanted
    own, ids, top = sampling.logprobs(logits, token, k)
    chosen = {"tokens": token, "logprobs": own}
    return chosen | {"top_ids": ids, "top_logprobs": top} if k else chosen


def _streams(key: jax.Array, batch: int) -> jax.Array:
    if not jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        key = jax.random.wrap_key_data(key)
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(batch))


def _padded_ids(ids: tuple[int, ...], batch: int) -> jax.Array:
    """int32 [batch, n], n a multiple of 8, padded with NO_TOKEN: few compilations."""
    padded = np.full(round_up(max(len(ids), 1), 8), NO_TOKEN, np.int32)
    padded[: len(ids)] = ids
    return jnp.tile(padded, (batch, 1))


def _check_prompts(config: GemmaConfig, tokens: jax.Array, lengths: jax.Array) -> None:
    if tokens.ndim != 2 or tokens.size == 0 or not jnp.issubdtype(tokens.dtype, jnp.integer):
        raise ValueError(f"tokens {tokens.shape} {tokens.dtype} must be integer [B, T], not empty")
    if lengths.shape != tokens.shape[:1] or not jnp.issubdtype(lengths.dtype, jnp.integer):
        raise ValueError(
            f"lengths {lengths.shape} {lengths.dtype} must be integer [B] = [{tokens.shape[0]}]"
        )
    if isinstance(tokens, jax.core.Tracer) or isinstance(lengths, jax.core.Tracer):
        return
    ids, n = np.asarray(tokens), np.asarray(lengths)
    if n.min() < 1 or n.max() > ids.shape[1]:
        raise ValueError(
            f"lengths from {n.min()} to {n.max()}: they must be in [1, T] = [1, {ids.shape[1]}]"
        )
    if ids.min() < 0 or ids.max() >= config.vocab_size:
        raise ValueError(
            f"ids from {ids.min()} to {ids.max()}: they must be in [0, {config.vocab_size})"
        )
