"""What a caller holds of a generation that runs beside others."""

import asyncio
import contextlib
import dataclasses
import itertools
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator

from carat_jax.batch_run import Row
from carat_jax.generation import Generation, Piece
from carat_jax.options import GenerateOptions

_numbers = itertools.count()


@dataclasses.dataclass
class Times:
    """Seconds on the clock of `time.perf_counter`; None while it has not happened.

    Attributes:
      submitted: by the caller.
      admitted: a slot was given; the prompt may have been read before.
      pieces: when tokens came, and how many.
      ended: nothing more comes.
    """

    submitted: float
    admitted: float | None = None
    pieces: list[tuple[float, int]] = dataclasses.field(default_factory=list)
    ended: float | None = None

    @property
    def first_token(self) -> float | None:
        """When the first token came."""
        return self.pieces[0][0] if self.pieces else None


class Cancelled(Exception):
    """The request was cancelled before its end; `generation` is what it had come to."""

    def __init__(self, generation: Generation | None) -> None:
        super().__init__("the request was cancelled")
        self.generation = generation


class Request:
    """One prompt on its way through an `Engine`, for one reader. Made by `Engine.submit`.

    Attributes:
      prompt: its ids.
      options: what was asked for.
      times: when things happened.
    """

    def __init__(
        self,
        prompt: list[int],
        options: GenerateOptions,
        row: Row,
        finishing: Callable[[Generation], Generation],
    ) -> None:
        """For the engine.

        Args:
          prompt, options: checked.
          row: collects tokens and text.
          finishing: what becomes of the finished Generation (a chat's thinking is taken apart).
        """
        self.number = next(_numbers)
        self.prompt = prompt
        self.options = options
        self.times = Times(time.perf_counter())
        self.row = row
        self.cancelling = False
        self._finishing = finishing
        self._pieces: queue.SimpleQueue[Piece | None] = queue.SimpleQueue()
        self._wakers: list[Callable[[], None]] = []  # of readers in an event loop
        self._ended = threading.Event()
        self._result: Generation | None = None
        self._error: BaseException | None = None

    def __repr__(self) -> str:
        return f"Request({self.number}, {len(self.prompt)} ids, {len(self.row.tokens)} generated)"

    @property
    def done(self) -> bool:
        """Whether nothing more comes."""
        return self._ended.is_set()

    def stream(self) -> Iterator[Piece]:
        """The pieces as they come; the last has the whole. Leaving the iterator early cancels.

        Raises:
          Cancelled, or what ended the request.
        """
        try:
            while (piece := self._pieces.get()) is not None:
                yield piece
            self._pieces.put(None)  # for who asks again
        finally:
            self.cancel()  # does nothing to a request that has ended
        self._raise_error()

    def result(self, timeout: float | None = None) -> Generation:
        """Waits for the end.

        Raises:
          TimeoutError: it did not come within `timeout` seconds; the request goes on.
          Cancelled, or what ended the request.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"no result within {timeout} s: wait longer, or cancel")
        self._raise_error()
        return self._result

    def cancel(self) -> None:
        """Ends the request soon; what it had generated is lost, but for what was streamed."""
        self.cancelling = True

    async def astream(self) -> AsyncIterator[Piece]:
        """`stream`, for `async for`."""
        try:
            while True:
                await self._until(lambda: not self._pieces.empty())
                piece = self._pieces.get()
                if piece is None:
                    break
                yield piece
            self._pieces.put(None)
        finally:
            self.cancel()
        self._raise_error()

    async def aresult(self) -> Generation:
        """`result`, for `await`."""
        await self._until(self._ended.is_set)
        return self.result()

    def push(self, text: str, tokens: list[int]) -> None:
        """For the engine: a piece that is not the last."""
        self._put(Piece(text, tokens))

    def finish(self, text: str, tokens: list[int], generation: Generation) -> None:
        """For the engine: the last piece."""
        try:
            self._result = self._finishing(generation)
        except Exception as error:
            self.fail(error)
            return
        self._put(Piece(text, tokens, self._result))
        self._end()

    def fail(self, error: BaseException) -> None:
        """For the engine: nothing more comes, for this reason."""
        self._error = error
        self._end()

    def _end(self) -> None:
        self.times.ended = time.perf_counter()
        self._ended.set()
        self._put(None)

    def _put(self, piece: Piece | None) -> None:
        self._pieces.put(piece)
        for wake in list(self._wakers):
            wake()

    async def _until(self, there: Callable[[], bool]) -> None:
        """Waits for what another thread does. Takes no thread: for many readers there are few."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody waits there
                loop.call_soon_threadsafe(news.set)

        self._wakers.append(wake)
        try:
            while not there():
                await news.wait()
                news.clear()
        finally:
            self._wakers.remove(wake)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error
