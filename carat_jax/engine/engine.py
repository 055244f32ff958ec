"""Engine: many generations at once, submitted whenever they come."""

import asyncio
import reprlib
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Self

from carat_jax import generate
from carat_jax.batch_run import Row
from carat_jax.engine.prefix import Past
from carat_jax.engine.request import Cancelled, Request
from carat_jax.engine.scheduler import STEPS, Scheduler
from carat_jax.gemma import Gemma
from carat_jax.generation import Generation
from carat_jax.prompts import Prompt
from carat_jax.speculative import NUM_PROPOSALS, Drafter, Rule, Speculation


class QueueFull(RuntimeError):
    """Too many requests wait already."""


class Engine:
    """Continuous batching: sequences join a running batch and leave it as they come and end.

    One thread of its own works for all requests; every method may be called from any thread. As
    a context manager it works off what was submitted before it closes, or, left by an
    exception, cancels it.

    A request gets the tokens that `Gemma.generate` gives it alone with the same options, though in
    bfloat16 rounding may decide between two nearly equal tokens.

    Memory, beside the weights: as many states of `max_context` tokens as there are slots (those
    of ended sequences are kept where a slot is free, for prompts that go on from there), one more
    for a prompt being read or read ahead of a slot, one for each snapshot, and for a moment one
    that is being moved.

    Attributes:
      registry: its metrics (see `metrics.Metrics`), for `prometheus_client.start_http_server` or
        `generate_latest`.
    """

    def __init__(
        self,
        gemma: Gemma,
        *,
        slots: int = 8,
        max_context: int | None = None,
        drafter: Drafter | None = None,
        num_proposals: int = NUM_PROPOSALS,
        acceptance: Rule | None = None,
        prefill_chunk: int = 512,
        max_waiting: int = 1024,
    ) -> None:
        """Starts the thread; memory is taken as requests come.

        Args:
          gemma: the model.
          slots: sequences that generate at once.
          max_context: tokens of a prompt and its continuation together; None = 32,768, or the
            model's own if that is less.
          drafter, num_proposals, acceptance: as in `Gemma.generate`.
          prefill_chunk: tokens of a prompt that are read before the others go on.
          max_waiting: requests that may wait for a slot.

        Raises:
          ValueError: a number out of its range, or a drafter that does not fit the model.
        """
        if max_context is None:
            max_context = min(32768, gemma.max_context)
        for name, value, least, most in (
            ("slots", slots, 1, 256),
            ("max_context", max_context, 1, gemma.max_context),
            ("prefill_chunk", prefill_chunk, 32, 2048),  # what is shorter is not prefill
            ("max_waiting", max_waiting, 1, 10**6),
        ):
            number = isinstance(value, int) and not isinstance(value, bool)
            if not number or not least <= value <= most:
                raise ValueError(
                    f"{name} = {value!r}: it must be an integer from {least} to {most:,}"
                )
        speculation = Speculation.of(drafter, num_proposals, acceptance)
        self.gemma = gemma
        self.max_context = max_context
        self.max_waiting = max_waiting
        # Of the engine's thread alone; the others leave work in the inbox, under the lock.
        self._scheduler = Scheduler(
            gemma.params,
            gemma.config,
            slots=slots,
            max_context=max_context,
            speculation=speculation,
            prefill_chunk=prefill_chunk,
        )
        self.registry = self._scheduler.metrics.registry
        self._lock = threading.Condition()
        self._inbox: deque[Request] = deque()
        self._jobs: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._closing = self._cancelling = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="carat-engine", daemon=True)
        self._thread.start()

    def __repr__(self) -> str:
        scheduler = self._scheduler
        waiting = len(self._inbox) + scheduler.without_slot()
        end = ", failed" if self._error is not None else ", closed" if self._closing else ""
        return (
            f"Engine({scheduler.slots} slots, {len(scheduler.rows.live)} live, {waiting} waiting, "
            f"max_context {self.max_context:,}{end})"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(drain=kind is None)

    def submit(
        self,
        prompt: Prompt | Sequence[Mapping[str, Any]],
        *,
        thinking: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> Request:
        """Queues a prompt, or a conversation.

        Args:
          prompt: a string, ids, or messages as `Gemma.chat` takes them.
          thinking, tools: of a conversation.
          **options: fields of `GenerateOptions`.

        Raises:
          ValueError: as `Gemma.generate`.
          QueueFull: `max_waiting` requests wait already.
          RuntimeError: the engine is closed, or has failed.
        """
        request = self._request(prompt, thinking, tools, options)
        with self._lock:
            self._check_open()
            if not self._has_room():
                self._scheduler.metrics.refused()
                raise QueueFull(
                    f"{self.max_waiting} requests wait already (max_waiting): read some results "
                    "first, or raise max_waiting"
                )
            self._queue(request)
        return request

    def generate(
        self, prompts: Sequence[Prompt | Sequence[Mapping[str, Any]]], **options: Any
    ) -> list[Generation]:
        """Continues every prompt of a list of any length, and waits for all of them.

        Raises as `submit`, before any of them is queued; or what ended a request.
        """
        single = isinstance(prompts, str | bytes) or not hasattr(prompts, "__iter__")
        if single or any(isinstance(prompt, Mapping) for prompt in prompts):
            raise ValueError(
                f"prompts is {reprlib.repr(prompts)}: generate takes a list of prompts, submit a "
                "single one"
            )
        requests = [self._request(prompt, False, None, options) for prompt in prompts]
        for request in requests:
            with self._lock:  # a list may be longer than the queue
                self._lock.wait_for(lambda: self._error or self._closing or self._has_room())
                self._check_open()
                self._queue(request)
        return [request.result() for request in requests]

    async def agenerate(
        self, prompts: Sequence[Prompt | Sequence[Mapping[str, Any]]], **options: Any
    ) -> list[Generation]:
        """`generate`, for `await`."""
        return await asyncio.to_thread(self.generate, prompts, **options)

    def warm_up(self, **options: Any) -> None:
        """Compiles what requests with these options will need, so that none has to wait for it.

        That is every size of a chunk of a prompt and every number of rows: minutes, for a large
        model and an empty compilation cache. It makes requests of its own, which the metrics count;
        call it before others come.

        Args:
          **options: fields of `GenerateOptions`. What is compiled hangs on whether all requests are
            greedy, and on `logprobs`.

        Raises as `submit`.
        """
        options |= {"stop_token_ids": [], "stop": ()}  # nothing but the number of tokens ends them
        longest = self.max_context - 1
        for i, chunk in enumerate(self._scheduler.chunks):
            prompt = [i] * min(chunk, longest)  # none begins like another
            self.submit(prompt, **options | {"max_new_tokens": 1}).result()
        # Those that join first end first, one after another, once all have joined.
        slots = self._scheduler.slots
        counts = [2 * STEPS * (slots + i) for i in range(slots)]
        requests = [
            self.submit([0], **options | {"max_new_tokens": min(count, longest)})
            for count in counts
        ]
        for request in requests:
            request.result()

    def snapshot(self, prompt: Prompt) -> Past:
        """Reads a beginning that many prompts share, a system prompt say, and keeps its state.

        Prompts that begin with these ids go on from there, until it is given to `release`. It is
        read before the prompts that wait, but for one after each snapshot, chunk by chunk: those
        that generate go on meanwhile.

        Raises:
          ValueError: as `Gemma.generate`.
          RuntimeError: the engine is closed, or has failed.
          Exception: what ended the reading, `Cancelled` if the engine was closed meanwhile.
        """
        ids = self.gemma.checked([prompt], {"max_new_tokens": 1}, self.max_context)[0][0]
        return self._call(lambda: self._scheduler.snapshot(ids)).result()

    def release(self, snapshot: Past) -> None:
        """Gives up a snapshot and its memory."""
        self._call(lambda: self._scheduler.pasts.drop(snapshot))

    def close(self, *, drain: bool = True) -> None:
        """Ends the engine, once all is worked off (`drain`) or soon; frees its memory."""
        with self._lock:
            self._closing = True
            self._cancelling |= not drain
            self._lock.notify_all()
        self._thread.join()

    def _request(
        self,
        prompt: Prompt | Sequence[Mapping[str, Any]],
        thinking: bool,
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
    ) -> Request:
        gemma = self.gemma
        chat = isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping)
        if chat:
            prompt = gemma.chat_prompt(prompt, thinking=thinking, tools=tools)
            options = gemma.chat_options(options)
        elif thinking or tools is not None:
            raise ValueError("thinking and tools are for conversations: give messages")
        (ids,), asked = gemma.checked([prompt], options, self.max_context)
        generate.row_keys(asked.seed, 1)  # for what it refuses

        def finishing(generation: Generation) -> Generation:
            return gemma.chat_reply(generation, asked) if chat else generation

        return Request(ids, asked, Row(gemma.tokenizer, asked), finishing)

    def _has_room(self) -> bool:
        return len(self._inbox) + self._scheduler.without_slot() < self.max_waiting

    def _queue(self, request: Request) -> None:
        self._inbox.append(request)
        self._lock.notify_all()

    def _call(self, job: Callable[[], Any]) -> Any:
        """Has the engine's thread do something between two units of work."""
        future: Future = Future()
        with self._lock:
            self._check_open()
            self._jobs.append((future, job))
            self._lock.notify_all()
        return future.result()

    def _check_open(self) -> None:
        if self._error is not None:
            raise RuntimeError("the engine has failed: make another") from self._error
        if self._closing:
            raise RuntimeError("the engine is closed: make another")

    def _run(self) -> None:
        """The thread."""
        end: BaseException = Cancelled(None)
        try:
            while self._take_work():
                if not self._scheduler.idle:
                    self._scheduler.step()
        except BaseException as error:
            end = error
        with self._lock:
            self._closing = True
            self._error = None if isinstance(end, Cancelled) else end
            self._scheduler.waiting += self._inbox
            for future, _ in self._jobs:
                future.set_exception(end)
            self._lock.notify_all()
        self._scheduler.abandon(end)

    def _take_work(self) -> bool:
        """Waits for work and takes it from the inbox; False when the engine is to end."""
        with self._lock:
            self._lock.wait_for(
                lambda: self._closing or self._inbox or self._jobs or not self._scheduler.idle
            )
            self._scheduler.waiting += self._inbox
            self._inbox.clear()
            jobs = list(self._jobs)
            self._jobs.clear()
            self._lock.notify_all()
        for future, job in jobs:
            try:
                future.set_result(job())
            except Exception as error:
                future.set_exception(error)
        return not (self._closing and (self._cancelling or self._scheduler.idle))
