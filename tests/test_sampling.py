"""Sampling against NumPy in float64: the filters one after another, and many draws."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats

from carat_jax import sampling
from carat_jax.sampling import Sampling

V = 40
NEVER = -np.inf

# Every (temperature, top_k, top_p, min_p) of these. Other tests use as many rows and columns, so
# that a function is compiled once.
GRID = list(
    itertools.product(
        (0.05, 0.7, 1.0, 50.0),
        (0, 1, 2, 7, V - 1, V, V + 1, 2**31 - 1),
        (1e-6, 0.3, 0.9, 0.999, 1.0),
        (0.0, 1e-3, 0.2, 1.0),
    )
)
ROWS = len(GRID)
KEYS = jax.random.split(jax.random.key(0), ROWS)

jitted_filter = jax.jit(sampling.filter_logits)
choose = jax.jit(sampling.choose)


def settings(
    rows: int = ROWS, *, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, keys=None, greedy=False
) -> Sampling:
    """The same numbers in every row, or a list with one for each row."""

    def row(value, dtype) -> np.ndarray:
        return np.broadcast_to(np.asarray(value, dtype), (rows,))

    return Sampling(
        temperature=row(temperature, np.float32),
        top_k=row(top_k, np.int32),
        top_p=row(top_p, np.float32),
        min_p=row(min_p, np.float32),
        keys=KEYS[:rows] if keys is None else keys,
        greedy=greedy,
    )


def filtered(logits, **options) -> np.ndarray:
    """`filter_logits` of fewer rows and columns than ROWS and V, in float64."""
    logits = np.asarray(logits)
    all_rows = np.full((ROWS, V), NEVER, np.float32)
    all_rows[:, 0] = 0
    all_rows[: len(logits), : logits.shape[1]] = logits
    got = jitted_filter(all_rows, settings(**options))
    return np.asarray(got, np.float64)[: len(logits), : logits.shape[1]]


def warped(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> np.ndarray:
    """One row as the logits processors of transformers leave it, in float64.

    Temperature; top-k drops what is below the k-th; top-p sorts upwards and drops while the mass
    up to and with a token is at most 1 - top_p; min-p drops below min_p times the largest. The most
    likely token always stays.
    """
    z = logits.astype(np.float64) / temperature
    if top_k:
        z[z < np.sort(z)[-min(top_k, len(z))]] = NEVER
    if top_p < 1:
        order = np.argsort(z, kind="stable")
        dropped = np.cumsum(scipy.special.softmax(z[order])) <= 1 - top_p
        z[order[:-1][dropped[:-1]]] = NEVER
    if min_p:
        p = scipy.special.softmax(z)
        z[p < min_p * p.max()] = NEVER
    return z


def random_logits(rows: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, V)) * spread).astype(np.float32)


# --- The filters ---------------------------------------------------------------------------------


@pytest.mark.parametrize("suppressed", [0, 3, V - 1])
def test_every_combination_of_filters_is_that_of_transformers(suppressed):
    logits = random_logits(ROWS, seed=suppressed)
    logits[:, :suppressed] = NEVER
    temperature, top_k, top_p, min_p = zip(*GRID, strict=True)
    got = filtered(logits, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for row, options in enumerate(GRID):
        expected = warped(logits[row], *options)
        np.testing.assert_array_equal(np.isfinite(got[row]), np.isfinite(expected), str(options))
        p = scipy.special.softmax(got[row])
        np.testing.assert_allclose(p, scipy.special.softmax(expected), atol=2e-6)


@pytest.mark.parametrize(
    "options", [{}, {"top_k": 0}, {"top_k": V}, {"top_k": V + 1}, {"top_p": 1.0}, {"min_p": 0.0}]
)
def test_a_filter_that_lets_everything_pass(options):
    logits = random_logits(4)
    got = scipy.special.log_softmax(filtered(logits, **options), axis=-1)
    np.testing.assert_allclose(got, scipy.special.log_softmax(logits, axis=-1), atol=1e-5)


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-30}, {"min_p": 1.0}])
def test_a_filter_that_leaves_the_most_likely_token(options):
    logits = random_logits(8)
    kept = np.isfinite(filtered(logits, **options))
    np.testing.assert_array_equal(kept.sum(-1), 1)
    np.testing.assert_array_equal(kept.argmax(-1), logits.argmax(-1))


@pytest.mark.parametrize("options", [{"top_k": 2}, {"top_p": 0.3}, {"min_p": 1.0}])
def test_equal_logits_stay_together(options):
    kept = np.isfinite(filtered([[1.0, 5.0, 5.0, 5.0, 2.0]], **options))
    np.testing.assert_array_equal(kept, [[False, True, True, True, False]])


def test_filters_count_only_what_the_ones_before_kept():
    """Of 0.4, 0.3, 0.2, 0.1 the first two are 0.57 and 0.43 once top-k has cut the others."""
    logits = np.log([[0.4, 0.3, 0.2, 0.1]])
    both = np.isfinite(filtered(logits, top_k=2, top_p=0.55))
    alone = np.isfinite(filtered(logits, top_p=0.55))
    np.testing.assert_array_equal(both, [[True, False, False, False]])
    np.testing.assert_array_equal(alone, [[True, True, False, False]])


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1.2e-38, 1e38])
def test_temperatures_at_the_ends_of_float32(temperature):
    logits = random_logits(16) * 3
    p = scipy.special.softmax(filtered(logits, temperature=temperature), axis=-1)
    expected = np.full_like(logits, 1 / V) if temperature > 1 else np.eye(V)[logits.argmax(-1)]
    np.testing.assert_allclose(p, expected, atol=1e-6)


# --- The draw ------------------------------------------------------------------------------------

DRAWS = 30 * ROWS
PROBABILITIES = np.array([0.35, 0.25, 0.15, 0.1, 0.08, 0.04, 0.02, 0.01])
SOME_KEYS = jax.random.split(jax.random.key(5), DRAWS)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.6},
        {"temperature": 2.5},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"temperature": 1.7, "top_k": 6, "top_p": 0.85, "min_p": 0.2},
    ],
    ids=str,
)
@pytest.mark.parametrize("varied", ["positions", "keys"])
def test_many_draws_have_the_exact_distribution(options, varied):
    """χ² over one row's positions, and over the rows' keys at one position."""
    logits = np.full(V, NEVER, np.float32)
    logits[3 : 3 + len(PROBABILITIES)] = np.log(PROBABILITIES) - 7
    counts = np.zeros(V, int)
    for start in range(0, DRAWS, ROWS):
        some = slice(start, start + ROWS)
        if varied == "positions":
            keys, position = jnp.repeat(SOME_KEYS[:1], ROWS), np.arange(DRAWS)[some]
        else:
            keys, position = SOME_KEYS[some], np.full(ROWS, 17)
        drawn = choose(np.tile(logits, (ROWS, 1)), settings(keys=keys, **options), position)
        counts += np.bincount(np.asarray(drawn), minlength=V)
    given = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0} | options
    p = scipy.special.softmax(warped(logits, **given))
    np.testing.assert_array_equal(counts[p == 0], 0)
    # The draws are the same in every run, so this cannot fail by chance now and then.
    assert scipy.stats.chisquare(counts[p > 0], DRAWS * p[p > 0]).pvalue > 1e-3


def test_a_draw_depends_on_its_key_and_its_position_alone():
    logits = random_logits(8, spread=0.5)
    keys, position = KEYS[:8], np.arange(100, 108)
    options = {"temperature": 0.9, "top_k": 30, "top_p": 0.95}
    together = choose(logits, settings(8, keys=keys, **options), position)
    for row in range(8):
        one = slice(row, row + 1)
        alone = choose(logits[one], settings(1, keys=keys[one], **options), position[one])
        assert int(alone[0]) == int(together[row])
        rows = np.random.default_rng(row).permutation(8)  # other neighbours, another place
        moved = choose(logits[rows], settings(8, keys=keys[rows], **options), position[rows])
        np.testing.assert_array_equal(moved, np.asarray(together)[rows])
    elsewhere = choose(logits, settings(8, keys=keys, **options), position + 1)
    assert (np.asarray(elsewhere) != np.asarray(together)).any()


def test_rows_may_differ_in_everything():
    logits = random_logits(8)
    rows = [(0.0, 0, 1.0, 0.0), (1.0, 1, 1.0, 0.0), (1.5, 0, 1e-6, 0.0), (1.0, 0, 1.0, 1.0)]
    rows += [(0.0, 5, 0.5, 0.0), (0.0, 0, 1.0, 1.0), (3.0, 2, 1.0, 0.0), (3.0, 3, 1.0, 0.0)]
    temperature, top_k, top_p, min_p = zip(*rows, strict=True)
    given = settings(8, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    drawn = np.array([choose(logits, given, np.full(8, position)) for position in range(200)])
    for row in range(6):  # greedy rows, and such as leave one token
        np.testing.assert_array_equal(drawn[:, row], logits[row].argmax())
    assert set(drawn[:, 6]) == set(np.argsort(logits[6])[-2:])
    assert set(drawn[:, 7]) == set(np.argsort(logits[7])[-3:])


def test_greedy_takes_the_first_of_the_largest():
    logits = np.full((8, V), NEVER, np.float32)
    logits[0, 11:14] = 3
    logits[1:, 39] = -5
    for given in (settings(8, temperature=0, greedy=True), settings(8, temperature=0)):
        chosen = choose(logits, given, np.zeros(8, np.int32))
        np.testing.assert_array_equal(chosen, [11] + [39] * 7)
        assert chosen.dtype == jnp.int32


# --- Log-probabilities ---------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 5, V])
def test_logprobs(k):
    logits = random_logits(16)
    logits[3] = np.float32(30) - logits[3] ** 2  # far from zero
    tokens = np.random.default_rng(1).integers(0, V, 16)
    own, ids, top = sampling.logprobs(jnp.asarray(logits), jnp.asarray(tokens), k)
    expected = scipy.special.log_softmax(logits.astype(np.float64), axis=-1)
    np.testing.assert_allclose(own, expected[np.arange(16), tokens], atol=1e-5)
    order = np.argsort(-expected, axis=-1)[:, :k]
    np.testing.assert_array_equal(ids, order)
    np.testing.assert_allclose(top, np.take_along_axis(expected, order, -1), atol=1e-5)
