"""Acceptance rules on made-up logits: against exact distributions, and NumPy in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from test_sampling import warped

from carat_jax import sampling
from carat_jax.sampling import Sampling
from carat_jax.speculative import Exact, Proposal
from carat_jax.speculative.acceptance import Forced, Typical

N, K, V = 200_000, 2, 5
NEVER = -np.inf
PLAIN = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
OPTIONS = [
    {},
    {"temperature": 0.7},
    {"temperature": 1.6, "top_k": 3},
    {"top_p": 0.8, "min_p": 0.2},
    {"temperature": 1.4, "top_k": 4, "top_p": 0.9, "min_p": 0.1},
]

draw = np.random.default_rng(0)
# What follows: FIRST of everything, SECOND[x] of the token x, THIRD[y] of y. The drafter's, too.
FIRST, SECOND, THIRD = (draw.standard_normal(s).astype(np.float32) for s in (V, (V, V), (V, V)))
GUESS, NEXT_GUESS = FIRST[::-1] * 1.5, SECOND + draw.standard_normal((V, V)).astype(np.float32)

accept_few = jax.jit(lambda rule, *arguments: rule.accept(*arguments))
# For N rows faster code is worth its compilation.
accept = jax.jit(
    lambda rule, *arguments: rule.accept(*arguments),
    compiler_options={"xla_backend_optimization_level": 1},
)


@functools.cache
def keys() -> jax.Array:
    return jax.random.split(jax.random.key(1), N)


def settings(rows: int = N, *, greedy: bool = False, **options) -> Sampling:
    given = PLAIN | options
    return Sampling(
        **{name: np.full(rows, given[name], np.float32) for name in given if name != "top_k"},
        top_k=np.full(rows, given["top_k"], np.int32),
        keys=keys()[:rows],
        greedy=greedy,
    )


def target_logits(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """[N, K + 1, V] of a target that is shown the guesses x and y."""
    return np.stack([np.broadcast_to(FIRST, (N, V)), SECOND[x], THIRD[y]], axis=1)


def emitted(verdict, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """accepted [B], and tokens [B, K + 1], of which the first accepted + 1 were emitted."""
    accepted, token = np.asarray(verdict.accepted), np.asarray(verdict.token)
    out = np.concatenate([tokens, token[:, None]], axis=1)
    out[np.arange(len(out)), accepted] = token
    return accepted, out


def assert_drawn_from(tokens: np.ndarray, logits: np.ndarray, options: dict) -> None:
    """χ² against the exact distribution. The draws are the same in every run."""
    p = scipy.special.softmax(warped(logits, **PLAIN | options))
    counts = np.bincount(tokens, minlength=V)
    np.testing.assert_array_equal(counts[p == 0], 0)
    if (p > 0).sum() > 1 and len(tokens) > 50:
        assert scipy.stats.chisquare(counts[p > 0], len(tokens) * p[p > 0]).pvalue > 1e-4


def assert_lossless(accepted: np.ndarray, out: np.ndarray, options: dict) -> None:
    """Each emitted token has the target's distribution after those before it."""
    assert_drawn_from(out[:, 0], FIRST, options)
    for x in range(V):
        assert_drawn_from(out[(accepted > 0) & (out[:, 0] == x), 1], SECOND[x], options)
        assert_drawn_from(out[(accepted > 1) & (out[:, 1] == x), 2], THIRD[x], options)


# --- Exact ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_single_guesses_leave_the_targets_distribution(options):
    """The rate of acceptance is the target's probability of the guess: p, not min(1, p / q)."""
    guess = int(FIRST.argmax()), 3
    tokens = np.tile(guess, (N, 1)).astype(np.int32)
    logits = target_logits(*tokens.T)
    verdict = accept(Exact(), logits, Proposal(tokens), settings(**options), np.full(N, 9))
    accepted, out = emitted(verdict, tokens)
    assert_lossless(accepted, out, options)
    p = scipy.special.softmax(warped(FIRST, **PLAIN | options))[guess[0]]
    assert (accepted > 0).mean() == pytest.approx(p, abs=5 * (p * (1 - p) / N) ** 0.5 + 1e-9)


def drawn(p: np.ndarray, seed: int) -> np.ndarray:
    """A draw from each row of p [N, V]."""
    u = np.random.default_rng(seed).random((len(p), 1))
    return np.minimum((u > np.cumsum(p, axis=1)).sum(1), p.shape[1] - 1).astype(np.int32)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_drawn_guesses_leave_the_targets_distribution(options):
    """And they are accepted as often as is possible: Σ min(p, q)."""
    q = scipy.special.softmax(GUESS.astype(np.float64))
    x = drawn(np.broadcast_to(q, (N, V)), 1)
    y = drawn(scipy.special.softmax(NEXT_GUESS[x].astype(np.float64), axis=-1), 2)
    tokens = np.stack([x, y], axis=1)
    proposal = Proposal(tokens, np.stack([np.broadcast_to(GUESS, (N, V)), NEXT_GUESS[x]], axis=1))
    verdict = accept(Exact(), target_logits(x, y), proposal, settings(**options), np.full(N, 9))
    accepted, out = emitted(verdict, tokens)
    assert_lossless(accepted, out, options)
    p = scipy.special.softmax(warped(FIRST, **PLAIN | options))
    assert (accepted > 0).mean() == pytest.approx(np.minimum(p, q).sum(), abs=5 * 0.5 / N**0.5)


