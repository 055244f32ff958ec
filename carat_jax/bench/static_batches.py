"""What continuous batching is compared with: `generate` on one request, or a batch, at a time."""

import dataclasses
import queue
import threading
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Self

from carat_jax import generate
from carat_jax.bench.serving_summary import Record
from carat_jax.gemma import Gemma

GATHER_S = 0.02  # that a batch with places left waits for the next request


@dataclasses.dataclass
class _Ask:
    ids: list[int]
    count: int
    seed: int
    submitted: float
    answer: Future


class StaticBatches:
    """Serves requests in the order they come, a batch after the other.

    A batch takes what has come, up to `size` requests, and goes on until its last one has
    ended. Places left are filled with copies, so that every batch has the same shapes.
    """

    def __init__(self, gemma: Gemma, size: int, speculation: dict[str, Any]) -> None:
        """`size`: requests of a batch. `speculation`: keywords of `Gemma.generate`."""
        self._gemma = gemma
        self._size = size
        self._speculation = speculation
        self._asks: queue.SimpleQueue[_Ask | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True  # what an interrupted run still has in the queue is of no interest
        self._asks.put(None)
        self._thread.join()

    def ask(self, ids: list[int], count: int, seed: int) -> tuple[list[int], Record | None]:
        """The `count` tokens after a prompt and the times, None of a failure; waits for them."""
        ask = _Ask(ids, count, seed, time.perf_counter(), Future())
        self._asks.put(ask)
        return ask.answer.result()

    def warm_up(self, lengths: Iterable[tuple[int, int]]) -> None:
        """Compiles what prompts of such lengths, for so many tokens, take."""
        seen = set()
        for length, count in lengths:
            chunks = frozenset(generate.prefill_plan(length, self._size))
            shapes = chunks, generate.capacity(length + count, self._gemma.max_context)
            if shapes not in seen:
                self._generate([_Ask([0] * length, count, 0, 0.0, Future())])
                seen.add(shapes)

    def _run(self) -> None:
        while (ask := self._asks.get()) is not None and not self._closed:
            batch = [ask]
            while len(batch) < self._size:
                try:
                    ask = self._asks.get(timeout=GATHER_S)
                except queue.Empty:
                    break
                if ask is None:
                    self._asks.put(None)  # once more, for after this batch
                    break
                batch.append(ask)
            try:
                self._generate(batch)
            except Exception as error:
                for ask in batch:
                    if not ask.answer.done():
                        ask.answer.set_exception(error)

    def _generate(self, batch: list[_Ask]) -> None:
        begun = time.perf_counter()
        rows = batch + batch[:1] * (self._size - len(batch))
        out = self._gemma.generate(
            [row.ids for row in rows],
            max_new_tokens=max(row.count for row in rows),
            seed=[row.seed for row in rows],
            stop_token_ids=[],
            temperature=0.0,
            **self._speculation,
        )
        for ask, generation in zip(batch, out, strict=False):
            stats, tokens = generation.stats, generation.tokens[: ask.count]
            if len(tokens) < ask.count:  # the logits were not finite
                ask.answer.set_result((tokens, None))
                continue
            record = Record(
                prompt_tokens=len(ask.ids),
                output_tokens=ask.count,
                queue_s=begun - ask.submitted,
                ttft_s=begun - ask.submitted + stats.ttft_s,
                tpot_s=stats.tpot_s if ask.count > 1 else None,
                gaps_s=(),  # all of it is returned at the end
                slot_s=stats.ttft_s + (ask.count - 1) * (stats.tpot_s or 0.0),
                rounds=sum((stats.rounds or {}).values()),
                accepted=stats.accepted or 0,
            )
            ask.answer.set_result((tokens, record))
