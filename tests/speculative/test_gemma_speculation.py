"""A drafter given to Gemma: the same text as without one, other numbers, clear refusals."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import scripted_model
from flax import struct

import carat_jax as carat
from carat_jax import cli
from carat_jax.params import abstract_params
from carat_jax.speculative import Drafter, Exact, Proposal, Rule, Scripted

PROMPTS, K = ["def main(", "import os\n"], 3


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
    """The first period of the bundled model's layers: half as long to compile."""
    whole = carat.load("tiny", dtype="float32", progress=False)
    kinds = whole.config.layer_types[:6]
    config = dataclasses.replace(whole.config, num_hidden_layers=len(kinds), layer_types=kinds)
    params = {name: whole.params[name] for name in abstract_params(config)}
    return carat.Gemma(
        config, params, whole.tokenizer, whole.chat_format, whole.options, whole.max_context
    )


def same(a, b):
    return (a.tokens, a.text, a.finish_reason) == (b.tokens, b.text, b.finish_reason)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.8, "top_k": 20, "seed": 3}, {"stop": [" "]}, {"max_new_tokens": 1}],
    ids=["greedy", "sampled", "stop string", "one token"],
)
def test_a_drafter_changes_nothing_but_speed(gemma, options):
    options = {"max_new_tokens": 33, "logprobs": 2} | options
    plain = gemma.generate(PROMPTS, **options)
    wrong = Knows(jnp.full((2, 33 + K), 7))  # of the shapes of the one that is right: compiled once
    drafted = gemma.generate(PROMPTS, drafter=wrong, num_proposals=K, **options)
    for a, b in zip(plain, drafted, strict=True):
        assert same(a, b)
        assert b.logprobs == pytest.approx(a.logprobs, abs=1e-4)
        assert [list(x) for x in a.top_logprobs] == [list(x) for x in b.top_logprobs]


def test_stats_of_a_drafter_that_is_always_right(gemma):
    plain = gemma.generate(PROMPTS, max_new_tokens=33, logprobs=2)
    assert plain[0].stats.drafted is plain[0].stats.acceptance_length is None
    table = jnp.asarray([g.tokens + [0] * K for g in plain])
    drafted = gemma.generate(
        PROMPTS, drafter=Knows(table), num_proposals=K, max_new_tokens=33, logprobs=2
    )
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


SPELT = scripted_model.chain("A", "bcdefghijklmn", "<eos>")  # a token for each letter


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("c", "b"),  # the first guess of the first round
        ("e", "bcd"),  # its last
        ("f", "bcde"),  # the model's own token after them
        ("hi", "bcdefg"),  # within the second round
        ("efgh", "bcd"),  # over two rounds
        ("bcd", ""),
        ("mn", "bcdefghijkl"),  # the last guess of the third and the token after it
    ],
)
def test_a_stop_string_among_guesses_that_all_stand(stop, text):
    """The first token, and four a round: those of a round after the stop string are not given."""
    gemma = scripted_model.gemma(SPELT)
    drafter = Scripted.of(jnp.asarray([SPELT[1:]]), K)
    options = {"stop": [stop], "max_new_tokens": 20}
    plain = gemma.generate("A", **options)
    out = gemma.generate("A", drafter=drafter, num_proposals=K, **options)
    *pieces, last = gemma.stream("A", drafter=drafter, num_proposals=K, **options)
    tokens = SPELT[1:][: len(text + stop)]
    for given in (plain, out, last.generation):
        assert (given.text, given.tokens, given.finish_reason) == (text, tokens, "stop")
    assert out.stats.accepted == out.stats.drafted > 0
    assert "".join(p.text for p in [*pieces, last]) == text
    assert [t for p in [*pieces, last] for t in p.tokens] == tokens


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"drafter": "ngram"}, "drafter is a str: give what `load_drafter` returns"),
        ({"drafter": Repeats(), "num_proposals": 0}, "num_proposals = 0: Repeats .* 1 to 15"),
        ({"drafter": Repeats(), "num_proposals": 16}, "num_proposals = 16: .* 1 to 15"),
        ({"drafter": Repeats(), "num_proposals": 2.0}, r"num_proposals = 2\.0"),
        ({"drafter": Repeats(), "num_proposals": "all"}, "num_proposals = 'all': .*, or 'auto'"),
        ({"profile": True}, "profile = True is for a drafter"),
        ({"num_proposals": 3}, "num_proposals = 3 is for a drafter"),
        ({"num_proposals": "auto"}, "num_proposals = 'auto' is for a drafter"),
        ({"acceptance": Exact()}, r"acceptance = Exact\(\) is for a drafter"),
        (
            {"drafter": Repeats(), "acceptance": "typical"},
            "acceptance = 'typical': give a rule, .*Exact",
        ),
        ({"drafter": Repeats(), "acceptance": ""}, "acceptance = '': give a rule"),
        ({"drafter": Repeats(), "acceptance": Exact}, "acceptance = .*Exact.*: give a rule"),
        ({"drafter": Drafter()}, "Drafter has no `propose`: a drafter must define it"),
    ],
)
def test_what_cannot_be_is_refused(gemma, given, message):
    with pytest.raises(ValueError, match=message):
        gemma.generate("a", **given)


