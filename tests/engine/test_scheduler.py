"""Scheduler: whatever comes and goes beside it, a request gets what it gets alone."""

import functools
import gc

import by_hand
import interleaving
import jax
import numpy as np
import pytest
import scripted_model
import small_model
from hypothesis import given, settings

import carat_jax as carat
from carat_jax import generate, sharding
from carat_jax.engine import Cancelled
from carat_jax.engine.scheduler import STEPS, STEPS_BESIDE_PREFILL
from carat_jax.kv_state import state_bytes
from carat_jax.speculative import Ngram

W, R, CHUNK = small_model.CONFIG.sliding_window, 128, by_hand.CHUNK
BASE = np.random.default_rng(0).integers(0, small_model.CONFIG.vocab_size, 300).tolist()


@functools.cache
def cases() -> list[interleaving.Case]:
    """Lengths at and beside the window, the chunk and the ring; some go on from one another."""
    model, draw = by_hand.small_gemma(), np.random.default_rng(1)
    # Two kinds only: each needs programs of its own for each number of rows.
    kinds = [{}, {"temperature": 1.2, "top_p": 0.95, "logprobs": 2}]
    made = []
    for i, n in enumerate([1, W - 1, W, W + 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1,
                           R - 1, R, R + 1, R + CHUNK, 250, 3 * W, 5, 90]):  # fmt: skip
        own = draw.integers(0, small_model.CONFIG.vocab_size, n).tolist()
        shared = n * (i % 4) // 4  # of the base: each other's beginnings
        options = kinds[i % 2] | {"max_new_tokens": int(draw.integers(1, 60))}
        if options.get("temperature"):
            options["seed"] = i
        case = interleaving.Case(model, (*BASE[:shared], *own[shared:]), options, Ngram())
        if i % 3 == 1 and len(case.alone.tokens) > 3:  # ends in the middle
            stop = (case.alone.tokens[-2], *range(90, 90 + i % 6))
            case = case.also(stop_token_ids=stop)
        if i % 3 == 2 and len(case.alone.text) > 6:  # two characters of two tokens
            case = case.also(stop=(case.alone.text[3:5],))
        made.append(case)
    return made


# --- Any interleaving ----------------------------------------------------------------------------


def test_the_cases_are_worth_the_name():
    ended = [case.alone.finish_reason for case in cases()]
    assert ended.count("stop") >= 6 and ended.count("length") >= 6
    assert len({tuple(case.alone.tokens[:4]) for case in cases()}) >= 14
    assert any("stop" in case.options for case in cases())


@pytest.mark.parametrize(
    ("slots", "drafter", "every"),  # all cases, or every second: the greedy ones
    [(1, None, 1), (2, None, 1), (4, None, 2), (2, Ngram(), 1)],
    ids=["1", "2", "4", "2 drafted"],
)
@settings(max_examples=8)
@given(arrivals=interleaving.ARRIVALS)
def test_any_interleaving_gives_each_what_it_gets_alone(slots, drafter, every, arrivals):
    s = by_hand.scheduler(by_hand.small_gemma(), slots, drafter)
    interleaving.play(s, arrivals, cases()[::every])


def test_more_ids_than_the_rows_had_room_for():
    """Eight places for stop ids are made; a row that comes later needs more."""
    model = by_hand.small_gemma()
    s = by_hand.scheduler(model, 2)
    first, second = (model.generate(BASE[:n], max_new_tokens=12).tokens for n in (20, 40))
    others = [i for i in range(small_model.CONFIG.vocab_size) if i not in second]
    stop = next(i for i in range(4, 9) if second[i] not in second[:i])
    few = by_hand.submit(s, model, BASE[:20], max_new_tokens=12)
    s.step()
    ids = [*others[:11], second[stop]]
    many = by_hand.submit(s, model, BASE[:40], max_new_tokens=12, stop_token_ids=ids)
    by_hand.work_off(s)
    assert few.result(0).tokens == first
    assert many.result(0).tokens == second[: stop + 1]


# --- Who comes when ------------------------------------------------------------------------------


def test_a_long_prompt_holds_nobody_up_for_longer_than_a_chunk():
    model = by_hand.small_gemma()
    s = by_hand.scheduler(model, 2)
    talking = by_hand.submit(s, model, BASE[:5], max_new_tokens=100)
    s.step()
    long = by_hand.submit(s, model, BASE[:300], max_new_tokens=2)
    for chunk in range(5):  # 4 chunks of 64, and the rest
        before = len(talking.row.tokens)
        s.step()
        assert len(talking.row.tokens) - before == STEPS_BESIDE_PREFILL
        assert bool(long.row.tokens) == (chunk == 4)
    by_hand.work_off(s)
    assert talking.result(0).tokens == model.generate(BASE[:5], max_new_tokens=100).tokens
    assert long.result(0).tokens == model.generate(BASE[:300], max_new_tokens=2).tokens


