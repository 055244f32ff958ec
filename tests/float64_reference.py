"""Gemma 4 in plain float64 NumPy: the yardstick of the numerical tests.

Written from the formulas and tensor names of the published checkpoints, one sequence at a time and
without a cache; it shares no code with the packages under test. Letters: T positions of the
sequence, N query heads, K KV heads, H head width, D model width, V vocabulary, L layers.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

EPS = 1e-6
FULL = "full_attention"


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    first: int | np.ndarray = 0,
    window: int | None = None,
) -> np.ndarray:
    """Causal attention of one sequence, scale 1.

    Args:
      q: [T, N, H], query t at position first + t; first [T] = query t at position first[t].
      k: [S, K, H], key s at position s; query head n reads KV head n // (N / K).
      v: [S, K, any width].
      window: keys a query sees, itself included; None = all.

    Returns:
      float64 [T, N, width of v].
    """
    (T, N, _), (S, K, _) = q.shape, k.shape
    q = q.astype(np.float64).reshape(T, K, N // K, -1).transpose(1, 2, 0, 3)  # K, G, T, H
    k, v = (x.astype(np.float64).transpose(1, 0, 2)[:, None] for x in (k, v))  # K, 1, S, H
    position = first if np.ndim(first) else first + np.arange(T)
    age = position[:, None] - np.arange(S)
    seen = (age >= 0) & (age < (np.inf if window is None else window))
    p = softmax(np.where(seen, q @ k.swapaxes(-1, -2), -np.inf))
    return (p @ v).transpose(2, 0, 1, 3).reshape(T, N, -1)


def softmax(x: np.ndarray) -> np.ndarray:
    x = np.exp(x - x.max(-1, keepdims=True))
    return x / x.sum(-1, keepdims=True)


def gelu(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def rope(x: np.ndarray, positions: np.ndarray, theta: float, partial: float) -> np.ndarray:
    """Turns x [T, heads, H], width d with d + H/2, in the first floor(partial · H / 2) pairs."""
    half = x.shape[-1] // 2
    d = np.arange(half)
    frequency = np.where(d < int(partial * half), theta ** (-d / half), 0.0)
    phase = positions[:, None, None] * frequency
    low, high = x[..., :half], x[..., half:]
    turned = low * np.cos(phase) - high * np.sin(phase), high * np.cos(phase) + low * np.sin(phase)
    return np.concatenate(turned, axis=-1)


@dataclass
class Outputs:
    """Everything that the published fixtures record.

    Attributes:
      logits: [T, V] after the soft cap.
      hidden_states: L + 1 arrays [T, D]: the scaled embedding, then the residual after each layer.
      final_hidden: [T, D] after the final norm.
      keys: by layer, (k, v) [T, K, H] that the layer attends to, a borrowing layer's donor's.
      per_layer_inputs: [T, L, P], or None.
      router_index, router_weight: by layer, [T, k] in descending order of probability.
    """

    logits: np.ndarray
    hidden_states: list[np.ndarray]
    final_hidden: np.ndarray
    keys: dict[int, tuple[np.ndarray, np.ndarray]]
    per_layer_inputs: np.ndarray | None = None
    router_index: list[np.ndarray] = field(default_factory=list)
    router_weight: list[np.ndarray] = field(default_factory=list)


def run(
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    ids: np.ndarray,
    cast: Callable[[np.ndarray], np.ndarray] = np.asarray,
) -> Outputs:
    """The model over one sequence.

    Args:
      config: the parsed `config.json`, nested or flat.
      tensors: the checkpoint's, by published name.
      ids: int [T].
      cast: applied to every intermediate that is an activation, and to the embedding scale. A
        rounding to bfloat16 here gives what a plain bfloat16 implementation computes.
    """
    return _Model(config, tensors, cast).run(np.asarray(ids))


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Rounds to the nearest bfloat16, ties to even; stays float64."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits & 0xFFFF0000).astype(np.uint32).view(np.float32).astype(np.float64)


class _Model:
    def __init__(self, config: Mapping[str, Any], tensors: Mapping[str, np.ndarray], cast) -> None:
        self.c = c = config.get("text_config", config)
        nested = "model.language_model.norm.weight" in tensors
        self.prefix = "model.language_model." if nested else "model."
        self.tensors, self.cast = tensors, cast
        layers = c["num_hidden_layers"]
        types = c.get("layer_types") or [FULL if i % 6 == 5 else "" for i in range(layers)]
        self.full = [kind == FULL for kind in types[:-1]] + [True]
        self.first_borrower = layers - (c.get("num_kv_shared_layers") or 0)

    def weight(self, name: str) -> np.ndarray:
        return self.tensors[self.prefix + name].astype(np.float64)

    def linear(self, name: str, x: np.ndarray) -> np.ndarray:
        return self.cast(x @ self.weight(name).T)

    def rms(self, x: np.ndarray, name: str | None) -> np.ndarray:
        y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + EPS)
        return self.cast(y if name is None else y * self.weight(name))

    def run(self, ids: np.ndarray) -> Outputs:
        c, D = self.c, self.c["hidden_size"]
        embed = self.weight("embed_tokens.weight")
        h = self.cast(embed[ids] * self.cast(np.sqrt(np.float64(D))))
        out = Outputs(logits=h, hidden_states=[h], final_hidden=h, keys={})
        if P := c.get("hidden_size_per_layer_input"):
            out.per_layer_inputs = self.per_layer_inputs(ids, h, P)
        for i in range(c["num_hidden_layers"]):
            out.hidden_states.append(self.layer(i, out.hidden_states[-1], out))
        out.final_hidden = self.rms(out.hidden_states[-1], "norm.weight")
        z, cap = out.final_hidden @ embed.T, c.get("final_logit_softcapping")
        out.logits = z if cap is None else cap * np.tanh(z / cap)
        return out

    def per_layer_inputs(self, ids: np.ndarray, h: np.ndarray, P: int) -> np.ndarray:
        shape = (len(ids), self.c["num_hidden_layers"], P)
        own = self.cast(self.weight("embed_tokens_per_layer.weight")[ids] * np.sqrt(P))
        context = self.cast(
            self.linear("per_layer_model_projection.weight", h) * h.shape[-1] ** -0.5
        )
        context = self.rms(context.reshape(shape), "per_layer_projection_norm.weight")
        return self.cast((context + own.reshape(shape)) * 2**-0.5)

    def layer(self, i: int, h: np.ndarray, out: Outputs) -> np.ndarray:
        cast, name = self.cast, f"layers.{i}."
        a = self.attention(i, self.rms(h, f"{name}input_layernorm.weight"), out)
        h = cast(h + self.rms(a, f"{name}post_attention_layernorm.weight"))
        f = self.mlp(f"{name}mlp.", self.rms(h, f"{name}pre_feedforward_layernorm.weight"))
        if self.c.get("enable_moe_block"):
            d = self.rms(f, f"{name}post_feedforward_layernorm_1.weight")
            m = self.experts(name, h, out)
            f = cast(d + self.rms(m, f"{name}post_feedforward_layernorm_2.weight"))
        h = cast(h + self.rms(f, f"{name}post_feedforward_layernorm.weight"))
        if out.per_layer_inputs is not None:
            g = cast(gelu(self.linear(f"{name}per_layer_input_gate.weight", h)))
            g = cast(g * out.per_layer_inputs[:, i])
            g = self.linear(f"{name}per_layer_projection.weight", g)
            h = cast(h + self.rms(g, f"{name}post_per_layer_input_norm.weight"))
        return cast(h * self.weight(f"{name}layer_scalar"))

    def attention(self, i: int, x: np.ndarray, out: Outputs) -> np.ndarray:
        c, full, name = self.c, self.full[i], f"layers.{i}.self_attn."
        same = full and c.get("attention_k_eq_v", False)
        H = (c.get("global_head_dim") or c["head_dim"]) if full else c["head_dim"]
        K = (same and c.get("num_global_key_value_heads")) or c["num_key_value_heads"]
        parameters = c["rope_parameters"][FULL if full else "sliding_attention"]
        partial = parameters.get("partial_rotary_factor", 1.0)
        T = len(x)

        def turned(y: np.ndarray) -> np.ndarray:
            return self.cast(rope(y, np.arange(T), parameters["rope_theta"], partial))

        q = self.linear(f"{name}q_proj.weight", x).reshape(T, -1, H)
        q = turned(self.rms(q, f"{name}q_norm.weight"))
        if i < self.first_borrower:
            k = self.linear(f"{name}k_proj.weight", x).reshape(T, K, H)
            v = k if same else self.linear(f"{name}v_proj.weight", x).reshape(T, K, H)
            out.keys[i] = turned(self.rms(k, f"{name}k_norm.weight")), self.rms(v, None)
        else:
            donors = [j for j in range(self.first_borrower) if self.full[j] == full]
            out.keys[i] = out.keys[donors[-1]]
        a = attention(q, *out.keys[i], window=None if full else c["sliding_window"])
        return self.linear(f"{name}o_proj.weight", self.cast(a).reshape(T, -1))

    def mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        gate = self.cast(gelu(self.linear(f"{name}gate_proj.weight", x)))
        up = self.linear(f"{name}up_proj.weight", x)
        return self.linear(f"{name}down_proj.weight", self.cast(gate * up))

    def experts(self, name: str, h: np.ndarray, out: Outputs) -> np.ndarray:
        cast = self.cast
        r = cast(self.rms(h, None) * self.weight(f"{name}router.scale") * h.shape[-1] ** -0.5)
        p = softmax(r @ self.weight(f"{name}router.proj.weight").T)
        index = np.argsort(-p, axis=-1, kind="stable")[:, : self.c["top_k_experts"]]
        share = np.take_along_axis(p, index, axis=-1)
        share = share / share.sum(-1, keepdims=True)
        share = share * self.weight(f"{name}router.per_expert_scale")[index]
        out.router_index.append(index)
        out.router_weight.append(share)
        x = self.rms(h, f"{name}pre_feedforward_layernorm_2.weight")
        gate_up = self.weight(f"{name}experts.gate_up_proj")  # [E, 2F, D]
        down = self.weight(f"{name}experts.down_proj")  # [E, D, F]
        y = np.zeros_like(x)
        for e in np.unique(index):
            t, place = np.nonzero(index == e)  # the tokens that visit this expert
            gate, up = np.split(cast(x[t] @ gate_up[e].T), 2, axis=-1)
            visited = cast(cast(cast(gelu(gate)) * up) @ down[e].T)
            y[t] += visited * share[t, place, None]
        return cast(y)
