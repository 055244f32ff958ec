"""`carat bench serving`: workloads against their distributions, figures against sums by hand."""

import dataclasses
import json
import math
import threading
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import scipy.stats
import small_model
from progress import only_progress

import carat_jax as carat
from carat_jax import cli, compilation_cache, generate, memory
from carat_jax.bench import random_model, serving_summary, workload
from carat_jax.bench.replay import replay
from carat_jax.bench.serving_summary import Record
from carat_jax.bench.static_batches import StaticBatches
from carat_jax.bench.workload import Conversation, Distribution, Turn
from carat_jax.config import PRESETS
from carat_jax.speculative.drafters.assistant_config import AssistantConfig

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"

# --- Workloads -----------------------------------------------------------------------------------


def made(**changed) -> list[Conversation]:
    given = {
        "conversations": 3000,
        "rate": 5.0,
        "turns": "uniform:1:3",
        "prompt": "lognormal:200:0.5",
        "follow_up": "uniform:10:19",
        "output": "fixed:7",
        "think": "uniform:0.5:2",
        "seed": 1,
    } | changed
    parsed = {
        name: Distribution.parse(value, 0) if isinstance(value, str) else value
        for name, value in given.items()
    }
    return workload.make(**parsed)


def test_arrivals_are_a_poisson_process():
    arrivals = np.array([c.arrival_s for c in made()])
    assert arrivals[0] == 0
    assert scipy.stats.kstest(np.diff(arrivals), scipy.stats.expon(scale=1 / 5).cdf).pvalue > 0.01


def test_an_infinite_rate_is_all_at_once():
    assert {c.arrival_s for c in made(rate=math.inf)} == {0.0}


def test_lengths_and_times_are_drawn_from_their_distributions():
    conversations = made()
    firsts = np.array([c.turns[0].prompt for c in conversations])
    # Half a token of rounding is little beside a spread of 100.
    expected = scipy.stats.lognorm(s=0.5, scale=200)
    assert scipy.stats.kstest(firsts, expected.cdf).pvalue > 0.01
    later = [turn for c in conversations for turn in c.turns[1:]]
    lengths, counts = np.unique([turn.prompt for turn in later], return_counts=True)
    assert lengths.tolist() == list(range(10, 20))
    assert scipy.stats.chisquare(counts).pvalue > 0.01
    thinks = [turn.think_s for turn in later]
    assert scipy.stats.kstest(thinks, scipy.stats.uniform(0.5, 1.5).cdf).pvalue > 0.01
    turns, counts = np.unique([len(c.turns) for c in conversations], return_counts=True)
    assert turns.tolist() == [1, 2, 3]
    assert scipy.stats.chisquare(counts).pvalue > 0.01
    assert {turn.output_tokens for c in conversations for turn in c.turns} == {7}
    assert {c.turns[0].think_s for c in conversations} == {0.0}


def test_a_seed_is_a_workload():
    few = {"conversations": 50}
    assert made(**few) == made(**few)
    assert made(**few) != made(**few, seed=2)
    longer = made(**few, output="uniform:1:500")  # what else is drawn stays
    for one, other in zip(made(**few), longer, strict=True):
        same = tuple(dataclasses.replace(turn, output_tokens=7) for turn in other.turns)
        assert dataclasses.replace(other, turns=same) == one


@pytest.mark.parametrize("text", ["fixed:3", "uniform:1:2.5", "lognormal:200:0.5"])
def test_distributions_are_printed_as_they_are_read(text):
    assert str(Distribution.parse(text, 1)) == text


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("normal:3:1", "fixed:VALUE, uniform:LOW:HIGH or lognormal:MEDIAN:SIGMA"),
        ("fixed", "fixed:VALUE"),
        ("uniform:3", "uniform:LOW:HIGH"),
        ("lognormal:3:x", "lognormal:MEDIAN:SIGMA"),
        ("fixed:nan", "fixed:VALUE"),
        ("fixed:0", "0 must be at least 1"),
        ("uniform:5:4", "4 is too small"),
        ("lognormal:5:-1", "-1 is too small"),
    ],
)
def test_other_distributions_are_refused(text, told):
    with pytest.raises(ValueError, match=told):
        Distribution.parse(text, 1)


