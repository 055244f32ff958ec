"""The model against the stored outputs of Hugging Face transformers; its sizes and kernels."""

import dataclasses
import functools
import re
from collections import Counter

import float64_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixture_models import (
    CHUNK,
    LENGTHS,
    LOGITS,
    each_model,
    empty,
    feed,
    model,
    record,
    run,
    step,
)
from h200_lowering import lower_for_h200

from carat_jax import attention, layers
from carat_jax.attention import Keys
from carat_jax.config import FULL, PRESETS, GemmaConfig
from carat_jax.kv_state import abstract_state
from carat_jax.model import embedding_scale, forward, hidden_states
from carat_jax.params import abstract_params, init_params, num_params, param_bytes
from pallas_kernels import residual_norm_matmul


@functools.cache
def one_pass(name: str):
    m = model(name)
    return jax.tree.map(np.array, record(m.params, m.config, m.ids[None]))


@functools.cache
def exact(name: str) -> float64_reference.Outputs:
    m = model(name)
    return float64_reference.run(m.raw, m.tensors, m.ids)


# --- Against transformers, float32 ---------------------------------------------------------------


@each_model
def test_the_float64_reference_is_the_same_model(name):
    """What other tests take for exact agrees with the stored float32 logits to their rounding."""
    assert np.abs(exact(name).logits - model(name).expected["logits_all"]).max() < 6e-4


@each_model
def test_one_pass_gives_the_stored_logits_of_all_positions(name):
    m = model(name)
    logits = one_pass(name)[1][0]
    assert logits.dtype == np.float32
    assert LOGITS[name] <= m.tolerance["logits_abs"]
    np.testing.assert_allclose(logits, m.expected["logits_all"], rtol=0, atol=LOGITS[name])
    np.testing.assert_array_equal(logits[49:89].argmax(-1), m.expected["continuation_ids"])


@each_model
def test_every_layer_leaves_the_stored_residual(name):
    m = model(name)
    hidden, _, recorded = one_pass(name)
    states = np.stack(recorded["hidden_states"])[:, 0, :50]
    tolerance = {"rtol": 0, "atol": m.tolerance["hidden_abs"] / 4}
    np.testing.assert_allclose(states, m.expected["hidden_states"], **tolerance)
    np.testing.assert_allclose(hidden[0, :50], m.expected["final_hidden"], **tolerance)


@each_model
def test_the_lending_layers_have_the_stored_keys_and_values(name):
    m = model(name)
    (keys,) = one_pass(name)[2]["keys"]
    for kind in ("sliding", "full"):
        owners = [s for s in m.config.kv_layers if (s.window is None) == (kind == "full")]
        k, v = whole_keys(keys[owners[-1].index])
        for array, letter in ((k, "k"), (v, "v")):
            expected = m.expected[f"kv_{kind}_{letter}"].swapaxes(0, 1)
            np.testing.assert_allclose(array[0, :, :50], expected, rtol=0, atol=2e-4)


def whole_keys(keys: Keys) -> tuple[np.ndarray, np.ndarray]:
    """k and v [B, K, T, H], also where only the rotated widths of k are kept beside v."""
    if keys.k is not None:
        return keys.k, keys.v
    k, half, pairs = keys.v * keys.k_norm, keys.v.shape[-1] // 2, keys.k_rotated.shape[-1] // 2
    k[..., :pairs], k[..., half : half + pairs] = np.split(keys.k_rotated, 2, axis=-1)
    return k, keys.v


def test_the_per_layer_inputs_are_the_stored_ones():
    (per_layer,) = one_pass("e2b_like")[2]["per_layer_inputs"]
    expected = model("e2b_like").expected["per_layer_inputs"]
    np.testing.assert_allclose(per_layer[0, :50], expected, rtol=0, atol=1e-5)


