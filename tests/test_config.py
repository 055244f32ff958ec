"""`GemmaConfig` against the published files, and against every way to write one wrongly."""

import copy
import dataclasses
import json
import pickle
from pathlib import Path

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from carat_jax.config import FULL, PRESETS, SLIDING, ConfigError, GemmaConfig

HERE = Path(__file__).parent
SIZES = ("e2b", "e4b", "12b", "26b-a4b", "31b")
# The published sizes once more, by hand: layers, the global ones, their KV heads where they are
# not those of the sliding layers.
GLOBAL_LAYERS = {
    "e2b": (35, [4, 9, 14, 19, 24, 29, 34], None),
    "e4b": (42, [5, 11, 17, 23, 29, 35, 41], None),
    "12b": (48, [5, 11, 17, 23, 29, 35, 41, 47], 1),
    "26b-a4b": (30, [5, 11, 17, 23, 29], 2),
    "31b": (60, [5, 11, 17, 23, 29, 35, 41, 47, 53, 59], 4),
}
FIVE_TO_ONE = tuple(size for size in SIZES if size != "e2b")
each_size = pytest.mark.parametrize("size", SIZES)


def published(size: str) -> dict:
    return json.loads((HERE / "configs" / f"{size}.json").read_text())


def flat(size: str = "31b") -> dict:
    """The text section by itself."""
    return published(size)["text_config"]


def with_value(path: str, value: object, size: str = "31b") -> dict:
    """A published config with one value changed; the path's parts are joined by dots."""
    raw = published(size)
    *sections, key = path.split(".")
    section = raw
    for name in sections:
        section = section[name]
    section[key] = value
    return raw


def refusal(raw: dict) -> str:
    with pytest.raises(ConfigError) as caught:
        GemmaConfig.from_dict(raw)
    return str(caught.value)


# What is read


@each_size
def test_a_preset_equals_the_published_file(size):
    assert GemmaConfig.from_json(HERE / "configs" / f"{size}.json") == GemmaConfig.preset(size)


@each_size
def test_the_flat_form_is_the_same(size):
    assert GemmaConfig.from_dict(flat(size)) == GemmaConfig.preset(size)


@each_size
@pytest.mark.parametrize("nested", [True, False])
def test_per_layer_config_is_the_same(size, nested):
    layers, global_layers, heads = GLOBAL_LAYERS[size]
    assert layers > 9  # so that "5" is written "05"
    raw = published(size)
    text = raw["text_config"]
    del text["global_head_dim"], text["num_global_key_value_heads"]
    entry = {"head_dim": 512} | ({} if heads is None else {"num_key_value_heads": heads})
    text["per_layer_config"] = {f"{i:02}": entry for i in global_layers}
    assert GemmaConfig.from_dict(raw if nested else text) == GemmaConfig.preset(size)


@pytest.mark.parametrize("size", FIVE_TO_ONE)
def test_absent_layer_types_are_five_to_one(size):
    raw = published(size)
    del raw["text_config"]["layer_types"]
    assert GemmaConfig.from_dict(raw) == GemmaConfig.preset(size)


@pytest.mark.parametrize("base", ["odd_window", "defaults", "full_rotary"])
def test_other_spellings_are_the_same(base):
    """Files that transformers wrote, or that it showed to give the same logits."""
    folder = HERE / "configs/layouts"
    spellings = [path for path in folder.glob(f"{base}_*.json")]
    assert len(spellings) >= {"odd_window": 7, "defaults": 2, "full_rotary": 1}[base]
    expected = GemmaConfig.from_json(folder / f"{base}.json")
    for path in spellings:
        assert GemmaConfig.from_json(path) == expected, path.name


