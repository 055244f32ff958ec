"""A drafter given to Gemma: the same text as without one, other numbers, clear refusals."""

import jax
import jax.numpy as jnp
import pytest

import carat_jax as carat
from carat_jax.speculative import Drafter, Proposal

PROMPTS = ["def main(", "import os\n"]


class Repeats(Drafter):
    """Guesses that the last token comes again."""

    def propose(self, state, target, num_proposals, keys):
        return Proposal(jnp.repeat(target.token[:, None], num_proposals, axis=1)), state


class Knows(Drafter):
    """Has been told what will come, and counts where it is."""

    continuation: jax.Array

    def init(self, config, batch, max_context):
        return jnp.zeros((batch,), jnp.int32)

    def observe(self, state, tokens, new):
        return state + new

    def propose(self, state, target, num_proposals, keys):
        index = state[:, None] + jnp.arange(num_proposals)
        return Proposal(jnp.take_along_axis(self.continuation, index, axis=1)), state


@pytest.fixture(scope="module")
def gemma():
    return carat.load("tiny", dtype="float32", progress=False)


def same(a, b):
    return (a.tokens, a.text, a.finish_reason) == (b.tokens, b.text, b.finish_reason)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.8, "top_k": 20, "seed": 3}, {"stop": [" "]}, {"max_new_tokens": 1}],
    ids=["greedy", "sampled", "stop string", "one token"],
)
def test_a_drafter_changes_nothing_but_speed(gemma, options):
    options = {"max_new_tokens": 40, "logprobs": 2} | options
    plain = gemma.generate(PROMPTS, **options)
    drafted = gemma.generate(PROMPTS, drafter=Repeats(), num_proposals=3, **options)
    for a, b in zip(plain, drafted, strict=True):
        assert same(a, b)
        assert b.logprobs == pytest.approx(a.logprobs, abs=1e-4)
        assert [list(x) for x in a.top_logprobs] == [list(x) for x in b.top_logprobs]


def test_stats_of_a_drafter_that_is_always_right(gemma):
    n, K = 33, 3
    plain = gemma.generate(PROMPTS, max_new_tokens=n)
    assert plain[0].stats.drafted is plain[0].stats.acceptance_length is None
    table = jnp.asarray([g.tokens + [0] * K for g in plain])
    drafted = gemma.generate(PROMPTS, drafter=Knows(table), num_proposals=K, max_new_tokens=n)
    for a, b in zip(plain, drafted, strict=True):
        assert same(a, b)
        # 32 tokens after the first one, four a round
        assert (b.stats.drafted, b.stats.accepted) == (24, 24)
        assert b.stats.per_position == [1.0] * K
        assert b.stats.acceptance_length == 4


def test_a_stream_with_a_drafter(gemma):
    pieces = list(gemma.stream(PROMPTS[0], drafter=Repeats(), max_new_tokens=24))
    plain = gemma.generate(PROMPTS[0], max_new_tokens=24)
    assert "".join(p.text for p in pieces) == plain.text
    assert [t for p in pieces for t in p.tokens] == plain.tokens
    assert same(pieces[-1].generation, plain)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"drafter": "ngram"}, "drafter is a str: give what `load_drafter` returns"),
        ({"drafter": Repeats(), "num_proposals": 0}, "num_proposals = 0: Repeats .* 1 to 15"),
        ({"drafter": Repeats(), "num_proposals": 16}, "num_proposals = 16: .* 1 to 15"),
        ({"drafter": Repeats(), "num_proposals": 2.0}, r"num_proposals = 2\.0"),
    ],
)
def test_what_cannot_be_is_refused(gemma, given, message):
    with pytest.raises(ValueError, match=message):
        gemma.generate("a", **given)
