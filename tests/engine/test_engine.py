"""Engine: its thread, its callers' threads, and what they see when something ends early."""

import asyncio
import gc
import threading
from collections.abc import Callable
from concurrent.futures import Future

import by_hand
import jax
import numpy as np
import pytest
import scripted_model

from carat_jax import generate
from carat_jax.bench.replay import compilation_seconds
from carat_jax.engine import Cancelled, Engine, QueueFull, Request
from carat_jax.engine.rows import Rows
from carat_jax.generation import Piece
from carat_jax.speculative import Model, Ngram

WAIT = 60  # seconds that nothing here takes
GEMMA = by_hand.small_gemma()
PROMPTS = [np.random.default_rng(n).integers(0, 96, n).tolist() for n in (1, 15, 64, 65, 130, 9)]


@pytest.fixture
def engine():
    """Makes engines, and closes them in the end."""
    made = []

    def make(gemma=GEMMA, slots=2, **options):
        sizes = {"max_context": by_hand.CONTEXT, "prefill_chunk": by_hand.CHUNK}
        made.append(Engine(gemma, slots=slots, **sizes | options))
        return made[-1]

    yield make
    for one in made:
        close(one, drain=False)


def within[T](call: Callable[[], T]) -> T:
    """What a call returns or raises; a failure if it waits for what does not come."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(WAIT)


def close(engine: Engine, **how) -> None:
    within(lambda: engine.close(**how))


def streamed(request: Request) -> list[Piece]:
    return within(lambda: list(request.stream()))


@pytest.fixture
def gate(monkeypatch):
    """Holds the engine before its next step while it is closed."""
    opened, inner = threading.Event(), Rows.step

    def step(self, steps):
        assert opened.wait(WAIT)
        return inner(self, steps)

    monkeypatch.setattr(Rows, "step", step)
    yield opened
    opened.set()


def alone(prompt: list[int], n: int = 12) -> list[int]:
    return GEMMA.generate(prompt, max_new_tokens=n).tokens


# --- Results -------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [None, Ngram()], ids=["plain", "drafted"])
def test_a_list_of_prompts(engine, drafter):
    """Longer than the queue."""
    made = engine(drafter=drafter, max_waiting=2)
    out = within(lambda: made.generate(PROMPTS, max_new_tokens=12))
    assert [g.tokens for g in out] == [alone(p) for p in PROMPTS]
    again = within(lambda: asyncio.run(made.agenerate(PROMPTS[:2], max_new_tokens=12)))
    assert [g.tokens for g in again] == [alone(p) for p in PROMPTS[:2]]
    assert made.generate([]) == []
    stats = out[-1].stats
    assert 0 <= stats.queue_s <= stats.ttft_s and stats.tpot_s > 0
    assert (stats.drafted is None) == (drafter is None)


def test_many_threads_submit(engine):
    made, wrong = engine(slots=2), []

    def caller(i: int) -> None:
        for j in range(4):
            prompt = PROMPTS[(i + j) % len(PROMPTS)]
            if made.submit(prompt, max_new_tokens=12).result(WAIT).tokens != alone(prompt):
                wrong.append((i, j))

    threads = [threading.Thread(target=caller, args=(i,), daemon=True) for i in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []


def test_a_stream_gives_everything_once_and_then_nothing(engine):
    request = engine().submit(PROMPTS[2], max_new_tokens=20)
    pieces = streamed(request)
    whole = request.result(WAIT)
    assert [t for piece in pieces for t in piece.tokens] == whole.tokens == alone(PROMPTS[2], 20)
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.generation for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].generation is whole
    assert len(pieces) == 4  # the first token, 8, 8, 3
    assert streamed(request) == []
    assert request.done


def test_the_async_twins(engine):
    made = engine()

    async def both():
        streamed = made.submit(PROMPTS[3], max_new_tokens=12)
        waited = made.submit(PROMPTS[4], max_new_tokens=12)
        pieces = [piece async for piece in streamed.astream()]
        return pieces, await asyncio.wait_for(waited.aresult(), WAIT)

    pieces, result = within(lambda: asyncio.run(both()))
    assert pieces[-1].generation.tokens == alone(PROMPTS[3])
    assert result.tokens == alone(PROMPTS[4])


def test_those_who_wait_do_not_keep_others_from_reading(engine, gate):
    """More readers than there are threads for them (32 at most); only the first gets anything."""
    made = engine(slots=1)
    requests = [made.submit(PROMPTS[0], max_new_tokens=3) for _ in range(50)]

    async def first(request):
        pieces = 0
        async for _ in request.astream():
            pieces += 1
            gate.set()
        return pieces

    async def everyone():
        waiting = [asyncio.create_task(r.aresult()) for r in requests[1:]]
        await asyncio.sleep(0)
        pieces = await first(requests[0])
        return pieces, [r.tokens for r in await asyncio.gather(*waiting)]

    pieces, tokens = within(lambda: asyncio.run(everyone()))
    assert pieces == 2
    assert tokens == [alone(PROMPTS[0], 3)] * 49


def test_a_conversation(engine):
    script = scripted_model.chain("<channel|>", "fine", "<turn|>")
    gemma = scripted_model.gemma(script)
    messages = [{"role": "user", "content": "how are you"}]
    made = engine(gemma)
    options = {"max_new_tokens": 9}
    chat = gemma.chat(messages, **options)
    out = made.submit(messages, **options).result(WAIT)
    assert (out.tokens, out.text, out.thinking) == (chat.tokens, chat.text, chat.thinking)
    with pytest.raises(ValueError, match="thinking and tools are for conversations"):
        made.submit("how", thinking=True)


# --- What ends early -----------------------------------------------------------------------------


def test_leaving_a_stream_cancels(engine, gate):
    made = engine()
    left, other = (made.submit(p, max_new_tokens=40) for p in PROMPTS[2:4])
    stream = left.stream()
    assert within(lambda: next(stream)).tokens
    stream.close()
    gate.set()
    with pytest.raises(Cancelled):
        left.result(WAIT)
    with pytest.raises(Cancelled):
        streamed(left)
    assert other.result(WAIT).tokens == alone(PROMPTS[3], 40)


def test_leaving_an_async_stream_cancels(engine, gate):
    request = engine().submit(PROMPTS[2], max_new_tokens=40)

    async def leave():
        stream = request.astream()
        async for _ in stream:
            break
        await stream.aclose()
        gate.set()
        with pytest.raises(Cancelled):
            await asyncio.wait_for(request.aresult(), WAIT)

    within(lambda: asyncio.run(leave()))


def test_a_result_that_does_not_come_in_time(engine, gate):
    request = engine().submit(PROMPTS[1], max_new_tokens=12)
    with pytest.raises(TimeoutError, match=r"within 0\.05 s"):
        request.result(timeout=0.05)
    gate.set()
    assert request.result(WAIT).tokens == alone(PROMPTS[1])


def test_a_full_queue_refuses(engine, gate):
    made = engine(slots=1, max_waiting=2)
    running = made.submit(PROMPTS[0], max_new_tokens=12)
    stream = running.stream()
    assert within(
        lambda: next(stream)
    ).tokens  # so it does not wait any more, and stays at the gate
    waiting = [made.submit(p, max_new_tokens=12) for p in PROMPTS[1:3]]
    assert repr(made) == "Engine(1 slots, 1 live, 2 waiting, max_context 512)"
    with pytest.raises(QueueFull, match=r"2 requests wait already \(max_waiting\)"):
        made.submit(PROMPTS[3], max_new_tokens=12)
    gate.set()
    assert [r.result(WAIT).tokens for r in waiting] == [alone(p) for p in PROMPTS[1:3]]
    assert made.submit(PROMPTS[3], max_new_tokens=12).result(WAIT).tokens == alone(PROMPTS[3])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"max_new_tokens": 510}, "prompt 3 .* 510 new tokens exceeds max_context 512"),
        ({"seed": [1, 2]}, "2 seeds for 1 prompts"),
        ({"temperature": -1}, "temperature"),
        ({"stop_token_ids": [96]}, "stop_token_ids has 96"),
    ],
)
def test_what_cannot_be_is_refused_before_it_is_queued(engine, given, message):
    made = engine()
    with pytest.raises(ValueError, match=message):
        made.submit([1, 2, 3], **given)
    assert made.submit(PROMPTS[1], max_new_tokens=12).result(WAIT).tokens == alone(PROMPTS[1])


def test_a_single_prompt_for_generate_is_refused(engine):
    made = engine(scripted_model.gemma())
    for prompts in ("abc", b"abc", 5, [{"role": "user", "content": "abc"}]):
        with pytest.raises(ValueError, match="list of prompts, submit a single one"):
            made.generate(prompts)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"slots": 0}, "slots = 0: it must be an integer from 1 to 256"),
        ({"max_context": 513}, "max_context = 513: .* to 512"),
        ({"prefill_chunk": 16}, "prefill_chunk = 16: .* from 32 to 2,048"),
        ({"max_waiting": True}, "max_waiting = True"),
        ({"drafter": Ngram(), "num_proposals": 99}, "num_proposals = 99"),
        ({"drafter": Ngram(), "num_proposals": "auto"}, "give a number"),
        ({"drafter": Ngram(), "acceptance": "typical"}, "acceptance = 'typical': give a rule"),
        ({"num_proposals": 3}, "num_proposals = 3 is for a drafter"),
        ({"drafter": Model(scripted_model.weights([]), scripted_model.CONFIG)}, "vocab_size"),
    ],
)
def test_an_engine_that_cannot_be(engine, given, message):
    threads = threading.active_count()
    with pytest.raises(ValueError, match=message):
        engine(**given)
    assert threading.active_count() == threads


# --- The end of the engine -----------------------------------------------------------------------


def test_close_drains(engine):
    made = engine(slots=1)
    requests = [made.submit(p, max_new_tokens=12) for p in PROMPTS]
    close(made)
    assert [r.result(0).tokens for r in requests] == [alone(p) for p in PROMPTS]
    for call in (
        lambda: made.submit(PROMPTS[0]),
        lambda: made.generate([PROMPTS[0]]),
        lambda: made.snapshot(PROMPTS[2]),
    ):
        with pytest.raises(RuntimeError, match="the engine is closed"):
            within(call)
    assert repr(made) == "Engine(1 slots, 0 live, 0 waiting, max_context 512, closed)"
    close(made)  # again


def test_close_cancels(engine, gate):
    made = engine(slots=1)
    requests = [made.submit(p, max_new_tokens=300) for p in PROMPTS]
    threading.Timer(0.1, gate.set).start()
    close(made, drain=False)
    for request in requests:
        with pytest.raises(Cancelled):
            request.result(0)


def test_leaving_by_an_exception_cancels(gate):
    sizes = {"max_context": by_hand.CONTEXT, "prefill_chunk": by_hand.CHUNK}
    requests = []
    threading.Timer(0.1, gate.set).start()
    with pytest.raises(KeyError), Engine(GEMMA, slots=1, **sizes) as made:
        requests += [made.submit(p, max_new_tokens=300) for p in PROMPTS]
        raise KeyError
    for request in requests:
        with pytest.raises(Cancelled):
            request.result(0)


@pytest.mark.parametrize("place", ["step", "insert", "begin"])
def test_an_error_of_the_device_reaches_every_request(engine, monkeypatch, place):
    """At whatever stage they are, the one at work included; and those who come later."""

    def broken(*_, **__):
        raise MemoryError("no room on the device")

    if place == "begin":
        monkeypatch.setattr(generate, "begin", broken)
    else:
        monkeypatch.setattr(Rows, place, broken)
    made = engine(slots=1, max_waiting=10)
    errors = []

    def list_of_prompts():
        try:
            made.generate(PROMPTS * 5, max_new_tokens=12)
        except (RuntimeError, MemoryError) as error:
            errors.append(error)

    thread = threading.Thread(target=list_of_prompts, daemon=True)
    requests = [made.submit(PROMPTS[4], max_new_tokens=12)]
    thread.start()
    try:
        while len(requests) < 5:
            requests.append(made.submit(PROMPTS[4], max_new_tokens=12))
    except (QueueFull, RuntimeError):
        pass  # the other thread was quicker, or the engine
    for request in requests:
        with pytest.raises(MemoryError, match="no room"):
            request.result(WAIT)
    thread.join(WAIT)
    assert not thread.is_alive() and len(errors) == 1
    with pytest.raises(RuntimeError, match="the engine has failed") as failed:
        made.submit(PROMPTS[0])
    assert isinstance(failed.value.__cause__, MemoryError)
    with pytest.raises(RuntimeError, match="the engine has failed"):
        within(lambda: made.snapshot(PROMPTS[0]))
    close(made)


# --- Snapshots and memory ------------------------------------------------------------------------


@pytest.mark.slow
def test_nothing_is_left_to_compile_after_warming_up(engine):
    compiled = compilation_seconds()
    start = len(compiled)
    jax.clear_caches()
    made = engine(slots=3)
    made.warm_up()
    before = len(compiled)
    assert before > start
    requests = [made.submit(p, max_new_tokens=12) for p in PROMPTS * 2]
    tokens = [r.result(WAIT).tokens for r in requests]
    assert not compiled[before:]
    assert tokens == [alone(p) for p in PROMPTS] * 2


def test_a_snapshot_from_another_thread_than_the_engines(engine):
    made = engine()
    busy = made.submit(PROMPTS[4], max_new_tokens=40)
    snapshot = within(lambda: made.snapshot(PROMPTS[3]))
    prompt = [*PROMPTS[3], 1, 2]
    assert made.submit(prompt, max_new_tokens=12).result(WAIT).tokens == alone(prompt)
    within(lambda: made.release(snapshot))
    with pytest.raises(ValueError, match="released already"):
        within(lambda: made.release(snapshot))
    assert busy.result(WAIT).tokens == alone(PROMPTS[4], 40)


@pytest.mark.parametrize("drafter", [None, Ngram()], ids=["plain", "drafted"])
def test_a_closed_engine_leaves_nothing_on_the_device(engine, drafter):
    def live() -> int:
        gc.collect()
        return len(jax.live_arrays())

    def use() -> None:
        made = engine(slots=2, drafter=drafter)
        within(lambda: made.snapshot(PROMPTS[2]))
        requests = [made.submit(p, max_new_tokens=12) for p in PROMPTS * 4]
        requests[-1].cancel()
        for request in requests[:-1]:
            request.result(WAIT)
        close(made)

    use()  # constants of compiled programs stay
    before = live()
    use()
    assert live() <= before
