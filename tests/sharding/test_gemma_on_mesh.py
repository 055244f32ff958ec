"""Generations on eight devices: those that transformers stored, and those of one device.

And the compiled step talks between devices as little as it should.
"""

import functools
import math
import re
from typing import Any

import jax
import numpy as np
import pytest
import small_model
from fixture_models import FOLDER, model
from on_mesh import on_mesh
from test_hlo import moved_caches

import carat_jax as carat
from carat_jax import generate, sharding
from carat_jax.chat import ChatFormat
from carat_jax.gemma import Gemma
from carat_jax.speculative import Model, Ngram, speculate

DENSE = FOLDER / "dense_31b_like"
NEW = 40
GREEDY = {"temperature": 0, "stop_token_ids": [], "max_new_tokens": NEW}


@functools.cache
def dense(data: int, cut: int) -> Gemma:
    mesh = carat.mesh(data=data, model=cut)
    return carat.load(DENSE, mesh=mesh, max_context=128, progress=False)


def stored() -> tuple[list[int], list[int], np.ndarray]:
    """The prompt, its continuation, and log-probabilities [NEW, V] of the latter's places."""
    m = model("dense_31b_like")
    ids = m.ids.tolist()
    return ids[:50], ids[50:], np.asarray(jax.nn.log_softmax(m.expected["logits_all"][49:89]))


# --- The stored model ----------------------------------------------------------------------------


def test_rows_cut_over_one_axis_and_the_model_over_the_other():
    gemma = dense(2, 4)
    prompt, continuation, logprobs = stored()
    for out in gemma.generate([prompt, prompt], logprobs=True, **GREEDY):
        assert out.tokens == continuation
        np.testing.assert_allclose(out.logprobs, logprobs.max(-1), atol=4e-4)
    # Another text takes the same programs: what a call returns lies as what the next one takes.
    jitted = (generate.prefill_chunk, generate.decode)
    before = [f._cache_size() for f in jitted]
    gemma.generate([prompt[:30], prompt], logprobs=True, **GREEDY | {"max_new_tokens": 70})
    assert [f._cache_size() for f in jitted] == before


def test_an_engine_and_a_stream_with_a_drafter():
    gemma = dense(1, 8)
    prompt, continuation, _ = stored()
    drafter = carat.load_drafter(FOLDER / "drafter_dense", gemma)
    assert drafter.params["layers_0"]["attention"]["qkv"].sharding.spec[1] == "model"
    with carat.Engine(gemma, slots=1, drafter=drafter, num_proposals=2) as engine:
        requests = [engine.submit(prompt, **GREEDY) for _ in range(2)]
        assert [request.result().tokens for request in requests] == [continuation] * 2
    *pieces, last = gemma.stream(prompt, drafter=drafter, num_proposals=2, **GREEDY)
    assert len(pieces) > 3 and last.generation.tokens == continuation


# --- What the devices tell each other ------------------------------------------------------------

COLLECTIVE = re.compile(
    r"= \(?(\w+)\[([\d,]*)\].*? "
    r"(all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?:-start)?\("
)


def test_a_step_has_two_sums_a_layer_and_moves_neither_weights_nor_caches():
    gemma, rows = dense(1, 8), 3
    config, params = gemma.config, gemma.params
    kv = carat.init_state(config, rows, 128, mesh=params.mesh)
    ids = np.zeros((rows, 1), np.int32)
    forward = jax.jit(carat.forward, static_argnames="config", donate_argnames="state")
    hlo = forward.lower(params, config, ids, kv).compile().as_text()
    found = [match.groups() for line in hlo.splitlines() if (match := COLLECTIVE.search(line))]
    sizes = [math.prod(map(int, shape.split(","))) for _, shape, _ in found]
    D, V, L = 64, 256, 12
    assert sorted((name, size) for (_, _, name), size in zip(found, sizes, strict=True)) == [
        ("all-gather", rows * V),  # the logits
        *[("all-reduce", rows * D)] * (2 * L + 1),  # and one sum for the embedding
    ]
    local = {leaf.addressable_shards[0].data.size for leaf in jax.tree.leaves(kv.layers)}
    assert all(f",{slots}," in hlo for slots in (128, 16 + 64 + 48))
    assert moved_caches(hlo, local) == []


