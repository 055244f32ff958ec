"""The speculative loop: propose, verify, accept, roll back, many rounds in one jitted call.

Rolling back is lowering `length`: a ring has slots to spare for the proposals, so rejected ones
have overwritten nothing that is still needed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from carat_jax import device_loops, generate, sampling
from carat_jax.config import GemmaConfig
from carat_jax.generate import LENGTH, NON_FINITE, RUNNING, STOP, DecodeState, Tokens
from carat_jax.model import Params, head, hidden_states
from carat_jax.speculative.acceptance import Rule, Verdict, drafting_keys
from carat_jax.speculative.protocol import Drafter, Proposal, Target, proposed
from carat_jax.speculative.speculation import check_num_proposals


class Counts(struct.PyTreeNode):
    """What speculation did in one call.

    Attributes:
      rounds: int32 [B], passes of the target in which a row took part.
      drafted, accepted: int32 [B], tokens.
      per_position: int32 [B, K], how often the i-th proposal of a round was accepted.
    """

    rounds: jax.Array
    drafted: jax.Array
    accepted: jax.Array
    per_position: jax.Array


class SpeculativeState(struct.PyTreeNode):
    """A batch in the middle of generating with a drafter.

    Attributes:
      decode: as without a drafter.
      hidden: [B, D], see `Target`.
      drafter: the drafter's own state.
    """

    decode: DecodeState
    hidden: jax.Array
    drafter: Any


@functools.partial(jax.jit, donate_argnames="state")
def read_prompt(drafter: Drafter, state: Any, tokens: jax.Array, new: jax.Array) -> Any:
    """`Drafter.prefill` under jit."""
    return drafter.prefill(state, tokens, new)


def start(
    drafter: Drafter,
    drafter_state: Any,
    hidden: jax.Array,
    decode: DecodeState,
) -> SpeculativeState:
    """The state after the first token, which `generate.begin` chose from `hidden` [B, D]."""
    new = (decode.generated > 0).astype(jnp.int32)
    observed = drafter.observe(drafter_state, decode.token[:, None], new)
    return SpeculativeState(decode, hidden, observed)


@functools.partial(
    device_loops.jit,
    static_argnames=("config", "num_proposals", "size"),
    donate_argnames="state",
)
def speculate(
    params: Params,
    config: GemmaConfig,
    drafter: Drafter,
    rule: Rule,
    state: SpeculativeState,
    rounds: jax.Array,
    stopped: jax.Array,
    *,
    num_proposals: int,
    size: int,
) -> tuple[Tokens, Counts, SpeculativeState]:
    """Up to `rounds` rounds, fewer where every row ends before.

    Calls with different K may follow one another.

    Args:
      params, config: the target.
      drafter: what proposes.
      rule: which proposals are accepted.
      state: donated.
      rounds: int32, at most size / (num_proposals + 1); traced.
      stopped: bool [B], rows that the caller ends now.
      num_proposals: K, static. 0 is plain decoding, through which the drafter is kept informed.
      size: static, columns of the result.

    Returns:
      Tokens, of which each row has its own number; what these rounds did; the state.

    Raises:
      ValueError: while traced, a K that is negative or of which the proposals and the token
        before them are no step that can be rolled back (`speculation.most_proposals`).
    """
    decode = state.decode
    check_num_proposals(num_proposals, drafter, decode.kv, config)
    finish = jnp.where(stopped & (decode.finish == RUNNING), STOP, decode.finish)
    state = state.replace(decode=decode.replace(finish=finish))
    rounds = jnp.minimum(rounds, size // (num_proposals + 1))
    before = decode.generated
    column = jax.eval_shape(
        lambda s: generate.columns(s, jnp.zeros_like(s.token), None), state.decode
    )
    buffers = jax.tree.map(lambda c: jnp.zeros((c.shape[0], size, *c.shape[1:]), c.dtype), column)

    none = jnp.zeros_like(before)
    counts = Counts(none, none, none, jnp.zeros((before.shape[0], num_proposals), jnp.int32))

    def running(carry):
        i, state, *_ = carry
        return (i < rounds) & jnp.any(state.decode.finish == RUNNING)

    def step(carry):
        i, state, counts, buffers = carry
        start = state.decode.generated - before
        emitted, count, new, state = _round(params, config, drafter, rule, state, num_proposals)
        counts = jax.tree.map(jnp.add, counts, new)
        index = jnp.arange(num_proposals + 1)
        place = jnp.where(index < count[:, None], start[:, None] + index, size)  # else dropped
        rows = jnp.arange(place.shape[0])[:, None]
        buffers = jax.tree.map(lambda b, e: b.at[rows, place].set(e, mode="drop"), buffers, emitted)
        return i + 1, state, counts, buffers

    start = jnp.int32(0), state, counts, buffers
    _, state, counts, buffers = lax.while_loop(running, step, start)
    count = state.decode.generated - before
    return Tokens(num_tokens=count, finish=state.decode.finish, **buffers), counts, state


@functools.partial(jax.jit, static_argnames=("config", "num_proposals"))
def draft(
    params: Params,
    config: GemmaConfig,
    drafter: Drafter,
    state: SpeculativeState,
    rounds: jax.Array,
    *,
    num_proposals: int,
) -> jax.Array:
    """The proposals of the next round, made `rounds` times over: for timing them alone.

    Returns:
      int32 [B], the last guesses; `state` is as it was.

    Raises:
      ValueError: as `speculate`.
    """
    check_num_proposals(num_proposals, drafter, state.decode.kv, config)

    def again(_, carry):
        token, drafting = carry
        decode = state.decode.replace(token=token)
        state_now = state.replace(decode=decode, drafter=drafting)
        proposal, drafting = _propose(params, config, drafter, state_now, num_proposals)
        last = proposal.tokens[:, -1] if num_proposals else token
        # Each round needs the one before, and nothing may be taken out of the loop.
        return lax.optimization_barrier((last, drafting))

    return lax.fori_loop(0, rounds, again, (state.decode.token, state.drafter))[0]


def _round(
    params: Params,
    config: GemmaConfig,
    drafter: Drafter,
    rule: Rule,
    state: SpeculativeState,
    K: int,
) -> tuple[dict[str, jax.Array], jax.Array, Counts, SpeculativeState]:
    """One round: `Tokens`' fields with K + 1 columns, how many of them count, Counts, state."""
    decode, controls = state.decode, state.decode.controls
    length, running = decode.kv.length, decode.finish == RUNNING
    proposal, drafted = _propose(params, config, drafter, state, K)

    fed = jnp.concatenate([decode.token[:, None], proposal.tokens], axis=1)
    new = jnp.where(running, K + 1, 0)
    hidden, kv = hidden_states(params, config, fed, decode.kv, new=new)
    logits = head(params, config, hidden)  # [B, K + 1, V]
    allowed = sampling.suppress(logits, controls.suppressed)
    if K:
        verdict = rule.accept(allowed, proposal, controls.sampling, length + 1)
    else:
        token = sampling.choose(allowed[:, 0], controls.sampling, length + 1)
        verdict = Verdict(accepted=jnp.zeros_like(token), token=token)

    index = jnp.arange(K + 1)
    tokens = jnp.concatenate([proposal.tokens, verdict.token[:, None]], axis=1)
    tokens = jnp.where(index == verdict.accepted[:, None], verdict.token[:, None], tokens)
    count, finish = _cut(decode, tokens, verdict.accepted + 1, jnp.isfinite(logits).all(-1))
    count = jnp.where(running, count, 0)
    # Of what was fed, as much stays as was emitted: the last token emitted is not fed yet.
    kv = kv.replace(length=length + count)
    last = jnp.maximum(count - 1, 0)
    took = count > 0
    token = jnp.take_along_axis(tokens, last[:, None], axis=1)[:, 0]
    newest = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    after = decode.replace(
        kv=kv,
        token=jnp.where(took, token, decode.token),
        generated=decode.generated + count,
        finish=jnp.where(running, finish, decode.finish),
    )
    accepted = jnp.minimum(verdict.accepted, count)
    counts = Counts(
        rounds=running.astype(jnp.int32),
        # Of a round that ends its row, only what could have been emitted counts.
        drafted=jnp.where(running & (finish == RUNNING), K, jnp.minimum(count, K)),
        accepted=accepted,
        per_position=(index[:K] < accepted[:, None]).astype(jnp.int32),
    )
    emitted = jax.vmap(generate.columns, in_axes=(None, 1, 1), out_axes=1)(decode, tokens, logits)
    state = SpeculativeState(
        decode=after,
        hidden=jnp.where(took[:, None], newest, state.hidden),
        drafter=drafter.observe(drafted, tokens, count),
    )
    return emitted, count, counts, state