def test_the_device_has_work_while_tokens_are_fetched(monkeypatch):
    model = by_hand.small_gemma()
    s = by_hand.scheduler(model, 1)
    count = 1 + STEPS_BESIDE_PREFILL + 3 * STEPS
    request = by_hand.submit(s, model, BASE[:5], max_new_tokens=count)
    s.step()  # the prompt, its first token
    made, ahead, step, fetch = [], [], s.rows.step, sharding.fetch

    def dispatching(n):
        made.append(step(n))
        return made[-1]

    def fetching(flight):
        ahead.append(bool(made) and flight[0] is not made[-1][0])
        return fetch(flight)

    monkeypatch.setattr(s.rows, "step", dispatching)
    monkeypatch.setattr(sharding, "fetch", fetching)
    by_hand.work_off(s)
    assert ahead == [True] * 4  # a newer one is on its way whenever one is fetched
    assert len(request.result(0).tokens) == count


def test_a_first_token_is_fetched_when_the_others_have_work(monkeypatch):
    model = by_hand.small_gemma()
    s = by_hand.scheduler(model, 2)
    requests = [by_hand.submit(s, model, BASE[:5], max_new_tokens=40)]
    s.step()
    requests.append(by_hand.submit(s, model, BASE[:7], max_new_tokens=2))
    told, step, fetch = [], s.rows.step, sharding.fetch
    monkeypatch.setattr(s.rows, "step", lambda n: told.append("dispatched") or step(n))
    monkeypatch.setattr(sharding, "fetch", lambda x: told.append("fetched") or fetch(x))
    s.step()
    assert told == ["dispatched", "fetched", "fetched"]  # what was in flight, the first token
    assert len(requests[1].row.tokens) == 1
    by_hand.work_off(s)
    assert requests[1].result(0).tokens == model.generate(BASE[:7], max_new_tokens=2).tokens


@pytest.mark.parametrize("drafter", [None, Ngram()], ids=["plain", "drafted"])
def test_no_row_works_for_one_that_has_all_its_tokens_while_someone_waits(monkeypatch, drafter):
    model = by_hand.small_gemma()
    s = by_hand.scheduler(model, 2, drafter)
    counts = [2, 9, 10, 16, 17, 18, 25, 33]
    requests = [
        by_hand.submit(s, model, BASE[i : i + 5], max_new_tokens=n) for i, n in enumerate(counts)
    ]
    made, step = [], s.rows.step

    def dispatching(steps):
        waited = s.without_slot() > 0
        tokens, speculated = step(steps)
        made.append((waited, [o is not None for o in s.rows.occupants], tokens.num_tokens))
        return tokens, speculated

    monkeypatch.setattr(s.rows, "step", dispatching)
    by_hand.work_off(s)
    for request, count in zip(requests, counts, strict=True):
        assert len(request.result(0).tokens) == count
    busy = [np.asarray(num)[taken] for waited, taken, num in made if waited]
    assert len(busy) > 10 and all((num > 0).all() for num in busy)


def test_a_snapshot_holds_nobody_up_for_longer_than_a_chunk():
    model = by_hand.small_gemma()
    s = by_hand.scheduler(model, 1)
    talking = by_hand.submit(s, model, BASE[:5], max_new_tokens=100)
    s.step()
    waiting = by_hand.submit(s, model, BASE[:200], max_new_tokens=2)
    snapshot = s.snapshot(BASE[:190])  # needs no slot
    for chunk in range(3):
        before = len(talking.row.tokens)
        s.step()
        assert len(talking.row.tokens) - before == STEPS_BESIDE_PREFILL
        assert snapshot.done() == (chunk == 2)
    by_hand.work_off(s)
    assert talking.result(0).tokens == model.generate(BASE[:5], max_new_tokens=100).tokens
    assert waiting.result(0).tokens == model.generate(BASE[:200], max_new_tokens=2).tokens
    read = s.metrics.registry.get_sample_value("carat_prompt_tokens_total", {"source": "reused"})
    assert read == 190