# --- A small model against one device ------------------------------------------------------------

PROMPTS = [[2, 5, 7, 9, 11], [2, 3, 4]]
SAMPLED = {"temperature": 1.0, "top_k": 20, "seed": (3, 4), "max_new_tokens": NEW}
each_mesh = pytest.mark.parametrize("mesh", [(1, 2), (1, 4), (2, 2), (8, 1), (2, 4)])


@functools.cache
def small(data: int, cut: int) -> Gemma:
    """Of its sliding layer 2 KV heads, of its global layer one."""
    params = on_mesh(small_model.params(), carat.mesh(data=data, model=cut))
    options, chat = carat.GenerateOptions(), ChatFormat(empty_thought=True)
    return Gemma(small_model.CONFIG, params, None, chat, options, small_model.CONTEXT)


@functools.cache
def on_one_device() -> list[carat.Generation]:
    return small_model.gemma().generate(PROMPTS, **SAMPLED, logprobs=2)


def alone(row: int) -> dict[str, Any]:
    """The options with which a row gives alone what it gives in the batch."""
    return SAMPLED | {"seed": SAMPLED["seed"][row]}


@pytest.mark.slow
@each_mesh
def test_sampled_rows(mesh):
    out = small(*mesh).generate(PROMPTS, **SAMPLED, logprobs=2)
    for row, expected in zip(out, on_one_device(), strict=True):
        assert row.tokens == expected.tokens and len(set(row.tokens)) > NEW / 2
        np.testing.assert_allclose(row.logprobs, expected.logprobs, atol=1e-4)
        assert [list(top) for top in row.top_logprobs] == [list(t) for t in expected.top_logprobs]


@pytest.mark.slow
@each_mesh
@pytest.mark.parametrize("kind", ["ngram", "model"])
def test_speculation(mesh, kind):
    gemma = small(*mesh)
    drafter = Ngram() if kind == "ngram" else Model(gemma.params, gemma.config)
    out = gemma.generate(PROMPTS, drafter=drafter, num_proposals=3, **SAMPLED)
    assert [row.tokens for row in out] == [row.tokens for row in on_one_device()]
    before = speculate._cache_size()
    gemma.generate(PROMPTS, drafter=drafter, num_proposals=3, **SAMPLED | {"max_new_tokens": 150})
    assert speculate._cache_size() == before


@pytest.mark.slow
@each_mesh
def test_an_engine_whose_rows_come_and_go(mesh):
    with carat.Engine(small(*mesh), slots=4) as engine:
        requests = [engine.submit(PROMPTS[row], **alone(row)) for row in (0, 1, 0, 1, 0)]
        got = [request.result().tokens for request in requests]
    assert got == [on_one_device()[row].tokens for row in (0, 1, 0, 1, 0)]


@pytest.mark.slow
def test_a_batch_that_the_mesh_does_not_divide():
    """Three rows on two groups of devices: each has them all."""
    gemma = small(2, 2)
    mesh = gemma.params.mesh
    assert sharding.rows(mesh, 3) == jax.P() != sharding.rows(mesh, 2)
    out = gemma.generate([*PROMPTS, PROMPTS[0]], **SAMPLED | {"seed": (3, 4, 3)})
    assert [row.tokens for row in out] == [on_one_device()[row].tokens for row in (0, 1, 0)]


@pytest.mark.slow
@each_mesh
def test_logits_and_the_functional_level(mesh):
    gemma, one = small(*mesh), small_model.gemma()
    np.testing.assert_allclose(gemma.logits(PROMPTS[0]), one.logits(PROMPTS[0]), atol=2e-5)
    tokens, lengths = np.array([[2, 5, 7, 9, 11], [2, 3, 4, 0, 0]]), np.array([5, 3])
    options = carat.GenerateOptions(max_new_tokens=NEW)
    out = carat.generate_tokens(
        gemma.params, gemma.config, tokens, lengths, jax.random.key(0), options
    )
    expected = one.generate(PROMPTS, max_new_tokens=NEW)
    assert out.tokens.tolist() == [row.tokens for row in expected]
