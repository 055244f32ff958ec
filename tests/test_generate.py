"""generate_tokens and what it is made of: against stored continuations, and inside a user's jit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scripted_model
import small_model
from fixture_models import each_model, model
from scripted_model import BOS, EOS, ID, chain

import carat_jax as carat
from carat_jax import generate
from carat_jax.options import OptionError

CONFIG, V = small_model.CONFIG, small_model.CONFIG.vocab_size
KEY = jax.random.key(0)
small = pytest.mark.xdist_group("generate")


def prompts(lengths: list[int], T: int) -> tuple[np.ndarray, np.ndarray]:
    """Right-padded ids [B, T] of the small model with rubbish as padding, and lengths [B]."""
    draw = np.random.default_rng(sum(lengths))
    return draw.integers(0, V, (len(lengths), T)), np.array(lengths, np.int32)


def run(tokens, lengths, key=KEY, **options) -> carat.Tokens:
    params = small_model.params()
    given = carat.GenerateOptions(**options)
    return generate.generate_tokens(params, CONFIG, tokens, lengths, key, given)


@functools.cache
def teacher_forced():
    return jax.jit(lambda params, tokens: carat.forward(params, CONFIG, tokens, None)[0])


# --- Against stored continuations ----------------------------------------------------------------


@each_model
def test_the_greedy_continuation_is_the_stored_one(name):
    m = model(name)
    prompt, continuation = m.expected["prompt_ids"], m.expected["continuation_ids"]
    options = carat.GenerateOptions(max_new_tokens=len(continuation))
    out = carat.generate_tokens(
        m.params, m.config, prompt[None], np.array([len(prompt)]), KEY, options
    )
    np.testing.assert_array_equal(out.tokens, continuation[None])
    assert out.num_tokens.tolist() == [len(continuation)]
    assert out.finish.tolist() == [generate.LENGTH]
    assert (out.logprobs, out.top_ids, out.top_logprobs) == (None, None, None)


# --- Rows ----------------------------------------------------------------------------------------

LENGTHS = [1, 63, 64, 65, 100, 17]
ROWS = {"max_new_tokens": 8, "logprobs": 2}


@small
def test_each_row_gets_what_gemma_gives_it_alone():
    """100 columns are two chunks: rows end in the first, at its edge, and in the second."""
    tokens, lengths = prompts(LENGTHS, 100)
    out = run(tokens, lengths, **ROWS)
    gemma = small_model.gemma()
    for b, n in enumerate(LENGTHS):
        alone = gemma.generate(tokens[b, :n], **ROWS)
        assert out.tokens[b].tolist() == alone.tokens
        np.testing.assert_allclose(out.logprobs[b], alone.logprobs, atol=1e-4)
        assert [set(ids) for ids in out.top_ids[b].tolist()] == [set(d) for d in alone.top_logprobs]


@small
def test_a_long_prompt_in_several_chunks_agrees_with_one_pass():
    tokens, lengths = prompts([300], 300)
    out = run(tokens, lengths, max_new_tokens=12)
    both = np.concatenate([tokens, out.tokens], axis=1)
    logits = teacher_forced()(small_model.params(), both)[0]
    np.testing.assert_array_equal(logits[299:-1].argmax(-1), out.tokens[0])


@small
def test_rows_that_end_early_are_padded():
    """Three rows: a stop id in the middle, as the first token, and none."""
    chains = chain("a", "bcd", "<eos>"), chain("A", "<turn|>"), chain("x", *range(20, 60))
    ids = np.array([[BOS, ID["a"]], [BOS, ID["A"]], [BOS, ID["x"]]])
    options = carat.GenerateOptions(max_new_tokens=9, stop_token_ids=[EOS, ID["<turn|>"]])
    out = carat.generate_tokens(
        scripted_model.weights(chains),
        scripted_model.CONFIG,
        ids,
        np.array([2, 2, 2]),
        KEY,
        options,
    )
    pad = scripted_model.CONFIG.pad_token_id
    np.testing.assert_array_equal(
        out.tokens,
        [chains[0][1:] + [pad] * 5, chains[1][1:] + [pad] * 8, list(range(20, 29))],
    )
    assert out.num_tokens.tolist() == [4, 1, 9]
    assert out.finish.tolist() == [generate.STOP, generate.STOP, generate.LENGTH]


@small
def test_a_damaged_row_ends_alone():
    chains = chain("a", "bcd", "<eos>"), chain("A", "BCD", "<eos>"), chain("x", "yz", "<eos>")
    ids = np.array([[BOS, ID["a"]], [BOS, ID["A"]], [BOS, ID["x"]]])
    options = carat.GenerateOptions(max_new_tokens=9, stop_token_ids=[EOS, ID["<turn|>"]])
    out = carat.generate_tokens(
        scripted_model.weights(chains, damaged=[ID["B"], ID["x"]]),
        scripted_model.CONFIG, ids, np.array([2, 2, 2]), KEY, options,
    )  # fmt: skip
    assert out.num_tokens.tolist() == [4, 1, 0]
    assert out.finish.tolist() == [generate.STOP, generate.NON_FINITE, generate.NON_FINITE]
    assert out.tokens[0, :4].tolist() == chains[0][1:]
    assert out.tokens[1].tolist() == [ID["B"]] + [0] * 8
    assert out.tokens[2].tolist() == [0] * 9


@small
def test_one_new_token():
    tokens, lengths = prompts(LENGTHS, 100)
    out = run(tokens, lengths, **ROWS | {"max_new_tokens": 1})
    longer = run(tokens, lengths, **ROWS)
    np.testing.assert_array_equal(out.tokens, longer.tokens[:, :1])
    np.testing.assert_allclose(out.top_logprobs, longer.top_logprobs[:, :1], atol=1e-5)
    assert out.num_tokens.tolist() == [1] * 6
    assert out.finish.tolist() == [generate.LENGTH] * 6


# --- Keys and options ----------------------------------------------------------------------------

SAMPLED = ROWS | {"temperature": 1.2, "top_k": 50}


@small
def test_raw_and_typed_keys_draw_the_same():
    tokens, lengths = prompts(LENGTHS, 100)
    typed = run(tokens, lengths, jax.random.key(7), **SAMPLED)
    raw = run(tokens, lengths, jax.random.PRNGKey(7), **SAMPLED)
    other = run(tokens, lengths, jax.random.key(8), **SAMPLED)
    np.testing.assert_array_equal(typed.tokens, raw.tokens)
    assert (np.asarray(typed.tokens) != np.asarray(other.tokens)).any(axis=1).sum() > 3


@small
def test_a_seed_of_gemma_is_a_key_of_generate_tokens():
    tokens, lengths = prompts(LENGTHS, 100)
    out = run(tokens, lengths, jax.random.key(7), **SAMPLED)
    alone = small_model.gemma().generate(tokens[0, :1], seed=7, **SAMPLED)
    assert out.tokens[0].tolist() == alone.tokens


@small
def test_changed_numbers_do_not_compile_again():
    tokens, lengths = prompts(LENGTHS, 100)
    run(tokens, lengths, **SAMPLED)
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
        run(tokens, lengths, jax.random.key(1), **SAMPLED | changed)
    assert generate._generate_tokens._cache_size() == before


@small
def test_options_are_obeyed():
    tokens, lengths = prompts(LENGTHS, 100)
    free = np.asarray(run(tokens, lengths, **SAMPLED).tokens)
    banned = sorted(set(free[:, :3].flatten().tolist()))
    out = np.asarray(run(tokens, lengths, **SAMPLED | {"suppress_tokens": banned}).tokens)
    assert not set(out.flatten().tolist()) & set(banned)
    greedy = np.asarray(run(tokens, lengths, **ROWS).tokens)
    np.testing.assert_array_equal(run(tokens, lengths, **SAMPLED | {"top_k": 1}).tokens, greedy)


# --- Inside a user's jit -------------------------------------------------------------------------


@small
def test_inside_a_users_jit():
    """Two generations in one jit, the second from the first one's tokens, with a traced key."""
    options = carat.GenerateOptions(max_new_tokens=6, temperature=1.0)

    @jax.jit
    def twice(params, tokens, lengths, key):
        first, second = jax.random.split(key)
        draft = carat.generate_tokens(params, CONFIG, tokens, lengths, first, options)
        again = carat.generate_tokens(
            params, CONFIG, draft.tokens, draft.num_tokens, second, options
        )
        return draft, again, (draft.tokens == again.tokens).sum()

    tokens, lengths = prompts([5, 20], 20)
    draft, again, equal = twice(small_model.params(), tokens, lengths, KEY)
    first, second = jax.random.split(KEY)
    expected = run(tokens, lengths, first, max_new_tokens=6, temperature=1.0)
    np.testing.assert_array_equal(draft.tokens, expected.tokens)
    expected = run(draft.tokens, draft.num_tokens, second, max_new_tokens=6, temperature=1.0)
    np.testing.assert_array_equal(again.tokens, expected.tokens)
    assert int(equal) == (np.asarray(draft.tokens) == np.asarray(again.tokens)).sum()


