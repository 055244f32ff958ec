"""Inputs for the attention ops at the head groups of the published sizes, and what must come out.

Whole histories of keys are drawn first; a ring, a cache or a chunk is then cut from them slot by
slot, and everything a row must not read is filled with values near the largest of the dtype. The
expected result comes from the history in float64, so it knows nothing of slots.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from float64_reference import attention

from pallas_kernels import Unsupported

DTYPES = ("float32", "bfloat16")
GARBAGE = 3e38  # just below the largest finite value of both dtypes


@dataclass(frozen=True)
class Heads:
    """One layer type of a published size.

    Attributes:
      K, G, H: KV heads, query heads of each, head width.
      P: rotated widths of a compact cache; 0 = a plain one.
      W: window of a local layer; None = a global one, or where a test has windows of its own.
    """

    name: str
    K: int
    G: int
    H: int
    P: int = 0
    W: int | None = None

    def __str__(self) -> str:
        return self.name


PUBLISHED_LOCAL = (
    Heads("31b", 16, 2, 256, W=1024),
    Heads("26b-a4b, 12b", 8, 2, 256, W=1024),
    Heads("e4b", 2, 4, 256, W=512),
    Heads("e2b", 1, 8, 256, W=512),
)
PUBLISHED_GLOBAL = (
    Heads("31b", 4, 8, 512, P=128),
    Heads("12b", 1, 16, 512, P=128),
    Heads("26b-a4b", 2, 8, 512, P=128),
    Heads("e4b", 2, 4, 512),
    Heads("e2b", 1, 8, 512),
)

# The same with widths cut by 8 and fewer KV heads, quick on a CPU. 12B and 26B-A4B have the local
# heads of 31B (two query heads on each KV head).
LOCAL = (Heads("31b", 2, 2, 32), Heads("e4b", 2, 4, 32), Heads("e2b", 1, 8, 32))
GLOBAL = (
    Heads("31b", 4, 8, 64, P=16),
    Heads("12b", 1, 16, 64, P=16),
    Heads("26b-a4b", 2, 8, 64, P=16),
    Heads("e4b", 2, 4, 64),
    Heads("e2b", 1, 8, 64),
)


@dataclass(frozen=True)
class History:
    """Queries and the keys of all positions, rounded to `dtype` and held in float32.

    Attributes:
      q: [B, T, N, H]; q_rotated [B, T, N, P] (P may be 0).
      k, v: [B, K, positions, H]; k_rotated [B, K, positions, P]. A compact cache has k = v.
      length: int [B]; the T queries of row b are at length[b] and after.
    """

    dtype: str
    length: np.ndarray
    q: np.ndarray
    q_rotated: np.ndarray
    k: np.ndarray
    k_rotated: np.ndarray
    v: np.ndarray

    @property
    def T(self) -> int:
        return self.q.shape[1]

    def queries(self) -> jax.Array:
        return jnp.asarray(self.q, self.dtype)

    def lengths(self) -> jax.Array:
        return jnp.asarray(self.length, jnp.int32)

    def forms(self, k: np.ndarray, v: np.ndarray, k_rotated: np.ndarray) -> tuple[list, dict]:
        """q, k, v, length and the keywords of the compact form, for caches cut from the history."""
        compact = self.q_rotated.shape[-1] > 0
        keywords = {}
        if compact:
            keywords["q_rotated"] = jnp.asarray(self.q_rotated, self.dtype)
            keywords["k_rotated"] = jnp.asarray(k_rotated, self.dtype)
        plain_k = None if compact else jnp.asarray(k, self.dtype)
        return [self.queries(), plain_k, jnp.asarray(v, self.dtype), self.lengths()], keywords

    def expected(
        self,
        window: int | None = None,
        oldest: int | None = None,
        at: Sequence[int] | slice = slice(None),
    ) -> tuple[np.ndarray, np.ndarray]:
        """float64 output [B, T, N, H], and the sum of p·|v| that bounds its rounding.

        `oldest`: how many positions before `length` the op is given; None = all. `at`: which of
        the T queries; the result has only these.
        """
        both = []
        t = np.arange(self.T)[at]
        for b, length in enumerate(self.length):
            first = 0 if oldest is None else max(0, length - oldest)
            q = np.concatenate([self.q[b, t], self.q_rotated[b, t]], axis=-1)
            k = np.concatenate([self.k[b], self.k_rotated[b]], axis=-1)
            v = np.concatenate([self.v[b], np.abs(self.v[b])], axis=-1)
            k, v = (x[:, first : length + self.T].swapaxes(0, 1) for x in (k, v))
            both.append(attention(q, k, v, length - first + t, window))
        out, scale = np.split(np.stack(both), 2, axis=-1)
        return out, scale


def history(heads: Heads, dtype: str, length: Sequence[int], T: int, seed: int = 0) -> History:
    """Random queries and keys; scores have a standard deviation of about 3, so a few keys rule."""
    rng = np.random.default_rng(seed)
    B, positions = len(length), max(length) + T
    K, H, P = heads.K, heads.H, heads.P

    def normal(*shape: int, deviation: float = 1.0) -> np.ndarray:
        return rounded(rng.standard_normal(shape) * deviation, dtype)

    spread = 3 / np.sqrt(H + P)
    q, q_rotated = (normal(B, T, K * heads.G, width, deviation=spread) for width in (H, P))
    v = normal(B, K, positions, H)
    k = v if P else normal(B, K, positions, H)
    return History(dtype, np.asarray(length), q, q_rotated, k, normal(B, K, positions, P), v)


def rounded(x: np.ndarray, dtype: str) -> np.ndarray:
    """x rounded to `dtype`, in float32."""
    return x.astype(jnp.dtype(dtype)).astype(np.float32)


def garbage(shape: tuple[int, ...]) -> np.ndarray:
    """Huge finite values of both signs."""
    x = np.full(shape, GARBAGE, np.float32)
    x.reshape(-1)[::3] *= -1
    return x


def blank(shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.float32)


Fill = Callable[[tuple[int, ...]], np.ndarray]


def jitted(op: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """The op under jit."""
    static = set(inspect.signature(op).parameters) & {"window", "absent", "implementation"}
    return jax.jit(op, static_argnames=static)


def require_gpu() -> None:
    """For tests marked `gpu`: none may pass where there is nothing to test."""
    if jax.default_backend() != "gpu":
        pytest.fail(f"needs a GPU: JAX finds only {jax.default_backend()}", pytrace=False)


def on_hopper() -> bool:
    return str(getattr(jax.devices()[0], "compute_capability", "")).startswith("9.")


def call(
    op: Callable[..., jax.Array],
    implementation: str,
    arguments: tuple[list, Mapping],
    *,
    must_run: bool = False,
) -> np.ndarray:
    """Runs one implementation, in float32; skips where it refuses these inputs, unless it must
    take them (xla always must).
    """
    positional, keywords = arguments
    try:
        out = op(*positional, **keywords, implementation=implementation)
    except Unsupported as refusal:
        if must_run or implementation == "xla":
            raise
        pytest.skip(f"{implementation}: {refusal}")
    v = positional[2]
    assert out.dtype == v.dtype
    assert out.shape == positional[0].shape
    return np.asarray(out, np.float32)


def assert_accurate(
    actual: np.ndarray, expected: tuple[np.ndarray, np.ndarray], dtype: str
) -> None:
    """Holds an op's output against float64.

    float32: scores of size up to 15 are off by some 1e-6, which each weight p takes over as its
    relative error; 1e-5 of the sum of p·|v| covers that, the softmax and the sums (XLA on CPU
    stays within 4e-6).
    bfloat16: the output is rounded once, by 2^-8 of itself at most, and so may each p be before
    it meets v, and the result of each split of the keys before it meets those of the others: by
    2^-8 of the sum of p·|v| in all, either of them; nothing else is as coarse. Over all elements
    together the error is about that of the final rounding: at most 1.5 times its rms (two
    roundings alike would give 1.41).
    """
    out, scale = expected
    assert np.isfinite(actual).all()
    error = np.abs(actual - out)
    if dtype == "float32":
        limit = 1e-5 * scale
    else:
        limit = 2.0**-8 * (np.abs(out) + 2 * scale) + 1e-5 * scale
        rms, least = (np.sqrt(np.mean(x**2)) for x in (error, rounded(out, dtype) - out))
        assert rms <= 1.5 * least, f"rms error {rms:.3g}, that of the final rounding {least:.3g}"
    worst = np.unravel_index(np.argmax(error / limit), error.shape)
    assert (error <= limit).all(), (
        f"[b, t, n, h] = {list(map(int, worst))}: {actual[worst]} instead of {out[worst]}, "
        f"off by {error[worst]:.3g} where {limit[worst]:.3g} is allowed"
    )
