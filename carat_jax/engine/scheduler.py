"""Which sequence the device works for next: first come, first served, no one stands still for long.

A unit of work is at most one chunk of one prompt, then a few tokens for everyone who is past
the prompt: fewer beside a chunk. So a long prompt holds the others up for a chunk at a time, and
they go on meanwhile. While all slots are taken the next prompt is read ahead, and joins the others
when one is free, so that no slot is idle while a prompt is read for it.
The tokens of a unit are fetched when the next one has been dispatched, so that the device need not
wait for the host; but where someone waits for a slot that this unit may free, before it is. No
threads here: `Engine` calls `step` from one.
"""

import contextlib
import dataclasses
import functools
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future

import jax
import numpy as np

from carat_jax import generate, sharding
from carat_jax.batch_run import FINISH_REASONS
from carat_jax.config import GemmaConfig
from carat_jax.engine.metrics import Metrics, tpot_s
from carat_jax.engine.prefix import Past, Pasts
from carat_jax.engine.reading import Reader, Reading, chunk_sizes
from carat_jax.engine.request import Cancelled, Request
from carat_jax.engine.rows import Rows, free
from carat_jax.generation import Generation, SpeculationTally, Stats
from carat_jax.kv_state import KVState, abstract_state
from carat_jax.model import Params
from carat_jax.speculative import (
    Counts,
    Speculation,
    check_speculation,
)

STEPS = 8  # tokens of a call while nothing else waits for the device
STEPS_BESIDE_PREFILL = 4


@dataclasses.dataclass(eq=False)
class Served:
    """A request that no longer waits: its prompt is being read, has been, or is gone on from.

    Attributes:
      request: whose it is.
      has_slot: not while its prompt is read ahead.
      generated: ids made on the device, those after a stop string too.
      written: see `Past`.
      tally: what speculation did; None without a drafter.
      finite: whether all logits so far were.
    """

    request: Request
    has_slot: bool = False
    generated: list[int] = dataclasses.field(default_factory=list)
    written: int = 0
    tally: SpeculationTally | None = None
    finite: bool = True


@dataclasses.dataclass
class Flight:
    """Tokens that were dispatched and not fetched yet.

    Attributes:
      occupants: of the rows at that time, None where one was free.
      most: tokens of a row, at most.
      tokens, counts: as `Rows.step` returned them.
    """

    occupants: list[Served | None]
    most: int
    tokens: generate.Tokens
    counts: Counts | None = None


