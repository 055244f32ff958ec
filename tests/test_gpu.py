"""The model on a GPU: through its kernels against XLA and float32, and against stored tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixture_models import NAMES, model

import carat_jax as carat
from carat_jax import compilation_cache, generate
from carat_jax.bench.decode import large_copies
from carat_jax.config import GemmaConfig
from carat_jax.kv_state import KVState, abstract_state, init_state
from carat_jax.model import Params, forward
from carat_jax.options import GenerateOptions
from carat_jax.params import abstract_params, init_params

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def gpu() -> None:
    """None of these may pass where there is nothing to test."""
    if jax.default_backend() != "gpu":
        pytest.fail(f"needs a GPU: JAX finds only {jax.default_backend()}", pytrace=False)


def small(name: str, layers: int, **changes: int) -> GemmaConfig:
    """A published size with its own heads and windows, and little of all else."""
    config = GemmaConfig.preset(name)
    return dataclasses.replace(
        config,
        hidden_size=1024,
        intermediate_size=2048,
        vocab_size=4096,
        num_hidden_layers=layers,
        layer_types=config.layer_types[:layers],
        **changes,
    )


# Each token of the mixture visits every expert: which ones it would choose among many hangs on
# rounding where routers are random.
CONFIGS = {
    "31b": small("31b", 6),
    "26b-a4b": small("26b-a4b", 6, num_experts=8, top_k_experts=8, moe_intermediate_size=256),
    "e4b": small("e4b", 12, num_kv_shared_layers=6, vocab_size_per_layer_input=4096),
}
each_config = pytest.mark.parametrize("name", list(CONFIGS))
# One that chooses, for the router's kernel: to the bit, so that nothing hangs on rounding.
CONFIGS["128 experts"] = small(
    "26b-a4b", 6, num_experts=128, top_k_experts=8, moe_intermediate_size=256
)

CAPACITY = 2304
CHUNK = 576  # tokens that a prompt is fed in at once
ONE_BY_ONE, TOGETHER = 3, 4  # tokens decoded, then verified

step = jax.jit(forward, static_argnames=("config", "implementation"), donate_argnames="state")


@functools.cache
def params(name: str) -> Params:
    """Random, with scores of a standard deviation of about 3."""
    made = init_params(CONFIGS[name], jax.random.key(0))
    for spec in CONFIGS[name].layers:
        made[f"layers_{spec.index}"]["attention"]["q_norm"] *= 3
    return made


def prompt_lengths(config: GemmaConfig) -> np.ndarray:
    """Prompts that end at the edges of window and ring; after the last, the kernel's splits of a
    31B-like global cache grow with the third token (on 132 multiprocessors)."""
    W, R = config.sliding_window, config.sliding_window + 64
    return np.array([1, 63, W - 4, W - 1, W, R - 2, R, 64 * 33 - 2])


def tokens_of(config: GemmaConfig) -> np.ndarray:
    """int32 [B, positions], prompts and what follows them."""
    lengths = prompt_lengths(config)
    shape = (len(lengths), max(lengths) + ONE_BY_ONE + TOGETHER)
    return np.random.default_rng(0).integers(0, config.vocab_size, shape, np.int32)


def followed(config: GemmaConfig, array: np.ndarray) -> np.ndarray:
    """Of an array [B, positions, ...], the positions that are decoded and verified."""
    index = prompt_lengths(config)[:, None] + np.arange(ONE_BY_ONE + TOGETHER)
    return array[np.arange(len(index))[:, None], index]


def prefilled(name: str, lengths: np.ndarray, tokens: np.ndarray, implementation: str | None):
    """The state after rows of these lengths."""
    config, state = CONFIGS[name], init_state(CONFIGS[name], len(lengths), CAPACITY)
    for start in range(0, max(lengths), CHUNK):
        piece = np.zeros((len(lengths), CHUNK), np.int32)
        kept = tokens[:, start : start + CHUNK]
        piece[:, : kept.shape[1]] = kept
        new = jnp.asarray(np.clip(lengths - start, 0, CHUNK))
        _, state = step(params(name), config, piece, state, new=new, implementation=implementation)
    return state


def decoded(
    name: str, state: KVState, tokens: np.ndarray, sizes: list[int], implementation: str | None
) -> np.ndarray:
    """Logits [B, T, V] of tokens [B, T] fed in steps of these sizes."""
    logits = []
    for piece in np.split(tokens, np.cumsum(sizes)[:-1], axis=1):
        out, state = step(params(name), CONFIGS[name], piece, state, implementation=implementation)
        logits.append(np.asarray(out))
    return np.concatenate(logits, axis=1)


def logits_by(name: str, implementation: str | None) -> np.ndarray:
    config = CONFIGS[name]
    tokens = tokens_of(config)
    state = prefilled(name, prompt_lengths(config), tokens, implementation)
    sizes = [1] * ONE_BY_ONE + [TOGETHER]
    return decoded(name, state, followed(config, tokens), sizes, implementation)


def exact_logits(name: str) -> np.ndarray:
    """In float32, in one pass without any cache."""
    config = dataclasses.replace(CONFIGS[name], dtype="float32")
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params(name))
    one_pass = jax.jit(
        lambda wide, tokens: forward(wide, config, tokens, None, implementation="xla")[0]
    )
    return followed(config, np.asarray(one_pass(wide, tokens_of(config))))


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param("31b", slice(None), id="31b-all"),
        pytest.param("31b", slice(5, 6), id="31b-one"),
        pytest.param("e4b", slice(5, 6), id="e4b-one"),
        pytest.param("128 experts", slice(5, 6), id="26b-a4b-one"),
    ],
)
def test_verifying_gives_the_bits_of_decoding(name, rows):
    """What makes speculation choose the tokens of plain decoding in bfloat16 too. Every product of
    these is large enough for `skinny_matmul`, or in `per_layer_input` or `expert_inputs`, which
    leave more than 16 rows to XLA. A row alone is decoded by kernels of its own, those of
    `residual_norm_matmul`."""
    config = CONFIGS[name]
    tokens, lengths = tokens_of(config), prompt_lengths(config)

    def logits(sizes: list[int]) -> np.ndarray:
        state = prefilled(name, lengths[rows], tokens[rows], None)
        return decoded(name, state, followed(config, tokens)[rows], sizes, None)

    one_by_one = logits([1] * (ONE_BY_ONE + TOGETHER))
    np.testing.assert_array_equal(logits([ONE_BY_ONE + TOGETHER]), one_by_one)


@each_config
def test_logits_through_the_kernels_are_as_good_as_through_xla(name):
    exact = exact_logits(name)

    def error(logits: np.ndarray) -> np.ndarray:
        """‖logits - exact‖ / ‖exact‖ [B, T]."""
        return np.linalg.norm(logits - exact, axis=-1) / np.linalg.norm(exact, axis=-1)

    kernels, xla = (error(logits_by(name, implementation)) for implementation in (None, "xla"))
    assert xla.max() < 0.25  # on a CPU 0.06 for 31B, 0.1 for E4B: random layers magnify rounding
    assert (kernels < 2 * xla + 0.005).all()  # one position's error is in part chance
    assert np.sqrt((kernels**2).mean()) < 1.25 * np.sqrt((xla**2).mean())


@each_config
def test_a_decode_loop_writes_its_caches_in_place(name):
    """And runs every layer through a kernel for the inputs of attention and one for attention."""
    config, B = CONFIGS[name], 2
    kv, row = abstract_state(config, B, CAPACITY), jax.ShapeDtypeStruct((B,), jnp.int32)
    controls = generate.Controls.of(GenerateOptions(max_new_tokens=8), generate.row_keys(0, B))
    state = generate.DecodeState(kv, token=row, generated=row, finish=row, controls=controls)
    stopped = jax.ShapeDtypeStruct((B,), jnp.bool_)
    program = generate.decode.lower(
        abstract_params(config), config, state, jnp.int32(5), stopped, size=8
    ).compile()
    text, leaves = program.as_text(), jax.tree.leaves(kv.layers)
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in leaves]
    assert large_copies(text, at_least=min(sizes)) == []
    assert program.memory_analysis().alias_size_in_bytes >= sum(sizes)
    if str(jax.devices()[0].compute_capability).startswith("9."):
        assert text.count('custom_call_target="mosaic_gpu') >= 2 * config.num_hidden_layers


@pytest.mark.parametrize("name", NAMES)
def test_greedy_tokens_are_the_stored_ones(name):
    """Those that Hugging Face transformers chose, in float32."""
    m = model(name)
    prompt, continuation = m.expected["prompt_ids"], m.expected["continuation_ids"]
    options = GenerateOptions(max_new_tokens=len(continuation))
    lengths = np.array([len(prompt)])
    out = carat.generate_tokens(
        m.params, m.config, prompt[None], lengths, jax.random.key(0), options
    )
    np.testing.assert_array_equal(out.tokens, continuation[None])


def test_the_bundled_model_writes_what_it_writes_on_a_cpu(monkeypatch):
    """Whoever guesses, and however often the loops within CUDA graphs are called."""
    monkeypatch.setattr(compilation_cache, "enable", lambda: None)  # that is the user's

    def texts(*drafters: str | None) -> list[str]:
        gemma = carat.load("tiny", dtype="float32", progress=False)
        drafters = [name and carat.load_drafter(name, gemma) for name in drafters]
        return [gemma.generate("def main(", max_new_tokens=96, drafter=d).text for d in drafters]

    with jax.default_device(jax.devices("cpu")[0]):
        (expected,) = texts(None)
    assert texts(None, "ngram", "tiny", None, "ngram") == [expected] * 5
