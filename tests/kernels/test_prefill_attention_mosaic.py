"""The Mosaic kernel of prefill_attention: simulated on CPU, and lowered for an H200."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Heads, History, assert_accurate
from h200_lowering import lower_for_h200
from jax.experimental.pallas import mosaic_gpu as plgpu
from test_prefill_attention import CHUNKS, PAST, chunk, published_heads, spans, whole

from pallas_kernels import Unsupported, prefill_attention
from pallas_kernels.prefill_attention import mosaic

PAIR = Heads("2x256", 1, 2, 256)
FOUR = Heads("4x256", 1, 4, 256)
WIDE = Heads("2x512", 1, 2, 512)
COMPACT = Heads("2x512-compact", 1, 2, 512, P=128)
NARROW_COMPACT = Heads("2x256-compact", 1, 2, 256, P=128)


def check(heads: Heads, length: list[int], T: int, **shape: int) -> None:
    """Simulates the kernel. shape: S of a global cache, or past and window."""
    h = chunk(heads, "bfloat16", length, T)
    arguments, keywords = whole(h, **shape) if "S" in shape else spans(h, **shape)
    simulated = plgpu.InterpretGPUParams(detect_races=True)
    out = mosaic.prefill_attention(*arguments, **keywords, interpret=simulated)
    assert_accurate(np.asarray(out, np.float32), expected(h, **shape), "bfloat16")


def expected(
    h: History, S: int | None = None, past: int | None = None, window: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    return h.expected(window=window, oldest=past)


garbage_overflows = pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")


@garbage_overflows
@pytest.mark.parametrize(
    ("heads", "length"),
    [
        (COMPACT, [0]),  # the first chunk
        (COMPACT, [1, 255]),  # chunks that end inside a tile, one where the cache ends
        (NARROW_COMPACT, [64]),  # one that ends with a tile
        (WIDE, [130]),
        (PAIR, [130]),
    ],
    ids=str,
)
def test_a_chunk_over_a_global_cache(heads, length):
    check(heads, length, T=64, S=320)


@garbage_overflows
@pytest.mark.parametrize(
    ("heads", "length", "T", "past", "window"),
    [
        (PAIR, [0, 300], 128, 128, 100),  # a window that starts inside a tile
        (PAIR, [63], 64, 128, 65),  # one that starts with a tile
        (PAIR, [300], 64, 128, 66),  # one key more
        (PAIR, [7], 64, 0, 1000),  # no past
        (FOUR, [65], 64, 64, 1),
    ],
    ids=str,
)
def test_a_chunk_through_a_window(heads, length, T, past, window):
    check(heads, length, T, past=past, window=window)


def shapes(
    N: int, K: int, H: int, T: int, S: int, P: int = 0, B: int = 1, dtype=jnp.bfloat16
) -> dict:
    """Arguments as shapes only."""
    array = jax.ShapeDtypeStruct
    given = {"q": array((B, T, N, H), dtype), "v": array((B, K, S, H), dtype)}
    given["length"] = array((B,), jnp.int32)
    if P:
        given["q_rotated"] = array((B, T, N, P), dtype)
        given["k_rotated"] = array((B, K, S, P), dtype)
    else:
        given["k"] = array((B, K, S, H), dtype)
    return given


def lowered(window: int | None = None, **given) -> str:
    return lower_for_h200(
        lambda k=None, **others: prefill_attention(
            k=k, **others, window=window, implementation="mosaic"
        ),
        **given,
    )


@pytest.mark.parametrize(
    ("N", "K", "W", "T"),
    [
        (32, 16, 1024, 2048),
        (16, 8, 1024, 2048),
        (8, 2, 512, 2048),
        (8, 1, 512, 2048),
        (8, 1, 512, 64),
    ],
    ids=["31b", "26b-a4b, 12b", "e4b", "e2b", "e2b, one block"],
)
def test_local_layers_lower(N, K, W, T):
    assert_lowers(window=W, **shapes(N, K, 256, T, W + T))


@pytest.mark.parametrize(
    ("N", "K", "P", "T"),
    [
        (32, 4, 128, 2048),
        pytest.param(16, 2, 128, 2048, marks=pytest.mark.slow),  # as the first, only fewer
        (16, 1, 128, 2048),
        (8, 2, 0, 2048),
        (8, 1, 0, 2048),
        (3, 1, 0, 64),  # an odd group: blocks have no partners
    ],
    ids=["31b", "26b-a4b", "12b", "e4b", "e2b", "three heads, one block"],
)
def test_global_layers_lower(N, K, P, T):
    assert_lowers(**shapes(N, K, 512, T, 8192, P))


@pytest.mark.slow  # the kernels above, for other numbers of positions
@pytest.mark.parametrize("T", sorted({T for T, _ in CHUNKS.values()}))
@published_heads
def test_what_runs_on_a_gpu_lowers(heads, T):
    past, N = heads.W or PAST, heads.K * heads.G
    given = shapes(N, heads.K, heads.H, T, past + T, heads.P, B=2)
    assert_lowers(window=heads.W, **given)


def assert_lowers(**given) -> None:
    """To one kernel that takes queries and gives its output as they lie."""
    text = lowered(**given)
    assert "mosaic_gpu" in text
    assert "stablehlo.transpose" not in text
    assert "stablehlo.copy" not in text


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (shapes(2, 1, 256, 64, 128, dtype=jnp.float32), "q float32, v float32: takes bfloat16"),
        (shapes(2, 1, 128, 64, 128), "head width 128"),
        (shapes(2, 1, 256, 65, 128), "65 queries over 128 keys"),
        (shapes(2, 1, 256, 64, 130), "64 queries over 130 keys"),
        (shapes(3, 1, 256, 64, 128), "3 query heads on a KV head of width 256"),
        (shapes(2, 1, 512, 64, 128, P=64), "64 rotated widths"),
    ],
)
def test_what_the_kernel_cannot_take_is_refused_by_name(given, reason):
    with pytest.raises(Unsupported, match=reason):
        lowered(**given)


def test_another_device_is_refused():
    with pytest.raises(Unsupported, match="Hopper"):
        jax.eval_shape(
            lambda **given: prefill_attention(**given, implementation="mosaic"),
            **shapes(2, 1, 256, 64, 128),
        )