class Scheduler:
    """Requests in, work for the device out.

    Attributes:
      waiting: requests without a slot; the caller appends.
      snapshots: what is to be read and kept, and who waits for it.
      reading: the prompt being read, if any.
      ready: one that was read before a slot was free for it, if any.
      rows: the sequences that generate.
      pasts: states of ended ones.
      metrics: what was done so far.
    """

    def __init__(
        self,
        params: Params,
        config: GemmaConfig,
        *,
        slots: int,
        max_context: int,
        speculation: Speculation | None,
        prefill_chunk: int,
    ) -> None:
        """Raises ValueError for a speculation that does not fit, before anything is allocated."""
        K = 0
        if speculation is not None:
            check_speculation(speculation, abstract_state(config, 1, max_context), config)
            if speculation.num_proposals == "auto":
                raise ValueError("num_proposals = 'auto' is for one generation: give a number")
            K = speculation.num_proposals
            begin = functools.partial(speculation.drafter.init, config, 1, max_context)
            jax.eval_shape(begin)  # for what it refuses
            drafter = sharding.everywhere(speculation.drafter, sharding.mesh_of(params))
            speculation = dataclasses.replace(speculation, drafter=drafter)
        self.params = params
        self.config = config
        self.slots = slots
        self.max_context = max_context
        self.speculation = speculation
        self.waiting: deque[Request] = deque()
        self.snapshots: deque[tuple[list[int], Future]] = deque()
        self.reading: Reading | None = None
        self.ready: Reading | None = None
        self._read_snapshot_last = False
        self.rows = Rows(params, config, slots, speculation)
        self.chunks = chunk_sizes(prefill_chunk)
        self._reader = Reader(params, config, max_context, self.chunks, speculation)
        self.pasts = Pasts(config)
        self._written_ahead = K + 1  # positions that a step may write beyond the tokens that stand
        self._served: list[Served] = []
        self._flights: deque[Flight] = deque()  # the oldest first
        self.metrics = Metrics(slots, self._occupied, self.without_slot)

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self._coming or self.snapshots or self.rows.live or self._flights)

    @property
    def _coming(self) -> bool:
        """Whether someone is on the way to a slot, or something is being read."""
        return bool(self.waiting or self.reading or self.ready)

    @property
    def _slot_free(self) -> bool:
        return self._occupied() < self.slots

    def _occupied(self) -> int:
        return sum(served.has_slot for served in self._served)

    def without_slot(self) -> int:
        """Requests that have none, one that is read ahead included."""
        return len(self.waiting) + len(self._served) - self._occupied()

    def step(self) -> None:
        """One unit of work; see the module's docstring."""
        self._drop_cancelled()
        if self._coming and self._may_end_in_flight():
            self._land()
        if self.ready is not None and self._slot_free:
            self._give_slot(self.ready)
            self._join(self.ready)
        if self.reading is None:
            self._begin_reading()
        beside_prefill = self.reading is not None
        if beside_prefill:
            self._read_on(self.reading)
        if not self._coming:
            self.rows.shrink()  # some may have been left while a prompt was read
        if self.rows.live:
            steps = STEPS_BESIDE_PREFILL if beside_prefill else STEPS
            most = -(-steps // self._written_ahead) * self._written_ahead
            self._flights.append(Flight(list(self.rows.occupants), most, *self.rows.step(steps)))
            self._land(ahead=1)
        else:
            self._land()

    def snapshot(self, ids: list[int]) -> Future:
        """Has tokens read, and their state kept for every prompt that begins with them.

        Until the result, a `Past`, is given to `pasts.drop`. It takes the memory of a slot, beside
        the slots.
        """
        future: Future = Future()
        self.snapshots.append((ids, future))
        return future

    def abandon(self, error: BaseException) -> None:
        """Ends every request with this error, and frees everything."""
        requests = [*(served.request for served in self._served), *self.waiting]
        futures = [future for _, future in self.snapshots]
        if self.reading is not None and isinstance(self.reading.owner, Future):
            futures.append(self.reading.owner)
        self.waiting.clear()
        self.snapshots.clear()
        self._served.clear()
        self._stop_reading(self.reading)
        self._stop_reading(self.ready)
        self._flights.clear()
        self.rows.clear()
        self.pasts.clear()
        for request in requests:
            self._fail(request, error)
        for future in futures:
            future.set_exception(error)

    def _begin_reading(self) -> None:
        """Takes up what is read next. A snapshot, which needs no slot, goes before the prompts; but
        of two in a row the second goes behind one, if there is one that may be read."""
        prompt_may = self.waiting and (self._slot_free or self._may_be_read_ahead(self.waiting[0]))
        if self.snapshots and not (prompt_may and self._read_snapshot_last):
            self._read_snapshot_last = True
            ids, future = self.snapshots.popleft()
            # The last token of a prompt is always left to be read: here it is none of theirs.
            with self._ending(future):
                self._open(future, [*ids, 0], len(ids))
        elif prompt_may:
            self._read_snapshot_last = False
            request = self.waiting.popleft()
            served = Served(request, tally=SpeculationTally(1) if self.speculation else None)
            self._served.append(served)
            self._open(served, request.prompt, len(request.prompt))

    def _may_be_read_ahead(self, request: Request) -> bool:
        """Not beside another; nor if one that generates began with half of the same prompt: then
        the state that it leaves is worth waiting for."""
        if self.ready is not None:
            return False
        half = request.prompt[: -(-len(request.prompt) // 2)]
        return not any(served.request.prompt[: len(half)] == half for served in self.rows.live)

    def _give_slot(self, reading: Reading) -> None:
        """Gives the request whose prompt this is a slot."""
        served, times = reading.owner, reading.owner.request.times
        served.has_slot, times.admitted = True, time.perf_counter()
        self.metrics.admitted(times, len(served.request.prompt), reading.reused)

    def _open(self, owner: Served | Future, ids: list[int], end: int) -> None:
        past = self.pasts.take(ids)
        self._make_room(self.rows.needed)
        self.reading = self._reader.open(owner, ids, end, past, drafted=isinstance(owner, Served))

    def _read_on(self, reading: Reading) -> None:
        """One chunk; after the last, the sequence joins the others, or the snapshot is kept."""
        owner = reading.owner
        with self._ending(owner):
            if isinstance(owner, Served) and not owner.has_slot and self._slot_free:
                self._give_slot(reading)
            if not self._reader.read_on(reading):
                return
            if isinstance(owner, Future):
                self._keep_snapshot(reading, owner)
            elif owner.has_slot:
                self._join(reading)
            else:
                self.ready, self.reading = reading, None

    def _keep_snapshot(self, reading: Reading, future: Future) -> None:
        if not reading.finite:
            raise FloatingPointError(
                f"the state after these {reading.end:,} tokens holds NaN or Inf: it cannot be gone "
                "on from"
            )
        ids = np.asarray(reading.ids[: reading.end])
        past = Past(ids, reading.kv, reading.written, pinned=True)
        self.pasts.keep(past)
        self.reading = None
        future.set_result(past)

    @contextlib.contextmanager
    def _ending(self, owner: Served | Future) -> Iterator[None]:
        """A snapshot that fails, for want of memory say, ends alone."""
        try:
            yield
        except Exception as error:
            if not isinstance(owner, Future):
                raise
            self._stop_reading(self.reading)
            owner.set_exception(error)

    def _join(self, reading: Reading) -> None:
        """A row for a sequence whose prompt has been read; its first token is in flight."""
        served = reading.owner
        served.written = reading.written
        first, state = self._reader.finish(reading, served.request.options)
        self._make_room(self.rows.needed)
        self.rows.insert(served, self._reader.with_drafter(reading, state))
        self._flights.append(Flight([served], 1, first))
        self._leave(reading)  # only now: if any of this fails, `abandon` is to find it
        if len(self.rows.live) == 1:  # no other has the device wait for the host
            self._land()

    def _may_end_in_flight(self) -> bool:
        """Whether a sequence may have all the tokens that were asked for when what is in flight
        has come."""
        live = self.rows.live
        coming = dict.fromkeys(live, 0)
        for flight in self._flights:
            for served in flight.occupants:
                if served in coming:
                    coming[served] += flight.most
        return any(
            most >= served.request.options.max_new_tokens - len(served.generated)
            for served, most in coming.items()
        )

    def _land(self, *, ahead: int = 0) -> None:
        """Hands out what is in flight, all but the newest `ahead`, and ends what is over then."""
        ended: dict[Served, tuple[str, list[int]]] = {}
        while len(self._flights) > ahead:
            if self._hand_out(self._flights.popleft(), ended):
                ahead = 0  # the states of those that ended hold what is still in flight
        for served, last in ended.items():
            self._end(served, last, self.rows.remove(served, keep=served.finite))

    def _hand_out(self, flight: Flight, ended: dict[Served, tuple[str, list[int]]]) -> bool:
        """Fetches the tokens of a flight and gives each request its own.

        Args:
          flight: the oldest one.
          ended: requests that are over, each with its last piece; those of this flight join them.

        Returns:
          whether one of these was ended by a stop string, of which the device knows nothing: it
          has gone on, maybe into NaN.
        """
        live, gone_on = self.rows.live, False
        if not any(served in live for served in flight.occupants):
            return False
        tokens, counts = sharding.fetch((flight.tokens, flight.counts))
        for row, served in enumerate(flight.occupants):
            if served not in live:  # free, or freed meanwhile
                continue
            served.finite &= bool(tokens.finish[row] != generate.NON_FINITE)
            over = served in ended
            if counts is not None and not over:
                own = _only(counts, row)
                served.tally.add(own, None, None)
                self.metrics.speculated(own)
            last = self._take(served, tokens, row)
            if last is not None and not over:
                ended[served] = last
                gone_on |= bool(tokens.finish[row] == generate.RUNNING)
        return gone_on

    def _take(
        self, served: Served, tokens: generate.Tokens, row: int
    ) -> tuple[str, list[int]] | None:
        """Hands out one row's new tokens; if they end the request, returns them instead."""
        request, text = served.request, served.request.row
        count, reason = int(tokens.num_tokens[row]), int(tokens.finish[row])
        before = len(text.tokens)
        for i in range(count):
            if text.finish_reason is not None:  # a stop string
                break
            text.add(tokens, row, i)
        served.generated += np.asarray(tokens.tokens)[row, :count].tolist()
        if text.finish_reason is None and reason != generate.RUNNING:
            text.end(FINISH_REASONS[reason])
        new = text.tokens[before:]
        if new:
            request.times.pieces.append((time.perf_counter(), len(new)))
            self.metrics.delivered(request.times)
        piece = (text.take_text(), new)
        if text.finish_reason is not None:
            return piece
        if any(piece):
            request.push(*piece)
        return None

    def _end(self, served: Served, last: tuple[str, list[int]], kv: KVState | None) -> None:
        """Finishes a request with its last piece."""
        request = served.request
        generation = self._generation(served)
        self._release(served, kv)
        self.metrics.ended(request.times, request.row.finish_reason)
        request.finish(*last, generation)

    def _fail(self, request: Request, error: BaseException) -> None:
        request.fail(error)
        outcome = "cancelled" if isinstance(error, Cancelled) else "failed"
        self.metrics.ended(request.times, outcome)

    def _release(self, served: Served, kv: KVState | None) -> None:
        """Frees a slot; what the model has read there may serve a conversation's next turn."""
        if kv is not None:
            ids = served.request.prompt + served.generated
            # The token chosen last has not been read; of a cancelled prompt, a part has.
            ids = np.asarray(ids[: int(kv.length[0])])
            written = max(served.written, len(ids) + self._written_ahead)
            self.pasts.keep(Past(ids, kv, written))
        if not self._coming:
            self.rows.shrink()
        self._make_room(len(self.rows.occupants))
        self._served.remove(served)  # last: `abandon` is to find it if any of this fails

    def _make_room(self, rows: int) -> None:
        """Keeps no more pasts than there are slots beside this many rows."""
        while len(self.pasts) and rows + len(self.pasts) > self.slots:
            self.pasts.drop_oldest()

    def _stop_reading(self, reading: Reading | None) -> None:
        if reading is not None:
            free((reading.kv, reading.drafting))
            self._leave(reading)

    def _leave(self, reading: Reading) -> None:
        """It is neither being read nor ready any more."""
        if reading is self.reading:
            self.reading = None
        elif reading is self.ready:
            self.ready = None

    def _drop_cancelled(self) -> None:
        for request in [r for r in self.waiting if r.cancelling]:
            self.waiting.remove(request)
            self._fail(request, Cancelled(None))
        for reading in (self.reading, self.ready):
            owner = reading and reading.owner
            if isinstance(owner, Served) and owner.request.cancelling:
                kv = reading.kv if reading.finite else None
                self._leave(reading)
                free(reading.drafting)
                owner.written = reading.written
                self._release(owner, kv)
                self._fail(owner.request, Cancelled(None))
        # Looked at once: another thread may cancel one more meanwhile.
        cancelled = [a for a in self.rows.live if a.request.cancelling]
        if cancelled:
            self._land()  # so that it is known what their states hold
        for served in [a for a in cancelled if a in self.rows.live]:
            generation = self._generation(served)
            self._release(served, self.rows.remove(served, keep=True))
            self._fail(served.request, Cancelled(generation))

    def _generation(self, served: Served) -> Generation:
        request, times = served.request, served.request.times
        first = times.first_token or time.perf_counter()
        return request.row.generation(
            len(request.prompt),
            Stats(
                ttft_s=first - times.submitted,
                tpot_s=tpot_s(times),
                queue_s=times.admitted - times.submitted,
                **(served.tally.stats(0) if served.tally else {}),
            ),
        )


def _only(counts: Counts, row: int) -> Counts:
    return Counts(**{
        name: getattr(counts, name)[row : row + 1]
        for name in ("rounds", "drafted", "accepted", "per_position")
    })  # fmt: skip
