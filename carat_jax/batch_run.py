"""One batch being generated, as the host sees it: prefill, then call after call until it ends."""

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from carat_jax import display, generate, sharding
from carat_jax.config import GemmaConfig
from carat_jax.generate import DECODE_STEPS
from carat_jax.generation import Generation, SpeculationTally, Stats
from carat_jax.kv_state import abstract_state, init_state
from carat_jax.model import Params
from carat_jax.options import GenerateOptions
from carat_jax.speculative import (
    Counts,
    Speculation,
    check_speculation,
    draft,
    read_prompt,
    speculate,
    start,
)
from carat_jax.speculative.auto import Auto, Call, Fixed, Policy, Profiled
from carat_jax.tokenizer import StopStrings, StreamDecoder, Tokenizer

FINISH_REASONS = {
    generate.STOP: "stop",
    generate.LENGTH: "length",
    generate.NON_FINITE: "non_finite",
}


@dataclasses.dataclass
class Pending:
    """What was dispatched and not fetched yet.

    Attributes:
      tokens: what it gives.
      call, counts: with a drafter, what was asked for and what came of it.
      seconds: of a timed call.
      draft_s: seconds of its rounds' proposals alone, where they are wanted.
    """

    tokens: generate.Tokens
    call: Call | None = None
    counts: Counts | None = None
    seconds: float | None = None
    draft_s: float | None = None