def test_the_router_takes_the_stored_experts_with_the_stored_weights():
    m, recorded = model("moe_26b_like"), one_pass("moe_26b_like")[2]
    for i in range(m.config.num_hidden_layers):
        ((index, share),) = recorded[f"layers_{i}"]["experts"]["router"]
        assert share.dtype == np.float32
        np.testing.assert_array_equal(index[:50], m.expected["router_index"][i])
        np.testing.assert_allclose(share[:50], m.expected["router_weight"][i], rtol=0, atol=1e-4)


@each_model
@pytest.mark.parametrize("T", [1, 16])
def test_prefill_and_then_decode_gives_the_stored_logits(name, T):
    """Prompts of all LENGTHS in one batch, in chunks of 30, then the rest T positions a step.

    For T = 1 the rest is 36 positions, more than two windows.
    """
    m, lengths = model(name), np.array(LENGTHS)
    ids = np.tile(m.ids, (len(lengths), 1))
    prompt, state = run(m, ids, lengths, CHUNK, empty(m, len(lengths)))
    np.testing.assert_array_equal(state.length, lengths)
    end = np.minimum(lengths + 36, 90) if T == 1 else np.full(len(lengths), 90)
    rest, state = run(m, ids, end, T, state)
    np.testing.assert_array_equal(state.length, end)
    for row, (n, last) in enumerate(zip(lengths, end, strict=True)):
        assert np.isnan(prompt[row, n:]).all()
        logits, expected = (
            np.concatenate([prompt[row, :n], rest[row, n:]]),
            m.expected["logits_all"],
        )
        np.testing.assert_allclose(logits[:last], expected[:last], rtol=0, atol=LOGITS[name])


@each_model
def test_greedy_decoding_gives_the_stored_tokens(name):
    m, rows = model(name), len(LENGTHS)
    prompt = np.tile(m.ids[:50], (rows, 1))
    logits, state = run(m, prompt, np.full(rows, 50), CHUNK, empty(m, rows))
    tokens = [logits[:, 49].argmax(-1)]
    for _ in range(39):
        new = jnp.ones(rows, jnp.int32)
        out, state = step(m.params, m.config, jnp.asarray(tokens[-1])[:, None], state, new=new)
        tokens.append(np.asarray(out[:, 0]).argmax(-1))
    for row in np.stack(tokens, axis=1):
        np.testing.assert_array_equal(row, m.expected["continuation_ids"])


# --- bfloat16 ------------------------------------------------------------------------------------


@each_model
def test_bfloat16_is_no_worse_than_rounding_every_intermediate(name):
    """The reference with every activation rounded to bfloat16 is what a plain implementation
    computes. This one keeps more in float32, so against the exact result for the same (rounded)
    weights its error, over all logits, must be no larger: 1.2 leaves room for chance.
    """
    m = model(name)
    config = dataclasses.replace(m.config, dtype="bfloat16")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), m.params)
    hidden, logits, _ = record(params, config, m.ids[None])
    assert (hidden.dtype, logits.dtype) == (jnp.bfloat16, jnp.float32)
    to_bfloat16 = float64_reference.to_bfloat16
    tensors = {key: to_bfloat16(x) for key, x in m.tensors.items()}
    true = float64_reference.run(m.raw, tensors, m.ids).logits
    plain = float64_reference.run(m.raw, tensors, m.ids, cast=to_bfloat16).logits
    error, of_plain = (np.sqrt(np.mean((x - true) ** 2)) for x in (np.asarray(logits[0]), plain))
    assert 0 < error <= 1.2 * of_plain, (error, of_plain)


@pytest.mark.parametrize(
    ("hidden_size", "scale"),
    [(1536, 39.25), (2560, 50.5), (2816, 53.0), (3840, 62.0), (5376, 73.5)],
)
def test_the_embedding_scale_is_rounded_to_the_weights_dtype(hidden_size, scale):
    (config,) = (c for c in PRESETS.values() if c.hidden_size == hidden_size)
    assert embedding_scale(config).dtype == jnp.bfloat16
    assert float(embedding_scale(config)) == scale
    wide = dataclasses.replace(config, dtype="float32")
    assert float(embedding_scale(wide)) == np.sqrt(np.float32(hidden_size))