def test_snapshots_and_prompts_take_turns():
    model = by_hand.small_gemma()
    s = by_hand.scheduler(model, 2)
    requests = [by_hand.submit(s, model, [i] * 9, max_new_tokens=200) for i in (1, 2, 3, 4)]
    snapshots = [s.snapshot([i] * 9) for i in (11, 12, 13, 14, 15, 16)]
    seen, order = [], ""
    for _ in range(9):  # one chunk each, of which the third prompt's is read ahead of a slot
        s.step()
        read = [future for future in snapshots if future.done()]
        read += [request for request in requests if request not in s.waiting]
        order += "".join("ps"[new in snapshots] for new in read if new not in seen)
        seen = read
    assert order == "spspspsss"  # the fourth has to wait for a slot
    s.abandon(Cancelled(None))


def test_a_prompt_is_read_while_all_slots_are_taken():
    model = by_hand.small_gemma()
    s = by_hand.scheduler(model, 1)
    talking = by_hand.submit(s, model, BASE[:5], max_new_tokens=60)
    s.step()
    first, second = (by_hand.submit(s, model, BASE[:n], max_new_tokens=9) for n in (200, 100))
    for _ in range(4):  # chunks of 64
        assert s.ready is None
        s.step()
    assert s.ready.owner.request is first and first.times.admitted is None
    gauge = s.metrics.registry.get_sample_value
    assert (gauge("carat_slots_occupied"), gauge("carat_requests_waiting")) == (1, 2)
    snapshot = s.snapshot(BASE[:30])  # what is ready is in nobody's way
    s.step()
    assert snapshot.done() and s.reading is None
    while not first.row.tokens:
        assert not second.row.tokens
        s.step()
    assert talking.result(0).tokens == model.generate(BASE[:5], max_new_tokens=60).tokens
    assert first.times.admitted >= talking.times.pieces[-1][0]
    by_hand.work_off(s)
    for request, n in ((first, 200), (second, 100)):
        assert request.result(0).tokens == model.generate(BASE[:n], max_new_tokens=9).tokens
    assert first.times.first_token < second.times.first_token


def test_a_prompt_that_a_live_sequence_began_with_waits_for_its_state():
    model = by_hand.small_gemma()
    s = by_hand.scheduler(model, 1)
    prompts = [[*BASE[:100], i, i] for i in range(5)]
    requests = [by_hand.submit(s, model, ids, max_new_tokens=4) for ids in prompts]
    by_hand.work_off(s)
    for request, ids in zip(requests, prompts, strict=True):
        assert request.result(0).tokens == model.generate(ids, max_new_tokens=4).tokens
    read = s.metrics.registry.get_sample_value("carat_prompt_tokens_total", {"source": "reused"})
    assert read == 4 * 100


def test_what_was_read_ahead_can_be_cancelled():
    model = by_hand.small_gemma()
    s = by_hand.scheduler(model, 1)
    talking = by_hand.submit(s, model, BASE[:5], max_new_tokens=60)
    s.step()
    cancelled, next_one = (by_hand.submit(s, model, BASE[:n], max_new_tokens=9) for n in (30, 40))
    s.step()
    assert s.ready.owner.request is cancelled
    cancelled.cancel()
    s.step()
    with pytest.raises(Cancelled):
        cancelled.result(0)
    assert s.ready.owner.request is next_one
    by_hand.work_off(s)
    assert talking.result(0).tokens == model.generate(BASE[:5], max_new_tokens=60).tokens
    assert next_one.result(0).tokens == model.generate(BASE[:40], max_new_tokens=9).tokens


def test_a_snapshot_that_fails_ends_alone(monkeypatch):
    model = by_hand.small_gemma()
    s = by_hand.scheduler(model, 1)
    talking = by_hand.submit(s, model, BASE[:5], max_new_tokens=30)
    s.step()

    def no_room(*_):
        raise MemoryError("no room")

    with monkeypatch.context() as broken:
        broken.setattr(generate, "prefill_chunk", no_room)
        snapshot = s.snapshot(BASE[:100])
        s.step()
    with pytest.raises(MemoryError, match="no room"):
        snapshot.result(0)
    by_hand.work_off(s)
    assert talking.result(0).tokens == model.generate(BASE[:5], max_new_tokens=30).tokens
    left = s.snapshot(BASE[:100])
    s.step()
    s.abandon(Cancelled(None))
    with pytest.raises(Cancelled):
        left.result(0)


