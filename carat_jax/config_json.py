"""The layouts of a published `config.json`, and what their keys mean to this engine.

The text model's keys lie under `text_config` or at the top. The shape of the global layers is
given by `global_head_dim` and `num_global_key_value_heads`, or by `per_layer_config`. What an
absent key means is what `Gemma4TextConfig` of transformers 5.24 takes for it; the sizes without
which there is no model must be there.
"""

import json
import os
import re
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

LayerType = Literal["sliding_attention", "full_attention"]
SLIDING: LayerType = "sliding_attention"
FULL: LayerType = "full_attention"
DTYPES = ("bfloat16", "float32")
MAX_LAYERS = 1_000  # every layer is unrolled into the compiled program

_MODEL_TYPE = re.compile(r"gemma4(_unified)?(_text)?")
_READ = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads num_global_key_value_heads head_dim global_head_dim sliding_window "
    "layer_types per_layer_config attention_k_eq_v num_kv_shared_layers use_double_wide_mlp "
    "hidden_size_per_layer_input vocab_size_per_layer_input enable_moe_block num_experts "
    "top_k_experts moe_intermediate_size rope_parameters rms_norm_eps final_logit_softcapping "
    "max_position_embeddings bos_token_id pad_token_id".split()
)
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh",),
    "attention_bias": (False,),
    "tie_word_embeddings": (True,),
    "use_bidirectional_attention": (None, False, "vision"),  # "vision": image tokens alone
}
_INERT = frozenset(
    "architectures model_type dtype torch_dtype transformers_version _name_or_path name_or_path "
    "use_cache initializer_range attention_dropout eos_token_id id2label label2id problem_type "
    "return_dict output_attentions output_hidden_states chunk_size_feed_forward "
    "is_encoder_decoder is_decoder _attn_implementation _attn_implementation_autoset "
    "cache_implementation tokenizer_class torchscript use_bfloat16 task_specific_params "
    "finetuning_task text_config vision_config audio_config unsloth_version unsloth_fixed".split()
)
_INERT_PATTERN = re.compile(r".*_token_(id|index)s?|(vision|audio|image|video|mm)_.*")


class ConfigError(ValueError):
    """A configuration that this engine would compute wrongly, so it is refused by name."""


def read(path: str | Path) -> dict[str, Any]:
    """The JSON object in a file, or in the `config.json` of a folder.

    Raises:
      FileNotFoundError: no such file.
      ConfigError: not a JSON object.
    """
    path = Path(os.path.expanduser(path))
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no config.json here; a checkpoint folder has one")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} holds a {type(raw).__name__}, not a JSON object")
    return raw


def arguments(raw: Mapping[str, Any]) -> dict[str, Any]:
    """What the constructor of `GemmaConfig` takes, which checks the values themselves.

    Raises:
      ConfigError: not a Gemma 4 text model, a key that may change the mathematics in a way
        this engine does not compute, or layouts that contradict themselves.
    """
    text = raw.get("text_config")
    sections = {"config": raw} if text is None else {"config": raw, "text_config": text}
    text = raw if text is None else text
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config = {show(text)} is not a JSON object")
    unified = _is_unified(sections)
    _refuse_auto_map(raw)
    for where, section in sections.items():
        _refuse_unknown(section, where, _READ if section is text else frozenset())

    layers = _need(text, "num_hidden_layers")
    check_int("num_hidden_layers", layers, 1, MAX_LAYERS)
    layer_types = _layer_types(text.get("layer_types"), layers)
    sliding, full = _shapes(text, layer_types)
    per_layer_width = text.get("hidden_size_per_layer_input", 0 if unified else 256)
    return {
        "vocab_size": _need(text, "vocab_size"),
        "hidden_size": _need(text, "hidden_size"),
        "intermediate_size": _need(text, "intermediate_size"),
        "num_hidden_layers": layers,
        "num_attention_heads": _need(text, "num_attention_heads"),
        "num_key_value_heads": sliding["num_key_value_heads"],
        "num_global_key_value_heads": full["num_key_value_heads"],
        "head_dim": sliding["head_dim"],
        "global_head_dim": full["head_dim"],
        "sliding_window": _need(text, "sliding_window"),
        "layer_types": layer_types,
        "attention_k_eq_v": text.get("attention_k_eq_v", False),
        "num_kv_shared_layers": text.get("num_kv_shared_layers", 0),
        "use_double_wide_mlp": text.get("use_double_wide_mlp", False),
        "hidden_size_per_layer_input": per_layer_width,
        "vocab_size_per_layer_input": (
            text.get("vocab_size_per_layer_input", 262_144) if per_layer_width else 0
        ),
        "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
        "final_logit_softcapping": text.get("final_logit_softcapping"),
        "max_position_embeddings": text.get(
            "max_position_embeddings", 262_144 if unified else 131_072
        ),
        "bos_token_id": _first_id(text.get("bos_token_id"), 2),
        "pad_token_id": _first_id(text.get("pad_token_id"), 0),
        "dtype": _dtype(sections),
        **_experts(text),
        **_rope(text.get("rope_parameters"), layer_types),
    }


