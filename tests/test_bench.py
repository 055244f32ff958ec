"""`carat bench` on a small shape: every documented number is there and follows from the others."""

import dataclasses
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_model
from fixture_models import record
from jax.experimental.compilation_cache import compilation_cache as jax_cache
from progress import only_progress

from carat_jax import cli, compilation_cache, feed_forward, memory
from carat_jax.bench import calls, decode, random_model, report, speculative
from carat_jax.config import PRESETS
from carat_jax.params import init_params, param_bytes
from carat_jax.speculative.drafters.assistant_config import AssistantConfig

CONFIG = small_model.CONFIG

ENVIRONMENT = {"device", "platform", "jax", "jaxlib", "python", "date", "commit", "settings"}
BANDWIDTH = 1e9  # bytes per second, so that times of a floor are no zeros


@pytest.fixture(autouse=True)
def a_small_preset(monkeypatch):
    monkeypatch.setitem(PRESETS, "small", dataclasses.replace(CONFIG, dtype="bfloat16"))
    monkeypatch.setattr(random_model, "init_params", lambda *_: small_model.params())
    monkeypatch.setattr(compilation_cache, "enable", lambda: None)
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # other tests go on in this process


def measured(capsys, tmp_path, *argv: str) -> tuple[dict, list[str]]:
    """The JSON that a benchmark writes and the lines that it prints."""
    file = tmp_path / "result.json"
    assert cli.main(["bench", *argv, "--json", str(file)]) == 0
    printed = capsys.readouterr()
    assert only_progress(printed.err)
    return json.loads(file.read_text()), printed.out.splitlines()