def test_rows_are_given_up_that_were_left_while_a_prompt_was_read():
    model = by_hand.small_gemma()
    s = by_hand.scheduler(model, 4)
    for n in (20, 20, 200):
        by_hand.submit(s, model, BASE[:3], max_new_tokens=n)
    for _ in range(3):
        s.step()
    assert len(s.rows.occupants) == 4
    by_hand.submit(s, model, BASE[:300], max_new_tokens=100)
    for _ in range(6):  # meanwhile two of three end
        s.step()
    assert s.reading is None and len(s.rows.live) == 2
    assert len(s.rows.occupants) == 2
    s.abandon(Cancelled(None))


def test_first_come_first_served():
    model = by_hand.small_gemma()
    s = by_hand.scheduler(model, 2)
    lengths = [90, 1, 200, 64, 3, 130, 2]
    requests = [by_hand.submit(s, model, BASE[:n], max_new_tokens=n % 7 + 1) for n in lengths]
    by_hand.work_off(s)
    admitted = [request.times.admitted for request in requests]
    assert admitted == sorted(admitted)
    for n, request in zip(lengths, requests, strict=True):
        assert len(request.result(0).tokens) == n % 7 + 1
        assert request.times.submitted <= request.times.admitted <= request.times.first_token


# --- What fails, fails alone ---------------------------------------------------------------------

SCRIPT = scripted_model.chain("abc", "defghijklm", "nopqrstuvw")
A, Z, DAMAGED = SCRIPT[0], scripted_model.ID["z"], SCRIPT[6]


def scripted() -> carat.Gemma:
    """Writes the alphabet, and fails after "g"; "n" to "w" are sound."""
    return scripted_model.gemma(SCRIPT, damaged=[DAMAGED])


@pytest.mark.parametrize("slots", [1, 2])
def test_logits_that_are_not_finite_end_one_request(slots):
    model = scripted()
    s = by_hand.scheduler(model, slots)
    start = scripted_model.ID["n"]
    prompts = [[A], [start], [Z, A], [DAMAGED], [Z, start]]
    requests = [by_hand.submit(s, model, ids, max_new_tokens=9) for ids in prompts]
    by_hand.work_off(s)
    texts = [(r.result(0).text, r.result(0).finish_reason) for r in requests]
    fine = ("opqrstuvw", "length")
    assert texts == [("bcdefg", "non_finite"), fine, ("bcdefg", "non_finite"),
                     ("", "non_finite"), fine]  # fmt: skip
    assert [r.result(0).non_finite_step for r in requests] == [6, None, 6, 0, None]


def test_what_came_after_a_stop_string_is_not_kept_where_it_was_not_finite():
    """It may be in keys and values, where a mask does not take it away: 0 times NaN is NaN."""
    model = scripted()
    s = by_hand.scheduler(model, 1)
    assert by_hand.run(s, model, [A], max_new_tokens=20, stop=["ef"]).text == "bcd"
    assert len(s.pasts) == 0
    assert by_hand.run(s, model, [A], max_new_tokens=5, stop=["ef"]).text == "bcd"
    assert len(s.pasts) == 1


def test_a_prompt_that_is_not_finite_is_not_kept():
    """Another that begins alike would look at keys and values of the rest of it, as above."""
    model = scripted()
    s = by_hand.scheduler(model, 1)
    assert by_hand.run(s, model, [A, DAMAGED]).finish_reason == "non_finite"
    assert len(s.pasts) == 0
    for damaged in (True, False):
        request = by_hand.submit(s, model, [A] + [DAMAGED if damaged else Z] * 100)
        s.step()
        assert s.reading is not None
        request.cancel()
        s.step()
        assert request.done and len(s.pasts) == (not damaged)
    snapshot = s.snapshot([A, DAMAGED])
    by_hand.work_off(s)
    with pytest.raises(FloatingPointError, match="these 2 tokens holds NaN"):
        snapshot.result(0)
    assert len(s.pasts) == 0  # the one of before went into it


def test_a_stop_string_across_pieces():
    """The first token comes alone, then eight at a time; none of what is cut off is shown."""
    model = scripted_model.gemma(SCRIPT)
    s = by_hand.scheduler(model, 2)
    whole = "".join(scripted_model.VOCABULARY[t] for t in SCRIPT[1:])
    for stop in ("bc", "bcdefghijkl", "ijk", "jklmn", "w"):
        requests = [by_hand.submit(s, model, [A], stop=[stop]), by_hand.submit(s, model, [A])]
        by_hand.work_off(s)
        stopped, other = (r.result(0) for r in requests)
        assert (stopped.text, stopped.finish_reason) == (whole[: whole.index(stop)], "stop")
        assert other.text == whole
        assert "".join(piece.text for piece in requests[0].stream()) == stopped.text