def test_a_file_is_read_as_it_was_written(tmp_path):
    by_hand = [
        Conversation(0.25, (Turn("text, \n and “more”", 3), Turn((5, 0, 7), 1, 2.5))),
        Conversation(0.0, (Turn(12, 4),)),
    ]
    workload.write(tmp_path / "folder" / "file", [*by_hand, *made(conversations=20)])
    assert workload.read(tmp_path / "folder" / "file") == [*by_hand, *made(conversations=20)]


GOOD = '{"arrival_s": 0, "prompt": 3, "output_tokens": 1}'


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "Expecting property name"),
        ("[1]", r"\[1\] is no JSON object"),
        ('{"arrival_s": 0, "prompt": 3}', "output_tokens is missing"),
        (GOOD[:-1] + ', "seed": 1}', "'seed' is none of arrival_s, output_tokens, prompt, then"),
        (GOOD.replace("3", '""'), "prompt = '': it must be text, ids, or how many ids"),
        (GOOD.replace("3", "0"), "prompt = 0"),
        (GOOD.replace("3", "[1, -2]"), r"prompt = \[1, -2\]"),
        (GOOD.replace("3", "[]"), r"prompt = \[\]"),
        (GOOD.replace("1}", "1.5}"), "output_tokens = 1.5: it must be an integer, at least 1"),
        (GOOD.replace("0,", "-1,"), "arrival_s = -1: it must be seconds, at least 0"),
        (GOOD.replace("0,", "NaN,"), "arrival_s = nan"),
        (GOOD[:-1] + ', "then": 3}', "then = 3: it must be a list"),
        (GOOD[:-1] + ', "then": [{"prompt": 3, "output_tokens": 1}]}', "think_s is missing"),
    ],
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line, told):
    path = tmp_path / "file"
    path.write_text(f"{GOOD}\n\n{line}\n{GOOD}\n")
    with pytest.raises(ValueError, match=f"file, line 3: {told}"):
        workload.read(path)


def test_a_file_without_a_request_is_refused(tmp_path):
    path = tmp_path / "file"
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="has no request"):
        workload.read(path)


def test_prompts_become_ids():
    tokenizer = carat.load("tiny").tokenizer
    conversations = [
        Conversation(0.0, (Turn("def f", 2), Turn("return", 3))),
        Conversation(0.0, (Turn((9, 8), 4), Turn(500, 5))),
        Conversation(0.0, (Turn(500, 6),)),
    ]
    ids = workload.as_ids(conversations, 4096, tokenizer, seed=3)
    assert ids[0][0] == tokenizer.encode("def f")  # with <bos>
    assert ids[0][1] == tokenizer.encode("return", add_bos=False)
    assert ids[1][0] == [9, 8]
    assert len(ids[1][1]) == len(ids[2][0]) == 500
    assert ids[1][1] != ids[2][0]
    assert 4000 < max(ids[2][0]) < 4096
    assert ids == workload.as_ids(conversations, 4096, tokenizer, seed=3)
    assert ids[2] != workload.as_ids(conversations, 4096, tokenizer, seed=4)[2]
    first, second = len(ids[0][0]), len(ids[0][1])
    assert workload.lengths(conversations, ids) == [
        (first, 2), (first + 2 + second, 3), (2, 4), (2 + 4 + 500, 5), (500, 6),
    ]  # fmt: skip


def test_the_stored_workload_is_what_was_measured():
    stored = json.loads((BENCHMARKS / "h200" / "serving_31b_6k.json").read_text())
    path = BENCHMARKS.parent / stored["workload"]["file"]
    turns = [turn for conversation in workload.read(path) for turn in conversation.turns]
    (row,) = stored["rows"]
    assert row["completed"] == len(turns)
    assert row["total_input_tokens"] == sum(turn.prompt for turn in turns)
    assert row["total_output_tokens"] == sum(turn.output_tokens for turn in turns)


@pytest.mark.parametrize(("prompt", "told"), [("text", "no tokenizer"), ((1, 96), "id 96: .* 95")])
def test_prompts_that_are_no_ids_of_the_model_are_refused(prompt, told):
    with pytest.raises(ValueError, match=told):
        workload.as_ids([Conversation(0.0, (Turn(prompt, 1),))], 96, None, seed=0)


# --- Replay --------------------------------------------------------------------------------------


