"""The kernel of ring_attention and global_attention on CPU: simulated, and lowered for an H200.

On a GPU it runs in `test_ring_attention` and `test_global_attention`.
"""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    PUBLISHED_GLOBAL,
    PUBLISHED_LOCAL,
    Heads,
    assert_accurate,
    history,
    on_hopper,
)
from h200_lowering import lower_for_h200
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_global_attention import caches
from test_ring_attention import rings

from carat_jax.config import GemmaConfig
from carat_jax.kv_state import abstract_state
from carat_jax.model import forward
from carat_jax.params import abstract_params
from pallas_kernels import Unsupported, global_attention, ring_attention
from pallas_kernels.split_keys import split_attention
from pallas_kernels.split_keys.geometry import ROWS, Shape

# --- Simulated -----------------------------------------------------------------------------------

LOCAL = Heads("local", 1, 2, 256)
TWO_LOCAL = Heads("two local", 2, 2, 256)
COMPACT = Heads("compact", 1, 4, 512, P=128)
NARROW = Heads("narrow compact", 1, 8, 256, P=128)
PLAIN = Heads("plain", 1, 2, 512)
TWO_PLAIN = Heads("two plain", 2, 2, 256)

garbage_overflows = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")


def simulated(arguments: tuple[list, dict], blocks: int) -> np.ndarray:
    """A device of so many multiprocessors; KV heads share them, so few give few splits."""
    positional, keywords = arguments
    interpret = plgpu.InterpretGPUParams()
    out = split_attention(*positional, **keywords, blocks=blocks, interpret=interpret)
    return np.asarray(out, np.float32)


@garbage_overflows
@pytest.mark.parametrize(
    ("heads", "lengths", "T", "W", "R", "blocks"),
    [
        (TWO_LOCAL, [0, 300], 1, 128, 192, 5),  # a block without work
        (LOCAL, [63, 250], 4, 129, 192, 2),  # splits of one and of two tiles
        (LOCAL, [70], 16, 49, 64, 3),  # no slot to spare
        (TWO_LOCAL, [1, 127, 191], 2, 100, 128, 2),  # more groups than blocks
    ],
    ids=str,
)
def test_a_ring(heads, lengths, T, W, R, blocks):
    h = history(heads, "bfloat16", lengths, T)
    out = simulated(rings(h, R, W), blocks)
    assert_accurate(out, h.expected(window=W), "bfloat16")


@garbage_overflows
@pytest.mark.parametrize("T", [1, 4])
def test_a_ring_at_the_edges_of_window_and_ring(T):
    """Of two tiles, a split each."""
    W, R = 64, 128
    h = history(LOCAL, "bfloat16", [1, W - 1, W, W + 1, R - 1, R, R + 1, 3 * W], T)
    out = simulated(rings(h, R, W), blocks=2)
    assert_accurate(out, h.expected(window=W), "bfloat16")


@garbage_overflows
@pytest.mark.parametrize(
    ("heads", "lengths", "T", "S", "blocks"),
    [
        (COMPACT, [0, 191], 1, 192, 3),  # the first position of a cache and the last
        (COMPACT, [126, 252], 4, 256, 2),  # splits grow at 128 and 256: one row meets that
        (PLAIN, [65, 125], 4, 192, 2),
        (NARROW, [120], 16, 192, 2),  # 128 query rows in four blocks, both sizes of splits
        (NARROW, [125], 5, 192, 2),  # 40 query rows in one
        (TWO_PLAIN, [61, 130], 4, 192, 2),  # more groups than blocks: splits grow at every tile
    ],
    ids=str,
)
def test_a_global_cache(heads, lengths, T, S, blocks):
    h = history(heads, "bfloat16", lengths, T)
    out = simulated(caches(h, S), blocks)
    assert_accurate(out, h.expected(), "bfloat16")