def test_values_that_a_file_leaves_out():
    """The defaults of transformers 5.24, some of which surprise."""
    raw = flat("e4b")
    for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input", "global_head_dim",
                "head_dim", "rope_parameters", "rms_norm_eps", "max_position_embeddings",
                "final_logit_softcapping", "attention_k_eq_v", "dtype", "bos_token_id",
                "pad_token_id", "enable_moe_block", "use_double_wide_mlp"):  # fmt: skip
        del raw[key]
    expected = dataclasses.replace(GemmaConfig.preset("e4b"), final_logit_softcapping=None)
    assert GemmaConfig.from_dict(raw) == expected
    small = raw | {"model_type": "gemma4_unified_text"}
    assert GemmaConfig.from_dict(small).hidden_size_per_layer_input == 0
    assert GemmaConfig.from_dict(small).max_position_embeddings == 262_144


@pytest.mark.parametrize(
    ("size", "layer", "expected"),
    [  # window, num_heads, num_kv_heads, head_dim, shared, donor, mlp_width, theta, rotated
        ("31b", 4, (1024, 32, 16, 256, False, 4, 21_504, 1e4, 256)),
        ("31b", 5, (None, 32, 4, 512, True, 5, 21_504, 1e6, 128)),
        ("26b-a4b", 29, (None, 16, 2, 512, True, 29, 2112, 1e6, 128)),
        ("12b", 47, (None, 16, 1, 512, True, 47, 15_360, 1e6, 128)),
        ("e4b", 23, (None, 8, 2, 512, False, 23, 10_240, 1e6, 128)),
        ("e4b", 24, (512, 8, 2, 256, False, 22, 10_240, 1e4, 256)),
        ("e2b", 14, (None, 8, 1, 512, False, 14, 6144, 1e6, 128)),
        ("e2b", 15, (512, 8, 1, 256, False, 13, 12_288, 1e4, 256)),
        ("e2b", 34, (None, 8, 1, 512, False, 14, 12_288, 1e6, 128)),
    ],
)
def test_what_a_layer_is_made_of(size, layer, expected):
    spec = GemmaConfig.preset(size).layers[layer]
    assert spec.index == layer
    assert (
        spec.window, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.shared_projection,
        spec.kv_donor, spec.mlp_width, spec.rope_theta, spec.rotated,
    ) == expected  # fmt: skip
    assert spec.owns_kv == (expected[5] == layer)
    assert spec.group == expected[1] // expected[2]


@pytest.mark.parametrize(("size", "owned"), list(zip(SIZES, (15, 24, 48, 30, 60), strict=True)))
def test_which_layers_own_keys(size, owned):
    assert [spec.index for spec in GemmaConfig.preset(size).kv_layers] == list(range(owned))


def test_global_kv_heads_need_attention_k_eq_v():
    raw = flat() | {"attention_k_eq_v": False}
    assert GemmaConfig.from_dict(raw).num_global_key_value_heads == 16
    raw["per_layer_config"] = {
        str(i): {"head_dim": 512, "num_key_value_heads": 4} for i in GLOBAL_LAYERS["31b"][1]
    }
    assert GemmaConfig.from_dict(raw).num_global_key_value_heads == 4  # here they do not


@pytest.mark.parametrize("empty", [{}, None])
def test_an_empty_per_layer_config_means_one_shape(empty):
    config = GemmaConfig.from_dict(flat() | {"per_layer_config": empty})
    assert (config.global_head_dim, config.num_global_key_value_heads) == (256, 16)


def test_per_layer_config_may_give_the_sliding_layers_too():
    everywhere = {
        f"{i:02}": {"head_dim": 512, "num_key_value_heads": 4} if i % 6 == 5 else
        {"head_dim": 256, "num_key_value_heads": 16, "sliding_window": 1024} for i in range(60)
    }  # fmt: skip
    raw = flat() | {"per_layer_config": everywhere, "head_dim": 7, "num_key_value_heads": 3}
    assert GemmaConfig.from_dict(raw) == GemmaConfig.preset("31b")