def record(**changed) -> Record:
    return dataclasses.replace(Record(1, 1, 0.0, 0.0, None, (), 0.0), **changed)


def test_conversations_begin_at_their_times_and_go_on_from_their_answers():
    conversations = [
        Conversation(1.06, (Turn(1, 2), Turn(1, 3, 0.02))),
        Conversation(1.0, (Turn(2, 1), Turn(1, 1), Turn(1, 1))),
    ]
    asked, begin = [], time.perf_counter()

    def ask(ids, count, seed):
        asked.append((time.perf_counter() - begin, list(ids), count, seed))
        failed = (seed, len(ids)) == (1, 4)  # the second turn of the second conversation
        return [90 + i for i in range(count)], None if failed else record()

    records, seconds = replay(ask, conversations, [[[1], [2]], [[3, 4], [5], [6]]])
    # The first arrival is at once; the last answer asked for after 60 ms and 20 ms of thought.
    assert [call[1:] for call in asked] == [
        ([3, 4], 1, 1), ([3, 4, 90, 5], 1, 1), ([1], 2, 0), ([1, 90, 91, 2], 3, 0),
    ]  # fmt: skip
    assert asked[2][0] >= 0.06
    assert asked[3][0] >= 0.08
    assert len(records) == 3
    assert 0.08 <= seconds < 1.0


def test_an_error_of_a_request_ends_the_replay():
    def ask(ids, count, seed):
        raise RuntimeError("the engine has failed")

    conversations = [Conversation(0.0, (Turn(1, 1),)), Conversation(0.1, (Turn(1, 1),))]
    with pytest.raises(RuntimeError, match="the engine has failed"):
        replay(ask, conversations, [[[1]], [[1]]])


def test_static_batches_give_each_request_its_own_tokens():
    gemma = small_model.gemma()
    prompts = [[1, 2, 3], [7] * 20, [9]]
    conversations = [
        Conversation(0.0, (Turn(p, n),)) for p, n in zip(prompts, (2, 5, 1), strict=True)
    ]
    answers = {}
    with StaticBatches(gemma, 2, {}) as batches:

        def ask(ids, count, seed):
            answer, measured = batches.ask(ids, count, seed)
            answers[seed] = answer, measured
            return answer, measured

        replay(ask, conversations, [[p] for p in prompts])
    for seed, count in enumerate((2, 5, 1)):
        alone, _ = gemma.generate([prompts[seed]] * 2, max_new_tokens=count)
        answer, measured = answers[seed]
        assert answer == alone.tokens
        assert (measured.prompt_tokens, measured.output_tokens) == (len(prompts[seed]), count)
        assert measured.ttft_s > measured.queue_s >= 0
    assert answers[2][1].tpot_s is None


# --- Figures -------------------------------------------------------------------------------------

RECORDS = [
    Record(10, 3, queue_s=0.1, ttft_s=0.2, tpot_s=0.05, gaps_s=(0.04, 0.06), slot_s=0.2),
    Record(20, 5, 0.0, 0.4, 0.1, (0.4,), 0.8, rounds=4, accepted=2),
    Record(30, 1, 0.2, 0.9, None, (), 1.0, rounds=1, accepted=1),
]


def test_figures_are_what_the_requests_add_up_to():
    figures = serving_summary.summary(
        RECORDS, failed=2, duration_s=2.0, slots=4, step_floor_s=0.016
    )
    assert figures == {
        "completed": 3,
        "failed": 2,
        "duration": 2.0,
        "total_input_tokens": 60,
        "total_output_tokens": 9,
        "request_throughput": 1.5,
        "output_throughput": 4.5,
        "total_token_throughput": 34.5,
        "mean_ttft_ms": 500.0,
        "median_ttft_ms": 400.0,
        "p99_ttft_ms": 890.0,  # 98 % of the way from the second to the third
        "max_ttft_ms": 900.0,
        "mean_tpot_ms": 75.0,
        "median_tpot_ms": 75.0,
        "p99_tpot_ms": 99.5,
        "max_tpot_ms": 100.0,
        "mean_itl_ms": 166.67,
        "median_itl_ms": 60.0,
        "p99_itl_ms": 393.2,
        "max_itl_ms": 400.0,
        "mean_queue_ms": 100.0,
        "median_queue_ms": 100.0,
        "p99_queue_ms": 198.0,
        "max_queue_ms": 200.0,
        "acceptance_length": 1.6,
        "slot_occupancy": 0.25,
        "floor_ms": 10.0,
        "tpot_over_floor": 7.5,
    }


