"""The shape of a Gemma 4 text model, read from either published `config.json` layout."""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

LayerType = Literal["sliding_attention", "full_attention"]
SLIDING: LayerType = "sliding_attention"
FULL: LayerType = "full_attention"


class ConfigError(ValueError):
    """A configuration that this engine would compute wrongly, so it is refused by name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerSpec:
    """What one decoder layer is made of; everything the model needs to build it.

    Attributes:
      index: position in the stack.
      window: keys a query sees, itself included; None in a global layer.
      num_heads, num_kv_heads, head_dim: N, K and H of this layer.
      shared_projection: values are the raw key projection (compact cache).
      kv_donor: layer whose keys and values are read; `index` itself where the layer owns them.
      mlp_width: F.
      rope_theta, rotated: RoPE base, and P, how many of the H widths it turns.
    """

    index: int
    window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    shared_projection: bool
    kv_donor: int
    mlp_width: int
    rope_theta: float
    rotated: int

    @property
    def owns_kv(self) -> bool:
        """Whether this layer projects and stores keys and values of its own."""
        return self.kv_donor == self.index

    @property
    def group(self) -> int:
        """G, query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True, kw_only=True)
class GemmaConfig:
    """A Gemma 4 text configuration; static under jit (hashable). Names are those of `config.json`.

    Attributes:
      layer_types: "sliding_attention" or "full_attention" for each layer; the last is full.
      num_global_key_value_heads, global_head_dim: K and H of the full-attention layers.
      attention_k_eq_v: full-attention layers take values from the raw key projection.
      num_kv_shared_layers: how many last layers borrow the keys and values of an earlier one.
      use_double_wide_mlp: those layers have an MLP of twice the width.
      hidden_size_per_layer_input: width of the per-layer inputs; 0 = none.
      partial_rotary_factor: share of a global head's widths that RoPE turns.
      final_logit_softcapping: None = no soft cap.

    Raises:
      ConfigError: from the constructor, where the values contradict each other.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    num_global_key_value_heads: int
    head_dim: int
    global_head_dim: int
    sliding_window: int
    layer_types: tuple[LayerType, ...]
    attention_k_eq_v: bool = False
    num_kv_shared_layers: int = 0
    use_double_wide_mlp: bool = False
    hidden_size_per_layer_input: int = 0
    vocab_size_per_layer_input: int = 0
    num_experts: int = 0
    top_k_experts: int = 0
    moe_intermediate_size: int = 0
    rope_theta: float = 10_000.0
    global_rope_theta: float = 1_000_000.0
    partial_rotary_factor: float = 0.25
    rms_norm_eps: float = 1e-6
    final_logit_softcapping: float | None = 30.0
    max_position_embeddings: int = 131_072
    bos_token_id: int = 2
    pad_token_id: int = 0
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        _check(self)

    @classmethod
    def from_json(cls, path: str | Path) -> "GemmaConfig":
        """Reads `config.json` (a file, or a folder that holds one) in any published layout.

        Raises:
          FileNotFoundError: no such file.
          ConfigError: not JSON, not a Gemma 4 text model, or a key that would change the
            mathematics in a way this engine does not compute; the message names the key.
        """
        path = Path(path)
        if path.is_dir():
            path = path / "config.json"
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no config.json here; a checkpoint folder has one")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise ConfigError(f"{path} is not valid JSON: {error}") from error
        if not isinstance(raw, dict):
            raise ConfigError(f"{path} holds a {type(raw).__name__}, not a JSON object")
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "GemmaConfig":
        """As `from_json`, from the parsed JSON object."""
        return _parse(raw)

    @classmethod
    def preset(cls, name: str) -> "GemmaConfig":
        """A published size: "e2b", "e4b", "12b", "26b-a4b" or "31b"."""
        try:
            return PRESETS[name.lower()]
        except KeyError:
            raise ConfigError(f"no preset {name!r}: choose one of {', '.join(PRESETS)}") from None

    def to_dict(self) -> dict[str, Any]:
        """The flat `config.json` form; `from_dict` gives this configuration back."""
        rope = {
            SLIDING: {"rope_type": "default", "rope_theta": self.rope_theta},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": self.global_rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
            },
        }
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        for name in ("rope_theta", "global_rope_theta", "partial_rotary_factor"):
            del own[name]
        return own | {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "layer_types": list(self.layer_types),
            "enable_moe_block": self.num_experts > 0,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
            "rope_parameters": rope,
        }

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """One `LayerSpec` for each decoder layer, KV donors resolved."""
        return tuple(self._layer(i) for i in range(self.num_hidden_layers))

    @property
    def kv_layers(self) -> tuple[LayerSpec, ...]:
        """The layers that own keys and values, in the order of `KVState.layers`."""
        return tuple(layer for layer in self.layers if layer.owns_kv)

    def _layer(self, i: int) -> LayerSpec:
        full = self.layer_types[i] == FULL
        first_shared = self.num_hidden_layers - self.num_kv_shared_layers
        donor = i
        if i >= first_shared:
            donor = _last(self.layer_types[:first_shared], self.layer_types[i])
        double = self.use_double_wide_mlp and i >= first_shared
        head_dim = self.global_head_dim if full else self.head_dim
        return LayerSpec(
            index=i,
            window=None if full else self.sliding_window,
            num_heads=self.num_attention_heads,
            num_kv_heads=self.num_global_key_value_heads if full else self.num_key_value_heads,
            head_dim=head_dim,
            shared_projection=full and self.attention_k_eq_v,
            kv_donor=donor,
            mlp_width=self.intermediate_size * (2 if double else 1),
            rope_theta=self.global_rope_theta if full else self.rope_theta,
            rotated=2 * int(self.partial_rotary_factor * head_dim // 2) if full else head_dim,
        )


def _last(layer_types: tuple[LayerType, ...], wanted: LayerType) -> int:
    for i in reversed(range(len(layer_types))):
        if layer_types[i] == wanted:
            return i
    raise ConfigError(
        f"num_kv_shared_layers leaves no {wanted} layer with keys of its own to borrow from"
    )


def _check(c: GemmaConfig) -> None:
    """Refuses values that contradict each other, naming the fields."""

    def refuse(message: str) -> None:
        raise ConfigError(message)

    for name in (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads num_global_key_value_heads head_dim global_head_dim sliding_window "
        "max_position_embeddings"
    ).split():
        value = getattr(c, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            refuse(f"{name} = {value!r}: it must be a positive integer")
    if len(c.layer_types) != c.num_hidden_layers:
        refuse(
            f"layer_types has {len(c.layer_types)} entries, "
            f"num_hidden_layers is {c.num_hidden_layers}"
        )
    for kind in c.layer_types:
        if kind not in (SLIDING, FULL):
            refuse(f"layer_types has {kind!r}: only {SLIDING!r} and {FULL!r} are Gemma 4's")
    if c.layer_types[-1] != FULL:
        refuse(f"the last of layer_types is {c.layer_types[-1]!r}: it must be {FULL!r}")
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        if c.num_attention_heads % getattr(c, name):
            refuse(f"num_attention_heads {c.num_attention_heads} is no multiple of {name} "
                   f"{getattr(c, name)}")  # fmt: skip
    for name in ("head_dim", "global_head_dim"):
        if getattr(c, name) % 2:
            refuse(f"{name} = {getattr(c, name)}: RoPE pairs widths, so it must be even")
    if not 0 <= c.num_kv_shared_layers < c.num_hidden_layers:
        refuse(f"num_kv_shared_layers = {c.num_kv_shared_layers}: it must be from 0 to "
               f"num_hidden_layers - 1 = {c.num_hidden_layers - 1}")  # fmt: skip
    if not 0.0 <= c.partial_rotary_factor <= 1.0:
        refuse(f"partial_rotary_factor = {c.partial_rotary_factor}: it must be within [0, 1]")
    for name in ("rope_theta", "global_rope_theta", "rms_norm_eps"):
        if not getattr(c, name) > 0:
            refuse(f"{name} = {getattr(c, name)}: it must be positive")
    if c.final_logit_softcapping is not None and not c.final_logit_softcapping > 0:
        refuse(f"final_logit_softcapping = {c.final_logit_softcapping}: positive, or null")
    if c.hidden_size_per_layer_input < 0 or c.num_experts < 0:
        refuse("hidden_size_per_layer_input and num_experts must not be negative")
    if c.hidden_size_per_layer_input and c.vocab_size_per_layer_input != c.vocab_size:
        refuse(f"vocab_size_per_layer_input {c.vocab_size_per_layer_input} differs from "
               f"vocab_size {c.vocab_size}: every id needs its per-layer row")  # fmt: skip
    if c.num_experts:
        if not 1 <= c.top_k_experts <= c.num_experts:
            refuse(f"top_k_experts = {c.top_k_experts}: it must be from 1 to num_experts = "
                   f"{c.num_experts}")  # fmt: skip
        if c.moe_intermediate_size < 1:
            refuse(f"moe_intermediate_size = {c.moe_intermediate_size}: experts need a width")
    if c.dtype not in ("bfloat16", "float32"):
        refuse(f"dtype = {c.dtype!r}: Gemma 4 overflows in float16; use 'bfloat16' or 'float32'")
    _ = c.layers  # resolves the KV donors


# Keys of a text config that are read, checked for one value, or known not to touch the forward
# pass. Anything else with a value is refused: a silent difference is worse than an error.
_READ = frozenset(
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads "
    "num_key_value_heads num_global_key_value_heads head_dim global_head_dim sliding_window "
    "layer_types attention_k_eq_v num_kv_shared_layers use_double_wide_mlp "
    "hidden_size_per_layer_input vocab_size_per_layer_input enable_moe_block num_experts "
    "top_k_experts moe_intermediate_size rope_parameters rms_norm_eps final_logit_softcapping "
    "max_position_embeddings bos_token_id pad_token_id dtype torch_dtype per_layer_config".split()
)
_ONLY: dict[str, tuple[Any, ...]] = {
    "hidden_activation": ("gelu_pytorch_tanh",),
    "hidden_act": ("gelu_pytorch_tanh",),
    "attention_bias": (False, None),
    "tie_word_embeddings": (True, None),
    "use_bidirectional_attention": (None, False, "vision"),
}
_INERT = frozenset(
    "architectures model_type transformers_version _name_or_path name_or_path use_cache "
    "initializer_range attention_dropout eos_token_id id2label label2id problem_type return_dict "
    "output_attentions output_hidden_states chunk_size_feed_forward is_encoder_decoder "
    "is_decoder _attn_implementation _attn_implementation_autoset cache_implementation "
    "tokenizer_class torchscript use_bfloat16 task_specific_params finetuning_task "
    "text_config vision_config audio_config vision_soft_tokens_per_image unsloth_version "
    "unsloth_fixed mm_tokens_per_image".split()
)
_INERT_PATTERN = re.compile(r".*_token_(id|index)s?$|^(vision|audio|image|video|mm)_.*")
_TOP_ONLY = frozenset(_ONLY) | _INERT | {"dtype", "torch_dtype"}


def _parse(raw: Mapping[str, Any]) -> GemmaConfig:
    nested = raw.get("text_config")
    if nested is not None and not isinstance(nested, Mapping):
        raise ConfigError("text_config is not a JSON object")
    text = dict(raw if nested is None else nested)
    model_type = str(text.get("model_type", ""))
    if not re.fullmatch(r"gemma4(_unified)?(_text)?", model_type):
        raise ConfigError(
            f"model_type {model_type!r} is no Gemma 4 text model (gemma4_text, gemma4_unified_text)"
        )
    _refuse_unknown(text, "text_config" if nested is not None else "config", _READ)
    if nested is not None:
        _refuse_unknown(raw, "config", _TOP_ONLY)
    dtype = text.get("dtype") or text.get("torch_dtype") or raw.get("dtype")
    dtype = dtype or raw.get("torch_dtype") or "bfloat16"

    def need(name: str) -> Any:
        if text.get(name) is None:
            raise ConfigError(f"the configuration lacks {name}")
        return text[name]

    layers = need("num_hidden_layers")
    if not isinstance(layers, int) or layers < 1:
        raise ConfigError(f"num_hidden_layers = {layers!r}: it must be a positive integer")
    layer_types = _layer_types(text.get("layer_types"), layers)
    k_eq_v = bool(text.get("attention_k_eq_v", False))
    head_dim, kv_heads = text.get("head_dim", 256), need("num_key_value_heads")
    if text.get("per_layer_config"):
        global_head_dim, global_kv_heads = _per_layer(text, layer_types, head_dim, kv_heads)
    else:
        global_head_dim = text.get("global_head_dim") or head_dim
        global_kv_heads = (k_eq_v and text.get("num_global_key_value_heads")) or kv_heads
    rope = _rope(text)
    moe = bool(text.get("enable_moe_block", False))
    per_layer_width = text.get("hidden_size_per_layer_input") or 0
    per_layer_vocab = text.get("vocab_size_per_layer_input") or text.get("vocab_size")
    return GemmaConfig(
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        intermediate_size=need("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=need("num_attention_heads"),
        num_key_value_heads=kv_heads,
        num_global_key_value_heads=global_kv_heads,
        head_dim=head_dim,
        global_head_dim=global_head_dim,
        sliding_window=need("sliding_window"),
        layer_types=layer_types,
        attention_k_eq_v=k_eq_v,
        num_kv_shared_layers=text.get("num_kv_shared_layers") or 0,
        use_double_wide_mlp=bool(text.get("use_double_wide_mlp", False)),
        hidden_size_per_layer_input=per_layer_width,
        vocab_size_per_layer_input=per_layer_vocab if per_layer_width else 0,
        num_experts=need("num_experts") if moe else 0,
        top_k_experts=need("top_k_experts") if moe else 0,
        moe_intermediate_size=need("moe_intermediate_size") if moe else 0,
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        final_logit_softcapping=text.get("final_logit_softcapping"),
        max_position_embeddings=text.get("max_position_embeddings", 131_072),
        bos_token_id=_first_id(text.get("bos_token_id"), 2),
        pad_token_id=_first_id(text.get("pad_token_id"), 0),
        dtype=str(dtype).removeprefix("torch."),
        **rope,
    )


def _first_id(value: Any, default: int) -> int:
    if isinstance(value, list):
        value = value[0] if value else None
    return default if value is None else value


def _refuse_unknown(section: Mapping[str, Any], where: str, known: frozenset[str]) -> None:
    if section.get("auto_map"):
        raise ConfigError(f"{where} has auto_map: code shipped with a checkpoint is never run")
    for key, value in section.items():
        if key in _ONLY:
            if value not in _ONLY[key]:
                raise ConfigError(f"{where}.{key} = {value!r}: this engine computes only "
                                  f"{_ONLY[key][0]!r}")  # fmt: skip
        elif key in known or key in _INERT or _INERT_PATTERN.match(key):
            continue
        elif value not in (None, False, [], {}, ""):
            raise ConfigError(
                f"{where}.{key} = {value!r} is unknown to this engine and may change what the "
                "model computes: remove the key if it does not"
            )


def _layer_types(given: Any, layers: int) -> tuple[LayerType, ...]:
    """Absent: every sixth layer is global. The last layer always is."""
    if given is None:
        given = [FULL if i % 6 == 5 else SLIDING for i in range(layers)]
    if not isinstance(given, list | tuple):
        raise ConfigError(f"layer_types is a {type(given).__name__}, not a list")
    return (*given[:-1], FULL) if given else ()


def _per_layer(
    text: Mapping[str, Any], layer_types: tuple[LayerType, ...], head_dim: int, kv_heads: int
) -> tuple[int, int]:
    """Global head width and KV heads from the `per_layer_config` layout.

    Keys are layer indices as zero-padded strings; values say what differs from the plain
    fields there. The engine has one shape for each layer type, so the entries of a type agree.
    """
    table = text["per_layer_config"]
    if not isinstance(table, Mapping):
        raise ConfigError("per_layer_config is not a JSON object")
    own: dict[int, Mapping[str, Any]] = {}
    for key, entry in table.items():
        if not str(key).isdigit() or int(key) >= len(layer_types):
            raise ConfigError(f"per_layer_config has layer {key!r} of {len(layer_types)} layers")
        if not isinstance(entry, Mapping):
            raise ConfigError(f"per_layer_config[{key!r}] is not a JSON object")
        for name in entry:
            if name not in ("head_dim", "num_key_value_heads"):
                raise ConfigError(f"per_layer_config[{key!r}].{name} is unknown to this engine")
        own[int(key)] = entry
    shapes: dict[str, set[tuple[int, int]]] = {SLIDING: set(), FULL: set()}
    for i, kind in enumerate(layer_types):
        entry = own.get(i, {})
        shapes.setdefault(kind, set()).add(
            (entry.get("head_dim", head_dim), entry.get("num_key_value_heads", kv_heads))
        )
    for kind, found in shapes.items():
        if len(found) > 1:
            raise ConfigError(f"per_layer_config gives {kind} layers different shapes: "
                              f"{sorted(found)}")  # fmt: skip
    if shapes[SLIDING] - {(head_dim, kv_heads)}:
        raise ConfigError("per_layer_config changes sliding layers: put their shape in the plain "
                          "head_dim and num_key_value_heads")  # fmt: skip
    return next(iter(shapes[FULL]))


def _rope(text: Mapping[str, Any]) -> dict[str, float]:
    """The three RoPE numbers; rope types other than Gemma 4's own two are refused."""
    table = text.get("rope_parameters")
    if table is None:
        return {}
    if not isinstance(table, Mapping) or set(table) - {SLIDING, FULL}:
        raise ConfigError(f"rope_parameters must have just {SLIDING!r} and {FULL!r}")
    allowed = {"rope_type", "rope_theta", "partial_rotary_factor"}
    for kind, entry in table.items():
        for key in set(entry) - allowed:
            if entry[key] is not None and not (key == "factor" and entry[key] == 1.0):
                raise ConfigError(f"rope_parameters.{kind}.{key} = {entry[key]!r} is unknown")
    local, wide = table.get(SLIDING, {}), table.get(FULL, {})
    if local.get("rope_type", "default") != "default":
        raise ConfigError(f"rope_parameters.{SLIDING}.rope_type = {local['rope_type']!r}: "
                          "this engine computes only 'default'")  # fmt: skip
    if local.get("partial_rotary_factor") not in (None, 1.0):
        raise ConfigError(f"rope_parameters.{SLIDING}.partial_rotary_factor = "
                          f"{local['partial_rotary_factor']}: sliding heads turn whole")  # fmt: skip
    kind = wide.get("rope_type", "proportional")
    factor = wide.get("partial_rotary_factor")
    if kind not in ("proportional", "default") or (kind == "default" and factor not in (None, 1.0)):
        raise ConfigError(f"rope_parameters.{FULL}.rope_type = {kind!r} with "
                          f"partial_rotary_factor = {factor}: only 'proportional'")  # fmt: skip
    return {
        "rope_theta": local.get("rope_theta", 10_000.0),
        "global_rope_theta": wide.get("rope_theta", 1_000_000.0),
        "partial_rotary_factor": 1.0 if factor is None else factor,
    }


