"""Gemma.generate over ids: rows of a batch, compilations, log-probabilities."""

import json
import subprocess
import sys

import numpy as np
import pytest
import scipy.special
import small_model

import carat_jax as carat
from carat_jax import generate


def prompt(length: int) -> list[int]:
    """Ids of the small model; another sequence for each length."""
    draw = np.random.default_rng(length)
    return draw.integers(0, small_model.CONFIG.vocab_size, length).tolist()


def compilations() -> int:
    return sum(
        f._cache_size() for f in (generate.prefill_chunk, generate._begin_jit, generate.decode)
    )


def same(a: carat.Generation, b: carat.Generation) -> None:
    """Equal but for times, and log-probabilities equal to rounding."""
    assert (a.tokens, a.text, a.finish_reason) == (b.tokens, b.text, b.finish_reason)
    assert (a.prompt_tokens, a.non_finite_step) == (b.prompt_tokens, b.non_finite_step)
    if a.logprobs is not None:
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


# --- Rows of a batch -----------------------------------------------------------------------------

LENGTHS = [1, 31, 32, 33, 63, 64, 65, 90]
ASKED = {"max_new_tokens": 12, "logprobs": 3}


@pytest.fixture(scope="module")
def alone() -> dict[int, carat.Generation]:
    """By prompt length, greedily."""
    gemma = small_model.gemma()
    return {n: gemma.generate(prompt(n), **ASKED) for n in LENGTHS}


def test_the_small_model_looks_at_its_context(alone):
    """Else what follows would test nothing: no two continuations share a token in most places."""
    tokens = np.array([alone[n].tokens for n in LENGTHS])
    assert np.mean(tokens[:, None] == tokens[None, :]) < 0.25


@pytest.mark.parametrize("order", [LENGTHS, LENGTHS[::-1]], ids=["rising", "falling"])
def test_a_batch_of_unequal_prompts_gives_each_row_what_it_gets_alone(alone, order):
    rows = small_model.gemma().generate([prompt(n) for n in order], **ASKED)
    for n, row in zip(order, rows, strict=True):
        assert row.prompt_tokens == n
        assert np.isfinite(row.logprobs).all()
        same(row, alone[n])


@pytest.mark.parametrize("copies", [2, 3, 4, 8])
def test_copies_of_a_prompt_get_the_same_tokens(alone, copies):
    for row in small_model.gemma().generate([prompt(33)] * copies, **ASKED):
        same(row, alone[33])


def test_rows_that_end_early_leave_the_others_alone(alone):
    """Each row stops where it first chooses the id, so at another column than the next."""
    gemma = small_model.gemma()
    stop = alone[33].tokens[4]
    rows = gemma.generate([prompt(n) for n in LENGTHS], stop_token_ids=[stop], **ASKED)
    ended = set()
    for n, row in zip(LENGTHS, rows, strict=True):
        expected = alone[n].tokens
        if stop in expected:
            expected = expected[: expected.index(stop) + 1]
        assert row.tokens == expected
        assert row.finish_reason == ("stop" if stop in expected else "length")
        ended.add(len(row.tokens))
    assert len(ended) > 1


def test_one_seed_for_each_prompt_draws_what_it_draws_alone():
    gemma = small_model.gemma(temperature=1.5, top_p=0.98)
    lengths, seeds = [64, 1, 90, 33, 33, 31, 65, 63], [3, 3, 0, 2**32 - 1, 5, 5, 6, 7]
    rows = gemma.generate([prompt(n) for n in lengths], seed=seeds, **ASKED)
    for n, seed, row in zip(lengths, seeds, rows, strict=True):
        same(row, gemma.generate(prompt(n), seed=seed, **ASKED))
        same(row, gemma.generate(prompt(n), seed=[seed], **ASKED))
    assert rows[3].tokens != rows[4].tokens  # the same prompt under two seeds


def test_one_seed_for_a_batch_draws_another_stream_for_each_row():
    gemma = small_model.gemma(temperature=1.5)
    rows = gemma.generate([prompt(33)] * 8, seed=4, **ASKED)
    assert len({tuple(row.tokens) for row in rows}) == 8
    same(rows[0], gemma.generate(prompt(33), seed=4, **ASKED))
    for first, again in zip(rows, gemma.generate([prompt(33)] * 8, seed=4, **ASKED), strict=True):
        same(first, again)


