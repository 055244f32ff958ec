"""`carat bench attention` on a small shape, and what it is made of: inputs, yardstick, timing."""

import argparse
import dataclasses
import json
import sys

import float64_reference
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_model
from progress import only_progress

from carat_jax import cli, compilation_cache, memory
from carat_jax.bench import attention, cases, decode, exact, peers, timing
from carat_jax.config import FULL, PRESETS, SLIDING, GemmaConfig
from pallas_kernels import Unsupported

BANDWIDTH = 1e9  # bytes per second, so that times of a floor are no zeros
SMALL = dataclasses.replace(small_model.CONFIG, dtype="bfloat16")  # N 4; K 2, H 8; K 1, H 16, P 4
PLAIN = dataclasses.replace(SMALL, attention_k_eq_v=False)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A small size, few and short measurements."""
    monkeypatch.setitem(PRESETS, "small", SMALL)
    monkeypatch.setitem(PRESETS, "plain", PLAIN)
    monkeypatch.setattr(compilation_cache, "enable", lambda: None)
    monkeypatch.setattr(timing, "TURNOVER", 1)
    monkeypatch.setattr(timing, "TRAIN_SECONDS", 0.0)
    monkeypatch.setattr(timing, "CALLS", 4)
    monkeypatch.setattr(attention, "PREFILL_CALLS", 2)
    monkeypatch.setitem(memory.READ_BANDWIDTH, jax.devices()[0].device_kind, BANDWIDTH)


def measured(capsys, tmp_path, *argv: str) -> tuple[dict, list[str]]:
    """The JSON that the benchmark writes and the lines that it prints."""
    file = tmp_path / "result.json"
    assert cli.main(["bench", "attention", *argv, "--json", str(file)]) == 0
    printed = capsys.readouterr()
    assert only_progress(printed.err)
    return json.loads(file.read_text()), printed.out.splitlines()


def test_ring_and_global(capsys, tmp_path):
    argv = "--config small plain --op ring global --context 7 70 --tokens 3 --batch 2"
    result, lines = measured(capsys, tmp_path, *argv.split(), "--implementation", "xla")
    rows, bfloat16 = result["rows"], 2
    shapes = [(r["config"], r["op"], r["cache"], r["context"]) for r in rows]
    assert shapes == [
        (config, op, "compact" if (config, op) == ("small", "global") else "plain", context)
        for config in ("small", "plain")
        for op in ("ring", "global")
        for context in (7, 70)
    ]
    for row in rows:
        assert (row["batch"], row["tokens"], row["implementation"]) == (2, 3, "xla")
        assert row["copies"] == 2
        if row["op"] == "ring":
            assert (row["heads"], row["window"]) == ("4/2×8", 16)
            keys = min(row["context"], 16 + 3 - 1)
            read = 2 * 2 * keys * (8 + 8) * bfloat16
        else:
            assert (row["heads"], row["window"]) == ("4/1×16", None)
            read = 2 * 1 * row["context"] * (16 + (4 if row["cache"] == "compact" else 16)) * 2
        assert row["bytes"] == read
        assert row["floor_us"] == pytest.approx(1e6 * read / BANDWIDTH, abs=0.01)
        assert 0 < row["us_min"] <= row["us"] <= row["us_max"]
        assert row["ratio"] == pytest.approx(row["us"] / row["floor_us"], rel=0.02, abs=0.02)
        assert row["gb_per_s"] == round(read / row["us"] / 1e3)
        assert row["tflop_per_s"] is None
        assert 1e-4 < row["error"] < 5e-3  # of rounding to bfloat16
        assert row["void"] is False
    assert result["skipped"] == []
    assert len(lines) == 1 + len(rows)
    assert "× floor" in lines[0]


def test_prefill(capsys, tmp_path):
    argv = "--config small --op prefill --context 40 90 --chunk 64 --implementation xla"
    result, _ = measured(capsys, tmp_path, *argv.split())
    rows = result["rows"]
    assert [(r["window"], r["context"], r["tokens"]) for r in rows] == [
        (16, 40, 40), (None, 40, 40), (16, 90, 64), (None, 90, 64),
    ]  # fmt: skip
    for row in rows:
        queries = range(row["context"] - row["tokens"], row["context"])
        pairs = sum(len(range(max(0, p + 1 - (row["window"] or 90)), p + 1)) for p in queries)
        assert row["flops"] == 4 * pairs * 4 * (8 if row["window"] else 16)
        assert row["tflop_per_s"] == round(row["flops"] / row["us"] / 1e6, 1)
        assert (row["floor_us"], row["ratio"], row["gb_per_s"]) == (None, None, None)
        assert row["error"] < 5e-3
        assert row["void"] is False


def test_a_wrong_implementation_is_void(capsys, tmp_path, monkeypatch):
    """One key too many is enough, and so is one number that is not finite."""
    op = cases.OPS["global"].implementations["xla"]

    def sees_the_future(q, k, v, length, **compact):
        return op(q, k, v, length + 1, **compact)

    def breaks_down(q, k, v, length, **compact):
        return op(q, k, v, length, **compact).at[0, 0, 0, 0].set(jnp.nan)

    for function in (sees_the_future, breaks_down):
        monkeypatch.setitem(cases.OPS["global"].implementations, function.__name__, function)
    argv = ["--config", "small", "--op", "global", "--context", "20", "--tokens", "4"]
    result, lines = measured(capsys, tmp_path, *argv)
    by_name = {row["implementation"]: row for row in result["rows"]}
    assert [by_name[name]["void"] for name in ("xla", "sees_the_future", "breaks_down")] == [
        False, True, True,
    ]  # fmt: skip
    assert by_name["sees_the_future"]["error"] > 0.05
    assert by_name["breaks_down"]["error"] is None
    assert sum("True" in line for line in lines) == 2


def test_what_refuses_is_skipped(capsys, tmp_path, monkeypatch):
    def only_decodes(q, k, v, length, *, window, reread):
        if q.shape[1] > 1:
            raise Unsupported(f"T = {q.shape[1]}: only 1")
        return cases.OPS["ring"].implementations["xla"](q, k, v, length, window=window)

    monkeypatch.setitem(cases.OPS["ring"].implementations, "picky", only_decodes)
    monkeypatch.setattr(peers, "why_not", lambda name: f"no {name} here")
    argv = "--config small --op ring --context 40 80 --tokens 1 4 --implementation picky sglang"
    result, lines = measured(capsys, tmp_path, *argv.split())
    assert [(r["implementation"], r["context"], r["tokens"]) for r in result["rows"]] == [
        ("picky", 40, 1), ("picky", 80, 1),
    ]  # fmt: skip
    first, *rest = result["skipped"]
    assert first == {"implementation": "sglang", "why": "no sglang here"}
    assert [(s["context"], s["tokens"], s["why"]) for s in rest] == [
        (40, 4, "T = 4: only 1"), (80, 4, "T = 4: only 1"),
    ]  # fmt: skip
    assert lines[-2:] == [
        "skipped sglang: no sglang here", "skipped picky, 2 ×: T = 4: only 1",
    ]  # fmt: skip


def test_a_peer_gets_a_plain_cache(capsys, tmp_path, monkeypatch):
    def peer(case, q, buffers):
        chain = timing.Chain(case.step("xla"))
        _, shared = case.queries()
        ends = chain.outputs(q, [buffers[0], buffers[-1]], shared)
        return ends, timing.Times(3e-6, 2e-6, 5e-6)

    monkeypatch.setitem(peers.PEERS, "peer", peer)
    monkeypatch.setattr(peers, "why_not", lambda name: None)
    argv = "--config small --op global --context 40 --tokens 4 --implementation peer".split()
    result, _ = measured(capsys, tmp_path, *argv)
    (row,) = result["rows"]
    assert (row["cache"], row["us"], row["us_min"], row["us_max"]) == ("plain", 3, 2, 5)
    assert row["bytes"] == 40 * (16 + 16) * 2
    assert row["void"] is False


def test_a_peer_that_is_not_installed(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert peers.why_not("sglang").startswith("sglang cannot be imported: ")
    assert "\n" not in peers.why_not("sglang")


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ("--context 3 --tokens 4", "context 3 holds the 4 new tokens too: it must be from 4 to"),
        ("--config e2b --context 131073", "from 1 to 131,072, which is as far as the model goes"),
        ("--tokens 0", "tokens 0: each must be at least 1"),
        ("--batch 0", "batch 0 and tokens 1: each must be at least 1"),
        ("--op prefill --chunk 0", "tokens 0: each must be at least 1"),
        ("--tokens 66", "66 new tokens overflow a ring of 1,088 slots with window 1,024"),
    ],
)  # fmt: skip
def test_nothing_is_made_for_numbers_that_do_not_fit(capsys, monkeypatch, argv, told):
    monkeypatch.delattr(cases.Case, "buffer")
    assert cli.main(["bench", "attention", *argv.split()]) == 1
    assert told in capsys.readouterr().err


def test_help_names_ops_sizes_and_implementations(capsys):
    with pytest.raises(SystemExit):
        cli.main(["bench", "attention", "--help"])
    told = capsys.readouterr().out
    for word in ("ring, global, prefill", "26b-a4b", "xla", "sglang", "1024 6005 32768 131072"):
        assert word in " ".join(told.split())


def test_without_arguments_every_op_is_measured_for_decode_and_verify():
    parser = argparse.ArgumentParser()
    attention.add_arguments(parser)
    found = attention._cases(parser.parse_args([]))
    shapes = {(case.op, case.spec.window, case.tokens, case.context) for _, case in found}
    contexts = (1024, 6005, 32_768, 131_072)
    assert shapes == {
        *(("ring", 1024, T, n) for T in (1, 4, 8) for n in contexts),
        *(("global", None, T, n) for T in (1, 4, 8) for n in contexts),
        *(("prefill", window, min(n, 2048), n) for window in (1024, None) for n in contexts),
    }


# --- Parts ---------------------------------------------------------------------------------------


def test_published_shapes():
    """Heads, windows and bytes of a token, from the published configurations."""
    found = {}
    for name in ("31b", "26b-a4b", "12b", "e4b", "e2b"):
        for op in ("ring", "global"):
            (case,) = cases.cases(GemmaConfig.preset(name), op, 4096, tokens=1)
            s = case.spec
            found[name, op] = s.num_heads, s.num_kv_heads, s.head_dim, s.window, case.bytes
    assert found == {
        ("31b", "ring"): (32, 16, 256, 1024, 1024 * 16 * 512 * 2),
        ("31b", "global"): (32, 4, 512, None, 4096 * 4 * 640 * 2),
        ("26b-a4b", "ring"): (16, 8, 256, 1024, 1024 * 8 * 512 * 2),
        ("26b-a4b", "global"): (16, 2, 512, None, 4096 * 2 * 640 * 2),
        ("12b", "ring"): (16, 8, 256, 1024, 1024 * 8 * 512 * 2),
        ("12b", "global"): (16, 1, 512, None, 4096 * 1 * 640 * 2),
        ("e4b", "ring"): (8, 2, 256, 512, 512 * 2 * 512 * 2),
        ("e4b", "global"): (8, 2, 512, None, 4096 * 2 * 1024 * 2),
        ("e2b", "ring"): (8, 1, 256, 512, 512 * 1 * 512 * 2),
        ("e2b", "global"): (8, 1, 512, None, 4096 * 1 * 1024 * 2),
    }


@pytest.mark.parametrize("window", [None, 7])
def test_exact_attention(monkeypatch, window):
    """In blocks and in any order of the keys, it is what plain float64 attention gives."""
    monkeypatch.setattr(exact, "BLOCK", 5)
    rng = np.random.default_rng(0)
    T, G, S, H = 3, 2, 23, 4
    q, k, v = (rng.standard_normal(shape) for shape in ((T, G, H), (S, 1, H), (S, 1, H)))
    expected = float64_reference.attention(q, k, v, S - T, window)
    order = rng.permutation(S)
    positions = np.repeat(S - T + np.arange(T), G)
    out = exact.attention(q.reshape(T * G, H), k[order, 0], v[order, 0], positions, order, window)
    np.testing.assert_allclose(out.reshape(T, G, H), expected, rtol=1e-12)


def test_the_share_that_is_checked_is_bounded(monkeypatch):
    """At a long context one KV head of the batch, the last; at a short one all."""
    config = dataclasses.replace(SMALL, num_global_key_value_heads=2)
    monkeypatch.setattr(cases, "CHECKED_KEYS", 128)
    for context, heads in ((30, 4), (64, 2), (1000, 1)):
        (case,) = cases.cases(config, "global", context, tokens=2, batch=2)
        q, shared = case.queries()
        expected = case.expected(q, shared, case.buffer(0))
        assert expected.shape == (heads, 2, 2, 16)
    outputs = [np.zeros(q.shape, q.dtype)]
    outputs[0][-1, :, -2:] = expected[0]
    assert case.judge(outputs, [expected])["void"] is False
    chunk = cases.cases(config, "prefill", 1000, tokens=300)[-1]
    assert chunk.expected(*chunk.queries(), chunk.buffer(0)).shape == (1, 16, 2, 16)


def test_enough_buffers_rotate(monkeypatch):
    monkeypatch.setattr(timing, "TURNOVER", 200 << 20)
    assert timing.copies(1 << 30) == 2
    assert timing.copies(10 << 20) == 20
    assert timing.copies(10 << 20, layers=50) == 50
    assert timing.copies(1) == timing.MOST_COPIES
    monkeypatch.setattr(jax, "devices", lambda: [Device({"bytes_limit": 100 << 20})])
    assert timing.copies(10 << 20, layers=50) == 4
    with pytest.raises(ValueError, match="exceed 40 % of the device's memory"):
        timing.copies(50 << 20)


@dataclasses.dataclass
class Device:
    stats: dict

    def memory_stats(self) -> dict:
        return self.stats


def test_a_chain_calls_one_after_the_other():
    """Twice around three buffers: what each call returns is what the next one takes."""
    chain = timing.Chain(lambda x, buffer, shared: x * buffer + shared, calls=5)
    x, buffers = jnp.float32(1), [jnp.float32(n) for n in (2, 3, 5)]
    expected = 1
    for factor in (2, 3, 5, 2, 3, 5):
        expected = expected * factor + 7
    assert chain.program(x, buffers, jnp.float32(7)) == expected
    assert chain.outputs(x, buffers, jnp.float32(7)) == [9, 10, 12]


@pytest.fixture
def full_optimization():
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.mark.usefixtures("full_optimization")
def test_work_on_a_buffer_stays_in_the_loop():
    """What a step does to its buffer alone is done in every call, and no buffer is copied."""
    chain = timing.Chain(lambda x, buffer, shared: x @ jnp.sin(buffer), calls=8)
    x, buffers = jnp.zeros((1, 64)), [jnp.zeros((64, 64))] * 2
    text = chain.program.lower(x, buffers, ()).compile().as_text()
    assert "sine" in text
    assert "sine" not in text[text.index("ENTRY") :]
    assert decode.large_copies(text, at_least=64 * 64 * 4) == []


def test_times_are_seconds_a_call(monkeypatch):
    """Trains of dispatches that fill TRAIN_SECONDS, on a clock that a dispatch moves by 2 s."""
    clock = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(timing, "TRAIN_SECONDS", 9.0)
    dispatched = []

    def dispatch():
        clock[0] += 2
        dispatched.append(len(dispatched))
        return dispatched[-1]

    waited = []
    times = timing.measure(dispatch, waited.append, calls=4)
    assert times == (0.5, 0.5, 0.5)
    assert len(dispatched) == timing.WARM_UP + 1 + 5 * timing.REPEATS
    assert waited == [0, 1, 2, 3, *range(8, len(dispatched), 5)]
    assert times.row(None)["floor_us"] is None
    assert times.row(250)["ratio"] == pytest.approx(0.5 / (250 / BANDWIDTH))


def test_layer_types_are_told_apart():
    """All layers of one type: the other op has nothing to measure."""
    assert {SLIDING, FULL} == set(SMALL.layer_types)
    only = dataclasses.replace(SMALL, layer_types=(FULL, FULL))
    assert cases.cases(only, "ring", 10, tokens=1) == []
    assert [case.layers for case in cases.cases(only, "global", 10, tokens=1)] == [2]
