"""Replays a workload in real time against something that answers, such as an engine."""

import functools
import itertools
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax

from carat_jax.bench.serving_summary import Record
from carat_jax.bench.workload import Conversation
from carat_jax.engine import Engine
from carat_jax.engine.metrics import tpot_s

# (prompt, tokens wanted, seed) -> the tokens, and the record or None where they did not all come.
Ask = Callable[[list[int], int, int], tuple[list[int], Record | None]]

AS_ASKED = {"stop_token_ids": [], "temperature": 0.0}  # nothing but the number of tokens ends it


def replay(
    ask: Ask, conversations: Sequence[Conversation], ids: Sequence[Sequence[Sequence[int]]]
) -> tuple[list[Record], float]:
    """Has every conversation begin at its time, in a thread of its own.

    A conversation with a failed turn has no later ones.

    Args:
      ask: waits for an answer; called from many threads.
      ids: that each turn adds, by conversation and turn.

    Returns:
      the records of all turns that succeeded, and the seconds from the first arrival to the end.

    Raises:
      what `ask` raises, after all threads have ended.
    """
    records: list[Record] = []
    errors: list[BaseException] = []

    def talk(index: int) -> None:
        said: list[int] = []
        try:
            for number, turn in enumerate(conversations[index].turns):
                time.sleep(turn.think_s)
                said += ids[index][number]
                answer, record = ask(said, turn.output_tokens, index)
                if record is None:
                    return
                records.append(record)
                said += answer
        except BaseException as error:
            errors.append(error)

    order = sorted(range(len(conversations)), key=lambda i: conversations[i].arrival_s)
    begin = time.perf_counter() - conversations[order[0]].arrival_s
    threads = []
    for index in order:
        arrival = begin + conversations[index].arrival_s
        time.sleep(max(arrival - time.perf_counter(), 0))
        if errors:
            break
        threads.append(threading.Thread(target=talk, args=(index,), daemon=True))
        threads[-1].start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return records, time.perf_counter() - begin - conversations[order[0]].arrival_s


def ask_engine(
    engine: Engine, ids: list[int], count: int, seed: int
) -> tuple[list[int], Record | None]:
    """`Ask`, of an engine."""
    request = engine.submit(ids, max_new_tokens=count, seed=seed, **AS_ASKED)
    generation, times = request.result(), request.times
    if len(generation.tokens) < count:  # the logits were not finite
        return generation.tokens, None
    came = [at for at, _ in times.pieces]
    return generation.tokens, Record(
        prompt_tokens=len(ids),
        output_tokens=count,
        queue_s=times.admitted - times.submitted,
        ttft_s=times.first_token - times.submitted,
        tpot_s=tpot_s(times),
        gaps_s=tuple(b - a for a, b in itertools.pairwise(came)),
        slot_s=times.ended - times.admitted,
        rounds=sum((generation.stats.rounds or {}).values()),
        accepted=generation.stats.accepted or 0,
    )


def reused_tokens(engine: Engine) -> int:
    """Prompt tokens so far that were not read again."""
    labels = {"source": "reused"}
    return int(engine.registry.get_sample_value("carat_prompt_tokens_total", labels) or 0)


@functools.cache
def compilation_seconds() -> list[float]:
    """A list to which every compilation of this process adds what it took, from now on."""
    seconds: list[float] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seconds