def test_figures_that_nothing_says_anything_about():
    figures = serving_summary.summary([record()], 0, 1.0, 1, step_floor_s=None)
    told = ("mean_tpot_ms", "p99_itl_ms", "acceptance_length", "floor_ms", "tpot_over_floor")
    assert [figures[name] for name in told] == [None] * 5
    assert serving_summary.summary([], 1, 1.0, 1, 0.01)["mean_ttft_ms"] is None


# --- The command ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def no_compilation_cache(monkeypatch):
    monkeypatch.setattr(compilation_cache, "enable", lambda: None)


def measured(capsys, tmp_path, *argv: str) -> tuple[dict, list[str]]:
    """The JSON that the benchmark writes and the lines that it prints."""
    file = tmp_path / "result.json"
    assert cli.main(["bench", "serving", *argv, "--json", str(file)]) == 0
    printed = capsys.readouterr()
    assert only_progress(printed.err)
    return json.loads(file.read_text()), printed.out.splitlines()


def test_the_bundled_model(capsys, tmp_path):
    """A conversation, whose second turn goes on where the first ended."""
    file = tmp_path / "workload.jsonl"
    file.write_text(
        '{"arrival_s": 9, "prompt": "def main(", "output_tokens": 6, '
        '"then": [{"think_s": 0, "prompt": 3, "output_tokens": 14}]}\n'
    )
    argv = ["--workload", str(file), "--slots", "1", "--max-context", "256"]
    result, lines = measured(capsys, tmp_path, *argv, "--prefill-chunk", "64")
    (row,) = result["rows"]
    first = len(carat.load("tiny").tokenizer.encode("def main("))
    assert (row["run"], row["slots"], row["drafter"]) == ("1 slot", 1, "none")
    assert (row["completed"], row["failed"]) == (2, 0)
    assert row["total_input_tokens"] == first + (first + 6 + 3)
    assert row["total_output_tokens"] == 6 + 14
    assert row["reused_tokens"] == first + 5  # all that was read of the first turn
    assert row["mean_ttft_ms"] > row["mean_queue_ms"] >= 0
    assert row["mean_tpot_ms"] > 0
    assert 0 < row["slot_occupancy"] <= 1
    assert row["output_throughput"] == pytest.approx(20 / row["duration"], rel=0.05)
    assert row["peak_gb"] is None  # a CPU does not count
    assert result["workload"] == {"seed": 0, "file": str(file)}
    assert result["environment"]["jax"] == jax.__version__
    head, *printed = lines
    assert head.split() == ["1", "slot"]
    assert len(printed) == len(serving_summary.LABELS)
    assert printed[0].split() == ["Successful", "requests", "2"]
    assert f"{row['p99_itl_ms']}" in next(line for line in printed if line.startswith("P99 ITL"))


@pytest.fixture
def small(monkeypatch):
    """`--config small`."""
    monkeypatch.setitem(PRESETS, "small", small_model.CONFIG)
    monkeypatch.setattr(random_model, "init_params", lambda *_: small_model.params())


def test_slots_static_batches_and_a_chunk(capsys, tmp_path, monkeypatch, small):
    """Reading a chunk is made to take longer, the further back its sequence begins."""
    chunks, inner = [], generate.prefill_chunk

    def slow(params, config, tokens, state, new, last):
        # The engine's are read in its thread, those of batches are of 64 tokens.
        if tokens.shape == (1, 32) and threading.current_thread() is threading.main_thread():
            chunks.append((int(state.length[0]), int(new[0])))
            time.sleep(0.001 * chunks[-1][0])
        return inner(params, config, tokens, state, new, last)

    monkeypatch.setattr(generate, "prefill_chunk", slow)
    argv = ["--config", "small", "--dtype", "float32", "--requests", "3", "--prompt", "fixed:100"]
    argv += ["--output", "fixed:9", "--slots", "2", "--baselines", "--prefill-chunk", "32"]
    result, lines = measured(capsys, tmp_path, *argv, "--max-context", "128")
    rows = {row["run"]: row for row in result["rows"]}
    assert list(rows) == ["2 slots", "sequential", "static 2"]
    for row in rows.values():
        assert (row["completed"], row["failed"], row["total_output_tokens"]) == (3, 0, 27)
    assert [row["slots"] for row in rows.values()] == [2, 1, 2]
    assert rows["2 slots"]["mean_itl_ms"] > 0 and rows["static 2"]["mean_itl_ms"] is None
    assert set(chunks) == {(68, 32)}  # the last 32 of 100
    chunk = rows["2 slots"]["chunk_ms"]
    assert 68 <= chunk < 200
    assert rows["sequential"]["chunk_ms"] is rows["static 2"]["chunk_ms"] is None
    line = next(i for i, line in enumerate(lines) if line.startswith("Max ITL")) + 1
    assert lines[line].split() == f"Longest chunk of a prompt (ms) {chunk} – –".split()