@garbage_overflows
@pytest.mark.parametrize("window", [100, None], ids=["ring", "global"])
def test_verifying_gives_the_bits_of_decoding(window):
    """Four positions in one call; two of them as sequences of their own, without those after.

    All have tiles of 8 query rows: for others XLA's products on CPU add up in another order.
    """
    slots, length, T = 192, 126, 4  # splits grow at 128

    def arguments(h):
        return caches(h, slots) if window is None else rings(h, slots, window)

    h = history(LOCAL, "bfloat16", [length], T)
    verified = simulated(arguments(h), blocks=2)
    alone, chosen = [], (0, 2)
    for t in chosen:
        q = h.q[:, t : t + 1]
        alone.append(arguments(replace(h, q=q, length=h.length + t)))
    batch = jax.tree.map(lambda *rows: jnp.concatenate(rows), *[given for given, _ in alone])
    decoded = simulated((batch, alone[0][1]), blocks=2)
    np.testing.assert_array_equal(decoded[:, 0], verified[0, chosen, :])


# --- Lowered -------------------------------------------------------------------------------------


def shapes(heads: Heads, B: int, T: int, slots: int, dtype: str = "bfloat16") -> dict:
    """Arguments of an op as shapes only."""
    N, widths = heads.K * heads.G, {"v": heads.H}
    given = {"q": (B, T, N, heads.H)}
    if heads.P:
        given["q_rotated"] = (B, T, N, heads.P)
        widths["k_rotated"] = heads.P
    else:
        widths["k"] = heads.H
    given |= {name: (B, heads.K, slots, width) for name, width in widths.items()}
    arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in given.items()}
    return arrays | {"length": jax.ShapeDtypeStruct((B,), jnp.int32)}


def lowered(heads: Heads, arguments: dict) -> str:
    def call(k=None, **others):
        if heads.W:
            return ring_attention(k=k, **others, window=heads.W, implementation="mosaic")
        return global_attention(k=k, **others, implementation="mosaic")

    return lower_for_h200(call, **arguments)


# (B, T): a decode step, verify steps, and many rows of query blocks. The kernel has tiles of 8, 16,
# 32 and 40 query rows; for T = 5 some have 10 or 20, no multiple of 8. Beyond 40 rows it takes
# several: for 12B from T = 3 on.
STEPS = [(1, 1), (1, 4), (1, 5), (1, 8), (8, 16)]
MORE = {"31b": [(8, 1)]}
# Tiles that no other size has. Heads of 26B-A4B are those of 31B, only fewer.
QUICK = {
    "31b": [(1, 1), (1, 4), (1, 5), (8, 16)],
    "12b": [(1, 1), (1, 5)],
    "26b-a4b": [],
    "e4b": [(1, 5)],
    "e2b": [(1, 1), (1, 5)],
}


@pytest.mark.parametrize(
    ("heads", "B", "T"),
    [
        pytest.param(
            heads,
            B,
            T,
            id=f"{'local' if heads.W else 'global'}-{heads}-B{B}-T{T}",
            marks=[] if (B, T) in QUICK.get(heads.name, [(1, 1)]) else pytest.mark.slow,
        )
        for heads in PUBLISHED_LOCAL + PUBLISHED_GLOBAL
        for B, T in STEPS + MORE.get(heads.name, [])
    ],
)
def test_the_published_shapes_lower(heads, B, T):
    text = lowered(heads, shapes(heads, B, T, slots=heads.W + 64 if heads.W else 8192))
    assert text.count("custom_call @mosaic_gpu") == 1
    if T * heads.G <= ROWS[-1]:
        assert "stablehlo.pad" not in text  # a kernel of its own


# G of rings and global layers: 31B and 26B-A4B 2 and 8, 12B 2 and 16, E4B 4, E2B 8.
@pytest.mark.parametrize(
    ("G", "passes"),
    [
        (2, {1: 1, 4: 1, 5: 1, 8: 1, 16: 1}),
        (4, {1: 1, 4: 1, 5: 1, 8: 1, 16: 2}),
        (8, {1: 1, 4: 1, 5: 1, 8: 2, 16: 4}),
        (16, {1: 1, 4: 2, 5: 2, 8: 4, 16: 7}),
    ],
)
def test_how_often_a_cache_is_read(G, passes):
    """Once for every 40 query rows of a KV head."""
    for T, count in passes.items():
        shape = Shape(1, T, 1, G, 512, 128, 8192, None, 132, interpreted=False)
        assert shape.row_blocks == count