def _propose(
    params: Params, config: GemmaConfig, drafter: Drafter, state: SpeculativeState, K: int
) -> tuple[Proposal, Any]:
    """K proposals, maybe none, and the drafter's state after them."""
    decode = state.decode
    target = Target(params, config, decode.kv, decode.token, state.hidden)
    keys = drafting_keys(decode.controls.sampling, decode.kv.length)
    # A drafter may fill a cache while it proposes. So it proposes once even where nothing is
    # wanted: what its state does not need of that, the compiler drops.
    proposal, drafted = proposed(drafter, state.drafter, target, max(K, 1), keys)
    if not K:
        proposal = Proposal(jnp.zeros((decode.token.shape[0], 0), jnp.int32))
    return proposal, drafted


def _cut(
    decode: DecodeState, tokens: jax.Array, count: jax.Array, finite: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """How many of a round's tokens [B, K + 1] are emitted, and why the row ends (or RUNNING).

    What plain decoding would have done token by token: nothing after a stop id or the limit, and
    no token from logits [B, K + 1] that are not finite.
    """
    controls = decode.controls
    index = jnp.arange(tokens.shape[1])
    chosen = index < count[:, None]
    stop = (tokens[..., None] == controls.stop_ids[:, None]).any(-1) & chosen
    full = (decode.generated[:, None] + index + 1 >= controls.limit[:, None]) & chosen
    bad = ~finite & chosen
    why = jnp.where(full, LENGTH, RUNNING)
    why = jnp.where(stop, STOP, why)
    why = jnp.where(bad, NON_FINITE, why)
    ends = why != RUNNING
    first = jnp.argmax(ends, axis=1)
    finish = jnp.take_along_axis(why, first[:, None], axis=1)[:, 0]
    emitted = first + (finish != NON_FINITE)
    any_end = ends.any(1)
    return jnp.where(any_end, emitted, count), jnp.where(any_end, finish, RUNNING)