def with_first(p: list[float], q: list[float], seed: int):
    """The p / q rule where the first guess is drawn from q, the target has p; both of two ids."""

    def logits(probabilities: list[float]) -> np.ndarray:
        return np.array([*np.log(probabilities), *[NEVER] * (V - 2)], np.float32)

    x = drawn(np.tile([*q, *[0.0] * (V - 2)], (N, 1)), seed)
    tokens = np.stack([x, x], axis=1)
    guesses = np.broadcast_to(logits(q), (N, K, V))
    target = np.broadcast_to(logits(p), (N, K + 1, V))
    verdict = accept(Exact(), target, Proposal(tokens, guesses), settings(), np.full(N, 9))
    return x, *emitted(verdict, tokens)


def assert_halves(tokens: np.ndarray) -> None:
    """χ² of all N draws: as many of token 0 as of token 1, and no other."""
    counts = np.bincount(tokens, minlength=V)
    assert len(tokens) == N and not counts[2:].any()
    assert scipy.stats.chisquare(counts[:2], [N / 2, N / 2]).pvalue > 1e-4


def test_a_guess_that_the_drafter_is_too_sure_of():
    """p = 0.5 and q = 0.8 stands with 0.5 / 0.8; the residual is all on the other token.

    So token 0 comes with 0.8 · 0.625 = 0.5. A drafter that always guesses token 0 must not be
    judged so: it would come with 0.625.
    """
    x, accepted, out = with_first([0.5, 0.5], [0.8, 0.2], seed=3)
    assert (accepted[x == 0] > 0).mean() == pytest.approx(0.625, abs=0.006)
    assert (accepted[x == 1] > 0).all()
    assert (accepted > 0).mean() == pytest.approx(0.7, abs=0.005)
    assert_halves(out[:, 0])
    np.testing.assert_array_equal(out[(x == 0) & (accepted == 0), 0], 1)

    logits = np.full((N, K + 1, V), NEVER, np.float32)
    logits[..., :2] = 0
    always = np.zeros((N, K), np.int32)
    point = accept(Exact(), logits, Proposal(always), settings(), np.full(N, 9))
    accepted, out = emitted(point, always)
    assert_halves(out[:, 0])
    np.testing.assert_array_equal(accepted > 0, out[:, 0] == 0)


def test_a_drafter_with_the_targets_distribution_is_always_right():
    _, accepted, _ = with_first([0.3, 0.7], [0.3, 0.7], seed=4)
    np.testing.assert_array_equal(accepted, K)


def test_a_drafter_that_breaks_down_is_always_wrong():
    """NaN for a distribution: the output is the target's."""
    tokens = np.zeros((N, K), np.int32)
    proposal = Proposal(tokens, np.full((N, K, V), np.nan, np.float32))
    verdict = accept(Exact(), target_logits(*tokens.T), proposal, settings(), np.full(N, 9))
    accepted, out = emitted(verdict, tokens)
    np.testing.assert_array_equal(accepted, 0)
    assert_drawn_from(out[:, 0], FIRST, {})


def test_rows_at_temperature_0_beside_others():
    """They take what is most likely, and their guesses must equal it."""
    tokens = np.stack([np.arange(N) % V, SECOND.argmax(1)[np.arange(N) % V]], axis=1)
    tokens = tokens.astype(np.int32)
    given = settings()
    hot = (np.arange(N) % 2 == 1).astype(np.float32)
    verdict = accept(
        Exact(),
        target_logits(*tokens.T),
        Proposal(tokens, np.zeros((N, K, V), np.float32)),
        dataclasses.replace(given, temperature=hot),
        np.full(N, 9),
    )
    accepted, out = emitted(verdict, tokens)
    greedy = hot == 0
    right = greedy & (tokens[:, 0] == FIRST.argmax())
    np.testing.assert_array_equal(accepted[right], K)
    np.testing.assert_array_equal(out[right, 2], THIRD.argmax(1)[tokens[right, 1]])
    np.testing.assert_array_equal(accepted[greedy & ~right], 0)
    np.testing.assert_array_equal(out[greedy & ~right, 0], FIRST.argmax())
    assert 0.1 < (accepted[~greedy] > 0).mean() < 0.9


# --- Typical -------------------------------------------------------------------------------------

