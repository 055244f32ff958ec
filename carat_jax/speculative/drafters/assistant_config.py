"""The shape of a Gemma 4 assistant drafter, and which targets it fits."""

import dataclasses
import functools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from carat_jax import config_json
from carat_jax.config import FULL, SLIDING, ConfigError, GemmaConfig, LayerSpec, LayerType
from carat_jax.config_json import check_int, show

_MODEL_TYPE = re.compile(r"gemma4(_unified)?_assistant")
_OWN = ("backbone_hidden_size", "use_ordered_embeddings", "num_centroids",
        "centroid_intermediate_top_k")  # fmt: skip
_MAX_INT = 2**31 - 1
_TARGET = -1  # kv_donor of the drafter's layers: none of its own

# What no published drafter has, and none is computed with.
_PLAIN: dict[str, Any] = {
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_experts": 0,
    "top_k_experts": 0,
    "moe_intermediate_size": 0,
    "final_logit_softcapping": None,
}

# What the drafter's layers must have in common with the target's, whose keys and values they read.
_SHARED: dict[LayerType, tuple[str, ...]] = {
    SLIDING: ("num_key_value_heads", "head_dim", "sliding_window", "rope_theta"),
    FULL: ("num_global_key_value_heads", "global_head_dim", "global_rope_theta",
           "partial_rotary_factor"),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class AssistantConfig:
    """An assistant drafter; static under jit (hashable). Names are those of its `config.json`.

    Attributes:
      text: its decoder layers. All of them read the target's keys and values, none another
        drafter layer's: `num_kv_shared_layers` is 0 here, and the number of layers in the file.
      backbone_hidden_size: D of the target.
      use_ordered_embeddings: tokens lie in clusters, and only those of the likeliest clusters
        are scored.
      num_centroids: C, clusters, of V / C tokens each. Not used otherwise.
      centroid_intermediate_top_k: clusters that are scored. Not used otherwise.

    Raises:
      ConfigError: from the constructor, where the values contradict each other.
    """

    text: GemmaConfig
    backbone_hidden_size: int
    use_ordered_embeddings: bool = False
    num_centroids: int = 2048
    centroid_intermediate_top_k: int = 32

    def __post_init__(self) -> None:
        for name, only in _PLAIN.items():
            value = getattr(self.text, name)
            if value != only:
                raise ConfigError(
                    f"text_config.{name} = {show(value)}: this engine computes drafters with "
                    f"{only!r}"
                )
        check_int("backbone_hidden_size", self.backbone_hidden_size, 1, _MAX_INT)
        if not isinstance(self.use_ordered_embeddings, bool):
            raise ConfigError(
                f"use_ordered_embeddings = {show(self.use_ordered_embeddings)}: it must be true "
                "or false"
            )
        if not self.use_ordered_embeddings:
            return
        C, V = self.num_centroids, self.text.vocab_size
        check_int("num_centroids", C, 1, V)
        if V % C:
            raise ConfigError(f"vocab_size {V} is no multiple of num_centroids {C}")
        check_int("centroid_intermediate_top_k", self.centroid_intermediate_top_k, 1, C)

    @classmethod
    def from_json(cls, path: str | Path) -> "AssistantConfig":
        """Reads `config.json` (a file, or a folder that holds one).

        Raises:
          FileNotFoundError: no such file.
          ConfigError: not JSON, not an assistant drafter, or a key that would change the
            mathematics in a way this engine does not compute; the message names the key.
        """
        return cls.from_dict(config_json.read(path))

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> "AssistantConfig":
        """As `from_json`, from the parsed JSON object."""
        kind, text = raw.get("model_type"), raw.get("text_config")
        if not isinstance(kind, str) or not _MODEL_TYPE.fullmatch(kind):
            raise ConfigError(
                f"config.model_type = {show(kind)} is no drafter: 'gemma4_assistant' or "
                "'gemma4_unified_assistant'"
            )
        if not isinstance(text, Mapping):
            raise ConfigError(f"text_config = {show(text)} is not a JSON object")
        layers, borrowing = text.get("num_hidden_layers"), text.get("num_kv_shared_layers")
        if borrowing != layers:
            raise ConfigError(
                f"text_config.num_kv_shared_layers = {show(borrowing)}: in a drafter all "
                f"{show(layers)} layers borrow their keys and values"
            )
        own = {name: raw[name] for name in _OWN if raw.get(name) is not None}
        if "backbone_hidden_size" not in own:
            raise ConfigError("the configuration lacks backbone_hidden_size")
        # The rest is a Gemma 4 configuration, and held to what is known of one.
        rest = {name: value for name, value in raw.items() if name not in _OWN}
        rest["model_type"] = kind.removesuffix("_assistant")
        rest["text_config"] = {**text, "num_kv_shared_layers": 0}
        return cls(text=GemmaConfig.from_dict(rest), **own)

    @classmethod
    def preset(cls, name: str) -> "AssistantConfig":
        """The published drafter of a published size: "e2b", "e4b", "12b", "26b-a4b" or "31b"."""
        target = GemmaConfig.preset(name)
        if target.hidden_size_per_layer_input:
            narrow = {"hidden_size": 256, "intermediate_size": 2048, "num_attention_heads": 4}
            return cls.for_target(target, **narrow, use_ordered_embeddings=True)
        return cls.for_target(target, hidden_size=1024, intermediate_size=8192)

    @classmethod
    def for_target(
        cls,
        target: GemmaConfig,
        *,
        hidden_size: int,
        intermediate_size: int,
        num_attention_heads: int | None = None,
        layer_types: tuple[LayerType, ...] = (SLIDING, SLIDING, SLIDING, FULL),
        **head: Any,
    ) -> "AssistantConfig":
        """A drafter that fits a target.

        Args:
          target: the model it drafts for.
          hidden_size, intermediate_size: of the drafter's layers.
          num_attention_heads: query heads; None = as many as the target has.
          layer_types: of the drafter's layers; the last is full.
          **head: the fields of the clustered head.
        """
        text = dataclasses.replace(
            target,
            **_PLAIN,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_attention_heads=num_attention_heads or target.num_attention_heads,
            num_hidden_layers=len(layer_types),
            layer_types=layer_types,
        )
        return cls(text=text, backbone_hidden_size=target.hidden_size, **head)

    def to_dict(self) -> dict[str, Any]:
        """The `config.json` form; `from_dict` gives this configuration back."""
        text = self.text.to_dict() | {"num_kv_shared_layers": self.text.num_hidden_layers}
        return {
            "architectures": ["Gemma4AssistantForCausalLM"],
            "model_type": "gemma4_assistant",
            "dtype": self.text.dtype,
            **{name: getattr(self, name) for name in _OWN},
            "tie_word_embeddings": True,
            "text_config": text,
        }

    @functools.cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """One `LayerSpec` for each layer; none owns keys and values."""
        return tuple(dataclasses.replace(s, kv_donor=_TARGET) for s in self.text.layers)


def check_pair(config: AssistantConfig, target: GemmaConfig) -> None:
    """Raises ConfigError, naming each field and both values, unless the drafter fits the target.

    Dtypes and context lengths may differ.
    """
    owned = {FULL if spec.window is None else SLIDING for spec in target.kv_layers}
    facts = [("backbone_hidden_size", config.backbone_hidden_size, "hidden_size")]
    names = ["vocab_size"]
    for kind in dict.fromkeys(config.text.layer_types):
        if kind not in owned:
            raise ConfigError(
                f"the drafter's layer_types have {kind!r}, and the target's "
                f"{show(target.layer_types)} no such layer with keys and values of its own"
            )
        names += _SHARED[kind]
    facts += [(name, getattr(config.text, name), name) for name in names]
    wrong = [
        f"its {own} {value:,} is not the target's {other} {getattr(target, other):,}"
        for own, value, other in facts
        if value != getattr(target, other)
    ]
    if wrong:
        raise ConfigError(
            f"the drafter was made for another model: {'; '.join(wrong)}. Take the drafter of the "
            "target's size"
        )