def show(value: object) -> str:
    """A value for an error message: its repr, cut short where it is long."""
    return reprlib.repr(value)


def check_int(name: str, value: object, low: int, high: int) -> None:
    """Refuses what is not an integer from low to high (a bool is none)."""
    if type(value) is not int or not low <= value <= high:
        raise ConfigError(f"{name} = {show(value)}: it must be an integer from {low} to {high:,}")


def check_dtype(name: str, value: object) -> None:
    """Refuses float16, above all, and whatever else the model is not computed in."""
    if value not in DTYPES:
        raise ConfigError(
            f"{name} = {show(value)}: use 'bfloat16' or 'float32' (Gemma 4 overflows in float16)"
        )


def _is_unified(sections: Mapping[str, Mapping[str, Any]]) -> bool:
    """Checks every model_type; True for the 12B's, whose absent keys mean other things."""
    found = {f"{where}.model_type": s["model_type"] for where, s in sections.items()
             if s.get("model_type") is not None}  # fmt: skip
    if not found:
        raise ConfigError("the configuration lacks model_type ('gemma4' or 'gemma4_text')")
    for where, value in found.items():
        if isinstance(value, str) and value.endswith("_assistant"):
            raise ConfigError(f"{where} = {value!r}: this is a drafter, not a model of its own")
        if not isinstance(value, str) or not _MODEL_TYPE.fullmatch(value):
            raise ConfigError(f"{where} = {show(value)} is no Gemma 4 text model: 'gemma4', "
                              "'gemma4_unified', or either with '_text'")  # fmt: skip
    return "unified" in list(found.values())[-1]


def _refuse_auto_map(raw: Mapping[str, Any]) -> None:
    waiting: list[tuple[str, Any]] = [("config", raw)]
    while waiting:
        where, value = waiting.pop()
        if isinstance(value, list):
            waiting += [(where, inner) for inner in value]
        elif isinstance(value, Mapping):
            if value.get("auto_map"):
                raise ConfigError(
                    f"{where} has auto_map: code shipped with a checkpoint is never run"
                )
            waiting += [(f"{where}.{key}", inner) for key, inner in value.items()]


def _refuse_unknown(section: Mapping[str, Any], where: str, known: frozenset[str]) -> None:
    """Refuses every key that has a value and is not known to be harmless: a silent difference
    is worse than an error."""
    for key, value in section.items():
        if key in _ONLY:
            if value not in _ONLY[key]:
                allowed = " or ".join(map(repr, _ONLY[key]))
                raise ConfigError(f"{where}.{key} = {show(value)}: this engine computes {allowed}")
        elif key in known or key in _INERT or _INERT_PATTERN.fullmatch(key):
            continue
        elif value not in (None, [], {}, ""):
            raise ConfigError(
                f"{where}.{key} = {show(value)} is unknown to this engine and may change what the "
                "model computes: remove the key if it does not"
            )


def _need(text: Mapping[str, Any], name: str) -> Any:
    if text.get(name) is None:
        raise ConfigError(f"the configuration lacks {name}")
    return text[name]


def _first_id(value: Any, default: int) -> Any:
    if isinstance(value, list):
        value = value[0] if value else None
    return default if value is None else value


def _dtype(sections: Mapping[str, Mapping[str, Any]]) -> str:
    """What the top asks for, else the text section; every request is checked."""
    found = []
    for where, section in sections.items():
        for key in ("dtype", "torch_dtype"):
            value = section.get(key)
            if value is not None:
                value = value.removeprefix("torch.") if isinstance(value, str) else value
                check_dtype(f"{where}.{key}", value)
                found.append(value)
    return found[0] if found else "bfloat16"


def _layer_types(given: Any, layers: int) -> tuple[LayerType, ...]:
    """Absent: every sixth layer is global. The last layer always is."""
    if given is None:
        given = [FULL if i % 6 == 5 else SLIDING for i in range(layers)]
    if not isinstance(given, list | tuple):
        raise ConfigError(f"layer_types = {show(given)} is not a list")
    return (*given[:-1], FULL) if given else ()


