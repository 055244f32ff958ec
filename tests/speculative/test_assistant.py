"""Assistant drafters against the stored outputs of Hugging Face transformers, and their files."""

import dataclasses
import functools
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fixture_models import FOLDER, Model, empty, model
from h200_lowering import lower_for_h200
from safetensors.numpy import load_file, save_file

from carat_jax import generate
from carat_jax.checkpoint import CheckpointError
from carat_jax.config import FULL, PRESETS, SLIDING, ConfigError, GemmaConfig
from carat_jax.generate import Controls
from carat_jax.kv_state import KVState, LayerKV, RingKV, abstract_state
from carat_jax.model import hidden_states
from carat_jax.options import GenerateOptions
from carat_jax.params import abstract_params
from carat_jax.speculative import Drafter, Exact, SpeculativeState, Target, speculate, start
from carat_jax.speculative.drafters.assistant import Assistant, lent_keys
from carat_jax.speculative.drafters.assistant_checkpoint import load_assistant
from carat_jax.speculative.drafters.assistant_config import AssistantConfig, check_pair

TARGETS = {"drafter_dense": "dense_31b_like", "drafter_e2b": "e2b_like"}
CONFIGS = Path(__file__).parents[1] / "configs"
K = 4
LENGTHS = np.arange(50, 90)  # of the text before the token that is fed next

each_drafter = pytest.mark.parametrize("name", TARGETS, scope="session")
read = jax.jit(hidden_states, static_argnames=("config", "implementation"))


@functools.cache
def drafter(name: str) -> tuple[Assistant, Model, dict[str, np.ndarray]]:
    """The drafter, its target, and what is stored for them."""
    m = model(TARGETS[name])
    with np.load(FOLDER / name / "expected.npz") as stored:
        expected = dict(stored)
    return load_assistant(FOLDER / name, m.config), m, expected


# --- Against transformers, float32 ---------------------------------------------------------------


def with_rings_of(slots: int, state: KVState) -> KVState:
    def cut(kv: LayerKV) -> LayerKV:
        return jax.tree.map(lambda x: x[:, :, :slots], kv) if isinstance(kv, RingKV) else kv

    return state.replace(layers=tuple(map(cut, state.layers)))


@functools.cache
def prefilled(name: str) -> tuple[np.ndarray, KVState]:
    """The target's last hidden state [40, D] and state for each length from 50 to 89.

    Rings of 24 slots, for a window of 16 and K + 1 new positions, have wrapped twice or more.
    """
    _, m, _ = drafter(name)
    tokens = np.tile(m.ids, (len(LENGTHS), 1))
    state = with_rings_of(24, empty(m, len(LENGTHS)))
    hidden, state = read(m.params, m.config, tokens, state, new=jnp.asarray(LENGTHS))
    return np.asarray(hidden)[np.arange(len(LENGTHS)), LENGTHS - 1], state


def littered(state: KVState) -> KVState:
    """The state with large numbers wherever a rejected proposal of K + 1 tokens may have been."""
    draw = np.random.default_rng(0)

    def litter(kv: LayerKV) -> LayerKV:
        position = np.asarray(state.length)[:, None] + np.arange(K + 1)
        slot = position % kv.v.shape[2]  # of 128 positions in a global cache, none wraps

        def write(x: jax.Array) -> jax.Array:
            x, rows = np.array(x), np.arange(len(slot))[:, None]
            x[rows, :, slot] = 100 * draw.standard_normal((*slot.shape, *x.shape[1::2]))
            return jnp.asarray(x)

        return jax.tree.map(write, kv)

    return state.replace(layers=tuple(map(litter, state.layers)))


@jax.jit
def draft(assistant: Assistant, target: Target) -> dict[str, jax.Array]:
    """K tokens, and step by step scores of the vocabulary [B, K, V] and projections [B, K, D].

    What the clustered head does not score is one below the least of what it does.
    """
    token, hidden, scored, projected = target.token, target.hidden, [], []
    for _ in range(K):
        scores, hidden = assistant.draft(target, token, hidden)
        token, logits = scores.best(), scores.logits
        if scores.ids is not None:
            others = jnp.min(logits, axis=-1, keepdims=True) - 1
            logits = jnp.repeat(others, target.config.vocab_size, axis=-1)
            logits = logits.at[jnp.arange(len(logits))[:, None], scores.ids].set(scores.logits)
        scored.append(logits)
        projected.append(hidden)
    proposal, _ = assistant.propose(None, target, K, None)
    assert proposal.logits is None  # points
    return {
        "ids": proposal.tokens,
        "logits": jnp.stack(scored, axis=1),
        "projected": jnp.stack(projected, axis=1),
    }


