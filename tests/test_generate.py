"""generate_tokens and what it is made of: against stored continuations, rows, keys, bad input."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scripted_model
import small_model
from fixture_models import model, quick_for
from scripted_model import BOS, EOS, ID, chain

import carat_jax as carat
from carat_jax import generate
from carat_jax.kv_state import init_state
from carat_jax.options import GenerateOptions

CONFIG, V = small_model.CONFIG, small_model.CONFIG.vocab_size
KEY = jax.random.key(0)


# --- Against stored continuations, inside a user's jit -------------------------------------------


@functools.partial(jax.jit, static_argnames=("config", "options"))
def users_function(params, config, tokens, lengths, key, options):
    """What a research script may write: a generation, and something computed from it."""
    out = carat.generate_tokens(params, config, tokens, lengths, key, options)
    return out, (out.tokens == tokens[:, -1:]).sum(axis=1)


@quick_for("dense_31b_like")  # of the others, step by step: `test_model`
def test_the_greedy_continuation_is_the_stored_one(name):
    m = model(name)
    prompt, continuation = m.expected["prompt_ids"], m.expected["continuation_ids"]
    options = carat.GenerateOptions(max_new_tokens=len(continuation))
    length = np.array([len(prompt)])
    out, count = users_function(m.params, m.config, prompt[None], length, KEY, options)
    np.testing.assert_array_equal(out.tokens, continuation[None])
    assert out.num_tokens.tolist() == [len(continuation)]
    assert out.finish.tolist() == [generate.LENGTH]
    assert (out.logprobs, out.top_ids, out.top_logprobs) == (None, None, None)
    assert count.tolist() == [(continuation == prompt[-1]).sum()]


# --- Rows ----------------------------------------------------------------------------------------

LENGTHS = [1, 63, 64, 65, 100, 17]
ASKED = {"max_new_tokens": 8, "logprobs": 3}


TOKENS = np.random.default_rng(0).integers(0, V, (len(LENGTHS), 100))


def run(key=KEY, **options) -> carat.Tokens:
    """Right-padded prompts of LENGTHS, with rubbish as padding: two chunks of 64."""
    given = carat.GenerateOptions(**ASKED | options)
    return carat.generate_tokens(
        small_model.params(), CONFIG, TOKENS, np.array(LENGTHS), key, given
    )


def test_each_row_gets_what_gemma_gives_it_alone():
    out, gemma = run(), small_model.gemma()
    for b, n in enumerate(LENGTHS):
        alone = gemma.generate(TOKENS[b, :n], **ASKED)
        assert out.tokens[b].tolist() == alone.tokens
        np.testing.assert_allclose(out.logprobs[b], alone.logprobs, atol=1e-4)
        for ids, logprobs, top in zip(
            out.top_ids[b].tolist(), out.top_logprobs[b], alone.top_logprobs, strict=True
        ):
            assert ids == list(top)
            np.testing.assert_allclose(logprobs, list(top.values()), atol=1e-4)
    assert out.num_tokens.tolist() == [8] * 6
    assert out.finish.tolist() == [generate.LENGTH] * 6


def scripted(*chains: list[int], damaged: list[int] = (), max_new_tokens: int) -> carat.Tokens:
    """Continues the first token of each of three chains."""
    return carat.generate_tokens(
        scripted_model.weights(chains, damaged),
        scripted_model.CONFIG,
        np.array([[BOS, ids[0]] for ids in chains]),
        np.array([2, 2, 2]),
        KEY,
        carat.GenerateOptions(max_new_tokens=max_new_tokens, stop_token_ids=[EOS, ID["<turn|>"]]),
    )


def test_rows_that_end_early_are_padded():
    """A stop id in the middle, one as the first token, and none."""
    chains = chain("a", "bcd", "<eos>"), chain("A", "<turn|>"), chain("x", *range(20, 60))
    out = scripted(*chains, max_new_tokens=9)
    pad = [scripted_model.CONFIG.pad_token_id]
    assert out.tokens.tolist() == [
        chains[0][1:] + pad * 5, chains[1][1:] + pad * 8, list(range(20, 29)),
    ]  # fmt: skip
    assert out.num_tokens.tolist() == [4, 1, 9]
    assert out.finish.tolist() == [generate.STOP, generate.STOP, generate.LENGTH]


def test_damaged_rows_end_alone():
    chains = chain("a", "bcd", "<eos>"), chain("A", "BCD", "<eos>"), chain("x", "yz", "<eos>")
    out = scripted(*chains, damaged=[ID["B"], ID["x"]], max_new_tokens=9)
    pad = [scripted_model.CONFIG.pad_token_id]
    assert out.tokens.tolist() == [chains[0][1:] + pad * 5, [ID["B"]] + pad * 8, pad * 9]
    assert out.num_tokens.tolist() == [4, 1, 0]
    assert out.finish.tolist() == [generate.STOP, generate.NON_FINITE, generate.NON_FINITE]


def test_one_new_token():
    """A loop of no steps."""
    chains = chain("a", "b"), chain("A", "<turn|>"), chain("x", "y")
    out = scripted(*chains, max_new_tokens=1)
    assert out.tokens.tolist() == [[ID["b"]], [ID["<turn|>"]], [ID["y"]]]
    assert out.num_tokens.tolist() == [1, 1, 1]
    assert out.finish.tolist() == [generate.LENGTH, generate.STOP, generate.LENGTH]


# --- Keys and options ----------------------------------------------------------------------------

SAMPLED = {"temperature": 1.2, "top_k": 50}


def test_raw_and_typed_keys_draw_the_same():
    typed, raw = run(jax.random.key(7), **SAMPLED), run(jax.random.PRNGKey(7), **SAMPLED)
    other = run(jax.random.key(8), **SAMPLED)
    np.testing.assert_array_equal(typed.tokens, raw.tokens)
    assert (np.asarray(typed.tokens) != np.asarray(other.tokens)).any(axis=1).sum() > 3


def test_changed_numbers_do_not_compile_again():
    run(**SAMPLED)
    before = generate._generate_tokens._cache_size()
    assert before > 0
    for changed in (
        {"temperature": 0.3},
        {"top_k": 1},
        {"top_p": 0.5},
        {"min_p": 0.2},
        {"stop_token_ids": [1, 2]},
        {"suppress_tokens": [3]},
        {"seed": 5},
    ):
        run(jax.random.key(1), **SAMPLED | changed)
    assert generate._generate_tokens._cache_size() == before


def test_options_are_obeyed():
    free = np.asarray(run(**SAMPLED).tokens)
    banned = sorted(set(free[:, :3].flatten().tolist()))
    out = np.asarray(run(**SAMPLED, suppress_tokens=banned).tokens)
    assert not set(out.flatten().tolist()) & set(banned)
    np.testing.assert_array_equal(run(**SAMPLED | {"top_k": 1}).tokens, run().tokens)
    stop = int(free[0, 2])
    stopped = run(**SAMPLED, stop_token_ids=[stop])
    for row, count, finish in zip(free, stopped.num_tokens, stopped.finish, strict=True):
        where = np.flatnonzero(row == stop)
        assert int(count) == (where[0] + 1 if len(where) else 8)
        assert int(finish) == (generate.STOP if len(where) else generate.LENGTH)


# --- Bad input -----------------------------------------------------------------------------------


def refused(tokens, lengths, **options) -> None:
    given = carat.GenerateOptions(**options)
    carat.generate_tokens(small_model.params(), CONFIG, tokens, np.array(lengths), KEY, given)


@pytest.mark.parametrize(
    ("tokens", "lengths", "told"),
    [
        ([[1, 2**70]], [2], "object must be integer"),
        ([1, 2, 3], [3], r"tokens \(3,\)"),
        ([[[1]]], [1], r"tokens \(1, 1, 1\)"),
        ([[]], [0], r"tokens \(1, 0\)"),
        (np.zeros((0, 3), int), [], r"tokens \(0, 3\)"),
        ([[1.0]], [1], "float64 must be integer"),
        ([[1, 2]], [[1]], r"lengths \(1, 1\)"),
        ([[1, 2]], [1, 2], r"lengths \(2,\) .* \[1\]"),
        ([[1, 2]], [1.0], "float64 must be integer"),
        ([[1, 2]], [0], r"lengths from 0 to 0: they must be in \[1, T\] = \[1, 2\]"),
        ([[1, 2], [3, 4]], [1, 3], "lengths from 1 to 3"),
        ([[1, 2]], [-1], "lengths from -1"),
        ([[1, -2]], [2], "ids from -2 to 1"),
        ([[1, V]], [2], f"ids from 1 to {V}"),
        (np.array([[2**32 + 5]]), [1], f"to {2**32 + 5}"),
    ],
    ids=str,
)
def test_prompts_that_are_none(tokens, lengths, told):
    before = generate._generate_tokens._cache_size()
    with pytest.raises(ValueError, match=told):
        refused(tokens, lengths)
    assert generate._generate_tokens._cache_size() == before


def test_options_that_do_not_fit():
    before = generate._generate_tokens._cache_size()
    for told, options in [
        ("stop strings need a tokenizer", {"stop": ["a"]}),
        ("stop_token_ids has 96: ids go to 95", {"stop_token_ids": [V]}),
        ("logprobs = 97", {"logprobs": V + 1}),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=told):
            refused([[1, 2]], [2], **options)
    assert generate._generate_tokens._cache_size() == before
    with pytest.raises(ValueError, match="max_context 4,097 exceeds the model's max_position"):
        refused([[1, 2]], [2], max_new_tokens=4095)


# --- Plans ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 2, 3, 4, 8, 63, 64, 65, 1000])
def test_a_prefill_plan_covers_the_prompt_with_little_padding(batch):
    for longest in [*range(1, 1200), 2000, 2048, 2049, 5000, 99_999, 100_000]:
        plan = generate.prefill_plan(longest, batch)
        assert set(plan) <= set(generate.PREFILL_CHUNKS)
        assert max(plan) * batch <= generate.PREFILL_TOKENS or set(plan) == {64}
        rest = longest - sum(plan[:-1])
        assert 0 < rest <= plan[-1]
        assert plan[-1] == 64 or 2 * rest > plan[-1]
        assert plan == sorted(plan, reverse=True)
    if batch == 1:
        assert generate.prefill_plan(100_000, 1) == [2048] * 49


def test_capacities_are_few():
    assert generate.capacity(1, 262_144) == generate.MIN_CAPACITY
    sizes = {generate.capacity(n, 131_072) for n in range(1, 131_073, 31)}
    assert sizes == {4096, 8192, 16384, 32768, 65536, 131_072}
    for n in (1, 64, 65, 4096, 4097, 100_000):
        for limit in (n, n + 1, 131_072):
            slots = generate.capacity(n, limit)
            assert n <= slots <= limit


def test_row_keys():
    one = jax.random.key_data(generate.row_keys(5, 4))
    assert len({tuple(key) for key in one.tolist()}) == 4
    for seeds in ((5, 5), (9, 5)):
        several = jax.random.key_data(generate.row_keys(seeds, 2))
        np.testing.assert_array_equal(several[1], one[0])
    key = jax.random.key(5)  # as `generate_tokens` takes it
    streams = jax.vmap(jax.random.fold_in, (None, 0))(key, np.arange(4))
    np.testing.assert_array_equal(jax.random.key_data(streams), one)
    with pytest.raises(ValueError, match="3 seeds for 2 prompts"):
        generate.row_keys((1, 2, 3), 2)


def test_decode_can_be_called_within_another_jit():
    """Where JAX takes no compiler options."""
    config, params = CONFIG, small_model.params()
    options = GenerateOptions(max_new_tokens=8)
    tokens, lengths = np.arange(12).reshape(1, 12) + 3, np.array([12])

    def text(decode):
        state, last = init_state(config, 1, 64), jnp.zeros((1, config.hidden_size))
        last, state = generate.prefill_chunk(params, config, tokens, state, lengths, last)
        controls = generate.Controls.of(options, generate.row_keys(0, 1))
        _, state = generate.begin(params, config, last, state, controls)
        return decode(state, jnp.int32(7), jnp.zeros(1, bool)).tokens

    def decode(state, steps, stopped):
        return generate.decode(params, config, state, steps, stopped, size=8)[0]

    np.testing.assert_array_equal(text(jax.jit(decode)), text(decode))
    assert jax.eval_shape(lambda: text(decode)).shape == (1, 8)
