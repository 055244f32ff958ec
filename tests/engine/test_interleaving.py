"""Scheduler: what holds of the small random model holds of trained models and other structures."""

import dataclasses
import functools
from pathlib import Path

import by_hand
import fixture_models
import numpy as np
import pytest
import scripted_model
import small_model
from hypothesis import given, settings
from interleaving import ARRIVALS, Case, play

import carat_jax as carat
from carat_jax.options import GenerateOptions
from carat_jax.params import abstract_params
from carat_jax.speculative import Drafter

SOURCE = Path(__file__).parent.parent / "data" / "sched.py.txt"


def cases(model: carat.Gemma, text: list[int], drafter: Drafter | None = None) -> list[Case]:
    """Lengths at and beside the window and the chunk, up to where rings of 128 slots wrap; every
    second prompt begins like the others."""
    W, C = model.config.sliding_window, by_hand.CHUNK
    made = []
    for i, n in enumerate([W - 1, C + 1, 128, W, W + 1, C - 1, 127, 5]):
        n = min(n, 128)  # more would take another program for `generate`
        start = 0 if i % 2 else 30 * i
        options = {"max_new_tokens": 5 + 11 * i % 37, "stop_token_ids": []}
        made.append(Case(model, tuple(text[start : start + n]), options, drafter))
    return made


@pytest.fixture(scope="module")
def bundled() -> list[Case]:
    """With the drafter that was trained for it, and text like what both have learned."""
    model = carat.load("tiny", dtype="float32", max_context=by_hand.CONTEXT, progress=False)
    text = model.tokenizer.encode(SOURCE.read_text())
    return cases(model, text, carat.load_drafter("tiny", model, progress=False))


@pytest.mark.slow
@settings(max_examples=8)
@given(arrivals=ARRIVALS)
def test_the_bundled_model_with_its_drafter(bundled, arrivals):
    play(by_hand.scheduler(bundled[0].model, 2, bundled[0].drafter), arrivals, bundled)


@pytest.mark.slow
def test_some_of_its_proposals_stand_and_some_fall(bundled):
    accepted = sum(case.accepted_alone for case in bundled)
    written = sum(case.options["max_new_tokens"] for case in bundled)
    assert 0.2 < accepted / written < 0.75  # four of five, if all of them stood


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("moe_26b_like", (4, 5)),  # one that slides, one that does not: quick to compile
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in fixture_models.NAMES),
    ],
)
@settings(max_examples=4)
@given(arrivals=ARRIVALS)
def test_stored_models(name, layers, arrivals):
    """Experts and compact caches, compact caches, and layers that have none of their own."""
    made = stored(name, layers)
    assert len({tuple(case.alone.tokens[:4]) for case in made}) >= 7
    play(by_hand.scheduler(made[0].model, 2), arrivals, made)


@functools.cache
def stored(name: str, layers: tuple[int, ...] | None) -> list[Case]:
    """Some layers of a stored model; None = all."""
    m = fixture_models.model(name)
    config, params = m.config, m.params
    if layers is not None:
        kinds = tuple(config.layer_types[i] for i in layers)
        config = dataclasses.replace(config, num_hidden_layers=len(kinds), layer_types=kinds)
        taken = {f"layers_{place}": params[f"layers_{i}"] for place, i in enumerate(layers)}
        params = {name: (params | taken)[name] for name in abstract_params(config)}
    model = carat.Gemma(
        config,
        params,
        scripted_model.TOKENIZER,
        small_model.gemma().chat_format,
        GenerateOptions(),
        by_hand.CONTEXT,
    )
    text = np.random.default_rng(2).integers(0, config.vocab_size, 400).tolist()
    return cases(model, text)
