"""Metrics of an engine, held against what its requests say of themselves."""

import itertools
import threading

import by_hand
import jax.numpy as jnp
import pytest
from prometheus_client import generate_latest

from carat_jax.engine import Cancelled, Engine, QueueFull
from carat_jax.engine.metrics import Metrics, tpot_s
from carat_jax.engine.request import Times
from carat_jax.engine.scheduler import Scheduler
from carat_jax.speculative import Ngram


def value(registry, name: str, **labels: str) -> float | None:
    return registry.get_sample_value(f"carat_{name}", labels)


def test_one_slot_and_a_drafter():
    """Turns of a conversation, which reuse what was read; one is cancelled, one waits."""
    gemma = by_hand.small_gemma()
    s = by_hand.scheduler(gemma, slots=1, drafter=Ngram())
    registry = s.metrics.registry
    assert value(registry, "slots") == 1
    before = value(registry, "memory_bytes")
    held = jnp.zeros(1000)
    assert value(registry, "memory_bytes") - before == held.nbytes

    first = by_hand.submit(s, gemma, [1, 2, 3, 1, 2], max_new_tokens=30)
    s.step()
    later = by_hand.submit(s, gemma, [9], max_new_tokens=30)
    assert value(registry, "slots_occupied") == 1
    assert value(registry, "requests_waiting") == 1
    later.cancel()
    by_hand.work_off(s)
    said = [1, 2, 3, 1, 2, *first.result().tokens]
    second = by_hand.submit(s, gemma, [*said, 4], max_new_tokens=20)
    by_hand.work_off(s)
    third = by_hand.submit(s, gemma, [5], max_new_tokens=1)
    by_hand.work_off(s)
    cut = by_hand.submit(s, gemma, [6], max_new_tokens=100)
    s.step()
    cut.cancel()
    by_hand.work_off(s)
    assert value(registry, "slots_occupied") == value(registry, "requests_waiting") == 0

    done, begun = [first, second, third], [first, second, third, cut]
    assert value(registry, "requests_total", outcome="length") == 3
    assert value(registry, "requests_total", outcome="cancelled") == 2
    assert value(registry, "generated_tokens_total") == sum(len(r.row.tokens) for r in begun)
    assert value(registry, "prompt_tokens_total", source="reused") == len(said) - 1
    assert value(registry, "prompt_tokens_total", source="read") == 5 + 2 + 1 + 1

    with pytest.raises(Cancelled) as cancelled:
        cut.result()
    counted = [r.result().stats for r in done] + [cancelled.value.generation.stats]
    for name in ("drafted", "accepted"):
        of_all = sum(getattr(stats, name) for stats in counted)
        assert value(registry, f"{name}_tokens_total") == of_all > 0
    rounds = sum(sum(stats.rounds.values()) for stats in counted)
    assert value(registry, "rounds_total") == rounds > 0

    def adds_up(name: str, seconds: list[float]) -> None:
        assert value(registry, f"{name}_seconds_count") == len(seconds)
        assert value(registry, f"{name}_seconds_sum") == pytest.approx(sum(seconds), abs=1e-6)

    adds_up("queue", [r.times.admitted - r.times.submitted for r in begun])
    adds_up("ttft", [r.times.first_token - r.times.submitted for r in begun])
    adds_up("tpot", [r.result().stats.tpot_s for r in (first, second)])
    came = [[at for at, _ in r.times.pieces] for r in begun]
    adds_up("itl", [b - a for at in came for a, b in itertools.pairwise(at)])


def test_refused_and_failed_requests(monkeypatch):
    gemma, gate = by_hand.small_gemma(), threading.Event()

    def fails(_: Scheduler) -> None:
        gate.wait(60)
        raise RuntimeError("no device")

    monkeypatch.setattr(Scheduler, "step", fails)
    with Engine(gemma, slots=1, max_context=by_hand.CONTEXT, max_waiting=1) as engine:
        request = engine.submit([1, 2], max_new_tokens=4)
        with pytest.raises(QueueFull):
            engine.submit([1, 2], max_new_tokens=4)
        gate.set()
        with pytest.raises(RuntimeError, match="no device"):
            request.result(timeout=60)
    assert value(engine.registry, "requests_total", outcome="refused") == 1
    assert value(engine.registry, "requests_total", outcome="failed") == 1
    assert value(engine.registry, "requests_total", outcome="length") is None


def test_what_is_read_of_times():
    times = Times(submitted=10.0, admitted=10.5, pieces=[(11.0, 1), (11.2, 3), (11.5, 2)])
    assert tpot_s(times) == pytest.approx(0.5 / 5)
    assert tpot_s(Times(10.0, 10.5, [(11.0, 1)])) is None
    assert tpot_s(Times(10.0)) is None
    metrics = Metrics(4, occupied=lambda: 2, waiting=lambda: 0)
    metrics.admitted(times, prompt=70, reused=64)
    metrics.ended(times, "non_finite")
    text = generate_latest(metrics.registry).decode()
    for line in (
        'carat_prompt_tokens_total{source="reused"} 64.0',
        'carat_prompt_tokens_total{source="read"} 6.0',
        'carat_requests_total{outcome="non_finite"} 1.0',
        'carat_queue_seconds_bucket{le="0.25"} 0.0',
        'carat_queue_seconds_bucket{le="0.5"} 1.0',
        "carat_tpot_seconds_count 0.0",  # only of requests that ended by themselves
        "carat_slots 4.0",
        "carat_slots_occupied 2.0",
    ):
        assert line in text.splitlines()
