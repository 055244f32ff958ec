"""attention_inputs against float64; the Mosaic kernel interpreted, and lowered for an H200."""

import functools
import re
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_lowering import lower_for_h200
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import (
    AttentionInputs,
    PartialSums,
    Unsupported,
    attention_inputs,
    split_keys,
)
from pallas_kernels.attention_inputs import IMPLEMENTATIONS, mosaic
from pallas_kernels.split_keys.geometry import Shape

EPS = 1e-6
on_a_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="simulates the kernel")


@dataclass(frozen=True)
class Layer:
    """Letters of `pallas_kernels`.

    Attributes:
      own: key and value (2), one product for both (1), neither (0).
      ring: whether its cache is one.
      lent: a layer without keys of its own that reads a compact cache.
      pieces: partial sums that the product comes in on an H200; 1 = whole.
    """

    K: int
    G: int
    own: int
    H: int
    P: int
    ring: bool = False
    lent: bool = False
    pieces: int = 1

    @property
    def compact(self) -> bool:
        return self.own == 1 or self.lent

    @property
    def caches(self) -> dict[str, int]:
        """Width of each."""
        if self.own == 0:
            return {}
        return {"v": self.H, "k_rotated": self.P} if self.compact else {"v": self.H, "k": self.H}


def layers(H: int, P: int) -> dict[str, Layer]:
    """One of each form."""
    return {
        "ring": Layer(2, 2, 2, H, H, ring=True),
        "compact": Layer(2, 1, 1, H, P),
        "plain": Layer(1, 2, 2, H, P),
        "borrowed ring": Layer(1, 2, 0, H, H, ring=True),
        "borrowed compact": Layer(1, 2, 0, H, P, lent=True),
        "borrowed plain": Layer(2, 1, 0, H, P),
    }