class BatchRun:
    """One batch being generated: the device state, and each row's text so far.

    A context manager: leaving it frees the state, even while a traceback still refers to it.
    """

    def __init__(
        self,
        params: Params,
        config: GemmaConfig,
        tokenizer: Tokenizer | None,
        max_context: int,
        prompts: list[list[int]],
        options: GenerateOptions,
        keys: jax.Array,
        speculation: Speculation | None = None,
    ) -> None:
        """Raises ValueError for a speculation that does not fit; nothing is allocated."""
        longest = max(map(len, prompts))
        self.slots = generate.capacity(longest + options.max_new_tokens, max_context)
        self.policy: Policy = Fixed(0)
        if speculation is not None:
            most = check_speculation(speculation, abstract_state(config, 1, self.slots), config)
            K = speculation.num_proposals
            self.policy = Auto(most) if K == "auto" else Fixed(K)
            if speculation.profile:
                self.policy = Profiled(self.policy)
            begin = functools.partial(speculation.drafter.init, config, len(prompts), self.slots)
            jax.eval_shape(begin)  # for what it refuses
        self.params = params
        self.config = config
        self.speculation = speculation
        self.prompts = prompts
        self.options = options
        self.keys = keys
        self.rows = [Row(tokenizer, options) for _ in prompts]
        self.tally = SpeculationTally(len(prompts))
        self.state: Any = None
        self.started = time.perf_counter()
        self.first_token_at = self.last_token_at = self.started

    def __enter__(self) -> "BatchRun":
        return self

    def __exit__(self, *_: object) -> None:
        for leaf in jax.tree.leaves(self.state):
            if isinstance(leaf, jax.Array) and not leaf.is_deleted():
                leaf.delete()
        self.state = None

    def advance(self, steps: int) -> Iterator[list[list[int]]]:
        """Generates, and yields each row's new ids every `steps` tokens (after the first one), or
        with a drafter after as many rounds as bring that many at best.

        The next call is dispatched before the tokens of the last are fetched, so the device does
        not wait for the host; what it made after a stop string is dropped. A call that is timed
        waits until they have been fetched and has the device to itself.
        """
        with display.waiting("reading the prompt, compiling what is new"):
            pending: Pending | None = self._begin()
        dispatched = 1
        while pending is not None:
            call = ahead = None
            if dispatched < self.options.max_new_tokens:
                call = self.policy.next(steps)
                dispatched += call.rounds  # each brings every row a token or more
            if call is not None and not call.timed:
                with display.waiting("compiling"):
                    ahead = self._dispatch(call)
            yield self._collect(pending)
            if all(row.finish_reason for row in self.rows):
                return
            if call is not None and call.timed:
                ahead = self._dispatch(call)
            pending = ahead

    def _begin(self) -> Pending:
        """Prefills and chooses the first token."""
        params, config, spec = self.params, self.config, self.speculation
        batch, drafting = len(self.prompts), None
        mesh = sharding.mesh_of(params)
        if spec is not None:
            drafter = sharding.everywhere(spec.drafter, mesh)
            self.speculation = spec = dataclasses.replace(spec, drafter=drafter)
        self.state = init_state(config, batch, self.slots, mesh=mesh)
        if spec is not None:
            drafting = sharding.place(spec.drafter.init(config, batch, self.slots), mesh)
        last = jnp.zeros((batch, config.hidden_size), jnp.dtype(config.dtype))
        last = sharding.place(last, mesh)
        for tokens, new in generate.prefill_pieces(self.prompts):
            last, self.state = generate.prefill_chunk(params, config, tokens, self.state, new, last)
            if spec is not None:
                drafting = read_prompt(spec.drafter, drafting, tokens, new)
        controls = generate.Controls.of(self.options, self.keys)
        first, self.state = generate.begin(params, config, last, self.state, controls)
        if spec is not None:
            self.state = start(spec.drafter, drafting, last, self.state)
        return Pending(first)

    def _dispatch(self, call: Call) -> Pending:
        params, config, spec, most = self.params, self.config, self.speculation, DECODE_STEPS
        K, rounds = call.num_proposals, np.int32(call.rounds)
        stopped = np.array([row.finish_reason is not None for row in self.rows])
        if spec is None:
            tokens, self.state = generate.decode(
                params, config, self.state, rounds, stopped, size=most
            )
            return Pending(tokens)
        draft_s = self._draft_time(K, rounds) if spec.profile else None
        begin = time.perf_counter()
        tokens, counts, self.state = speculate(
            params,
            config,
            spec.drafter,
            spec.rule,
            self.state,
            rounds,
            stopped,
            num_proposals=K,
            size=-(-most // (K + 1)) * (K + 1),
        )
        pending = Pending(tokens, call, counts)
        if call.timed:
            jax.block_until_ready(tokens)
            pending.seconds = time.perf_counter() - begin
            self._learn(pending)
            if draft_s is not None:  # of as many rounds as were asked for
                pending.draft_s = draft_s * int(pending.counts.rounds.max()) / call.rounds
        return pending

    def _draft_time(self, num_proposals: int, rounds: jax.Array) -> float:
        """Seconds of the next round's proposals, made `rounds` times; the state stays."""
        drafter, begin = self.speculation.drafter, time.perf_counter()
        guesses = draft(
            self.params, self.config, drafter, self.state, rounds, num_proposals=num_proposals
        )
        jax.block_until_ready(guesses)
        return time.perf_counter() - begin

    def _learn(self, pending: Pending) -> None:
        """Fetches what came of a call, and tells the policy."""
        pending.counts = counts = sharding.fetch(pending.counts)
        self.policy.observe(
            pending.call,
            tries=int(counts.rounds.sum()),
            accepted=counts.per_position.sum(0).tolist(),
            rounds=int(counts.rounds.max()),
            seconds=pending.seconds,
        )

    def _collect(self, pending: Pending) -> list[list[int]]:
        """Fetches tokens and adds them to the rows; returns what each row took."""
        out = sharding.fetch(pending.tokens)
        now = time.perf_counter()
        if pending.call is not None:
            if not pending.call.timed:
                self._learn(pending)
            self.tally.add(pending.counts, pending.seconds, pending.draft_s)
        if not any(row.tokens for row in self.rows):
            self.first_token_at = now
        taken = []
        for b, row in enumerate(self.rows):
            before = len(row.tokens)
            for i in range(int(out.num_tokens[b])):
                if row.finish_reason is not None:  # a stop string, maybe of an earlier call
                    break
                row.add(out, b, i)
            reason = int(out.finish[b])
            if row.finish_reason is None and reason != generate.RUNNING:
                row.end(FINISH_REASONS[reason])
            taken.append(row.tokens[before:])
        if any(taken):
            self.last_token_at = now
        return taken

    def generation(self, index: int) -> Generation:
        row = self.rows[index]
        later = max(len(r.tokens) for r in self.rows) - 1
        decode_s = self.last_token_at - self.first_token_at
        stats = Stats(
            ttft_s=self.first_token_at - self.started,
            tpot_s=decode_s / later if later > 0 else None,
            **(self.tally.stats(index) if self.speculation else {}),
        )
        return row.generation(len(self.prompts[index]), stats)


class Row:
    """Tokens and text of one row, as they come from the device."""

    def __init__(self, tokenizer: Tokenizer | None, options: GenerateOptions) -> None:
        k = options.num_logprobs
        self.tokens: list[int] = []
        self.logprobs: list[float] | None = None if k is None else []
        self.top_logprobs: list[dict[int, float]] | None = [] if k else None
        self.text: list[str] = []
        self.finish_reason: str | None = None
        self._taken = 0
        self._top = k
        self._stop_ids = frozenset(options.stop_token_ids)
        self._tokenizer = tokenizer
        self._decoder: StreamDecoder | None = tokenizer.stream_decoder() if tokenizer else None
        self._stops = StopStrings(options.stop)

    def add(self, out: generate.Tokens, b: int, i: int) -> None:
        """Takes column i of row b; may end the row by a stop string."""
        token = int(out.tokens[b, i])
        self.tokens.append(token)
        if self.logprobs is not None:
            self.logprobs.append(float(out.logprobs[b, i]))
        if self.top_logprobs is not None:
            ids, values = (x[b, i, : self._top].tolist() for x in (out.top_ids, out.top_logprobs))
            self.top_logprobs.append(dict(zip(ids, values, strict=True)))
        if self._tokenizer is None or token in self._stop_ids or not self._tokenizer.has_id(token):
            return
        text, stopped = self._stops.push(self._decoder.push(token))
        self.text.append(text)
        if stopped:
            self.finish_reason = "stop"

    def end(self, reason: str) -> None:
        """The device says that the row has ended: lets go of text that was held back."""
        if self._decoder is not None:
            text, stopped = self._stops.push(self._decoder.flush())
            self.text += [text, "" if stopped else self._stops.flush()]
            reason = "stop" if stopped else reason
        self.finish_reason = reason

    def generation(self, prompt_tokens: int, stats: Stats) -> Generation:
        """The whole, as far as it has come."""
        return Generation(
            text="".join(self.text),
            tokens=self.tokens,
            finish_reason=self.finish_reason or "length",
            prompt_tokens=prompt_tokens,
            logprobs=self.logprobs,
            top_logprobs=self.top_logprobs,
            stats=stats,
            non_finite_step=len(self.tokens) if self.finish_reason == "non_finite" else None,
        )

    def take_text(self) -> str:
        """Text that came since the last call."""
        text = "".join(self.text[self._taken :])
        self._taken = len(self.text)
        return text