@functools.cache
def drafted(name: str) -> dict[str, np.ndarray]:
    """What `draft` gives for each of LENGTHS."""
    assistant, m, _ = drafter(name)
    hidden, state = prefilled(name)
    token = jnp.asarray(m.ids[LENGTHS])
    target = Target(m.params, m.config, littered(state), token, jnp.asarray(hidden))
    return jax.tree.map(np.asarray, draft(assistant, target))


@each_drafter
def test_the_chain_is_the_stored_one(name):
    _, m, expected = drafter(name)
    assert LENGTHS[0] == expected["kv_len"] == expected["ref_position"] + 1
    assert m.ids[LENGTHS[0]] == expected["bonus_id"]
    hidden, got = prefilled(name)[0][0], drafted(name)
    np.testing.assert_allclose(hidden, expected["target_hidden"], rtol=0, atol=5e-4)
    np.testing.assert_array_equal(got["ids"][0], expected["ref_ids"])
    np.testing.assert_allclose(got["logits"][0], expected["ref_logits"], rtol=0, atol=5e-4)
    np.testing.assert_allclose(got["projected"][0], expected["ref_projected"], rtol=0, atol=5e-4)


# --- On a GPU -------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=pytest.mark.slow) for n in ("12b", "26b-a4b")), "31b"]
)
def test_a_round_with_a_full_head_leaves_only_the_choice_of_tokens_to_xla(name, rows):
    config = GemmaConfig.from_dict(json.loads((CONFIGS / f"{name}.json").read_text()))
    raw = json.loads((CONFIGS / f"{name}-drafter.json").read_text())
    assistant = Assistant.abstract(AssistantConfig.from_dict(raw))
    token = jax.ShapeDtypeStruct((rows,), jnp.int32)
    hidden = jax.ShapeDtypeStruct((rows, config.hidden_size), jnp.bfloat16)
    state, params = abstract_state(config, rows, 8192), abstract_params(config)

    def propose(assistant, params, state, token, hidden):
        target = Target(params, config, state, token, hidden)
        return assistant.propose(None, target, 2, None)[0].tokens

    text = lower_for_h200(propose, assistant, params, state, token, hidden)
    reductions = [line for line in text.splitlines() if "stablehlo.reduce(" in line]
    assert reductions  # no norm among them
    assert all(f"x{config.vocab_size}xf32>" in line for line in reductions), reductions
    assert "dot_general" not in text


# --- In the loop ---------------------------------------------------------------------------------


class Recording(Drafter):
    """Passes on the proposals of a drafter, and keeps them by the length they were made at."""

    inner: Assistant

    def init(self, config, batch, max_context):
        self.inner.init(config, batch, max_context)
        return jnp.full((batch, max_context, K), -1)

    def propose(self, state, target, num_proposals, keys):
        proposal, _ = self.inner.propose(None, target, num_proposals, keys)
        rows = jnp.arange(state.shape[0])
        return proposal, state.at[rows, target.kv.length].set(proposal.tokens)