PUBLISHED = {
    "31b local": Layer(16, 2, 2, 256, 256, ring=True),
    "31b global": Layer(4, 8, 1, 512, 128, pieces=7),
    "12b local": Layer(8, 2, 2, 256, 256, ring=True, pieces=2),
    "12b global": Layer(1, 16, 1, 512, 128, pieces=3),
    "26b-a4b global": Layer(2, 8, 1, 512, 128, pieces=3),
    "e4b local": Layer(2, 4, 2, 256, 256, ring=True, pieces=5),
    "e4b global": Layer(2, 4, 2, 512, 128, pieces=4),
    "e4b borrowed local": Layer(2, 4, 0, 256, 256, ring=True),
    "e4b borrowed global": Layer(2, 4, 0, 512, 128),
    "e2b local": Layer(1, 8, 2, 256, 256, ring=True),
    "e2b global": Layer(1, 8, 2, 512, 128, pieces=3),
    "e2b borrowed global": Layer(1, 8, 0, 512, 128),
}


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def inputs(layer: Layer, length: list[int], T: int, slots: int, dtype: str) -> tuple[list, dict]:
    """Arrays of the op as they are without a product in pieces, and its keywords."""
    B, s = len(length), layer
    y = draw(0, B, T, s.K, s.G + s.own, s.H) * 3
    k_norm = jnp.asarray(1 + draw(2, s.H) / 2, dtype) if s.own or s.lent else None
    positions = np.asarray(length)[:, None] + np.arange(T)
    phase = positions[..., None, None] * 100.0 ** (-2 * np.arange(s.P // 2) / s.H)
    caches = {
        name: jnp.asarray(draw(3 + i, B, s.K, slots, width), dtype)
        for i, (name, width) in enumerate(s.caches.items())
    }
    arrays = [
        jnp.asarray(y, dtype),
        jnp.asarray(1 + draw(1, s.H) / 2, dtype),
        k_norm,
        jnp.asarray(np.cos(phase), jnp.float32),
        jnp.asarray(np.sin(phase), jnp.float32),
        jnp.asarray(length, jnp.int32),
        jnp.full((B,), T, jnp.int32),
    ]
    return arrays, {"group": s.G, "eps": EPS, "ring": s.ring, **caches}


def expected(layer: Layer, arrays: list, caches: dict) -> dict[str, np.ndarray]:
    """Head by head in float64; caches slot by slot."""
    y, q_norm, k_norm, cos, sin = (None if x is None else np.float64(x) for x in arrays[:5])
    length, new = (np.asarray(x).tolist() for x in arrays[5:])
    (B, T, K, _, H), half, pairs = y.shape, layer.H // 2, layer.P // 2
    turning = np.r_[0:pairs, half : half + pairs]

    def norm(x, w=1.0):
        return x / np.sqrt((x * x).mean() + EPS) * w

    def turn(x, b, t):
        out, c, s = x.copy(), cos[b, t, 0], sin[b, t, 0]
        low, high = x[:pairs], x[half : half + pairs]
        out[:pairs], out[half : half + pairs] = low * c - high * s, high * c + low * s
        return out

    q = np.zeros((B, T, K * layer.G, H))
    q_rotated = np.zeros((B, T, K * layer.G, layer.P))
    out = {name: np.array(x, np.float64) for name, x in caches.items()}
    for b, t, k in np.ndindex(B, T, K):
        heads = y[b, t, k]
        for g in range(layer.G):
            n, x = k * layer.G + g, norm(heads[g], q_norm)
            q_rotated[b, t, n], q[b, t, n] = turn(x, b, t)[turning], turn(x, b, t)
            if layer.compact:
                q[b, t, n] = x * k_norm
                q[b, t, n, turning] = 0
        slot, S = length[b] + t, out["v"].shape[2] if out else 0
        slot = slot % S if layer.ring and out else slot
        if slot >= S:
            continue
        key, real = heads[layer.G], t < new[b]
        turned = turn(norm(key, k_norm), b, t)
        rows = {"k": turned, "k_rotated": turned[turning], "v": norm(heads[-1])}
        for name, cache in out.items():
            cache[b, k, slot] = rows[name] if real else 0
    return {"q": q, **({"q_rotated": q_rotated} if layer.compact else {}), **out}


def assert_close(actual: AttentionInputs, wanted: dict[str, np.ndarray], dtype: str) -> None:
    unit = 2.0**-8 if dtype == "bfloat16" else 2.0**-21
    got = {name: x for name, x in actual._asdict().items() if x is not None}
    assert got.keys() == wanted.keys()
    for name, x in got.items():
        assert x.dtype == dtype
        x, w = np.asarray(x, np.float64), wanted[name]
        assert x.shape == w.shape
        # What is turned is a difference of products, of up to some 20.
        assert (np.abs(x - w) <= unit * np.abs(w) + 1e-5).all(), (name, np.abs(x - w).max())


def in_pieces(y: jax.Array, count: int) -> PartialSums:
    parts = draw(7, count - 1, *y.shape)
    parts = np.stack([*parts, np.asarray(y, np.float64) - parts.sum(0)])
    return PartialSums(jnp.asarray(parts, jnp.float32), y.dtype)


def simulated(arrays: list, keywords: dict, **options: bool) -> AttentionInputs:
    interpret = plgpu.InterpretGPUParams(**options)
    return mosaic.attention_inputs(*arrays, **keywords, interpret=interpret)


op = jax.jit(
    attention_inputs,
    static_argnames=("group", "eps", "ring", "implementation"),
    donate_argnames=("k", "v", "k_rotated"),
)

# Slots are 64: a ring that wraps within a step, and one at its start; a cache that ends.
LENGTHS = {True: [63, 0, 127], False: [63, 0, 64]}

# --- Numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("T", "dtype"), [(1, "bfloat16"), (4, "float32"), (16, "bfloat16")])
@pytest.mark.parametrize("name", layers(24, 12))
def test_xla_against_float64(name, T, dtype):
    layer = layers(24, 12)[name]
    arrays, keywords = inputs(layer, LENGTHS[layer.ring], T, 64, dtype)
    arrays[-1] = jnp.asarray([T, T // 2, 0])
    caches = {name: keywords[name] for name in layer.caches}
    wanted = expected(layer, arrays, caches)
    assert_close(op(*arrays, **keywords, implementation="xla"), wanted, dtype)


@on_a_cpu
@pytest.mark.parametrize(
    ("name", "H", "T", "pieces"),
    [
        ("ring", 256, 2, 1),
        ("compact", 512, 2, 3),
        ("plain", 256, 2, 2),
        ("borrowed compact", 256, 1, 1),
        ("borrowed plain", 512, 1, 2),
    ],
)
def test_mosaic_interpreted(name, H, T, pieces):
    layer = layers(H, 128)[name]
    arrays, keywords = inputs(layer, LENGTHS[layer.ring][:2], T, 64, "bfloat16")
    arrays[-1] = jnp.asarray([T, T - 1])
    wanted = expected(layer, arrays, {name: keywords[name] for name in layer.caches})
    if pieces > 1:
        arrays[0] = in_pieces(arrays[0], pieces)
    assert_close(simulated(arrays, keywords, detect_races=True), wanted, "bfloat16")


@pytest.mark.parametrize("implementation", ["xla", pytest.param("mosaic", marks=on_a_cpu)])
def test_padding_is_stored_as_zeros_whatever_it_is(implementation):
    layer = Layer(1, 1, 1, 256, 128)
    arrays, keywords = inputs(layer, [5], 2, 64, "bfloat16")
    arrays[0], arrays[-1] = arrays[0].at[:, 1].set(jnp.nan), jnp.asarray([1])
    if implementation == "mosaic":
        out = simulated(arrays, keywords)
    else:
        out = op(*arrays, **keywords, implementation="xla")
    for cache in (out.v, out.k_rotated):
        assert not cache[0, 0, 6].any()
        assert cache[0, 0, 5].all()
        assert cache[0, 0, 7].all()


def test_without_a_cache_the_new_keys_come_alone():
    """In the order of time, padding as zeros."""
    layer = layers(24, 12)["compact"]
    arrays, keywords = inputs(layer, [9, 70], 3, 64, "float32")
    arrays[-1] = jnp.asarray([3, 1])
    blank = {name: np.zeros((2, layer.K, 3, width)) for name, width in layer.caches.items()}
    keywords |= dict.fromkeys(blank)
    at_once = [*arrays[:5], jnp.zeros(2, jnp.int32), arrays[-1]]
    out = op(*arrays, **keywords, implementation="xla")
    assert_close(out, expected(layer, at_once, blank), "float32")


# --- On a GPU ------------------------------------------------------------------------------------


def on_the_gpu(layer: Layer, arrays: list, keywords: dict) -> AttentionInputs:
    caches = {name: keywords[name] + 0 for name in layer.caches}  # these are donated
    return op(*arrays, **keywords | caches, implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.parametrize("T", [1, 4, 16])
@pytest.mark.parametrize("name", PUBLISHED)
def test_mosaic_on_a_gpu(name, T):
    layer = PUBLISHED[name]
    arrays, keywords = inputs(layer, [190, 0, 192 - T], T, 192, "bfloat16")
    arrays[-1] = jnp.asarray([T, T // 2, T])
    wanted = expected(layer, arrays, {name: keywords[name] for name in layer.caches})
    if layer.pieces > 1:
        arrays[0] = in_pieces(arrays[0], layer.pieces)
    out = on_the_gpu(layer, arrays, keywords)
    assert_close(out, wanted, "bfloat16")
    for _ in range(20):  # what races does not do so every time
        again = on_the_gpu(layer, arrays, keywords)
        assert all((a == b).all() for a, b in zip(out, again, strict=True) if a is not None)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["31b local", "31b global", "e4b global"])
def test_a_row_has_the_same_bits_in_any_company(name):
    layer, T = PUBLISHED[name], 5
    arrays, keywords = inputs(layer, [189, 7, 64], T, 256, "bfloat16")
    together = on_the_gpu(layer, arrays, keywords)
    for b, t in np.ndindex(3, T):
        here = slice(b, b + 1), slice(t, t + 1)
        alone = [x[here] if x is not None and x.ndim > 1 else x for x in arrays[:5]]
        alone += [arrays[5][here[0]] + t, jnp.ones(1, jnp.int32)]
        own = {name: keywords[name][here[0]] for name in layer.caches}
        out = on_the_gpu(layer, alone, keywords | own)
        slot = int(arrays[5][b]) + t
        assert (out.q[0, 0] == together.q[b, t]).all()
        for name in own:
            assert (getattr(out, name)[0, :, slot] == getattr(together, name)[b, :, slot]).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["31b local", "31b global", "e4b global"])
def test_a_loop_copies_no_cache_on_a_gpu(name):
    layer = PUBLISHED[name]
    arrays, keywords = inputs(layer, [0], 1, 8192, "bfloat16")

    def loop(caches):
        def body(i, caches):
            out = attention_inputs(
                *arrays[:5], arrays[5] + i, arrays[6], **keywords | caches, implementation="mosaic"
            )
            return {name: getattr(out, name) for name in caches}

        return jax.lax.fori_loop(0, 8, body, caches)

    caches = {name: keywords[name] for name in layer.caches}
    program = jax.jit(loop, donate_argnums=0).lower(caches).compile()
    shapes = ["bf16[" + ",".join(map(str, x.shape)) + "]" for x in caches.values()]
    lines = [line for line in program.as_text().splitlines() if " copy(" in line]
    assert not [line for line in lines if any(shape in line for shape in shapes)]
    sizes = [x.size * x.dtype.itemsize for x in caches.values()]
    assert program.memory_analysis().alias_size_in_bytes >= sum(sizes)


# --- Lowered -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "B", "T"),
    [
        pytest.param(name, B, T, marks=[] if (name[:3], T) == ("31b", 1) else pytest.mark.slow)
        for name in PUBLISHED
        for B, T in ((1, 1), (8, 5), (3, 16))
    ],
)
def test_the_published_shapes_lower(name, B, T):
    """And the kernel writes to the caches that it is given."""
    layer = PUBLISHED[name]
    arrays, keywords = jax.eval_shape(lambda: _shapes(layer, B, T))
    text = lower_for_h200(_run(layer), arrays, keywords)
    assert text.count("custom_call @mosaic_gpu") == 1
    assert len(re.findall(r"output_operand_alias<", text)) == len(layer.caches)


def _shapes(layer: Layer, B: int, T: int) -> tuple[list, dict]:
    arrays, keywords = inputs(layer, [0] * B, T, 1088, "bfloat16")
    if layer.pieces > 1:
        parts = jnp.zeros((layer.pieces, *arrays[0].shape))
        arrays[0] = PartialSums(parts, arrays[0].dtype)
    return arrays, {name: keywords[name] for name in layer.caches}


def _run(layer: Layer):
    static = {"group": layer.G, "eps": EPS, "ring": layer.ring, "implementation": "mosaic"}
    return lambda arrays, caches: attention_inputs(*arrays, **caches, **static)


def test_queries_come_in_the_order_of_the_kernels_of_attention():
    """So that nothing is moved between the two."""
    B, T, K, G, H = 2, 3, 2, 2, 256
    read = Shape(B, T, K, G, H, P=0, slots=64, window=None, blocks=132, interpreted=False)

    def there_and_back(x):
        by_position = mosaic.by_position(x, T)
        assert by_position.shape == (B, T, K * G, H)
        return split_keys.by_group(by_position, read)

    shape = jax.ShapeDtypeStruct((B, K, T * G, H), jnp.bfloat16)
    program = jax.jit(there_and_back).lower(shape).compile()
    assert not re.findall(r"transpose|fusion|pad", program.as_text())


# --- Refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("H", "dtype", "caches", "message"),
    [
        (256, "float32", True, "bfloat16 only, not float32"),
        (128, "bfloat16", True, "head width 128"),
        (256, "bfloat16", False, "there are none"),
    ],
)
def test_what_the_kernel_cannot_take(H, dtype, caches, message):
    arrays, keywords = inputs(Layer(1, 1, 1, H, 64), [0], 1, 64, dtype)
    keywords |= {} if caches else {"v": None, "k_rotated": None}
    with pytest.raises(Unsupported, match=message):
        simulated(arrays, keywords)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({0: jnp.ones((1, 1, 2, 4, 24))}, r"own 0, 1 or 2; group is 1"),
        ({1: jnp.ones(23)}, r"\(23,\).* must both be \[H\], H = 24"),
        ({2: None}, "must both be"),
        ({3: jnp.ones((1, 2, 1, 6))}, r"cos \(1, 2, 1, 6\)"),
        ({5: jnp.ones(2, int)}, r"length \(2,\)"),
        ({"k_rotated": None}, "do not fit"),
        ({"v": jnp.ones((1, 2, 63, 24))}, r"it needs .*'v': '\(1, 2, S, 24\)'"),
    ],
    ids=str,
)
def test_shapes_that_do_not_fit(change, message):
    arrays, keywords = inputs(layers(24, 12)["compact"], [0], 1, 64, "float32")
    for key, x in change.items():
        (keywords if isinstance(key, str) else arrays)[key] = x
    with pytest.raises(ValueError, match=message):
        attention_inputs(*arrays, **keywords)


def test_a_ring_holds_all_that_is_written_to_it_at_once():
    """Else two positions meet in a slot, and which of them stays is not defined."""
    arrays, keywords = inputs(layers(24, 12)["ring"], [5], 9, 8, "float32")
    with pytest.raises(ValueError, match="ring of 8 slots cannot hold 9 new positions"):
        attention_inputs(*arrays, **keywords)


@on_a_cpu
def test_none_falls_back_where_there_is_no_hopper():
    arrays, keywords = inputs(Layer(1, 1, 1, 256, 128), [0], 1, 64, "bfloat16")
    assert list(IMPLEMENTATIONS) == ["mosaic", "xla"]

    def program(implementation):
        run = functools.partial(attention_inputs, **keywords, implementation=implementation)
        return str(jax.make_jaxpr(run)(*arrays))

    assert program(None) == program("xla")