@pytest.mark.parametrize(
    ("entry", "partial"),
    [
        ({"rope_type": "proportional", "rope_theta": 1e6}, 1.0),
        ({"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25}, 1.0),
        ({"rope_theta": 1e6, "partial_rotary_factor": 0.25}, 1.0),  # no type is "default"
        ({"type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5}, 0.5),
        ({"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0}, 0.0),
    ],
)
def test_how_much_of_a_global_head_turns(entry, partial):
    raw = flat()
    raw["rope_parameters"][FULL] = entry
    assert GemmaConfig.from_dict(raw).partial_rotary_factor == partial


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("prefix", ["", "torch."])
def test_dtype_has_two_names(key, prefix):
    raw = flat()
    del raw["dtype"]
    assert GemmaConfig.from_dict(raw | {key: prefix + "float32"}).dtype == "float32"


def test_the_top_dtype_wins():
    assert GemmaConfig.from_dict(with_value("text_config.dtype", "float32")).dtype == "bfloat16"


def test_harmless_keys_are_let_through():
    raw = published("31b") | {
        "transformers_version": "5.24.0",
        "vision_config": {"hidden_size": 1152, "dtype": "float16"},
        "audio_config": {"anything": [1, 2]},
        "vision_soft_tokens_per_image": 280,
        "some_token_id": 7,
        "not_set": None,
        "nothing_in_it": {},
    }
    assert GemmaConfig.from_dict(raw) == GemmaConfig.preset("31b")


def test_a_text_section_may_leave_its_type_to_the_top():
    raw = published("31b")
    del raw["text_config"]["model_type"]
    assert GemmaConfig.from_dict(raw) == GemmaConfig.preset("31b")


# What it gives


FIXTURES = [path.parent for path in sorted((HERE / "fixtures").glob("*/config.json"))]
MODELS = [folder for folder in FIXTURES if not folder.name.startswith("drafter")]


@pytest.mark.parametrize(
    "config",
    [*PRESETS.values(), *map(GemmaConfig.from_json, MODELS)],
    ids=[*PRESETS, *(folder.name for folder in MODELS)],
)
def test_to_dict_round_trip(config):
    text = json.dumps(config.to_dict(), allow_nan=False)
    again = GemmaConfig.from_dict(json.loads(text))
    assert again == config
    assert hash(again) == hash(config)
    assert again.layers == config.layers


def test_a_configuration_is_static_under_jit():
    compilations = []

    def width(config):
        compilations.append(config)
        return config.hidden_size

    jitted = jax.jit(width, static_argnums=0)
    for _ in range(2):
        for size in SIZES:
            assert jitted(GemmaConfig.from_dict(flat(size))) == flat(size)["hidden_size"]
    assert len(compilations) == len(SIZES)
    config = compilations[0]
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config


# What is refused


@pytest.mark.parametrize("section", ["", "text_config."])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attn_logit_softcapping", 50.0),
        ("query_pre_attn_scalar", 256),
        ("quantization_config", {"quant_method": "bitsandbytes"}),
        ("rope_theta", 10_000.0),
        ("rope_scaling", {"rope_type": "linear", "factor": 8.0}),
        ("altup_num_inputs", 4),
        ("use_qk_norm", False),
        ("attention_bias", True),
        ("tie_word_embeddings", False),
        ("hidden_activation", "silu"),
        ("hidden_activation", ["gelu_pytorch_tanh"]),
        ("hidden_act", "gelu"),
        ("use_bidirectional_attention", "all"),
    ],
)
def test_a_key_that_changes_the_mathematics(section, key, value):
    message = refusal(with_value(section + key, value))
    assert f"{section or 'config.'}{key} = " in message


@pytest.mark.parametrize(
    "path", ["auto_map", "text_config.auto_map", "text_config.rope_parameters.auto_map"]
)
def test_auto_map(path):
    assert "auto_map" in refusal(with_value(path, {"AutoModel": "code.Model"}))


def test_auto_map_deep_inside():
    deep: dict = {"auto_map": {"AutoModel": "code.Model"}}
    for _ in range(5_000):
        deep = {"inner": [deep]}
    assert "auto_map" in refusal(published("31b") | {"vision_config": deep})


@pytest.mark.parametrize("key", ["dtype", "torch_dtype", "text_config.dtype",
                                 "text_config.torch_dtype"])  # fmt: skip
@pytest.mark.parametrize("value", ["float16", "torch.float16", "float64", "half", 16, ["bfloat16"]])
def test_a_dtype_that_is_not_computed_in(key, value):
    message = refusal(with_value(key, value))
    assert f"{key} = " in message
    assert "float16" in message and "'bfloat16' or 'float32'" in message


@pytest.mark.parametrize("key", ["model_type", "text_config.model_type"])
@pytest.mark.parametrize("value", ["gemma3_text", "gemma4_vision", "llama", "", 4, ["gemma4"]])
def test_other_models(key, value):
    assert f"{key} = " in refusal(with_value(key, value))


def test_no_model_type():
    raw = flat()
    del raw["model_type"]
    assert "model_type" in refusal(raw)


@each_size
def test_drafters(size):
    assert "drafter" in refusal(published(f"{size}-drafter"))


NEEDED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "sliding_window",
          "num_attention_heads", "num_key_value_heads")  # fmt: skip


@pytest.mark.parametrize("key", NEEDED)
def test_sizes_must_be_there(key):
    raw = flat()
    del raw[key]
    assert key in refusal(raw)
    assert key in refusal(raw | {key: None})


INTEGERS = (*NEEDED, "head_dim", "num_kv_shared_layers", "hidden_size_per_layer_input",
            "vocab_size_per_layer_input", "num_experts", "top_k_experts", "moe_intermediate_size",
            "max_position_embeddings", "bos_token_id", "pad_token_id", "global_head_dim",
            "num_global_key_value_heads")  # fmt: skip
FLOATS = ("rms_norm_eps", "final_logit_softcapping")
FLAGS = ("attention_k_eq_v", "use_double_wide_mlp", "enable_moe_block")
ODD_INTEGERS = (-1, 5.0, 2.5, "5", True, [5], {"a": 5}, float("nan"), float("inf"), 2**31, 10**400)
ODD_FLOATS = (0, -1.0, 0.0, "1e-6", True, [1.0], {}, float("nan"), float("inf"), 1e-300, 10**400)


def reading_everything() -> dict:
    """A configuration that uses every key: per-layer inputs, experts, a shared projection."""
    return flat("e2b") | {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1,
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64,
    }  # fmt: skip


@pytest.mark.parametrize("key", INTEGERS)
@pytest.mark.parametrize("value", ODD_INTEGERS, ids=lambda value: repr(value)[:12])
def test_integers(key, value):
    if key.endswith("_token_id") and value == [5]:
        value = [[5]]  # of a list of ids, the first counts
    assert key in refusal(reading_everything() | {key: value})


def test_the_test_above_starts_from_a_sound_configuration():
    GemmaConfig.from_dict(reading_everything())


@pytest.mark.parametrize("key", FLOATS)
@pytest.mark.parametrize("value", ODD_FLOATS, ids=lambda value: repr(value)[:12])
def test_floats(key, value):
    assert key in refusal(flat() | {key: value})


@pytest.mark.parametrize("kind", [SLIDING, FULL])
@pytest.mark.parametrize("value", [None, *ODD_FLOATS], ids=lambda value: repr(value)[:12])
def test_rope_theta(kind, value):
    raw = flat()
    raw["rope_parameters"][kind]["rope_theta"] = value
    assert "rope_theta" in refusal(raw)


@pytest.mark.parametrize("value", [-0.1, 1.1, "0.25", True, [0.25], float("nan")])
def test_partial_rotary_factor(value):
    raw = flat()
    raw["rope_parameters"][FULL]["partial_rotary_factor"] = value
    assert "partial_rotary_factor" in refusal(raw)


@pytest.mark.parametrize("key", FLAGS)
@pytest.mark.parametrize("value", ["false", "true", 0, 1, 1.0, None, [], [False]])
def test_flags(key, value):
    assert key in refusal(flat() | {key: value})


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"num_hidden_layers": 59}, ["layer_types", "60", "num_hidden_layers", "59"]),
        ({"num_hidden_layers": 10**9}, ["num_hidden_layers"]),
        ({"layer_types": [SLIDING, FULL]}, ["layer_types", "num_hidden_layers"]),
        ({"layer_types": []}, ["layer_types"]),
        ({"layer_types": "full_attention"}, ["layer_types"]),
        ({"layer_types": 60}, ["layer_types"]),
        ({"layer_types": ["chunked_attention"] * 60}, ["chunked_attention"]),
        ({"layer_types": [[FULL]] * 60}, ["layer_types"]),
        ({"layer_types": [None] * 60}, ["layer_types", "None"]),
        ({"num_attention_heads": 30}, ["num_attention_heads 30", "num_key_value_heads 16"]),
        ({"num_global_key_value_heads": 5}, ["num_global_key_value_heads 5"]),
        ({"head_dim": 255}, ["head_dim = 255"]),
        ({"global_head_dim": 511}, ["global_head_dim = 511"]),
        ({"global_head_dim": None}, ["global_head_dim"]),
        ({"sliding_window": 0}, ["sliding_window = 0"]),
        ({"num_kv_shared_layers": 60}, ["num_kv_shared_layers = 60"]),
        ({"num_kv_shared_layers": 55}, ["num_kv_shared_layers", FULL]),
        ({"bos_token_id": 262_144}, ["bos_token_id"]),
        ({"pad_token_id": -1}, ["pad_token_id"]),
        ({"enable_moe_block": True}, ["num_experts"]),
        ({"enable_moe_block": True, "num_experts": 0, "top_k_experts": 0,
          "moe_intermediate_size": 0}, ["num_experts = 0"]),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5,
          "moe_intermediate_size": 8}, ["top_k_experts = 5", "4"]),
        ({"enable_moe_block": True, "num_experts": 4, "top_k_experts": 0,
          "moe_intermediate_size": 8}, ["top_k_experts = 0"]),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 0},
         ["vocab_size_per_layer_input 0"]),
        ({"rope_parameters": {}}, ["rope_parameters.sliding_attention"]),
        ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}, ["rope_parameters"]),
        ({"rope_parameters": {SLIDING: None, FULL: None}}, ["rope_parameters.sliding_attention"]),
        ({"rope_parameters": []}, ["rope_parameters"]),
        ({"text_config": []}, ["text_config"]),
        ({"text_config": "x"}, ["text_config"]),
        ({"per_layer_config": []}, ["per_layer_config"]),
        ({"per_layer_config": {"5": None}}, ["per_layer_config.5"]),
        ({"per_layer_config": {"60": {"head_dim": 512}}}, ["per_layer_config", "'60'"]),
        ({"per_layer_config": {"-1": {"head_dim": 512}}}, ["per_layer_config", "'-1'"]),
        ({"per_layer_config": {"5": {}, "05": {}}}, ["per_layer_config", "'05'"]),
        ({"per_layer_config": {"five": {}}}, ["per_layer_config", "'five'"]),
        ({"per_layer_config": {"9" * 5_000: {}}}, ["per_layer_config"]),
        ({"per_layer_config": {"59": {"head_dim": 512}}}, ["per_layer_config", "layer 59"]),
        ({"per_layer_config": {"00": {"head_dim": 512}}}, ["per_layer_config", SLIDING]),
        ({"per_layer_config": {"05": {"sliding_window": 512}}}, ["05.sliding_window = 512"]),
        ({"per_layer_config": {"05": {"skip": ["mlp"]}}}, ["05.skip"]),
    ],
    ids=lambda value: str(value)[:60] if isinstance(value, dict) else "",
)  # fmt: skip
def test_values_that_contradict_each_other(change, names):
    message = refusal(flat() | change)
    for name in names:
        assert name in message