class Answers(Drafter):
    """Returns what it is told to, whatever it is asked for."""

    answer: Callable[[int], Any] = struct.field(pytree_node=False)

    def propose(self, state, target, num_proposals, keys):
        return self.answer(num_proposals)


def zeros(columns: int, dtype: Any = jnp.int32) -> Proposal:
    return Proposal(jnp.zeros((1, columns), dtype))


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda K: None, r"Answers\.propose returned NoneType: it must return \(Proposal"),
        (lambda K: zeros(K), "returned Proposal: it must return"),
        (lambda K: (zeros(K).tokens, None), r"returned \(\w+, NoneType\): it must"),
        (lambda K: (zeros(K - 1), None), r"gave int32\[1, 2\] as tokens: .* = 3 .* int32\[1, 3\]"),
        (lambda K: (zeros(K, jnp.float32), None), r"gave float32\[1, 3\] as tokens"),
        (lambda K: (Proposal([0] * K), None), r"gave list as tokens"),
        (lambda K: (Proposal(jnp.zeros(K, jnp.int32)), None), r"gave int32\[3\] as tokens"),
    ],
)
def test_proposals_of_another_form_are_refused(gemma, answer, message):
    with pytest.raises(ValueError, match=message):
        gemma.generate("a", drafter=Answers(answer), num_proposals=3, max_new_tokens=2)


def test_what_has_to_be_defined_says_so():
    with pytest.raises(NotImplementedError, match="Drafter has no `propose`"):
        Drafter().propose(None, None, 1, None)
    with pytest.raises(NotImplementedError, match="Rule has no `accept`"):
        Rule().accept(None, None, None, None)


FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"
BUNDLED = Path(carat.__file__).parent / "assets" / "tiny"


@pytest.fixture(scope="module")
def small_gemma():
    return carat.load(FIXTURES / "dense_31b_like", progress=False)


@pytest.mark.parametrize(
    "source",
    ["ngram", "drafter_dense", pytest.param("dense_31b_like", marks=pytest.mark.slow)],
)
def test_every_kind_of_drafter_that_can_be_loaded(small_gemma, source):
    path = source if source == "ngram" else FIXTURES / source
    drafter = carat.load_drafter(path, small_gemma, progress=False)
    prompt, options = [2, 5, 9, 5, 9, 5], {"max_new_tokens": 22, "temperature": 0}
    plain = small_gemma.generate(prompt, stop_token_ids=[], **options)
    out = small_gemma.generate(
        prompt, drafter=drafter, num_proposals=2, stop_token_ids=[], **options
    )
    assert out.tokens == plain.tokens
    if source == "dense_31b_like":  # the model itself is always right: 21 tokens in 7 rounds
        assert (out.stats.accepted, out.stats.drafted) == (14, 14)


def test_drafters_of_another_model_are_refused_by_both_fields(small_gemma, gemma):
    with pytest.raises(carat.ConfigError, match=r"backbone_hidden_size 48 .* hidden_size 64"):
        carat.load_drafter(FIXTURES / "drafter_e2b", small_gemma)
    with pytest.raises(carat.ConfigError, match=r"vocab_size 4,096 .* vocab_size 256"):
        carat.load_drafter(BUNDLED, small_gemma, progress=False)
    with pytest.raises(ValueError, match="gemma is a str: give the drafter's name first"):
        carat.load_drafter(gemma, "tiny")
    with pytest.raises(FileNotFoundError, match="no-such-folder"):
        carat.load_drafter("no-such-folder", gemma)


def test_the_command_line(gemma, capsys, monkeypatch):
    monkeypatch.setattr(carat.gemma, "load", lambda *_, **__: gemma)
    argv = ["generate", "import os", "--max-new-tokens", "12", "--json"]
    assert cli.main(argv) == 0
    plain = json.loads(capsys.readouterr().out)
    assert cli.main([*argv, "--drafter", "ngram", "--num-proposals", "3"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["tokens"] == plain["tokens"]
    assert drafted["stats"]["drafted"] > 0
    assert cli.main([*argv, "--drafter", "ngram", "--num-proposals", "auto"]) == 0
    drafted = json.loads(capsys.readouterr().out)
    assert drafted["tokens"] == plain["tokens"]
    with pytest.raises(SystemExit):
        cli.main([*argv, "--drafter", "ngram", "--num-proposals", "some"])
    assert "'some': give an integer or 'auto'" in capsys.readouterr().err
    assert cli.main([*argv, "--num-proposals", "3"]) == 1
    assert "--num-proposals is for a drafter" in capsys.readouterr().err
