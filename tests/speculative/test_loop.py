"""The loop against plain decoding and stored continuations: tokens, log-probabilities, caches."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
import scripted_model
import small_model
from batches import (
    BATCHES,
    CONFIG,
    NEW,
    PROMPTS,
    SIZE,
    R,
    Result,
    V,
    W,
    assert_same_cache,
    begun,
    controls_of,
    decoded,
    drafted,
    joined,
    knowing,
    options_of,
    plain,
)
from fixture_models import LOGITS, model, quick_for
from scripted_model import BOS, EOS, ID, chain

from carat_jax import generate
from carat_jax.config import FULL
from carat_jax.generate import LENGTH, NON_FINITE, RUNNING, STOP
from carat_jax.kv_state import init_state
from carat_jax.model import forward, head
from carat_jax.options import GenerateOptions
from carat_jax.params import abstract_params
from carat_jax.speculative import (
    Counts,
    Drafter,
    Exact,
    Proposal,
    Speculation,
    check_speculation,
    draft,
    read_prompt,
    speculate,
    start,
)
from carat_jax.speculative.acceptance import Forced
from carat_jax.speculative.drafters.model import Model

# --- Greedy --------------------------------------------------------------------------------------


def assert_greedy(prompts: tuple, num_proposals: int, right) -> Counts:
    options = options_of()
    expected = plain(prompts, options)
    drafter = knowing(expected.tokens, right)
    got = drafted(drafter, num_proposals, prompts, controls_of(prompts, options))
    got.assert_same_text(expected)
    assert_same_cache(got.kv, expected.kv, CONFIG)
    return got.counts


@pytest.mark.parametrize("num_proposals", range(1, 9))
def test_every_number_of_proposals_gives_the_text_of_plain_decoding(num_proposals):
    """Drafters that are right always, never, at first, now and then; prompts round the window."""
    some = num_proposals // 2, [0.9, 0.5, 0.9, 0.5, 0.9, 0.9, 0.9, 0.9]
    scripts = itertools.cycle([*some, 0, num_proposals])
    for prompts, right in zip(BATCHES, scripts, strict=False):
        assert_greedy(prompts, num_proposals, right)


@pytest.mark.parametrize("num_proposals", range(1, 9))
def test_one_prompt_alone(num_proposals):
    """It gets, text and cache, what it gets in a batch. As long as the window, less or plus up to
    the positions of a round, and three windows.
    """
    options, some = options_of(), [0.9, 0.5, 0.9, 0.5, 0.9, 0.9, 0.9, 0.9]
    rights = itertools.cycle([num_proposals // 2, some, 0, num_proposals])
    lengths = {*range(W - num_proposals - 1, W + num_proposals + 2), 3 * W}
    prompts = [prompt for prompt in PROMPTS if len(prompt) in lengths]
    assert len(prompts) == len(lengths)
    for prompt, right in zip(prompts, rights, strict=False):
        batch = next(batch for batch in BATCHES if prompt in batch)
        row, expected = batch.index(prompt), plain(batch, options)
        drafter, alone = knowing([expected.tokens[row]], right), (prompt,)
        got = drafted(drafter, num_proposals, alone, controls_of(alone, options))
        got.assert_same_text(expected.of_row(row))
        kv = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], expected.kv)
        assert_same_cache(got.kv, kv, CONFIG)


@quick_for("dense_31b_like")
def test_the_text_is_the_stored_one(name):
    """Of every kind of model: with per-layer inputs and borrowed keys, keys that are values, a
    mixture of experts. Prompt and continuation are cut at four places; the rings wrap while
    guesses are rejected.
    """
    m, new, lengths = model(name), 26, (50, 53, 60, 64)
    prompts = tuple(tuple(m.ids[:n].tolist()) for n in lengths)
    expected = [m.ids[n : n + new].tolist() for n in lengths]
    logits = scipy.special.log_softmax(m.expected["logits_all"].astype(np.float64), axis=-1)
    controls = controls_of(prompts, options_of(max_new_tokens=new))
    for right in (0, 2, 8, [0.9, 0.8, 0.7, 0.6, 0.5]):
        drafter = knowing(expected, right)
        got = drafted(drafter, 8, prompts, controls, params=m.params, config=m.config)
        assert got.tokens == expected
        assert got.finish == [LENGTH] * 4
        for b, n in enumerate(lengths):
            stored = logits[np.arange(n - 1, n - 1 + new), expected[b]]
            np.testing.assert_allclose(got.logprobs[b], stored, atol=2 * LOGITS[m.name])


# --- A drafter that remembers --------------------------------------------------------------------


@pytest.mark.parametrize("rates", [[1, 1, 1, 1], [0.8, 0.6, 0.4, 0.3], [0, 0, 0, 0]], ids=str)
def test_the_model_as_its_own_drafter(rates):
    """Guesses that stand by chance alone are the text of plain decoding only if the drafter's cache
    is right after any number of rejected ones, and has the last guess of a round, too.
    """
    for prompts in BATCHES[4:]:
        options = options_of(max_new_tokens=40)
        got = drafted(
            Model(small_model.params(), CONFIG),
            4,
            prompts,
            controls_of(prompts, options),
            rule=Forced.at_rates(rates),
        )
        got.assert_same_text(plain(prompts, options))
        accepted = np.asarray(got.counts.accepted).sum() / np.asarray(got.counts.rounds).sum()
        assert accepted == pytest.approx(sum(rates), abs=0.5)


# --- Another K in every call ---------------------------------------------------------------------

IN_TURN = (4, 0, 0, 2)


def test_without_proposals_it_is_plain_decoding():
    for prompts in BATCHES[:3]:
        controls = controls_of(prompts, options_of(temperature=0.9, top_k=50))
        expected = decoded(prompts, controls)
        got = drafted(knowing(expected.tokens, 0), 0, prompts, controls)
        got.assert_same_text(expected)
        assert_same_cache(got.kv, expected.kv, CONFIG)
        assert got.counts.rounds.tolist() == [NEW - 1] * 4
        assert got.counts.drafted.tolist() == [0] * 4
        assert got.counts.per_position.shape == (4, 0)


@pytest.mark.parametrize("right", [0, 1, 9])
def test_k_may_change_from_call_to_call(right):
    for prompts in BATCHES[:3]:
        options = options_of(max_new_tokens=30)
        expected = plain(prompts, options)
        drafter = knowing(expected.tokens, right)
        got = drafted(drafter, IN_TURN, prompts, controls_of(prompts, options))
        got.assert_same_text(expected)
        assert_same_cache(got.kv, expected.kv, CONFIG)
        for K, counts in zip(IN_TURN, got.counted, strict=False):
            stood = min(K, right)
            assert counts.accepted.tolist() == [2 * stood] * 4 or counts is got.counted[-1]


@pytest.mark.slow
def test_a_drafter_with_a_cache_misses_nothing_while_nobody_asks_it():
    """The model itself is right at once when its guesses are wanted again."""
    drafter = Model(small_model.params(), CONFIG)
    for prompts in BATCHES[:3]:
        options = options_of(max_new_tokens=40)
        got = drafted(drafter, IN_TURN, prompts, controls_of(prompts, options))
        got.assert_same_text(plain(prompts, options))
        drafts, accepted = (
            sum(np.sum(getattr(c, name)) for c in got.counted) for name in ("drafted", "accepted")
        )
        assert drafts == accepted > 50


def test_drafting_alone_makes_the_guesses_of_the_next_round():
    prompts, options = BATCHES[0], options_of()
    params, drafter = small_model.params(), Model(small_model.params(), CONFIG)
    _, decode, last = begun(params, CONFIG, prompts, controls_of(prompts, options))
    drafting = drafter.init(CONFIG, 4, 128)
    for tokens, new in generate.prefill_pieces(prompts):
        drafting = read_prompt(drafter, drafting, tokens, new)
    state = start(drafter, drafting, last, decode)
    for _ in range(2):  # the state is not used up
        guesses = draft(params, CONFIG, drafter, state, jnp.int32(1), num_proposals=4)
        assert guesses.tolist() == [row[4] for row in plain(prompts, options).tokens]


# --- Counts --------------------------------------------------------------------------------------


def test_its_own_continuation_is_accepted_whole():
    counts = assert_greedy(BATCHES[0], 4, 4)
    rounds = (NEW - 1) // 5
    assert counts.rounds.tolist() == [rounds] * 4
    assert counts.drafted.tolist() == counts.accepted.tolist() == [4 * rounds] * 4
    assert counts.per_position.tolist() == [[rounds] * 4] * 4


def test_one_wrong_in_each_round():
    counts = assert_greedy(BATCHES[0], 4, 1)
    assert counts.rounds.tolist() == [(NEW - 1) // 2] * 4
    assert counts.accepted.tolist() == [(NEW - 1) // 2] * 4
    assert counts.per_position.tolist() == [[(NEW - 1) // 2, 0, 0, 0]] * 4


def test_random_guesses_are_hardly_ever_accepted():
    prompts, options = BATCHES[1], options_of()
    guesses = np.random.default_rng(9).integers(0, V, (4, 40)).tolist()
    got = drafted(knowing(guesses, 4), 4, prompts, controls_of(prompts, options))
    got.assert_same_text(plain(prompts, options))
    assert np.asarray(got.counts.accepted).sum() < 0.05 * np.asarray(got.counts.drafted).sum()
    assert len(got.counted) == 2  # of 12 rounds: 12 tokens, and the rest


# --- Ends ----------------------------------------------------------------------------------------


def assert_ends_as_plain(prompts: tuple, options: GenerateOptions, right) -> Result:
    whole = plain(prompts, options_of()).tokens
    expected = plain(prompts, options)
    got = drafted(knowing(whole, right), 4, prompts, controls_of(prompts, options))
    got.assert_same_text(expected)
    return expected


def test_limits_cut_a_round_anywhere():
    for limit in range(1, 13):
        expected = assert_ends_as_plain(BATCHES[2], options_of(max_new_tokens=limit), 4)
        assert [len(row) for row in expected.tokens] == [limit] * 4


def test_stop_ids_cut_a_round_anywhere():
    """Rows that end go on beside others that run."""
    text, ended = plain(BATCHES[3], options_of()).tokens, set()
    for place in range(11):
        for right in (4, 2):
            options = options_of(stop_token_ids=[text[place % 4][place]])
            expected = assert_ends_as_plain(BATCHES[3], options, right)
            ended |= {len(row) for row in expected.tokens if row[-1] == options.stop_token_ids[0]}
    assert len(ended) > 8


def test_suppressed_ids_are_never_emitted():
    """The drafter still proposes them."""
    text = plain(BATCHES[4], options_of()).tokens
    banned = sorted({row[i] for row in text for i in (1, 2)})
    expected = assert_ends_as_plain(BATCHES[4], options_of(suppress_tokens=banned), 4)
    assert not set(banned) & set(itertools.chain(*expected.tokens))


def test_rows_that_the_caller_stops():
    prompts, options = BATCHES[0], options_of()
    expected = plain(prompts, options).tokens
    drafter, params = knowing(expected, 2), small_model.params()
    first, decode, last = begun(params, CONFIG, prompts, controls_of(prompts, options))
    state = start(drafter, drafter.init(CONFIG, 4, 128), last, decode)
    call = functools.partial(speculate, num_proposals=4, size=SIZE)
    one, _, state = call(params, CONFIG, drafter, Exact(), state, jnp.int32(2), np.zeros(4, bool))
    assert one.num_tokens.tolist() == [6] * 4  # two rounds of two accepted, and the target's own
    assert one.finish.tolist() == [RUNNING] * 4
    length = np.asarray(state.decode.kv.length)
    stopped = np.array([False, True, False, False])
    two, _, state = call(params, CONFIG, drafter, Exact(), state, jnp.int32(SIZE), stopped)
    assert two.num_tokens.tolist() == [NEW - 7, 0, NEW - 7, NEW - 7]
    assert two.finish.tolist() == [LENGTH, STOP, LENGTH, LENGTH]
    assert int(state.decode.kv.length[1]) == length[1]
    got = joined([first, one, two], state.decode.kv)
    assert got.tokens == [expected[0], expected[1][:7], *expected[2:]]
    none, counts, _ = call(
        params, CONFIG, drafter, Exact(), state, jnp.int32(SIZE), np.zeros(4, bool)
    )
    assert none.num_tokens.tolist() == counts.rounds.tolist() == [0] * 4


def test_logits_that_are_not_finite_end_a_row():
    """At every place in a round, and only where the damaged token is accepted."""
    text = [ID[c] for c in "abcdefghij"]
    chains = [[ID["A"], *text, EOS], chain("X", "YZ", EOS), chain("0", "<turn|>")]
    prompts = tuple((BOS, ids[0]) for ids in chains)
    options = GenerateOptions(max_new_tokens=12, logprobs=2, stop_token_ids=[EOS, ID["<turn|>"]])
    for place, right in itertools.product(range(len(text)), (3, 1)):
        got = drafted(
            knowing([ids[1:] for ids in chains], right),
            3,
            prompts,
            controls_of(prompts, options),
            params=scripted_model.weights(chains, [text[place]]),
            config=scripted_model.CONFIG,
        )
        assert got.tokens == [text[: place + 1], chains[1][1:], chains[2][1:]]
        assert got.finish == [NON_FINITE, STOP, STOP]
    wrong = [t + 1 for t in text if t + 1 not in text]
    got = drafted(
        knowing([ids[1:] for ids in chains], 2),
        3,
        prompts,
        controls_of(prompts, options),
        params=scripted_model.weights(chains, wrong),
        config=scripted_model.CONFIG,
    )
    assert got.tokens == [ids[1:] for ids in chains]
    assert got.finish == [STOP] * 3


# --- Sampling ------------------------------------------------------------------------------------


@pytest.mark.parametrize("right", [0, 2, 4])
def test_single_guesses_give_the_tokens_of_plain_sampling(right):
    """With the same seed; one row beside them is at temperature 0."""
    for prompts in BATCHES[:3]:
        controls = controls_of(prompts, options_of(temperature=0.9, top_k=50, top_p=0.98))
        temperature = jnp.array([0.9, 0.0, 1.5, 0.3])
        controls = controls.replace(sampling=controls.sampling.replace(temperature=temperature))
        expected = decoded(prompts, controls)
        got = drafted(knowing(expected.tokens, right), 4, prompts, controls)
        got.assert_same_text(expected)
        assert_same_cache(got.kv, expected.kv, CONFIG)
        assert expected.tokens[1] == plain(prompts, options_of()).tokens[1]
        assert got.counts.per_position[:, :right].sum() == got.counts.accepted.sum()


class Draws(Drafter):
    """Draws all its guesses from one distribution, straight from the keys that it is given."""

    logits: jax.Array

    def propose(self, state, target, num_proposals, keys):
        B, V = target.token.shape[0], self.logits.shape[0]
        drawn = jax.vmap(lambda k: jax.random.categorical(k, self.logits, shape=(num_proposals,)))
        logits = jnp.broadcast_to(self.logits, (B, num_proposals, V))
        return Proposal(drawn(keys).astype(jnp.int32), logits), state


def test_texts_have_the_models_distribution():
    """Of 10,000 rows. What a drafter draws must not hang on what was drawn before."""
    B, V, n = 10_000, 3, 3
    config = dataclasses.replace(
        CONFIG, vocab_size=V, num_hidden_layers=1, layer_types=(FULL,), hidden_size=8
    )
    draw = np.random.default_rng(3)
    params = jax.tree.map(
        lambda leaf: jnp.asarray(draw.standard_normal(leaf.shape) / 3, jnp.float32),
        abstract_params(config),
    )
    # The first token hangs on a vector in place of a prompt.
    beginning = jnp.arange(8) / 4.0
    texts = np.stack(np.meshgrid(*[np.arange(V)] * n, indexing="ij"), axis=-1).reshape(-1, n)
    once = functools.partial(jax.jit, static_argnames="config")
    first = once(head)(params, config, beginning)
    later, _ = once(forward)(params, config, texts, None)
    logits = np.concatenate([np.tile(first, (len(texts), 1, 1)), later[:, : n - 1]], axis=1)
    p = scipy.special.softmax(logits.astype(np.float64), axis=-1)
    p = np.take_along_axis(p, texts[..., None], axis=-1)[..., 0].prod(axis=1)
    assert p.sum() == pytest.approx(1) and p.max() < 0.3

    options = GenerateOptions(max_new_tokens=n, temperature=1.0)
    controls = generate.Controls.of(options, jax.random.split(jax.random.key(4), B))
    last = jnp.tile(beginning, (B, 1))
    first, decode = generate.begin(params, config, last, init_state(config, B, 64), controls)
    drafter = Draws(jnp.array([0.0, 0.5, 1.0]))
    state = start(drafter, None, last, decode)
    rest, done, _ = speculate(
        params, config, drafter, Exact(), state, n, np.zeros(B, bool), num_proposals=2, size=9
    )
    out = np.concatenate([first.tokens, rest.tokens[:, : n - 1]], axis=1)
    np.testing.assert_array_equal(rest.num_tokens, n - 1)
    counts = np.bincount(out @ V ** np.arange(n)[::-1], minlength=V**n)
    assert scipy.stats.chisquare(counts, B * p / p.sum()).pvalue > 1e-4
    # More than with guesses that are never accepted, less than with such as always are.
    assert 0.2 < np.asarray(done.accepted).sum() / (B * (n - 1)) < 0.9


# --- Slack ---------------------------------------------------------------------------------------

NARROW = dataclasses.replace(CONFIG, sliding_window=R - 4)  # leaves its rings a slack of 4


def test_as_many_proposals_as_the_rings_have_slack():
    """Rejected guesses fill every slot that no later token reads."""
    for prompts, right in zip(BATCHES[4:], (0, 2, [0.7] * 4), strict=True):
        controls = controls_of(prompts, options_of())
        expected = decoded(prompts, controls, NARROW)
        drafter = knowing(expected.tokens, right)
        got = drafted(drafter, 4, prompts, controls, config=NARROW)
        got.assert_same_text(expected)
        assert_same_cache(got.kv, expected.kv, NARROW)


# --- Refusals ------------------------------------------------------------------------------------


def test_proposals_beyond_the_slack_are_refused():
    drafter = knowing([[0]], 1)
    for config, most in ((NARROW, 4), (CONFIG, 15)):
        state = init_state(config, 1, 64, slack=0)
        assert check_speculation(Speculation(drafter, most), state, config) == most
        assert check_speculation(Speculation(drafter, "auto"), state, config) == most
        for K in (0, most + 1):
            with pytest.raises(ValueError, match=f"num_proposals = {K}: Scripted .* 1 to {most}"):
                check_speculation(Speculation(drafter, K), state, config)
    forced = Speculation(drafter, "auto", Forced.at_rates([0.5, 0.25]))
    with pytest.raises(ValueError, match=r"'auto': Forced has probabilities .* give 2"):
        check_speculation(forced, state, CONFIG)


@pytest.mark.parametrize(
    ("config", "K", "slack", "most"), [(NARROW, 5, 4, 4), (CONFIG, 16, 48, 15)], ids=["5", "16"]
)
def test_the_loop_itself_refuses_them_too(config, K, slack, most):
    """Such a step would run as a prompt's chunk, and could overwrite what is needed again."""
    prompts, drafter = BATCHES[4], knowing([[0]] * 4, 1)
    params, controls = small_model.params(), controls_of(prompts, options_of())
    _, decode, last = begun(params, config, prompts, controls)
    state = start(drafter, drafter.init(config, 4, 128), last, decode)
    told = f"num_proposals = {K}: .* a slack of {slack} in its rings: give 0 to {most}, or .*slack"
    for call in (
        functools.partial(draft, params, config, drafter, state, 1),
        functools.partial(
            speculate, params, config, drafter, Exact(), state, 1, np.zeros(4, bool), size=SIZE
        ),
    ):
        for wrong in (K, -1):
            with pytest.raises(ValueError, match=told.replace(f"{K}:", f"{wrong}:")):
                call(num_proposals=wrong)