@pytest.mark.slow
def test_drafters_baselines_and_a_floor(capsys, tmp_path, monkeypatch, small):
    monkeypatch.setitem(memory.READ_BANDWIDTH, jax.devices()[0].device_kind, 1e6)
    drafter = AssistantConfig.for_target(small_model.CONFIG, hidden_size=16, intermediate_size=32)
    monkeypatch.setattr(AssistantConfig, "preset", lambda name: drafter)
    written = tmp_path / "written.jsonl"
    argv = ["--config", "small", "--dtype", "float32", "--requests", "3", "--prompt", "fixed:5"]
    argv += ["--output", "fixed:60", "--slots", "1", "--drafter", "none", "assistant"]
    argv += ["--acceptance", "1", "0.5", "--baselines", "--prefill-chunk", "64"]
    argv += ["--max-context", "4096"]  # `generate` takes as much: it shares its compilations
    result, lines = measured(capsys, tmp_path, *argv, "--write", str(written))
    assert lines[0] == "acceptance is scripted"
    assert result["workload"]["output"] == "fixed:60"
    runs = {row["run"]: row for row in result["rows"]}
    assert list(runs) == ["1 slot", "sequential", "1 slot + assistant", "sequential + assistant"]
    step = memory.step_bytes(small_model.CONFIG, 1, 1).weights / 1e6 * 1e3
    for name, row in runs.items():
        assert (row["completed"], row["failed"], row["total_output_tokens"]) == (3, 0, 180), name
        length = row["acceptance_length"]
        assert length is None if row["drafter"] == "none" else 2.2 < length < 2.8  # 1 + 1 + 0.5
        assert row["floor_ms"] == pytest.approx(step / (length or 1), rel=1e-3)
        assert (row["mean_itl_ms"] is None) == name.startswith("sequential")
    assert [c.turns for c in workload.read(written)] == [(Turn(5, 60),)] * 3


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (["--config", "31b", "--model", "tiny"], "--model and --config: give one"),
        (["--slots", "1", "0"], "--slots 0: it must be from 1 to 256"),
        (["--requests", "0"], "--requests 0"),
        (["--prefill-chunk", "4096"], "--prefill-chunk 4096: it must be from 1 to 2,048"),
        (["--rate", "0"], "--rate 0: it must be above 0"),
        (["--rate", "nan"], "--rate nan"),
        (["--acceptance", "0.5"], "--acceptance and --num-proposals are for a drafter"),
        (["--drafter", "assistant"], "--drafter assistant is for --config"),
        (["--drafter", "ngram", "--acceptance", "0.5", "0.7"], "none above the last"),
        (["--drafter", "ngram", "--acceptance", "0.5", "--num-proposals", "2"], "leave it out"),
        (["--workload", "FILE", "--rate", "2"], "--rate is for a workload without --workload"),
        (["--config", "31b", "--max-context", "100"], "--max-context 100: it must be from"),
        (["--config", "31b", "--prompt", "fixed:262144"], "to 262,144, the model's own"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_nothing_is_made_for_arguments_that_do_not_fit(capsys, monkeypatch, argv, told):
    monkeypatch.delattr(random_model, "make")
    assert cli.main(["bench", "serving", *argv]) == 1
    assert told in capsys.readouterr().err


def test_a_distribution_that_is_none_is_wrong_usage(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main(["bench", "serving", "--prompt", "fixed:0"])
    assert ended.value.code == 2
    assert "0 must be at least 1" in capsys.readouterr().err
