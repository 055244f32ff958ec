"""The shape of a Gemma 4 text model: `GemmaConfig`, and the published sizes."""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from carat_jax import config_json
from carat_jax.config_json import (
    FULL,
    MAX_LAYERS,
    SLIDING,
    ConfigError,
    LayerType,
    check_dtype,
    check_int,
    show,
)

__all__ = ["FULL", "SLIDING", "ConfigError", "GemmaConfig", "LayerSpec", "LayerType"]


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

    def share(self, devices: int) -> "LayerSpec":
        """What one of so many devices has of this layer: at least one KV head, maybe repeated."""
        return dataclasses.replace(
            self,
            num_heads=self.num_heads // devices,
            num_kv_heads=max(self.num_kv_heads // devices, 1),
            mlp_width=self.mlp_width // devices,
        )


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
        _check_values(self)
        _check_agreement(self)

    @classmethod
    def from_json(cls, path: str | Path) -> "GemmaConfig":
        """Reads `config.json` (a file, or a folder that holds one) in any published layout.

        Raises:
          FileNotFoundError: no such file.
          ConfigError: not JSON, not a Gemma 4 text model, or a key that would change the
            mathematics in a way this engine does not compute; the message names the key.
        """
        return cls.from_dict(config_json.read(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "GemmaConfig":
        """As `from_json`, from the parsed JSON object."""
        return cls(**config_json.arguments(raw))

    @classmethod
    def preset(cls, name: str) -> "GemmaConfig":
        """A published size: "e2b", "e4b", "12b", "26b-a4b" or "31b"."""
        try:
            return PRESETS[name.lower()]
        except KeyError:
            raise ConfigError(f"no preset {name!r}: choose one of {', '.join(PRESETS)}") from None

    def to_dict(self) -> dict[str, Any]:
        """The flat `config.json` form; `from_dict` gives this configuration back."""
        result = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        full = {
            "head_dim": result.pop("global_head_dim"),
            "num_key_value_heads": result.pop("num_global_key_value_heads"),
        }
        rope = {
            SLIDING: {"rope_type": "default", "rope_theta": result.pop("rope_theta")},
            FULL: {
                "rope_type": "proportional",
                "rope_theta": result.pop("global_rope_theta"),
                "partial_rotary_factor": result.pop("partial_rotary_factor"),
            },
        }
        digits = len(str(self.num_hidden_layers - 1))
        return result | {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "layer_types": list(self.layer_types),
            "per_layer_config": {
                f"{i:0{digits}}": full for i, kind in enumerate(self.layer_types) if kind == FULL
            },
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
            window=None if full else min(self.sliding_window, self.max_position_embeddings),
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


_MAX_INT = 2**31 - 1  # array indices are int32
_MAY_BE_ZERO = frozenset(
    "num_kv_shared_layers hidden_size_per_layer_input vocab_size_per_layer_input num_experts "
    "top_k_experts moe_intermediate_size bos_token_id pad_token_id".split()
)


def _check_values(c: GemmaConfig) -> None:
    """Refuses values of the wrong type or out of range, each field by itself."""
    check_int("num_hidden_layers", c.num_hidden_layers, 1, MAX_LAYERS)
    check_dtype("dtype", c.dtype)
    if not isinstance(c.layer_types, tuple):
        raise ConfigError(f"layer_types = {show(c.layer_types)}: it must be a tuple")
    for kind in c.layer_types:
        if kind not in (SLIDING, FULL):
            raise ConfigError(
                f"layer_types has {show(kind)}: only {SLIDING!r} and {FULL!r} are Gemma 4's"
            )
    for field in dataclasses.fields(c):
        name, value = field.name, getattr(c, field.name)
        if field.type is int:
            check_int(name, value, 0 if name in _MAY_BE_ZERO else 1, _MAX_INT)
        elif field.type is bool and not isinstance(value, bool):
            raise ConfigError(f"{name} = {show(value)}: it must be true or false")
        elif name == "partial_rotary_factor":
            _check_float(name, value, 0.0, 1.0)
        elif field.type is float or (name == "final_logit_softcapping" and value is not None):
            _check_float(name, value, 1e-37, 1e37)


def _check_float(name: str, value: object, low: float, high: float) -> None:
    if type(value) not in (int, float) or not low <= value <= high:  # NaN is in no range
        raise ConfigError(
            f"{name} = {show(value)}: it must be a number from {low:g} to {high:g} (float32)"
        )


def _check_agreement(c: GemmaConfig) -> None:
    """Refuses values that contradict each other."""

    def refuse(message: str) -> None:
        raise ConfigError(message)

    if len(c.layer_types) != c.num_hidden_layers:
        refuse(
            f"layer_types has {len(c.layer_types)} entries, "
            f"num_hidden_layers is {c.num_hidden_layers}"
        )
    if c.layer_types[-1] != FULL:
        refuse(f"the last of layer_types is {c.layer_types[-1]!r}: it must be {FULL!r}")
    for name in ("num_key_value_heads", "num_global_key_value_heads"):
        if c.num_attention_heads % getattr(c, name):
            refuse(
                f"num_attention_heads {c.num_attention_heads} is no multiple of {name} "
                f"{getattr(c, name)}"
            )
    for name in ("head_dim", "global_head_dim"):
        if getattr(c, name) % 2:
            refuse(f"{name} = {getattr(c, name)}: RoPE pairs widths, so it must be even")
    check_int("num_kv_shared_layers", c.num_kv_shared_layers, 0, c.num_hidden_layers - 1)
    if bool(c.hidden_size_per_layer_input) != bool(c.vocab_size_per_layer_input):
        refuse(
            f"hidden_size_per_layer_input {c.hidden_size_per_layer_input} and "
            f"vocab_size_per_layer_input {c.vocab_size_per_layer_input}: both or neither"
        )
    check_int("top_k_experts", c.top_k_experts, 1 if c.num_experts else 0, c.num_experts)
    width = c.moe_intermediate_size
    if bool(c.num_experts) != bool(width):
        refuse(f"num_experts {c.num_experts} and moe_intermediate_size {width}: both or neither")
    for name in ("bos_token_id", "pad_token_id"):
        check_int(name, getattr(c, name), 0, c.vocab_size - 1)
    _ = c.layers  # resolves the KV donors


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