@pytest.mark.parametrize(
    ("kind", "change", "name"),
    [
        (FULL, {"rope_type": "linear", "factor": 2.0}, "factor"),
        (FULL, {"rope_type": "yarn"}, "rope_type = 'yarn'"),
        (FULL, {"rope_type": ["default"]}, "rope_type"),
        (FULL, {"factor": 8.0}, "factor = 8.0"),
        (SLIDING, {"rope_type": "proportional", "partial_rotary_factor": 0.5}, "partial_rotary"),
        (SLIDING, {"rope_type": "llama3"}, "rope_type = 'llama3'"),
        (SLIDING, {"rope_theta": None}, "rope_theta"),
    ],
)
def test_other_rotary_embeddings(kind, change, name):
    raw = flat()
    raw["rope_parameters"][kind] |= change
    message = refusal(raw)
    assert f"rope_parameters.{kind}" in message and name in message


WORDS = st.text(max_size=8)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
    max_leaves=5,
)


def paths_of(raw: dict, prefix: str = "") -> list[str]:
    paths = []
    for key, value in raw.items():
        paths.append(prefix + key)
        if isinstance(value, dict):
            paths += paths_of(value, f"{prefix}{key}.")
    return paths


@given(size=st.sampled_from(SIZES), data=st.data())
def test_whatever_stands_in_a_file_there_is_no_other_error(size, data):
    raw = published(size)
    raw["text_config"]["per_layer_config"] = {"05": {"head_dim": 512, "num_key_value_heads": 4}}
    path = data.draw(st.sampled_from(paths_of(raw)))
    value = data.draw(JSON_VALUES | st.sampled_from([*ODD_INTEGERS, *ODD_FLOATS]))
    *sections, key = path.split(".")
    section = raw
    for name in sections:
        section = section[name]
    section[key] = value
    try:
        config = GemmaConfig.from_dict(raw)
    except ConfigError as error:
        assert len(str(error)) < 1_000
    else:
        assert GemmaConfig.from_dict(config.to_dict()) == config
        hash(config)