FRESH_PROCESS = """
import json, sys
import small_model
gemma = small_model.gemma()
out = gemma.generate(json.loads(sys.argv[1]), max_new_tokens=12, logprobs=3)
print(json.dumps([out.tokens, out.logprobs]))
"""


def test_a_shorter_prompt_after_a_long_one_gives_what_a_fresh_process_gives():
    gemma = small_model.gemma()
    gemma.generate(prompt(1500), **ASKED)
    out = gemma.generate(prompt(40), **ASKED)
    fresh = subprocess.run(
        [sys.executable, "-c", FRESH_PROCESS, json.dumps(prompt(40))],
        env={"PYTHONPATH": ":".join(filter(None, sys.path)), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=True,
    )
    tokens, logprobs = json.loads(fresh.stdout)
    assert tokens == out.tokens
    np.testing.assert_allclose(logprobs, out.logprobs, atol=1e-4)


# --- Compilations --------------------------------------------------------------------------------


def test_prompts_of_1_to_2000_tokens_share_a_few_compilations():
    """The four chunk sizes, and two functions that do not know the prompt's length."""
    gemma = small_model.gemma()
    asked = {"max_new_tokens": 70, "temperature": 0.5, "logprobs": 3}
    before = compilations()
    for n in (1, 32, 33, 64, 65, 127, 128, 129, 512, 513, 1024, 1025, 1999, 2000):
        assert len(gemma.generate(prompt(n), **asked).tokens) == 70
    assert compilations() - before <= len(generate.PREFILL_CHUNKS) + 2
    for n in range(1, 2001):
        assert set(generate.prefill_plan(n, 1)) <= set(generate.PREFILL_CHUNKS)
        assert generate.capacity(n + 70, small_model.CONTEXT) == small_model.CONTEXT


def test_other_numbers_do_not_compile_again():
    gemma = small_model.gemma()
    gemma.generate(prompt(20), **ASKED, temperature=0.5)
    before = compilations()
    for options in (
        {"max_new_tokens": 1},
        {"max_new_tokens": 130},
        {"top_k": 3, "top_p": 0.5, "min_p": 0.1, "temperature": 2},
        {"seed": 99},
        {"stop_token_ids": [1, 2, 3]},
        {"suppress_tokens": [4, 5]},
    ):
        gemma.generate(prompt(20), **ASKED | {"temperature": 0.5} | options)
    list(gemma.stream(prompt(20), **ASKED, temperature=0.5))
    assert compilations() == before


# --- Log-probabilities and suppressed tokens -----------------------------------------------------


@pytest.mark.parametrize("asked", [{}, {"temperature": 1.3, "top_k": 20, "seed": 1}], ids=str)
def test_logprobs_are_those_of_the_logits(asked):
    gemma, ids = small_model.gemma(), prompt(70)
    out = gemma.generate(ids, max_new_tokens=12, logprobs=3, suppress_tokens=[7], **asked)
    logits = np.asarray(gemma.logits([*ids, *out.tokens]), np.float64)
    assert logits.shape == (82, small_model.CONFIG.vocab_size)
    expected = scipy.special.log_softmax(logits, axis=-1)[69:81]
    np.testing.assert_allclose(out.logprobs, expected[np.arange(12), out.tokens], atol=1e-4)
    for top, row in zip(out.top_logprobs, expected, strict=True):
        assert list(top) == np.argsort(-row)[:3].tolist()
        np.testing.assert_allclose(list(top.values()), np.sort(row)[::-1][:3], atol=1e-4)
    if not asked:
        expected[:, 7] = -np.inf
        np.testing.assert_array_equal(out.tokens, expected.argmax(-1))


def test_suppressed_tokens_are_never_chosen(alone):
    banned = sorted(set(alone[33].tokens))
    for options in ({}, {"temperature": 3.0}):
        asked = ASKED | {"max_new_tokens": 60, "suppress_tokens": banned} | options
        out = small_model.gemma().generate(prompt(33), **asked)
        assert not set(out.tokens) & set(banned)
        assert len(set(out.tokens)) > 5


def test_logits_of_a_long_prompt_do_not_depend_on_how_it_is_cut():
    gemma, ids = small_model.gemma(), prompt(300)
    whole = np.asarray(gemma.logits(ids))
    assert whole.shape == (300, small_model.CONFIG.vocab_size)
    assert whole.dtype == np.float32
    for n in (1, 64, 200):
        np.testing.assert_allclose(gemma.logits(np.array(ids[:n])), whole[:n], atol=1e-4)
