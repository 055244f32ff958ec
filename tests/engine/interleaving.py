"""Requests that come and are cancelled while others are served, each held to what it gets alone."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import by_hand
import numpy as np
from hypothesis import strategies as st

from carat_jax.engine import Cancelled
from carat_jax.engine.scheduler import Scheduler
from carat_jax.gemma import Gemma
from carat_jax.generation import Generation
from carat_jax.speculative import Drafter

# (case, steps until it comes, steps until it is cancelled)
Arrival = tuple[int, int, int | None]
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 15), st.integers(0, 12), st.one_of(st.none(), st.integers(0, 12))),
    min_size=2,
    max_size=9,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Case:
    """A request; the drafter is what a scheduler has that has one."""

    model: Gemma
    prompt: tuple[int, ...]
    options: dict[str, Any]
    drafter: Drafter | None = None

    def also(self, **options: Any) -> "Case":
        """With these options too."""
        return dataclasses.replace(self, options=self.options | options)

    @functools.cached_property
    def alone(self) -> Generation:
        return self.model.generate(list(self.prompt), **self.options)

    @functools.cached_property
    def accepted_alone(self) -> int:
        """Proposals that stand."""
        out = self.model.generate(list(self.prompt), drafter=self.drafter, **self.options)
        return out.stats.accepted


def play(s: Scheduler, arrivals: Sequence[Arrival], cases: Sequence[Case]) -> None:
    """Has a scheduler serve cases as they arrive, and compares all of them."""
    played = []  # request, case, when it is cancelled
    for step in range(1000):
        for index, when, cancelled in arrivals:
            if when == step:
                case = cases[index % len(cases)]
                request = by_hand.submit(s, case.model, list(case.prompt), **case.options)
                played.append((request, case, None if cancelled is None else step + cancelled))
        for request, _, cancelled in played:
            if cancelled == step:
                request.cancel()
        if s.idle and step > 12:
            break
        s.step()
        assert len(s.rows.occupants) + len(s.pasts) <= s.slots
    assert len(played) == len(arrivals)
    for request, case, cancelled in played:
        assert request.done
        try:
            out = request.result(timeout=0)
            same(out, case.alone)
            # After a stop string the device goes on for a while.
            if s.speculation is not None and "stop" not in case.options:
                assert out.stats.accepted == case.accepted_alone
        except Cancelled as error:
            assert cancelled is not None
            if error.generation is not None:
                tokens = error.generation.tokens
                assert tokens == case.alone.tokens[: len(tokens)]
    s.abandon(Cancelled(None))


def same(out: Generation, alone: Generation) -> None:
    """Equal but for times, and log-probabilities equal to rounding."""
    assert (out.tokens, out.text, out.finish_reason) == (
        alone.tokens,
        alone.text,
        alone.finish_reason,
    )
    assert out.prompt_tokens == alone.prompt_tokens
    assert (out.logprobs is None) == (alone.logprobs is None)
    if out.logprobs is not None:
        np.testing.assert_allclose(out.logprobs, alone.logprobs, atol=1e-4)
    if alone.top_logprobs is not None:
        assert [list(top) for top in out.top_logprobs] == [list(t) for t in alone.top_logprobs]