def test_the_scaled_embedding_is_that_of_the_rounded_scale():
    """sqrt(64 · 0.75) = 6.928… is 6.9375 in bfloat16; the product of the two roundings shows it."""
    m = model("e2b_like")  # D = 48
    config = dataclasses.replace(m.config, dtype="bfloat16")
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), m.params)
    first = record(params, config, m.ids[None])[2]["hidden_states"][0][0]
    rows = np.asarray(params["embed_tokens"], np.float32)[m.ids]
    expected = float64_reference.to_bfloat16(rows * np.float32(6.9375))
    np.testing.assert_array_equal(np.asarray(first, np.float64), expected)


# --- Parameters ----------------------------------------------------------------------------------


# The text part of the published file, less the K/V weights that nothing reads.
PUBLISHED = {
    "e2b": 4_647_449_891 - 18_880_512,
    "e4b": 7_518_069_034 - 55_055_616,
    "12b": 11_907_350_320,
    "26b-a4b": 25_233_141_790,
    "31b": 30_697_345_340,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_published_sizes_have_the_published_parameters(name):
    assert num_params(GemmaConfig.preset(name)) == PUBLISHED[name]
    assert param_bytes(GemmaConfig.preset(name)) == 2 * PUBLISHED[name]


@each_model
def test_random_weights_have_the_shapes_of_the_loaded_ones(name):
    m = model(name)
    random = jax.eval_shape(functools.partial(init_params, m.config), jax.random.key(0))
    loaded = jax.tree.map(lambda x: (x.shape, x.dtype), m.params)
    for tree in (random, abstract_params(m.config)):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), tree) == loaded


def test_random_weights_keep_the_size_of_what_they_multiply():
    """Variance times the widths summed over is one; norms and scales are one."""
    config = dataclasses.replace(
        model("dense_31b_like").config, num_hidden_layers=1, layer_types=(FULL,)
    )
    init = jax.jit(init_params, static_argnums=0)
    layer = init(config, jax.random.key(1))["layers_0"]
    summed = {"qkv": (0,), "o": (0, 1, 2)}
    for name, axes in summed.items():
        w = np.asarray(layer["attention"][name], np.float64)
        assert np.var(w) * np.prod([w.shape[a] for a in axes]) == pytest.approx(1, rel=0.1), name
    for name in ("gate_up", "down"):
        w = np.asarray(layer["mlp"][name], np.float64)
        assert np.var(w) * w.shape[0] == pytest.approx(1, rel=0.1), name
    assert (np.asarray(layer["input_layernorm"]) == 1).all()


# --- The calls -----------------------------------------------------------------------------------


def test_an_unknown_implementation_is_refused():
    m = model("dense_31b_like")
    tokens = jnp.zeros((1, 1), jnp.int32)
    for state in (None, empty(m, 1)):
        with pytest.raises(ValueError, match="implementation='nope' does not exist"):
            jax.eval_shape(
                lambda state: forward(m.params, m.config, tokens, state, implementation="nope"),
                state,
            )


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        (np.zeros(3, np.int32), r"tokens int32\[3\] must be integer \[B, T\], .*tokens\[None\]"),
        (np.zeros((1, 1, 3), np.int32), r"tokens int32\[1, 1, 3\] must be integer \[B, T\]$"),
        (np.zeros((1, 3), np.float32), r"tokens float32\[1, 3\] must be integer"),
        ([[1, 2, 3]], r"tokens is a list: give an integer array \[B, T\]"),
    ],
    ids=["flat", "3D", "float", "list"],
)
def test_tokens_of_another_form_are_refused(tokens, told):
    m = model("dense_31b_like")
    for call in (forward, hidden_states):
        with pytest.raises(ValueError, match=told):
            call(m.params, m.config, tokens, None)