@pytest.mark.parametrize(
    "name", [pytest.param("drafter_dense", marks=pytest.mark.slow), "drafter_e2b"], scope="session"
)
def test_the_loop_gives_the_plain_tokens_and_the_drafter_sees_a_clean_past(name):
    """Whatever was rejected before, proposals are those after a fresh prefill of as much text."""
    assistant, m, _ = drafter(name)
    end, rows = len(m.ids), np.array([0, 11])
    lengths = LENGTHS[rows]
    hidden, kv = jax.tree.map(lambda x: jnp.asarray(x[rows]), prefilled(name))
    options = GenerateOptions(max_new_tokens=end, stop_token_ids=())
    controls = Controls.of(options, generate.row_keys(0, 2))
    controls = controls.replace(limit=jnp.asarray(end - lengths, jnp.int32))
    first, decode = generate.begin(m.params, m.config, hidden, kv, controls)
    recording = Recording(assistant)
    state = start(recording, recording.init(m.config, 2, end), hidden, decode)
    out, _, state = speculate(
        m.params,
        m.config,
        recording,
        Exact(),
        state,
        jnp.int32(end),
        jnp.zeros((2,), bool),
        num_proposals=K,
        size=end * (K + 1),
    )
    for row, length in enumerate(lengths):
        rest = out.tokens[row, : out.num_tokens[row]]
        np.testing.assert_array_equal([first.tokens[row, 0], *rest], m.ids[length:])

    recorded = np.asarray(state.drafter)[:, LENGTHS]
    visited = recorded[..., 0] >= 0
    assert visited.sum() > 50  # a random drafter is right by luck only
    # Equal, but for what follows a choice that hangs on rounding.
    top = np.sort(drafted(name)["logits"], axis=-1)
    clear = np.logical_and.accumulate(top[..., -1] - top[..., -2] > 1e-3, axis=-1)
    assert clear.mean() > 0.95
    expected = np.broadcast_to(drafted(name)["ids"], recorded.shape)
    compared = visited[..., None] & clear
    np.testing.assert_array_equal(recorded[compared], expected[compared])


def test_while_it_is_not_asked_it_does_nothing():
    """It has no state, so of a round without proposals the compiler drops all its work."""
    assistant, m, _ = drafter("drafter_dense")
    kv = abstract_state(m.config, 1, 64)
    row = jax.ShapeDtypeStruct((1,), jnp.int32)
    hidden = jax.ShapeDtypeStruct((1, m.config.hidden_size), jnp.float32)
    controls = Controls.of(GenerateOptions(), generate.row_keys(0, 1))
    decode = generate.DecodeState(kv=kv, token=row, generated=row, finish=row, controls=controls)
    state = SpeculativeState(decode, hidden, None)
    stopped = jax.ShapeDtypeStruct((1,), bool)
    lowered = speculate.lower(
        m.params,
        m.config,
        assistant,
        Exact(),
        state,
        jnp.int32(1),
        stopped,
        num_proposals=0,
        size=8,
    )
    assert "/draft/" in lowered.as_text(debug_info=True)
    assert "/draft/" not in lowered.compile().as_text()


# --- Configurations ------------------------------------------------------------------------------

# hidden_size, query heads, parameters without the scalar of each layer, and the target's layers
# whose keys and values are read: sliding, full.
PUBLISHED = {
    "e2b": (256, 4, 77_731_328, 13, 14),
    "e4b": (256, 4, 78_517_760, 22, 23),
    "12b": (1024, 16, 422_856_960, 46, 47),
    "26b-a4b": (1024, 16, 419_711_232, 28, 29),
    "31b": (1024, 32, 469_518_592, 58, 59),
}
each_size = pytest.mark.parametrize("size", PUBLISHED)


@each_size
def test_the_published_configurations(size):
    config = AssistantConfig.from_json(CONFIGS / f"{size}-drafter.json")
    hidden_size, heads, parameters, *_ = PUBLISHED[size]
    assert config == AssistantConfig.preset(size)
    assert AssistantConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert (config.text.hidden_size, config.text.num_attention_heads) == (hidden_size, heads)
    assert config.text.layer_types == (SLIDING, SLIDING, SLIDING, FULL)
    assert config.use_ordered_embeddings == (size in ("e2b", "e4b"))
    leaves = jax.tree.leaves(Assistant.abstract(config).params)
    assert sum(leaf.size for leaf in leaves) == parameters + 4
    assert {leaf.dtype.name for leaf in leaves} == {"bfloat16"}