def _shapes(
    text: Mapping[str, Any], layer_types: tuple[LayerType, ...]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """head_dim and num_key_value_heads of the sliding and of the full layers."""
    plain = {
        "head_dim": text.get("head_dim", 256),
        "num_key_value_heads": _need(text, "num_key_value_heads"),
    }
    if "per_layer_config" in text:  # then the two global keys are stale, where they exist
        overrides = _per_layer_config(text, len(layer_types))
    else:
        wide = {"head_dim": text.get("global_head_dim", 512)}
        heads = text.get("num_global_key_value_heads")
        if heads is not None and text.get("attention_k_eq_v", False):
            wide["num_key_value_heads"] = heads
        overrides = {i: wide for i, kind in enumerate(layer_types) if kind == FULL}
    shapes: dict[str, dict[str, Any]] = {}
    for i, kind in enumerate(layer_types):
        shape = plain | overrides.get(i, {})
        first = shapes.setdefault(str(kind), shape)
        if shape != first:
            raise ConfigError(f"per_layer_config gives {kind} layers different shapes: "
                              f"{show(first)} and, in layer {i}, {show(shape)}")  # fmt: skip
    return shapes.get(SLIDING, plain), shapes.get(FULL, plain)


def _per_layer_config(text: Mapping[str, Any], layers: int) -> dict[int, dict[str, Any]]:
    """What differs from the plain keys, by layer. Indices come as strings, mostly zero-padded."""
    table = {} if text["per_layer_config"] is None else text["per_layer_config"]
    if not isinstance(table, Mapping):
        raise ConfigError(f"per_layer_config = {show(table)} is not a JSON object")
    overrides: dict[int, dict[str, Any]] = {}
    for key, entry in table.items():
        index = int(key) if re.fullmatch(r"[0-9]{1,9}", str(key)) else layers
        if index >= layers or index in overrides:
            raise ConfigError(f"per_layer_config has layer {key!r}, of {layers} layers")
        if not isinstance(entry, Mapping):
            raise ConfigError(f"per_layer_config.{key} = {show(entry)} is not a JSON object")
        for name, value in entry.items():
            if name not in ("head_dim", "num_key_value_heads") and value != text.get(name):
                raise ConfigError(f"per_layer_config.{key}.{name} = {show(value)}: this engine "
                                  f"takes one {name} for all layers")  # fmt: skip
        overrides[index] = {
            name: entry[name] for name in ("head_dim", "num_key_value_heads") if name in entry
        }
    return overrides


def _experts(text: Mapping[str, Any]) -> dict[str, Any]:
    enabled = text.get("enable_moe_block", False)
    if not isinstance(enabled, bool):
        raise ConfigError(f"enable_moe_block = {show(enabled)}: it must be true or false")
    if not enabled:
        return {}
    names = ("num_experts", "top_k_experts", "moe_intermediate_size")
    found = {name: _need(text, name) for name in names}
    check_int("enable_moe_block is true, num_experts", found["num_experts"], 1, 2**31 - 1)
    return found


def _rope(table: Any, layer_types: tuple[LayerType, ...]) -> dict[str, Any]:
    """The three RoPE numbers; anything but the two rope types of Gemma 4 is refused."""
    if table is None:
        return {}
    if not isinstance(table, Mapping) or not set(table) <= {SLIDING, FULL}:
        raise ConfigError(f"rope_parameters = {show(table)}: it must be a JSON object with just "
                          f"{SLIDING!r} and {FULL!r}")  # fmt: skip
    result: dict[str, Any] = {}
    if SLIDING in layer_types or SLIDING in table:
        result["rope_theta"], factor = _rope_entry(table, SLIDING)
        if factor != 1.0:
            raise ConfigError(f"rope_parameters.{SLIDING}.partial_rotary_factor = {show(factor)}: "
                              "this engine turns sliding heads whole")  # fmt: skip
    result["global_rope_theta"], result["partial_rotary_factor"] = _rope_entry(table, FULL)
    return result


def _rope_entry(table: Mapping[str, Any], kind: LayerType) -> tuple[Any, Any]:
    """theta, and the share of the widths that turns."""
    where, entry = f"rope_parameters.{kind}", table.get(kind)
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{where} = {show(entry)} is not a JSON object")
    for key, value in entry.items():
        known = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
        if key not in known and value is not None:
            raise ConfigError(f"{where}.{key} = {show(value)} is unknown to this engine")
    rope_type = entry.get("rope_type", entry.get("type", "default"))
    if rope_type not in ("default", "proportional"):
        raise ConfigError(f"{where}.rope_type = {show(rope_type)}: this engine computes only "
                          "'default' and 'proportional'")  # fmt: skip
    if entry.get("rope_theta") is None:
        raise ConfigError(f"{where} lacks rope_theta")
    factor = entry.get("partial_rotary_factor")  # 'default' turns whole heads, whatever it says
    return entry["rope_theta"], 1.0 if factor is None or rope_type == "default" else factor