@pytest.mark.parametrize(
    "content",
    [
        b"", b"{", b"[]", b'"gemma4"', b"null", b"5", b"\xff\xfe\x00", b"\x80PNG",
        b'{"a": 1}}', b"[" * 100_000, b'{"a":' * 100_000, b'{"vocab_size": ' + b"9" * 5_000 + b"}",
    ],
    ids=lambda content: repr(content[:12]),
)  # fmt: skip
def test_files_that_are_no_json_object(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        GemmaConfig.from_json(tmp_path)


def test_json_with_nan(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(flat() | {"rms_norm_eps": float("nan")}))
    with pytest.raises(ConfigError, match="rms_norm_eps = nan"):
        GemmaConfig.from_json(tmp_path / "config.json")


def test_no_file(tmp_path):
    for path in (tmp_path, tmp_path / "config.json", tmp_path / "not" / "here"):
        with pytest.raises(FileNotFoundError, match=r"config\.json"):
            GemmaConfig.from_json(path)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"layer_types": [SLIDING, FULL]}, "layer_types"),
        ({"layer_types": (SLIDING,) * 60}, "the last of layer_types"),
        ({"layer_types": ()}, "layer_types"),
        ({"dtype": "float16"}, "dtype = 'float16'"),
        ({"dtype": None}, "dtype"),
        ({"dtype": ["bfloat16"]}, "dtype"),
        ({"num_experts": 4, "top_k_experts": 2}, "num_experts 4"),
        ({"top_k_experts": 4}, "top_k_experts"),
        ({"moe_intermediate_size": 4}, "moe_intermediate_size"),
        ({"vocab_size_per_layer_input": 4}, "vocab_size_per_layer_input"),
        ({"global_rope_theta": float("inf")}, "global_rope_theta = inf"),
        ({"partial_rotary_factor": None}, "partial_rotary_factor"),
        ({"num_hidden_layers": 60.0}, "num_hidden_layers"),
        ({"attention_k_eq_v": 1}, "attention_k_eq_v"),
    ],
)
def test_the_constructor_checks_too(change, name):
    with pytest.raises(ConfigError, match=name):
        dataclasses.replace(GemmaConfig.preset("31b"), **change)


def test_a_preset_that_is_none():
    with pytest.raises(ConfigError, match="e2b, e4b, 12b, 26b-a4b, 31b"):
        GemmaConfig.preset("70b")