ROWS = 64
MANY = np.random.default_rng(5).standard_normal((ROWS, 4, 40)).astype(np.float32) * 2
GUESSES = np.argsort(-MANY, axis=-1)[:, :3, :12][
    np.arange(ROWS)[:, None], np.arange(3), np.random.default_rng(6).integers(0, 12, (ROWS, 3))
].astype(np.int32)
POSITION = np.arange(ROWS) + 5


def typical_in_numpy(options: dict, epsilon: float, delta: float) -> np.ndarray:
    accepted = np.zeros(ROWS, int)
    for b in range(ROWS):
        for i, x in enumerate(GUESSES[b]):
            p = scipy.special.softmax(warped(MANY[b, i], **options))
            entropy = -sum(v * np.log(v) for v in p if v > 0)
            if p[x] <= min(epsilon, delta * np.exp(-entropy)):
                break
            accepted[b] += 1
    return accepted


def chosen_after(accepted: np.ndarray, given: Sampling) -> np.ndarray:
    """What plain decoding chooses at the position after the accepted guesses."""
    logits = MANY[np.arange(ROWS), accepted]
    return np.asarray(sampling.choose(jnp.asarray(logits), given, POSITION + accepted))


@pytest.mark.parametrize("thresholds", [(0.09, 0.3), (0.4, 0.9), (0.01, 0.1)])
@pytest.mark.parametrize("options", [None, {}, {"temperature": 0.6, "top_k": 3}], ids=str)
def test_typical_acceptance_is_that_of_its_formula(options, thresholds):
    epsilon, delta = thresholds
    greedy = options is None
    given = settings(ROWS, greedy=greedy, **{"temperature": 0.0, "top_k": 1} if greedy else options)
    rule = Typical(epsilon=jnp.float32(epsilon), delta=jnp.float32(delta))
    verdict = accept_few(rule, MANY, Proposal(GUESSES), given, POSITION)
    expected = typical_in_numpy(PLAIN | (options or {}), epsilon, delta)
    np.testing.assert_array_equal(verdict.accepted, expected)
    assert len(set(expected.tolist())) > 1
    np.testing.assert_array_equal(verdict.token, chosen_after(expected, given))
    if greedy:  # beside rows that draw, a row at temperature 0 gets the same
        mixed = dataclasses.replace(given, greedy=False)
        np.testing.assert_array_equal(
            accept_few(rule, MANY, Proposal(GUESSES), mixed, POSITION).accepted, expected
        )


def test_typical_acceptance_is_lossy():
    """A guess of probability 0.3 always stands, where plain decoding gives it 0.3 of the time."""
    logits = np.tile(np.log([0.3, 0.7] + [1e-9] * 38).astype(np.float32), (ROWS, 4, 1))
    tokens = np.zeros((ROWS, 3), np.int32)
    rule = Typical()
    assert (rule.epsilon, rule.delta) == (0.09, 0.3)
    rule = jax.tree.map(jnp.float32, rule)
    verdict = accept_few(rule, logits, Proposal(tokens), settings(ROWS), POSITION)
    np.testing.assert_array_equal(verdict.accepted, 3)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"epsilon": -0.1}, r"epsilon = -0.1: it must be in \[0, 1\]"),
        ({"epsilon": 1.5}, "epsilon = 1.5"),
        ({"epsilon": float("nan")}, "epsilon = nan"),
        ({"delta": -1}, r"delta = -1: it must be in \[0, inf\]"),
    ],
)
def test_thresholds_out_of_range(given, told):
    with pytest.raises(ValueError, match=told):
        Typical(**given)


# --- Forced --------------------------------------------------------------------------------------


def test_forced_acceptance_has_the_stated_rates():
    rates = [0.9, 0.4]
    tokens = np.zeros((N, K), np.int32)
    logits = target_logits(*tokens.T)
    verdict = accept_few(
        Forced.at_rates(rates), logits, Proposal(tokens), settings(), np.full(N, 9)
    )
    accepted, out = emitted(verdict, tokens)
    for i, rate in enumerate(rates):
        assert (accepted > i).mean() == pytest.approx(rate, abs=0.006)
    assert_drawn_from(out[accepted == 0, 0], FIRST, {})
    assert_drawn_from(out[accepted == 2, 2], THIRD[0], {})
    np.testing.assert_allclose(Forced.at_rates([0.92, 0.46, 0]).probabilities, [0.92, 0.5, 0])
    np.testing.assert_allclose(Forced.at_rates([0.5, 0, 0]).probabilities, [0.5, 0, 0])


def test_forced_acceptance_that_cannot_be():
    for rates in ([0.5, 0.6], [1.1], [-0.1], [0.5, float("nan")]):
        with pytest.raises(ValueError, match=r"each must be in \[0, 1\], none above the last"):
            Forced.at_rates(rates)
    with pytest.raises(ValueError, match=r"probabilities \(2,\) must be \[K\] = \[3\]"):
        accept_few(Forced.at_rates([1, 1]), MANY, Proposal(GUESSES), settings(ROWS), POSITION)