NARROW = {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 1024}


@pytest.mark.parametrize(
    ("name", "B", "T", "widths"),
    [
        pytest.param("31b", 1, 1, {}, id="31b-B1-T1"),
        pytest.param("31b", 2, 5, NARROW, id="31b-narrow-B2-T5"),
        pytest.param("e4b", 2, 5, NARROW, id="e4b-narrow-B2-T5"),
        pytest.param("31b", 2, 5, {}, id="31b-B2-T5", marks=pytest.mark.slow),
        pytest.param("e4b", 1, 1, {}, id="e4b-B1-T1", marks=pytest.mark.slow),
        pytest.param("e4b", 2, 5, {}, id="e4b-B2-T5", marks=pytest.mark.slow),
    ],
)
def test_a_step_reads_its_caches_where_they_lie(name, B, T, widths):
    """Each is written by one kernel and read by another, and nothing else touches it.

    Of two rings and two global caches; in E4B another layer borrows the last of each.
    """
    whole = GemmaConfig.preset(name)
    borrowers = 2 if whole.num_kv_shared_layers else 0
    kinds = (whole.layer_types[0], whole.layer_types[-1]) * (2 + borrowers // 2)
    config = replace(
        whole,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        num_kv_shared_layers=borrowers,
        **widths,
    )
    state = abstract_state(config, B, 8192)
    text = lower_for_h200(
        lambda params, tokens, state: forward(params, config, tokens, state),
        abstract_params(config),
        jax.ShapeDtypeStruct((B, T), jnp.int32),
        state,
    )
    kernels = set(re.findall(r"func private @(\w+)\((?:(?!func).)*?@mosaic_gpu", text, re.DOTALL))
    every = [leaf.shape for leaf in jax.tree.leaves(state.layers)]
    for kind, layer in zip(kinds[:2], state.layers[:2], strict=True):
        own = [leaf.shape for leaf in jax.tree.leaves(layer)]
        for shape in set(own):
            array = f"tensor<{'x'.join(map(str, shape))}xbf16>"
            lines = [line for line in text.splitlines() if array in line]
            uses = [re.sub(r"^\s*(%[\w:]+ = )?", "", line) for line in lines]
            calls = [use for use in uses if use.startswith("call")]
            assert {re.match(r"call @(\w+)", call)[1] for call in calls} <= kernels
            written = [call for call in calls if array in call.rpartition("->")[2]]
            assert len(written) * own.count(shape) == every.count(shape)
            assert len(calls) == len(written) + kinds.count(kind)
            frame = ("call", "func.func", "return", "stablehlo.custom_call @mosaic_gpu")
            assert [use for use in uses if not use.startswith(frame)] == []


@pytest.mark.parametrize("T", [1, 2, 4, 5, 16])
def test_a_tile_comes_while_the_one_before_it_is_computed_with(T):
    """Of a compact cache: a chunk of rotated keys and four of values, with heads of 31B."""
    shape = Shape(
        B=1, T=T, K=4, G=8, H=512, P=128, slots=8192, window=None, blocks=132, interpreted=False
    )
    assert shape.buffers >= 2 * (1 + 4)


# --- Refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (shapes(COMPACT, 1, 1, 64, dtype="float32"), "bfloat16 only, not float32"),
        (shapes(Heads("", 1, 2, 128), 1, 1, 64), "head width 128"),
        (shapes(Heads("", 1, 2, 256, P=64), 1, 1, 64), "rotated widths 64"),
        (shapes(COMPACT, 1, 1, 100), "slots 100"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(arguments, reason):
    with pytest.raises(Unsupported, match=reason):
        lowered(COMPACT, arguments)


@pytest.mark.skipif(on_hopper(), reason="there is one here")
def test_without_a_hopper_gpu_it_is_refused():
    arguments = shapes(COMPACT, 1, 1, 64)
    with pytest.raises(Unsupported, match="Hopper"):
        jax.eval_shape(
            lambda **given: global_attention(k=None, **given, implementation="mosaic"), **arguments
        )
