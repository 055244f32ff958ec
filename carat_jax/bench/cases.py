"""One attention call of a published shape: random inputs, what it must read, the exact result."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from carat_jax.bench import exact
from carat_jax.config import GemmaConfig, LayerSpec
from carat_jax.kv_state import ring_capacity, round_up
from pallas_kernels import global_attention, prefill_attention, ring_attention, rotation
from pallas_kernels.global_attention import IMPLEMENTATIONS as GLOBAL
from pallas_kernels.prefill_attention import IMPLEMENTATIONS as PREFILL
from pallas_kernels.ring_attention import IMPLEMENTATIONS as RING

SPREAD = 3.0  # standard deviation of the scores: a few keys outweigh the rest, as in a model
CHECKED_KEYS = 1 << 15  # of a buffer, about so many are read in float64
CHECKED_QUERIES = 16  # of each KV head, at most so many positions

Buffer = dict[str, jax.Array]
Step = Callable[[jax.Array, Buffer, Buffer], jax.Array]


class Op(NamedTuple):
    """A public function of `pallas_kernels` and its implementations by name."""

    function: Callable[..., jax.Array]
    implementations: Mapping[str, Callable[..., jax.Array]]


OPS = {
    "ring": Op(ring_attention, RING),
    "global": Op(global_attention, GLOBAL),
    "prefill": Op(prefill_attention, PREFILL),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A call of `op` by a layer. Letters as in `pallas_kernels`.

    Attributes:
      op: a key of OPS.
      spec: the layer.
      layers: how many such layers the model has with keys of their own.
      batch, tokens: B and T.
      context: positions that the last query sees or, with a window, could see without it.
      dtype: of queries, keys and values.
      compact: the cache has the compact form.
    """

    op: str
    spec: LayerSpec
    layers: int
    batch: int
    tokens: int
    context: int
    dtype: str
    compact: bool

    @property
    def length(self) -> int:
        """Positions before the new ones."""
        return self.context - self.tokens

    @property
    def capacity(self) -> int:
        """Slots of the key axis, R or S."""
        if self.spec.window is None:
            return round_up(self.context)
        return ring_capacity(self.spec.window) if self.op == "ring" else self._past + self.tokens

    @property
    def _past(self) -> int:
        return round_up(self.spec.window - 1)

    @property
    def positions(self) -> np.ndarray:
        """int [keys], the positions that any query sees."""
        first = 0 if self.spec.window is None else max(0, self.length - self.spec.window + 1)
        return np.arange(first, self.context)

    def slots(self, positions: np.ndarray) -> np.ndarray:
        """Where the key axis holds them."""
        if self.spec.window is None:
            return positions
        return (
            positions % self.capacity if self.op == "ring" else positions - self.length + self._past
        )

    @property
    def widths(self) -> dict[str, int]:
        """Arrays of the cache, and the width of each."""
        s = self.spec
        if self.compact:
            return {"v": s.head_dim, "k_rotated": s.rotated}
        return {"v": s.head_dim, "k": s.head_dim}

    @property
    def bytes(self) -> int:
        """Live keys and values, each once."""
        return self._bytes(len(self.positions))

    @property
    def buffer_bytes(self) -> int:
        """Bytes of `buffer`."""
        return self._bytes(self.capacity)

    def _bytes(self, keys: int) -> int:
        widths = sum(self.widths.values())
        return self.batch * self.spec.num_kv_heads * keys * widths * jnp.dtype(self.dtype).itemsize

    @property
    def flops(self) -> int:
        """Of both products, over the pairs of query and key that the mask lets through."""
        seen = self.length + 1 + np.arange(self.tokens)
        pairs = int(np.minimum(seen, self.spec.window or self.context).sum())
        return 4 * self.batch * pairs * self.spec.num_heads * self.spec.head_dim

    def queries(self) -> tuple[jax.Array, Buffer]:
        """q [B, T, N, H], and what else every call takes: length, q_rotated."""
        s, shape = self.spec, (self.batch, self.tokens, self.spec.num_heads)
        spread = SPREAD / math.sqrt(s.head_dim)
        q = _normal(1, (*shape, s.head_dim), self.dtype) * spread
        shared = {"length": jnp.full((self.batch,), self.length, jnp.int32)}
        if self.compact:
            q = rotation.without_rotated_widths(q, s.rotated)
            shared["q_rotated"] = _normal(2, (*shape, s.rotated), self.dtype) * spread
        return q, shared

    def buffer(self, seed: int) -> Buffer:
        """Random keys and values in every slot, live or not."""
        shape = (self.batch, self.spec.num_kv_heads, self.capacity)
        return {
            name: _normal(10 + 2 * seed + i, (*shape, width), self.dtype)
            for i, (name, width) in enumerate(self.widths.items())
        }

    def step(self, implementation: str | None) -> Step:
        """The call as `timing.chain` takes it: (q, buffer, shared) -> the next q."""
        function = OPS[self.op].function
        options: dict[str, Any] = {"implementation": implementation}
        if self.op != "global":
            options["window"] = self.spec.window

        def call(q: jax.Array, buffer: Buffer, shared: Buffer) -> jax.Array:
            rotated = {}
            if self.compact:
                rotated = {"q_rotated": shared["q_rotated"], "k_rotated": buffer["k_rotated"]}
            return function(q, buffer.get("k"), buffer["v"], shared["length"], **rotated, **options)

        return call

    def expected(self, q: jax.Array, shared: Buffer, buffer: Buffer) -> np.ndarray:
        """float64 [heads, t, G, H]: the rows that `judge` looks at."""
        s, t = self.spec, self._checked_queries
        slots = self.slots(self.positions)
        results = []
        for b, head in self._checked_heads:
            rows = self._rows(q, b, head)
            v = np.asarray(buffer["v"][b, head])[slots]
            if self.compact:
                rows = np.concatenate([rows, self._rows(shared["q_rotated"], b, head)], axis=-1)
                k = np.concatenate([v, np.asarray(buffer["k_rotated"][b, head])[slots]], axis=-1)
            else:
                k = np.asarray(buffer["k"][b, head])[slots]
            position = np.repeat(self.length + t, s.group)
            rows = rows.reshape(len(position), -1)
            out = exact.attention(rows, k, v, position, self.positions, s.window)
            results.append(out.reshape(len(t), s.group, -1))
        return np.stack(results)

    def judge(
        self, outputs: Sequence[np.ndarray], expected: Sequence[np.ndarray]
    ) -> dict[str, Any]:
        """ "error" and "void" of outputs [B, T, N, H], each against its `expected`."""
        heads = self._checked_heads
        checked = [np.stack([self._rows(out, b, head) for b, head in heads]) for out in outputs]
        return exact.judge(outputs, checked, expected)

    def _rows(self, x: jax.Array | np.ndarray, b: int, head: int) -> np.ndarray:
        G = self.spec.group
        return np.asarray(x)[b, self._checked_queries, head * G : (head + 1) * G]

    @property
    def _checked_heads(self) -> list[tuple[int, int]]:
        """(b, KV head) pairs spread over all, the last among them."""
        pairs = self.batch * self.spec.num_kv_heads
        count = min(pairs, max(1, CHECKED_KEYS // len(self.positions)))
        chosen = np.unique(np.linspace(pairs - 1, 0, count).round().astype(int))
        return [divmod(int(i), self.spec.num_kv_heads) for i in chosen]

    @property
    def _checked_queries(self) -> np.ndarray:
        count = min(self.tokens, CHECKED_QUERIES)
        return np.unique(np.linspace(0, self.tokens - 1, count).round().astype(int))


def cases(
    config: GemmaConfig, op: str, context: int, *, tokens: int, batch: int = 1
) -> Sequence[Case]:
    """The calls of `op` in this model: one, or one for each type of layer (prefill).

    Raises:
      ValueError: numbers that the op or the model does not take.
    """
    limit = config.max_position_embeddings
    if batch < 1 or tokens < 1:
        raise ValueError(f"batch {batch} and tokens {tokens}: each must be at least 1")
    if not tokens <= context <= limit:
        raise ValueError(
            f"context {context:,} holds the {tokens:,} new tokens too: it must be from "
            f"{tokens:,} to {limit:,}, which is as far as the model goes"
        )
    found = {spec.window: spec for spec in reversed(config.kv_layers)}
    windows = {"ring": lambda w: w is not None, "global": lambda w: w is None}
    chosen = [
        Case(
            op=op,
            spec=spec,
            layers=sum(other.window == window for other in config.kv_layers),
            batch=batch,
            tokens=tokens,
            context=context,
            dtype=config.dtype,
            compact=spec.shared_projection,
        )
        for window, spec in sorted(found.items(), key=lambda item: item[0] is None)
        if windows.get(op, lambda _: True)(window)
    ]
    for case in chosen:
        if op == "ring" and case.spec.window + tokens - 1 > case.capacity:
            raise ValueError(
                f"{tokens} new tokens overflow a ring of {case.capacity:,} slots with window "
                f"{case.spec.window:,}: at most {case.capacity - case.spec.window + 1}"
            )
    return chosen


def _normal(seed: int, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return _draw(jax.random.key(seed), shape, dtype)


_draw = jax.jit(jax.random.normal, static_argnums=(1, 2))