# --- Bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "lengths", "told"),
    [
        ([1, 2, 3], [3], r"tokens \(3,\)"),
        ([[[1]]], [1], r"tokens \(1, 1, 1\)"),
        ([[]], [0], r"tokens \(1, 0\)"),
        (np.zeros((0, 3), int), [], r"tokens \(0, 3\)"),
        ([[1.0]], [1], "float32 must be integer"),
        ([[1, 2]], [[1]], r"lengths \(1, 1\)"),
        ([[1, 2]], [1, 2], r"lengths \(2,\) .* \[1\]"),
        ([[1, 2]], [1.0], "float32 must be integer"),
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
        run(tokens, np.array(lengths))
    assert generate._generate_tokens._cache_size() == before


def test_options_that_do_not_fit():
    before = generate._generate_tokens._cache_size()
    for told, options in [
        ("stop strings need a tokenizer", {"stop": ["a"]}),
        ("stop_token_ids has 96: ids go to 95", {"stop_token_ids": [V]}),
        ("logprobs = 97", {"logprobs": V + 1}),
        ("max_context 4,097 exceeds the model's max_position_embeddings 4,096",
         {"max_new_tokens": 4095}),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=told):
            run([[1, 2]], np.array([2]), **options)
    assert generate._generate_tokens._cache_size() == before
    with pytest.raises(OptionError):
        run([[1, 2]], np.array([2]), temperature=-1)


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
        assert generate.prefill_plan(100_000, 1) == [2048] * 48 + [1024, 256, 256, 256]


def test_capacities_are_few():
    assert generate.capacity(1, 262_144) == generate.MIN_CAPACITY
    sizes = {generate.capacity(n, 131_072) for n in range(1, 131_073, 31)}
    assert sizes == {4096, 8192, 16384, 32768, 65536, 131_072}
    for n in (1, 64, 65, 4096, 4097, 100_000):
        for limit in (n, n + 1, 131_072):
            slots = generate.capacity(n, limit)
            assert n <= slots <= generate.round_up(limit)
            assert slots % 64 == 0


def test_row_keys():
    one = jax.random.key_data(generate.row_keys(5, 4))
    assert len({tuple(key) for key in one.tolist()}) == 4
    for seeds in ((5, 5), (9, 5)):
        several = jax.random.key_data(generate.row_keys(seeds, 2))
        np.testing.assert_array_equal(several[1], one[0])
    with pytest.raises(ValueError, match="3 seeds for 2 prompts"):
        generate.row_keys((1, 2, 3), 2)