@each_size
def test_the_keys_of_the_published_donors_are_read(size):
    config = GemmaConfig.preset(size)
    kv = abstract_state(config, 1, 64)
    at = {spec.index: layer for spec, layer in zip(config.kv_layers, kv.layers, strict=True)}
    norms = {f"layers_{i}": {"attention": {"k_norm": i}} for i in range(config.num_hidden_layers)}
    lent = lent_keys(Target(norms, config, kv, None, None))
    sliding, full = PUBLISHED[size][3:]
    assert lent[SLIDING].k is at[sliding].k and lent[SLIDING].v is at[sliding].v
    assert lent[FULL].v is at[full].v and lent[FULL].k is at[full].k
    assert lent[FULL].k_rotated is at[full].k_rotated
    assert lent[FULL].k_norm == (full if config.attention_k_eq_v else None)


@each_size
def test_a_drafter_fits_its_own_size_alone(size):
    for other, target in PRESETS.items():
        if other == size:
            check_pair(AssistantConfig.preset(size), target)
            continue
        with pytest.raises(ConfigError) as refusal:
            check_pair(AssistantConfig.preset(size), target)
        own, theirs = PRESETS[size].hidden_size, target.hidden_size
        assert f"backbone_hidden_size {own:,}" in str(refusal.value)
        assert f"hidden_size {theirs:,}" in str(refusal.value)


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("hidden_size", 96, "backbone_hidden_size 64 is not the target's hidden_size 96"),
        ("vocab_size", 300, "vocab_size 256 is not the target's vocab_size 300"),
        ("num_key_value_heads", 2, "num_key_value_heads 4 is not"),
        ("num_global_key_value_heads", 4, "num_global_key_value_heads 2 is not"),
        ("head_dim", 32, "head_dim 16 is not the target's head_dim 32"),
        ("global_head_dim", 64, "global_head_dim 32 is not"),
        ("sliding_window", 20, "sliding_window 16 is not the target's sliding_window 20"),
        ("rope_theta", 2e4, "rope_theta 10,000.0 is not the target's rope_theta 20,000.0"),
        ("global_rope_theta", 2e6, "global_rope_theta 1,000,000.0 is not"),
        ("partial_rotary_factor", 0.5, "partial_rotary_factor 0.25 is not"),
        ("layer_types", (FULL,) * 12, "'sliding_attention'"),
    ],
)
def test_what_differs_in_a_wrong_pair_is_named(field, value, complaint):
    assistant, m, _ = drafter("drafter_dense")
    target = dataclasses.replace(m.config, **{field: value})
    for refused in (
        lambda: load_assistant(FOLDER / "drafter_dense", target),
        lambda: assistant.init(target, 1, 64),
    ):
        with pytest.raises(ConfigError) as refusal:
            refused()
        assert complaint in str(refusal.value)


REMOVED = object()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"model_type": "gemma4"}, "model_type = 'gemma4' is no drafter"),
        ({"model_type": REMOVED}, "model_type = None"),
        ({"text_config": REMOVED}, "text_config = None"),
        ({"backbone_hidden_size": REMOVED}, "lacks backbone_hidden_size"),
        ({"backbone_hidden_size": 0}, "backbone_hidden_size = 0"),
        ({"use_ordered_embeddings": 1}, "use_ordered_embeddings = 1"),
        ({"num_centroids": 31}, "vocab_size 256 is no multiple of num_centroids 31"),
        ({"centroid_intermediate_top_k": 33}, "centroid_intermediate_top_k = 33"),
        ({"tie_word_embeddings": False}, "tie_word_embeddings = False"),
        ({"dtype": "float16"}, "dtype = 'float16'"),
        ({"a_new_key": 3}, "a_new_key = 3"),
        ({"auto_map": {"AutoModel": "code.Model"}}, "auto_map"),
        ({"text_config.model_type": "gemma3_text"}, "'gemma3_text'"),
        ({"text_config.a_new_key": 3}, "a_new_key = 3"),
        ({"text_config.num_kv_shared_layers": 3}, "num_kv_shared_layers = 3"),
        ({"text_config.final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"text_config.hidden_size_per_layer_input": REMOVED}, "hidden_size_per_layer_input"),
        ({"text_config.use_double_wide_mlp": True}, "use_double_wide_mlp = True"),
        ({"text_config.num_attention_heads": 0}, "num_attention_heads = 0"),
    ],
)
def test_a_configuration_that_would_be_computed_wrongly_is_refused(changes, complaint):
    raw = json.loads((FOLDER / "drafter_e2b" / "config.json").read_text())
    for path, value in changes.items():
        *section, key = path.split(".")
        where = raw[section[0]] if section else raw
        if value is REMOVED:
            del where[key]
        else:
            where[key] = value
    with pytest.raises(ConfigError) as refusal:
        AssistantConfig.from_dict(raw)
    assert complaint in str(refusal.value)