def _five_to_one(layers: int, period: int = 6) -> tuple[LayerType, ...]:
    return tuple(FULL if i % period == period - 1 else SLIDING for i in range(layers))


# The published sizes. What is the same in all of them is the dataclass's defaults.
_LARGE = {"attention_k_eq_v": True, "sliding_window": 1024, "max_position_embeddings": 262_144}
_SMALL = {
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262_144,
}
_COMMON = {"vocab_size": 262_144, "head_dim": 256, "global_head_dim": 512}
PRESETS: dict[str, GemmaConfig] = {
    "e2b": GemmaConfig(
        **_COMMON | _SMALL,
        hidden_size=1536,
        intermediate_size=6144,
        num_hidden_layers=35,
        layer_types=_five_to_one(35, period=5),
        num_attention_heads=8,
        num_key_value_heads=1,
        num_global_key_value_heads=1,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
    ),
    "e4b": GemmaConfig(
        **_COMMON | _SMALL,
        hidden_size=2560,
        intermediate_size=10_240,
        num_hidden_layers=42,
        layer_types=_five_to_one(42),
        num_attention_heads=8,
        num_key_value_heads=2,
        num_global_key_value_heads=2,
        num_kv_shared_layers=18,
    ),
    "12b": GemmaConfig(
        **_COMMON | _LARGE,
        hidden_size=3840,
        intermediate_size=15_360,
        num_hidden_layers=48,
        layer_types=_five_to_one(48),
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=1,
    ),
    "26b-a4b": GemmaConfig(
        **_COMMON | _LARGE,
        hidden_size=2816,
        intermediate_size=2112,
        num_hidden_layers=30,
        layer_types=_five_to_one(30),
        num_attention_heads=16,
        num_key_value_heads=8,
        num_global_key_value_heads=2,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    "31b": GemmaConfig(
        **_COMMON | _LARGE,
        hidden_size=5376,
        intermediate_size=21_504,
        num_hidden_layers=60,
        layer_types=_five_to_one(60),
        num_attention_heads=32,
        num_key_value_heads=16,
        num_global_key_value_heads=4,
    ),
}