@pytest.mark.parametrize("stage", ["waiting", "reading", "generating"])
def test_cancelled_at_any_stage(stage):
    model = by_hand.small_gemma()
    s = by_hand.scheduler(model, 2)
    other = by_hand.submit(s, model, BASE[:20], max_new_tokens=40)
    s.step()
    request = by_hand.submit(s, model, BASE[:200], max_new_tokens=40)
    steps = {"waiting": 0, "reading": 2, "generating": 5}[stage]
    for _ in range(steps):
        s.step()
    assert (request in s.waiting) == (stage == "waiting")
    assert (s.reading is not None) == (stage == "reading")
    generating = [admitted.request for admitted in s.rows.live]
    assert (request in generating) == (stage == "generating")
    request.cancel()
    s.step()
    assert request.done
    with pytest.raises(Cancelled) as cancelled:
        request.result(0)
    if stage == "generating":
        alone = model.generate(BASE[:200], max_new_tokens=40).tokens
        tokens = cancelled.value.generation.tokens
        assert 0 < len(tokens) < 40 and tokens == alone[: len(tokens)]
    else:
        assert cancelled.value.generation is None
    again = by_hand.submit(s, model, BASE[:190], max_new_tokens=5)  # into the same slot
    by_hand.work_off(s)
    assert other.result(0).tokens == model.generate(BASE[:20], max_new_tokens=40).tokens
    assert again.result(0).tokens == model.generate(BASE[:190], max_new_tokens=5).tokens


def test_a_finish_that_fails_ends_one_request():
    model = by_hand.small_gemma()
    s = by_hand.scheduler(model, 1)

    def finishing(generation):
        raise ZeroDivisionError("in what a chat makes of its reply")

    broken = by_hand.submit(s, model, [1, 2, 3], max_new_tokens=3)
    broken._finishing = finishing
    sound = by_hand.submit(s, model, [1, 2, 3], max_new_tokens=3)
    by_hand.work_off(s)
    with pytest.raises(ZeroDivisionError):
        broken.result(0)
    with pytest.raises(ZeroDivisionError):
        list(broken.stream())
    assert len(sound.result(0).tokens) == 3


def test_an_error_while_a_slot_is_freed_reaches_whose_it_was(monkeypatch):
    model = by_hand.small_gemma()
    s = by_hand.scheduler(model, 2)
    requests = [by_hand.submit(s, model, BASE[:3], max_new_tokens=n) for n in (30, 60)]

    def no_room(*_):
        raise MemoryError("no room")

    for _ in range(2):
        s.step()
    monkeypatch.setattr(s.rows, "_resize", no_room)
    with pytest.raises(MemoryError, match="no room") as caught:
        by_hand.work_off(s)
    assert not any(request.done for request in requests)
    s.abandon(caught.value)
    for request in requests:
        with pytest.raises(MemoryError, match="no room"):
            request.result(0)


# --- Memory --------------------------------------------------------------------------------------


def large() -> int:
    """Bytes of arrays that grow with the context."""
    return sum(x.nbytes for x in jax.live_arrays() if x.ndim == 4)


@pytest.mark.parametrize("place", ["fetch", "insert"])
def test_a_prompt_whose_joining_fails_leaves_nothing(monkeypatch, place):
    """Even while somebody keeps the error, whose traceback refers to the state."""
    model = by_hand.small_gemma()

    def no_room(*_):
        raise MemoryError("no room")

    gc.collect()
    before = large()
    s = by_hand.scheduler(model, 1)
    monkeypatch.setattr(sharding if place == "fetch" else s.rows, place, no_room)
    by_hand.submit(s, model, BASE[:5])
    with pytest.raises(MemoryError, match="no room") as kept:
        s.step()
    s.abandon(kept.value)
    assert large() == before


def test_states_are_as_many_as_slots_and_one_being_read():
    model = by_hand.small_gemma()
    one = state_bytes(model.config, 1, by_hand.CONTEXT) - 4  # without the length
    draw = np.random.default_rng(3)

    gc.collect()
    before, most = large(), 0
    s = by_hand.scheduler(model, 3)
    for i in range(24):
        n = int(draw.integers(1, 150))
        request = by_hand.submit(s, model, BASE[:n], max_new_tokens=int(draw.integers(1, 20)))
        if i % 5 == 0:
            request.cancel()
        s.step()
        most = max(most, large() - before)
    while not s.idle:
        s.step()
        most = max(most, large() - before)
    assert 3 * one <= most <= 4 * one
    s.abandon(Cancelled(None))
    assert large() == before
