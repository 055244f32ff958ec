"""The stored models, cut over eight devices, give what transformers gave on one."""

import functools

import jax
import numpy as np
import pytest
from fixture_models import FOLDER, LOGITS, NAMES, model, step

import carat_jax as carat
from carat_jax.sharding import MeshParams
from carat_jax.speculative import Target
from carat_jax.speculative.drafters.assistant_checkpoint import load_assistant

ROWS = 2


@functools.cache
def params(name: str, mesh: jax.sharding.Mesh) -> MeshParams:
    return carat.load_params(FOLDER / name, model(name).config, mesh=mesh, progress=False)


def check_logits(name: str, data: int, cut: int, T: int, until: int = 90) -> carat.KVState:
    """Feeds the stored ids to every row, T at a time, and compares the logits of each."""
    m, mesh = model(name), carat.mesh(data=data, model=cut)
    state = carat.init_state(m.config, ROWS, 128, slack=0, mesh=mesh)
    for at in range(0, until, T):
        ids = np.tile(m.ids[at : at + T], (ROWS, 1)).astype(np.int32)
        logits, state = step(params(name, mesh), m.config, ids, state)
        for row in np.asarray(logits):
            expected = m.expected["logits_all"][at : at + T]
            np.testing.assert_allclose(row, expected, rtol=0, atol=LOGITS[name])
    return state


def test_logits_with_inputs_of_every_layer():
    check_logits("e2b_like", data=2, cut=4, T=10)


def test_logits_of_a_mixture():
    check_logits("moe_26b_like", data=2, cut=4, T=10)


@pytest.mark.slow
@pytest.mark.parametrize("T", [30, 10, 1])
@pytest.mark.parametrize("mesh", [(1, 2), (4, 2), (2, 4), (8, 1), (1, 8)])
@pytest.mark.parametrize("name", NAMES)
def test_logits_on_every_mesh(name, mesh, T):
    if mesh[1] > model(name).config.num_attention_heads:
        pytest.skip("more devices than heads")
    check_logits(name, *mesh, T)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "target", "cut"),
    [("drafter_dense", "dense_31b_like", 8), ("drafter_dense", "dense_31b_like", 2),
     ("drafter_e2b", "e2b_like", 4)],
)  # fmt: skip
def test_an_assistant_drafter(name, target, cut):
    m, mesh = model(target), carat.mesh(model=cut)
    with np.load(FOLDER / name / "expected.npz") as stored:
        expected = dict(stored)
    assistant = load_assistant(FOLDER / name, m.config, mesh)
    state = check_logits(target, 1, cut, T=50, until=50)
    token = np.full(ROWS, expected["bonus_id"], np.int32)
    hidden = np.tile(expected["target_hidden"], (ROWS, 1))
    at = Target(params(target, mesh), m.config, state, token, hidden)
    for i in range(4):
        scores, hidden = jax.jit(type(assistant).draft)(assistant, at, token, hidden)
        token = scores.best()
        assert token.tolist() == [expected["ref_ids"][i]] * ROWS
        if scores.ids is None:
            for row in np.asarray(scores.logits):
                np.testing.assert_allclose(row, expected["ref_logits"][i], rtol=0, atol=5e-4)