def test_the_state_is_donated():
    m = model("dense_31b_like")
    state = empty(m, len(LENGTHS))
    ids = np.tile(m.ids, (len(LENGTHS), 1))
    next(feed(m, state, ids, np.full(len(LENGTHS), 90), T=1))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.layers))


# --- What reaches the kernels --------------------------------------------------------------------


@each_model
def test_norms_are_taken_together_with_the_products_after_them(name, monkeypatch):
    """All but the last, which no layer follows; to the first residual nothing is added."""
    matrices, added = [], []

    def spy(h, y, w, next_w, matrix, **more):
        matrices.append(matrix.shape)
        added.append(h is not None)
        return residual_norm_matmul(h, y, w, next_w, matrix, **more)

    monkeypatch.setattr(layers, "residual_norm_matmul", spy)
    config, tokens = model(name).config, jax.ShapeDtypeStruct((1, 1), jnp.int32)
    jax.eval_shape(
        lambda params, tokens: hidden_states(params, config, tokens, None),
        abstract_params(config),
        tokens,
    )
    D, expected = config.hidden_size, []
    for spec in config.layers:
        own = (1 if spec.shared_projection else 2) if spec.owns_kv else 0
        heads = spec.num_kv_heads * (spec.group + own)
        expected += [(D, heads * spec.head_dim), (D, 2 * spec.mlp_width)]
    assert matrices == expected
    assert added == [False] + [True] * (len(expected) - 1)


def test_a_mixture_runs_where_integers_have_64_bits():
    """As in a program that switches them on for itself: every op takes what it is given there."""
    m = model("moe_26b_like")
    tokens = jax.ShapeDtypeStruct((1, 5), jnp.int32)
    with jax.enable_x64(True):
        logits, _ = jax.eval_shape(lambda tokens: forward(m.params, m.config, tokens, None), tokens)
    assert logits.dtype == jnp.float32


@each_model
def test_keys_and_values_that_layers_are_lent_may_stay_in_the_cache(name, monkeypatch):
    """Those of a layer's own are read once in a step."""
    reread = []

    def spy(op):
        def call(*args, **more):
            reread.append(more["reread"])
            return op(*args, **more)

        return call

    for op in ("ring_attention", "global_attention"):
        monkeypatch.setattr(attention, op, spy(getattr(attention, op)))
    m = model(name)
    jax.eval_shape(
        lambda state: forward(m.params, m.config, jnp.zeros((1, 1), jnp.int32), state),
        empty(m, 1),
    )
    assert reread == [not spec.owns_kv for spec in m.config.layers]


def test_a_token_passes_a_mixtures_layers_through_kernels_alone():
    """Of 26B-A4B on an H200: twelve a layer; XLA has the embedding, angles and the cap."""
    whole = PRESETS["26b-a4b"]
    kinds = whole.layer_types[0], whole.layer_types[-1]
    config = dataclasses.replace(whole, num_hidden_layers=2, layer_types=kinds, vocab_size=16384)
    text = lower_for_h200(
        lambda params, tokens, state: forward(params, config, tokens, state),
        abstract_params(config),
        jax.ShapeDtypeStruct((1, 1), jnp.int32),
        abstract_state(config, 1, 4096),
    )
    ops = Counter(re.findall(r"stablehlo\.(\w+)", text))
    assert not ops.keys() & {"sort", "scatter", "dot_general", "concatenate", "dynamic_slice"}
    assert [ops[name] for name in ("rsqrt", "reduce", "tanh")] == [0, 0, 1]  # that of the cap
    kernels = re.findall(r"func private @(\w+)\((?:(?!func).)*?@mosaic_gpu", text, re.DOTALL)
    calls = [name for name in re.findall(r"= call @(\w+)\(", text) if name in kernels]
    assert len(calls) == 2 * 12 + 2  # and the first product, with its norm, and the head