@pytest.fixture
def cold():
    """Nothing that was compiled and kept on disk before is used."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    jax_cache.reset_cache()  # which it was is remembered
    yield
    jax.config.update("jax_enable_compilation_cache", before)
    jax_cache.reset_cache()


def test_decode(capsys, tmp_path, monkeypatch, cold):
    monkeypatch.setitem(memory.READ_BANDWIDTH, jax.devices()[0].device_kind, BANDWIDTH)
    monkeypatch.setattr(calls, "REPEATS", 3)
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    argv = ["--config", "small", "--batch", "2", "--context", "128", "64", "--dtype", "float32"]
    result, lines = measured(capsys, tmp_path, "decode", *argv)
    assert set(result) == {"benchmark", "environment", "rows"}
    assert result["benchmark"] == "decode"
    assert set(result["environment"]) == ENVIRONMENT
    assert result["environment"]["jax"] == jax.__version__
    assert result["environment"]["settings"]["NCCL_ALGO"] == "Ring"
    row, other = result["rows"]
    assert [r["context"] for r in (row, other)] == [128, 64]
    assert other["kv_bytes"] < row["kv_bytes"]
    assert (row["config"], row["batch"]) == ("small", 2)
    assert 0 < row["ms_min"] <= row["ms"] <= row["ms_max"]
    read = memory.step_bytes(CONFIG, 2, 128)
    assert row["weights_bytes"] == read.weights
    assert row["kv_bytes"] == read.kv
    assert row["floor_ms"] == pytest.approx(1e3 * read.total / BANDWIDTH, abs=1e-3)
    assert row["ratio"] == pytest.approx(row["ms"] / row["floor_ms"], rel=0.05)
    assert row["tokens_per_s"] == pytest.approx(1e3 * row["batch"] / row["ms"], rel=0.05)
    assert row["gb_per_s"] == round(read.total / row["ms"] / 1e6)
    assert row["compile_s"] > 0
    assert row["first_token_s"] > 0
    assert row["peak_gb"] is None  # a CPU does not count
    assert row["large_copies"] == 0
    assert row["decode_vs_prefill"] < 1e-5
    head, line, _ = lines
    assert "× floor" in head
    assert len(head) == len(line)
    assert str(row["ms"]) in line.split()


def test_prefill(capsys, tmp_path):
    argv = ["--config", "small", "--prompt", "20", "70", "--max-context", "200"]
    result, lines = measured(capsys, tmp_path, "prefill", *argv, "--dtype", "float32")
    assert set(result["environment"]) == ENVIRONMENT
    estimate = memory.memory_estimate(CONFIG, 1, 200)
    for row, length in zip(result["rows"], (20, 70), strict=True):
        assert (row["prompt"], row["max_context"]) == (length, 200)
        assert row["ttft_s"] > 0
        assert row["decode_ms"] > 0
        assert row["estimate_gb"] == round(estimate / 1e9, 2)
        assert (row["peak_gb"], row["peak_over_estimate"]) == (None, None)
    assert len(lines) == 3


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["decode", "--batch", "0"], "--batch at least 1"),
        (["decode", "--context", "1"], "--context 1 must be at least 2"),
        (["prefill", "--prompt", "0"], "--prompt 0: it must be at least 1"),
        (["prefill", "--prompt", "32769"], "prompt 32,769 + 64 tokens exceeds"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_nothing_is_made_for_numbers_that_do_not_fit(capsys, monkeypatch, argv, told):
    monkeypatch.delattr(random_model, "make")
    assert cli.main(["bench", *argv]) == 1
    assert told in capsys.readouterr().err


# --- Parts ---------------------------------------------------------------------------------------


def test_random_models():
    config, params = random_model.make("small", "float32")
    assert config == CONFIG
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(params)) == param_bytes(config)
    state = random_model.used_state(config, 2, 100, 90)
    assert state.length.tolist() == [90, 90]
    for leaf in jax.tree.leaves(state.layers):
        assert leaf.dtype == jnp.float32
        assert np.std(np.asarray(leaf, np.float32)) == pytest.approx(1, abs=0.1)
    ids = random_model.random_ids(config, 3, 500)
    assert ids.shape == (3, 500)
    assert ids.min() >= 0
    assert config.vocab_size - 10 < ids.max() < config.vocab_size


def test_speculative(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "REPEATS", 3)
    drafter = AssistantConfig.for_target(CONFIG, hidden_size=16, intermediate_size=32)
    monkeypatch.setattr(AssistantConfig, "preset", lambda name: drafter)
    argv = ["--config", "small", "--batch", "2", "--context", "128", "--dtype", "float32"]
    argv += ["--acceptance", "1", "0.5"]
    keys, speculate = [], speculative.speculate

    def spying(params, config, drafter, rule, state, *rest, **sizes):
        keys.append(str(jax.random.key_data(state.decode.controls.sampling.keys)))
        return speculate(params, config, drafter, rule, state, *rest, **sizes)

    monkeypatch.setattr(speculative, "speculate", spying)
    result, lines = measured(capsys, tmp_path, "speculative", *argv)
    assert result["acceptance"] == "scripted"
    (row,) = result["rows"]
    assert (row["config"], row["batch"], row["context"], row["proposals"]) == ("small", 2, 128, 2)
    first, second = row["per_position"]
    assert first == 1
    assert row["drafted"] == 2 * row["rounds"]  # no row ends
    assert row["accepted"] == pytest.approx((1 + second) * row["rounds"], rel=1e-3)
    scripted, _, _, stood = lines
    assert scripted == "acceptance is scripted"
    assert stood == (
        f"batch 2: {row['accepted']:,} of {row['drafted']:,} proposals accepted; "
        f"by position: 1.000  {second:.3f}"
    )
    assert 0.4 < second < 0.6  # of several hundred draws
    assert len(set(keys)) == len(keys)  # the same positions come again and again
    assert row["acceptance_length"] == pytest.approx(1 + first + second, abs=0.01)
    per_token = row["round_ms"] / row["acceptance_length"]
    assert row["ms_per_token"] == pytest.approx(per_token, rel=0.02)
    assert row["speedup"] == pytest.approx(row["step_ms"] / row["ms_per_token"], rel=0.05)
    rest = row["round_ms"] - row["draft_ms"] - row["verify_ms"]
    assert row["loop_share"] == pytest.approx(rest / row["round_ms"], abs=0.01)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--acceptance", "0.5", "0.7"], "none above the last"),
        (["--acceptance", *["1"] * 16, "--context", "128"], "num_proposals = 16"),
        (["--context", "1"], "--context 1"),
    ],
)
def test_speculative_refuses(capsys, argv, message):
    assert cli.main(["bench", "speculative", "--config", "small", *argv]) == 1
    assert message in capsys.readouterr().err


HLO = """
ENTRY %main (p: bf16[1,16,8192,512]) -> bf16[1,16,8192,512] {
  %copy.1 = bf16[1,16,8192,512]{3,2,1,0:T(8,128)(2,1)} copy(%p), metadata={op_name="x"}
  ROOT %transpose = f32[512,1024]{1,0} transpose(%q), dimensions={1,0}
  %copy-start.2 = (f32[1024,512]{1,0}, f32[1024,512]{1,0}, u32[]) copy-start(%r)
  %copy.3 = s32[128]{0} copy(%small)
  %copy.4 = bf16[512,1023]{1,0} copy(%almost)
  %fusion = bf16[8192,8192]{1,0} fusion(%copy.1), kind=kLoop, calls=%copy_fusion
  %copy-done.2 = f32[1024,512]{1,0} copy-done(%copy-start.2)
"""


def test_large_copies_in_hlo():
    found = decode.large_copies(HLO)
    assert [line.removeprefix("ROOT ").split(" ")[0] for line in found] == [
        "%copy.1", "%transpose", "%copy-start.2",
    ]  # fmt: skip
    assert len(decode.large_copies(HLO, at_least=512)) == 5


def test_a_real_copy_is_seen():
    x = jnp.zeros((1024, 512))
    text = jax.jit(lambda x: (x, jnp.flip(x.T.copy()))).lower(x).compile().as_text()
    shapes = [line for line in text.splitlines() if "transpose(" in line or "copy(" in line]
    assert len(decode.large_copies(text)) == len(shapes)


def test_tables():
    text = report.table(["a", "long"], [[1, None], ["xyz", 2.5]])
    assert text.splitlines() == ["  a  long", "  1     –", "xyz   2.5"]
    assert report.rounded(None, 2) is None
    assert report.rounded(math.pi, 2) == 3.14


def test_an_unknown_device_has_no_floor(monkeypatch):
    kind = jax.devices()[0].device_kind
    monkeypatch.setattr(memory, "READ_BANDWIDTH", {})
    monkeypatch.setattr(report, "READ_BANDWIDTH", {})
    assert report.read_bandwidth() is None
    monkeypatch.setattr(report, "READ_BANDWIDTH", {kind: 5.0})
    assert report.read_bandwidth() == 5.0


MIXTURE = dataclasses.replace(
    CONFIG, num_experts=8, top_k_experts=2, moe_intermediate_size=32, dtype="bfloat16"
)


@pytest.mark.parametrize("mixed_up", [False, True])
def test_a_mixture_is_compared_in_its_own_dtype(monkeypatch, mixed_up):
    """And is void where decoding gives an expert the share of another."""
    vocab_size = CONFIG.vocab_size + mixed_up  # so that neither takes what the other compiled
    mixture = dataclasses.replace(MIXTURE, vocab_size=vocab_size)
    monkeypatch.setitem(PRESETS, "mixture", mixture)
    choose, multiply, seen = feed_forward.choose_experts, feed_forward.expert_matmul, set()

    def chosen(logits, scale, *, k):
        index, share = choose(logits, scale, k=k)
        return index, share[:, ::-1] if mixed_up and len(logits) == 1 else share

    def multiplied(x, w, index, *, absent):
        seen.add((x.dtype.name, w.dtype.name, len(w), len(index)))
        return multiply(x, w, index, absent=absent)

    monkeypatch.setattr(feed_forward, "choose_experts", chosen)
    monkeypatch.setattr(feed_forward, "expert_matmul", multiplied)
    error = decode._decode_error(decode._short("mixture", "bfloat16"))
    assert seen == {("bfloat16", "bfloat16", 8, 2 * rows) for rows in (1, decode.PROMPT)}
    assert (error > decode.LARGEST_ERROR) == mixed_up, error


def test_all_tokens_of_a_compared_mixture_visit_the_first_experts():
    """With shares of a half times 1, 2, ...: exactly, so that no rounding decides anything."""
    params = decode._routed_alike(init_params(MIXTURE, jax.random.key(0)), MIXTURE)
    *_, kept = record(params, MIXTURE, random_model.random_ids(MIXTURE, 1, 20))
    for layer in ("layers_0", "layers_1"):
        ((index, share),) = kept[layer]["experts"]["router"]
        np.testing.assert_array_equal(index, [[0, 1]] * 20)
        np.testing.assert_array_equal(share, [[0.5, 1]] * 20)