# --- Checkpoints ---------------------------------------------------------------------------------


@each_drafter
def test_random_weights_have_the_shapes_of_the_loaded_ones(name):
    assistant, _, _ = drafter(name)
    config, key = assistant.config, jax.random.key(0)
    random = jax.eval_shape(functools.partial(Assistant.random, config), key)
    loaded = jax.tree.map(lambda x: (x.shape, x.dtype), assistant)
    for other in (random, Assistant.abstract(config)):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), other) == loaded


def test_random_clusters_hold_every_token():
    config = drafter("drafter_e2b")[0].config
    ordering = jax.jit(lambda key: Assistant.random(config, key).token_ordering)
    ids = np.sort(ordering(jax.random.key(0)), axis=None)
    np.testing.assert_array_equal(ids, np.arange(config.text.vocab_size))


def test_weights_come_in_the_dtype_of_the_target():
    assistant, m, _ = drafter("drafter_e2b")
    target = dataclasses.replace(m.config, dtype="bfloat16")
    cast = load_assistant(FOLDER / "drafter_e2b", target)
    assert cast.config.text.dtype == "bfloat16"
    np.testing.assert_array_equal(cast.token_ordering, assistant.token_ordering)
    for a, b in zip(jax.tree.leaves(cast.params), jax.tree.leaves(assistant.params), strict=True):
        np.testing.assert_array_equal(a, b.astype(jnp.bfloat16), strict=True)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "drafter"
    shutil.copytree(FOLDER / "drafter_e2b", folder)
    return folder


def refusal(folder: Path, **changes: np.ndarray | None) -> str:
    """What loading says after tensors have been replaced, added or, with None, removed."""
    file = folder / "model.safetensors"
    tensors = {name.replace(".", "__"): x for name, x in load_file(file).items()} | changes
    kept = {name.replace("__", "."): x for name, x in tensors.items() if x is not None}
    save_file(kept, file)
    with pytest.raises(CheckpointError) as caught:
        load_assistant(folder, drafter("drafter_e2b")[1].config)
    return str(caught.value)


def test_everything_wrong_with_the_weights_is_in_one_error(copy):
    message = refusal(
        copy,
        model__norm__weight=None,
        model__layers__3__self_attn__q_proj__weight=np.zeros((64, 24), np.float32),
        model__layers__0__self_attn__k_proj__weight=np.zeros((16, 24), np.float32),
        pre_projection__weight=np.zeros((24, 96), np.int32),
        masked_embedding__token_ordering=np.arange(256, dtype=np.int32),
    )
    for line in (
        "5 problems",
        "missing model.norm.weight [24]",
        "model.layers.3.self_attn.q_proj.weight has shape [64, 24], the configuration gives "
        "[128, 24]",
        "unexpected model.layers.0.self_attn.k_proj.weight [16, 24]",
        "pre_projection.weight has dtype I32; supported: BF16, F32",
        "masked_embedding.token_ordering has dtype I32; supported: I64",
    ):
        assert line in message


def test_clusters_that_leave_out_a_token_are_refused(copy):
    ids = np.arange(256)
    ids[7] = 8
    changes = {"masked_embedding__token_ordering": ids, "model__norm__weight": None}
    message = refusal(copy, **changes)
    assert "token_ordering does not name every token once" in message
    assert "missing model.norm.weight [24]" in message


def test_a_damaged_file_is_refused(copy):
    file = copy / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="damaged"):
        load_assistant(copy, drafter("drafter_e2b")[1].config)


def test_a_folder_without_a_drafter_is_refused(copy):
    target = drafter("drafter_e2b")[1].config
    with pytest.raises(ConfigError, match="'gemma4' is no drafter"):
        load_assistant(FOLDER / "e2b_like", target)
    (copy / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors"):
        load_assistant(copy, target)
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        load_assistant(copy / "config.json", target)
