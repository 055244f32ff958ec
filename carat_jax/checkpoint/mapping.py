"""Which checkpoint tensors make up each parameter, and how they lie in it.

Checkpoints store every matrix output-major, [out, in]; the model's are input-major and some are
several tensors merged. A tensor is looked at in its own order with the parameter's axes
(`Part.view`), so that any run of its first axis is one run of the file; transposed by
`Recipe.order`, it is a block of the parameter that begins at `Part.start`.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from carat_jax.config import GemmaConfig, LayerSpec

PREFIXES = ("model.language_model.", "model.")
SKIPPED = re.compile(
    r"model\.(vision_tower|embed_vision|audio_tower|embed_audio|vision_embedder)\..*"
)


@dataclass(frozen=True)
class Part:
    """One tensor of a parameter.

    Attributes:
      name: in the checkpoint, without prefix.
      shape: in the checkpoint.
      view: the same values with the axes of the parameter, before `Recipe.order`.
      start: the index in the parameter where they begin.
    """

    name: str
    shape: tuple[int, ...]
    view: tuple[int, ...]
    start: tuple[int, ...]


@dataclass(frozen=True)
class Recipe:
    """How to make one parameter.

    Attributes:
      parts: the tensors; together they fill it.
      shape: of the parameter.
      order: the transposition from a part's view to the parameter's layout.
    """

    parts: tuple[Part, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...]


def recipes(config: GemmaConfig) -> dict[str, Recipe]:
    """A recipe for each parameter, by its path in the tree ("layers_0/mlp/down")."""
    result: dict[str, Recipe] = dict(_model(config))
    for spec in config.layers:
        for name, recipe in layer_recipes(config, spec, f"layers.{spec.index}."):
            result[f"layers_{spec.index}/{name}"] = recipe
    return result


def unused(config: GemmaConfig) -> frozenset[str]:
    """Tensors that published files hold and nothing reads: K/V weights of borrowing layers."""
    return frozenset(
        f"layers.{spec.index}.self_attn.{name}.weight"
        for spec in config.layers
        if not spec.owns_kv
        for name in ("k_proj", "v_proj", "k_norm")
    )


def single(
    name: str,
    shape: tuple[int, ...],
    view: tuple[int, ...] | None = None,
    order: tuple[int, ...] | None = None,
) -> Recipe:
    """A parameter that is one tensor."""
    view = shape if view is None else view
    order = tuple(range(len(view))) if order is None else order
    part = Part(name, shape, view, (0,) * len(view))
    return Recipe((part,), tuple(view[axis] for axis in order), order)


def _model(c: GemmaConfig) -> Iterator[tuple[str, Recipe]]:
    V, D = c.vocab_size, c.hidden_size
    yield "embed_tokens", single("embed_tokens.weight", (V, D))
    yield "norm", single("norm.weight", (D,))
    if P := c.hidden_size_per_layer_input:
        L, rows = c.num_hidden_layers, c.vocab_size_per_layer_input
        yield (
            "embed_tokens_per_layer",
            single("embed_tokens_per_layer.weight", (rows, L * P), (rows, L, P)),
        )
        yield (
            "per_layer_model_projection",
            single("per_layer_model_projection.weight", (L * P, D), (L, P, D), (2, 0, 1)),
        )
        yield "per_layer_projection_norm", single("per_layer_projection_norm.weight", (P,))


def layer_recipes(
    config: GemmaConfig, spec: LayerSpec, prefix: str
) -> Iterator[tuple[str, Recipe]]:
    """A recipe for each parameter of a `Block`; `prefix` begins the names of its tensors."""
    c, s = config, spec
    D, F = c.hidden_size, s.mlp_width
    for name in ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
                 "post_feedforward_layernorm"):  # fmt: skip
        yield name, single(f"{prefix}{name}.weight", (D,))
    yield "layer_scalar", single(f"{prefix}layer_scalar", (1,))
    yield from _attention(c, s, f"{prefix}self_attn.")
    gate_up = tuple(
        Part(f"{prefix}mlp.{name}_proj.weight", (F, D), (F, 1, D), (0, i, 0))
        for i, name in enumerate(("gate", "up"))
    )
    yield "mlp/gate_up", Recipe(gate_up, (D, 2, F), (2, 1, 0))
    yield "mlp/down", single(f"{prefix}mlp.down_proj.weight", (D, F), order=(1, 0))
    if P := c.hidden_size_per_layer_input:
        for name, shape in (("per_layer_input_gate", (P, D)), ("per_layer_projection", (D, P))):
            yield name, single(f"{prefix}{name}.weight", shape, order=(1, 0))
        name = "post_per_layer_input_norm"
        yield name, single(f"{prefix}{name}.weight", (D,))
    if c.num_experts:
        yield from _experts(c, prefix)


def _attention(c: GemmaConfig, s: LayerSpec, prefix: str) -> Iterator[tuple[str, Recipe]]:
    D, K, G, H = c.hidden_size, s.num_kv_heads, s.group, s.head_dim
    parts = [Part(f"{prefix}q_proj.weight", (K * G * H, D), (K, G, H, D), (0, 0, 0, 0))]
    if s.owns_kv:
        for i, name in enumerate(("k_proj",) if s.shared_projection else ("k_proj", "v_proj")):
            start = (0, 0, G + i, 0)
            parts.append(Part(f"{prefix}{name}.weight", (K * H, D), (K, 1, H, D), start))
        yield "attention/k_norm", single(f"{prefix}k_norm.weight", (H,))
    width = G + len(parts) - 1
    yield "attention/qkv", Recipe(tuple(parts), (D, K, width, H), (3, 0, 1, 2))
    o = f"{prefix}o_proj.weight"
    yield "attention/o", single(o, (D, K * G * H), (D, K, G, H), (1, 2, 3, 0))
    yield "attention/q_norm", single(f"{prefix}q_norm.weight", (H,))


def _experts(c: GemmaConfig, prefix: str) -> Iterator[tuple[str, Recipe]]:
    D, E, F = c.hidden_size, c.num_experts, c.moe_intermediate_size
    for name in ("pre_feedforward_layernorm_2", "post_feedforward_layernorm_1",
                 "post_feedforward_layernorm_2"):  # fmt: skip
        yield name, single(f"{prefix}{name}.weight", (D,))
    yield "experts/router", single(f"{prefix}router.proj.weight", (E, D), order=(1, 0))
    yield "experts/router_scale", single(f"{prefix}router.scale", (D,))
    yield "experts/per_expert_scale", single(f"{prefix}router.per_expert_scale", (E,))
    gate_up = f"{prefix}experts.gate_up_proj"
    yield "experts/gate_up", single(gate_up, (E, 2 * F, D), (E, 2, F, D), (0, 3, 1, 2))
    yield "experts/down", single(f"{prefix}experts.down_proj", (E, D, F), order=(0, 2, 1))
