"""Drafters that are scripted, copy, or are models: what they propose, and what they remember."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
import small_model

from carat_jax.config import ConfigError
from carat_jax.kv_state import init_state
from carat_jax.speculative import Target, read_prompt
from carat_jax.speculative.drafters.model import Model
from carat_jax.speculative.drafters.ngram import Ngram
from carat_jax.speculative.drafters.scripted import Scripted

CONFIG, V = small_model.CONFIG, small_model.CONFIG.vocab_size

propose = jax.jit(
    lambda drafter, *arguments, K: drafter.propose(*arguments[:2], K, *arguments[2:]),
    static_argnames="K",
)
observe = jax.jit(lambda drafter, *arguments: drafter.observe(*arguments))


def target(B: int, length: int = 1) -> Target:
    """One of which only the vocabulary and the length matter."""
    kv = init_state(CONFIG, 1, 64).replace(layers=(), length=jnp.full((B,), length, jnp.int32))
    return Target({}, CONFIG, kv, jnp.zeros((B,), jnp.int32), jnp.zeros((B, 1)))


# --- Scripted ------------------------------------------------------------------------------------

TEXT = np.array([[5, 9, V - 1, 3, 0, 7], [1, 2, 3, 4, 5, 6]])
KEYS = jax.random.split(jax.random.key(0), 2)


def scripted_guesses(right, seen: list[int], K: int = 4) -> np.ndarray:
    drafter = Scripted.of(TEXT, right)
    state = drafter.init(CONFIG, 2, 64)
    state = observe(drafter, state, jnp.zeros((2, 6), jnp.int32), jnp.array(seen))
    proposal, _ = propose(drafter, state, target(2), KEYS, K=K)
    assert proposal.logits is None
    return np.asarray(proposal.tokens)


def test_scripted_guesses_are_right_or_wrong_as_told():
    """Wrong ones are ids, too: after the last id comes the first. Rows are at their own places."""
    right, wrong = [[9, V - 1, 3, 0], [3, 4, 5, 6]], [[10, 0, 4, 1], [4, 5, 6, 7]]
    for k in range(6):
        expected = [r[:k] + w[k:] for r, w in zip(right, wrong, strict=True)]
        assert scripted_guesses(k, [1, 2]).tolist() == expected
    assert scripted_guesses([1, 0, 1], [1, 2]).tolist() == [[9, 0, 3, 1], [3, 5, 5, 7]]
    assert scripted_guesses(9, [4, 6]).tolist() == [[0, 7, 7, 7], [6] * 4]  # past the end


def test_scripted_guesses_are_right_with_the_stated_probabilities():
    B, chances = 20_000, [0.9, 0.5, 0.1]
    drafter = Scripted.of(np.full((B, 4), 7), chances)
    state = drafter.init(CONFIG, B, 64)
    keys = jax.random.split(jax.random.key(1), B)
    tokens = np.asarray(propose(drafter, state, target(B), keys, K=3)[0].tokens)
    np.testing.assert_allclose((tokens == 7).mean(0), chances, atol=0.02)
    both = (tokens[:, :2] == 7).all(1).mean()  # whatever the others are
    assert both == pytest.approx(0.45, abs=0.02)


def test_scripts_that_cannot_be():
    for right, told in (
        (-1, "right = -1"),
        ([0.5, 1.5], r"probabilities in \[0, 1\]"),
        ([float("nan")], r"probabilities in \[0, 1\]"),
        ([1.0] * 16, "up to 15"),
    ):
        with pytest.raises(ValueError, match=told):
            Scripted.of(TEXT, right)
    for shape in ((6,), (2, 0), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"must be \[B, n\]"):
            Scripted.of(np.zeros(shape, int), 1)
    with pytest.raises(ValueError, match=r"\(2, 6\) \[B, n\] is not for 3 prompts"):
        Scripted.of(TEXT, 1).init(CONFIG, 3, 64)


# --- Ngram ---------------------------------------------------------------------------------------


def looked_up(text: list[int], most: int, least: int, K: int) -> list[int]:
    """Looks for the newest earlier place token by token; copies on from it one at a time."""
    for n in range(most, least - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):  # the place is text[end - n : end]
            if text[end - n : end] == text[-n:]:
                out = list(text)
                for i in range(K):
                    out.append(out[end + i])
                return out[len(text) :]
    return [text[-1]] * K


@pytest.mark.parametrize(("most", "least"), [(3, 1), (2, 2), (4, 3)])
def test_ngrams_against_a_search_token_by_token(most, least):
    """Texts of few different ids, that grow by pieces of another length in each row."""
    B, C, T, K = 64, 40, 6, 5
    draw = np.random.default_rng(most)
    drafter = Ngram(max_ngram=most, min_ngram=least)
    state = drafter.init(CONFIG, B, C)
    texts: list[list[int]] = [[] for _ in range(B)]
    for _ in range(14):
        tokens = draw.integers(0, 1 + np.arange(B)[:, None] // 8, (B, T)).astype(np.int32)
        new = draw.integers(0, T + 1, B).astype(np.int32)
        for text, row, n in zip(texts, tokens.tolist(), new, strict=True):
            text += row[:n]
            del text[C:]  # a full history takes no more
        state = observe(drafter, state, tokens, new)
        proposal, state = propose(drafter, state, target(B), None, K=K)
        got = np.asarray(proposal.tokens)
        for text, row in zip(texts, got.tolist(), strict=True):
            assert row == (looked_up(text, most, least, K) if text else [0] * K)
    assert sum(len(text) == C for text in texts) > 3
    np.testing.assert_array_equal(state.count, [len(text) for text in texts])


def test_a_prompt_is_read_like_what_is_generated():
    drafter = Ngram()
    tokens, new = jnp.array([[1, 2, 3, 1, 2, 9]]), jnp.array([5])
    read = read_prompt(drafter, drafter.init(CONFIG, 1, 40), tokens, new)
    proposal, _ = propose(drafter, read, target(1), None, K=5)
    assert proposal.tokens.tolist() == [[3, 1, 2, 3, 1]]


def test_ngrams_that_cannot_be():
    for given in ({"min_ngram": 0}, {"max_ngram": 2, "min_ngram": 3}):
        with pytest.raises(ValueError, match="give 1 <= min_ngram <= max_ngram"):
            Ngram(**given)


# --- Model ---------------------------------------------------------------------------------------


def test_what_a_model_draws_is_of_the_distribution_that_it_states():
    """Two guesses each of 1,200 rounds, the second of a distribution that hangs on the first."""
    B, length = 400, 5
    prompts = np.tile(np.random.default_rng(0).integers(0, V, length + 1), (B, 1))
    drafter, given = Model(small_model.params(), CONFIG, temperature=2.0), np.full(B, length)
    state = read_prompt(drafter, drafter.init(CONFIG, B, 64), prompts[:, :length], given)
    state = drafter.observe(state, prompts[:, length:], np.ones(B, int))
    standing, second = [], []
    for round_of in range(3):
        keys = jax.random.split(jax.random.key(round_of), B)
        proposal, state = propose(drafter, state, target(B, length), keys, K=2)
        p = scipy.special.softmax(np.asarray(proposal.logits, np.float64), axis=-1)
        np.testing.assert_allclose(p[:, 0], p[:1, 0].repeat(B, 0), atol=1e-6)
        second.append(p[:, 1])
        # Where a draw stands among all, in order of their ids, is uniform.
        at = np.asarray(proposal.tokens)[..., None]
        below, own = (np.take_along_axis(x, at, -1)[..., 0] for x in (np.cumsum(p, axis=-1) - p, p))
        standing.append(below + own * np.random.default_rng(round_of).random(own.shape))
    for values in np.concatenate(standing).T:
        assert scipy.stats.kstest(values, "uniform").pvalue > 1e-3
    assert np.concatenate(second).std(axis=0).max() > 0.005


def test_models_that_cannot_draft():
    drafter = Model({}, dataclasses.replace(CONFIG, vocab_size=V + 1))
    with pytest.raises(ConfigError, match=rf"drafter's vocab_size {V + 1} .* vocab_size {V}"):
        drafter.init(CONFIG, 1, 64)
    with pytest.raises(ConfigError, match="max_context 5,000 exceeds"):
        Model({}, CONFIG).init(CONFIG, 1, 5000)
    for temperature in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature = "):
            Model({}, CONFIG, temperature=temperature)
