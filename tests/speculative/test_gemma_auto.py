"""K = "auto" and profiles given to Gemma: the same tokens, and calls as they were decided on."""

import functools

import numpy as np
import pytest
import small_model

from carat_jax import batch_run
from carat_jax.generation import Generation
from carat_jax.speculative.auto import Auto
from carat_jax.speculative.drafters.scripted import Scripted

GEMMA = small_model.gemma()
PROMPTS = [[2, 5, 9]]


@functools.cache
def plain(new: int) -> list[Generation]:
    return GEMMA.generate(PROMPTS, max_new_tokens=new)


def drafter(right: int) -> Scripted:
    return Scripted.of(np.array([g.tokens for g in plain(200)]), right)


def same(a: Generation, b: Generation) -> bool:
    return (a.tokens, a.finish_reason) == (b.tokens, b.finish_reason)


@pytest.fixture
def used(monkeypatch):
    """K and rounds of every call, which takes 1 s and 0.05 s a proposal for each round."""
    calls, observe = [], Auto.observe

    def told(self, call, tries, accepted, rounds, seconds):
        calls.append((call.num_proposals, rounds))
        if seconds is not None:
            seconds = rounds * (1 + 0.05 * call.num_proposals)
        observe(self, call, tries, accepted, rounds, seconds)

    monkeypatch.setattr(Auto, "observe", told)
    return calls


def test_auto_switches_a_drafter_off_that_is_always_wrong(used):
    drafted = GEMMA.generate(PROMPTS, drafter=drafter(0), num_proposals="auto", max_new_tokens=100)
    for a, b in zip(plain(100), drafted, strict=True):
        assert same(a, b)
        assert b.stats.accepted == 0
        assert b.stats.rounds == {0: 99 - 13, 4: 13}
        assert b.stats.drafted == 4 * 13
        assert b.stats.per_position == [0.0] * 4
        assert b.stats.acceptance_length == 1
        assert b.stats.draft_s is None
    assert used[:6] == [(4, 1), (4, 4), (4, 4), (4, 4), (0, 1), (0, 4)]
    assert {K for K, _ in used[6:]} == {0}


def test_auto_takes_as_many_proposals_as_pay(used):
    drafted = GEMMA.generate(PROMPTS, drafter=drafter(8), num_proposals="auto", max_new_tokens=200)
    for a, b in zip(plain(200), drafted, strict=True):
        assert same(a, b)
        rounds = b.stats.rounds
        assert rounds[8] >= 8
        # The last round of all is cut short, and counts as far as it went.
        some = [1 if i < 4 else (rounds[8] - 1) / rounds[8] for i in range(8)]
        assert b.stats.per_position[:8] == pytest.approx(some, abs=0.2)
        assert b.stats.per_position[8:] == [0.0] * (len(b.stats.per_position) - 8)
    assert {K for K, _ in used} <= {0, 4, 8, 15}


def test_a_stream_under_auto(used):
    given = {"drafter": drafter(0), "num_proposals": "auto", "max_new_tokens": 40}
    pieces = list(GEMMA.stream(PROMPTS[0], **given))
    assert [t for p in pieces for t in p.tokens] == plain(40)[0].tokens
    assert same(pieces[-1].generation, plain(40)[0])
    assert used[-1] == (0, 1)  # token by token


def test_a_profile_adds_up_drafting_and_the_rest(monkeypatch):
    """By a clock that goes on by 2 s in drafting alone, by 5 s in a call, and not elsewhere.

    33 rounds of three tokens: one that is not counted, since it may compile; then a call of 22
    and one that ends after 10 of 22.
    """
    now, draft, speculate = [0.0], batch_run.draft, batch_run.speculate

    def slow(function, seconds):
        def call(*given, **more):
            now[0] += seconds
            return function(*given, **more)

        return call

    monkeypatch.setattr(batch_run, "draft", slow(draft, 2.0))
    monkeypatch.setattr(batch_run, "speculate", slow(speculate, 5.0))
    monkeypatch.setattr(batch_run.time, "perf_counter", lambda: now[0])
    drafting = 2.0 + 2.0 * 10 / 22
    both = drafting * 33 / 32, (10.0 - drafting) * 33 / 32
    given = {"max_new_tokens": 100, "drafter": drafter(2), "num_proposals": 2}
    for profile, draft_s, verify_s in ((False, None, None), (True, *both)):
        for a, b in zip(plain(100), GEMMA.generate(PROMPTS, profile=profile, **given), strict=True):
            assert same(a, b)
            assert (b.stats.drafted, b.stats.accepted, b.stats.rounds) == (66, 66, {2: 33})
            assert b.stats.draft_s == (draft_s and pytest.approx(draft_s))
            assert b.stats.verify_s == (verify_s and pytest.approx(verify_s))
    short = GEMMA.generate(PROMPTS, profile=True, **(given | {"max_new_tokens": 4}))
    assert short[0].stats.draft_s is None  # there was nothing but the first round
