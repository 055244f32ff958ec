"""Which tensors make up the parameters, against lists that were written by others."""

import json
import math
from pathlib import Path

import jax
import pytest
from random_checkpoints import tensor_shapes
from safetensors import safe_open

from carat_jax.checkpoint.mapping import PREFIXES, SKIPPED, recipes, unused
from carat_jax.config import PRESETS, GemmaConfig
from carat_jax.params import abstract_params

CONFIGS = Path(__file__).parents[1] / "configs"
FIXTURES = Path(__file__).parents[1] / "fixtures"
# Of the published files: text parameters, and those of them that nothing reads.
PARAMETERS = {
    "e2b": (4_647_449_891, 18_880_512),
    "e4b": (7_518_069_034, 55_055_616),
    "12b": (11_907_350_320, 0),
    "26b-a4b": (25_233_141_790, 0),
    "31b": (30_697_345_340, 0),
}
UNUSED_TENSORS = {"e2b": 60, "e4b": 54, "12b": 0, "26b-a4b": 0, "31b": 0}
each_size = pytest.mark.parametrize("size", PARAMETERS)


@each_size
def test_the_published_number_of_parameters(size):
    total, dead = PARAMETERS[size]
    parts = [part for recipe in recipes(PRESETS[size]).values() for part in recipe.parts]
    assert sum(math.prod(part.shape) for part in parts) == total - dead
    assert len({part.name for part in parts}) == len(parts)
    assert len(unused(PRESETS[size])) == UNUSED_TENSORS[size]


@each_size
def test_recipes_make_the_parameters_of_the_model(size):
    shapes = jax.tree_util.tree_leaves_with_path(abstract_params(PRESETS[size]))
    expected = {
        jax.tree_util.keystr(path, simple=True, separator="/"): s.shape for path, s in shapes
    }
    assert {path: recipe.shape for path, recipe in recipes(PRESETS[size]).items()} == expected


@each_size
def test_parts_fill_their_parameter(size):
    for recipe in recipes(PRESETS[size]).values():
        assert math.prod(recipe.shape) == sum(math.prod(part.shape) for part in recipe.parts)
        for part in recipe.parts:
            assert math.prod(part.view) == math.prod(part.shape)
            end = [s + part.view[axis] for s, axis in zip(part.start, recipe.order, strict=True)]
            assert all(at <= size for at, size in zip(end, recipe.shape, strict=True))


@pytest.mark.parametrize(
    "name", ["dense_31b_like", "e2b_like", "moe_26b_like", "per_layer_ungated"]
)
def test_names_and_shapes_are_those_of_stored_models(name):
    config = GemmaConfig.from_json(FIXTURES / name)
    with safe_open(FIXTURES / name / "model.safetensors", "numpy") as file:
        stored = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
    dead = {PREFIXES[0] + name for name in unused(config)}
    assert stored.keys() >= dead
    assert {
        PREFIXES[0] + part.name: part.shape
        for recipe in recipes(config).values()
        for part in recipe.parts
    } == {name: shape for name, shape in stored.items() if name not in dead}


@each_size
def test_names_and_shapes_of_the_published_sizes(size):
    text = json.loads((CONFIGS / f"{size}.json").read_text())["text_config"]
    parts = [part for recipe in recipes(PRESETS[size]).values() for part in recipe.parts]
    assert {f"model.{part.name}": part.shape for part in parts} == tensor_shapes(text, "model.")


@pytest.mark.parametrize(
    ("name", "skipped"),
    [
        ("model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight", True),
        ("model.embed_vision.embedding_projection.weight", True),
        ("model.audio_tower.subsample.weight", True),
        ("model.embed_audio.embedding_projection.weight", True),
        ("model.vision_embedder.patch.weight", True),
        ("model.language_model.layers.0.vision_tower.weight", False),
        ("model.vision_tower", False),
        ("lm_head.weight", False),
        ("model.layers.0.mlp.gate_proj.bias", False),
    ],
)
def test_which_tensors_are_of_other_modalities(name, skipped):
    assert bool(SKIPPED.fullmatch(name)) == skipped
