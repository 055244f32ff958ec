"""What an engine does, counted and timed where it happens, for Prometheus to read."""

from collections.abc import Callable

import jax
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from carat_jax.engine.request import Times
from carat_jax.speculative import Counts

# Upper ends of a histogram's buckets, in seconds: of waiting, and of one token.
WAITS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKENS = (
    *(0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.015, 0.02, 0.03, 0.05),
    *(0.075, 0.1, 0.25, 0.5, 1.0, 5.0),
)
ENDED_BY_ITSELF = ("stop", "length")


class Metrics:
    """Metrics of one engine.

    Counters grow from its start; a rate over them is a throughput, a ratio of two rates a share:
    generated tokens a second, accepted of drafted tokens, tokens a round (1 + accepted / rounds).

    Attributes:
      registry: of `prometheus_client`, with these metrics alone. Times are in seconds.
    """

    def __init__(self, slots: int, occupied: Callable[[], int], waiting: Callable[[], int]) -> None:
        """`occupied` of so many slots, and requests that have none."""
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"carat_{name}", text, labels, registry=self.registry)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"carat_{name}", text, buckets=buckets, registry=self.registry)

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(f"carat_{name}", text, registry=self.registry).set_function(value)

        self._requests = counter(
            "requests",
            "Requests by outcome: stop, length, non_finite, cancelled, failed, refused (the queue "
            "was full).",
            "outcome",
        )
        self._prompt = counter(
            "prompt_tokens",
            "Tokens of admitted prompts: read, or reused from the state of an earlier sequence.",
            "source",
        )
        self._generated = counter("generated_tokens", "Tokens handed out.")
        self._rounds = counter("rounds", "Rounds of speculation, counted for each sequence.")
        self._drafted = counter("drafted_tokens", "Tokens that the drafter proposed.")
        self._accepted = counter("accepted_tokens", "Proposed tokens that stood.")
        self._queue = histogram("queue_seconds", "Submitted until a slot was given.", WAITS)
        self._ttft = histogram("ttft_seconds", "Submitted until the first token.", WAITS)
        self._tpot = histogram(
            "tpot_seconds", "A token after the first, on average over a finished request.", TOKENS
        )
        self._itl = histogram(
            "itl_seconds", "Between two arrivals of tokens; one may bring several.", TOKENS
        )
        gauge("slots", "Sequences that can generate at once.", lambda: slots)
        gauge("slots_occupied", "Slots with a request.", occupied)
        gauge("requests_waiting", "Requests without a slot.", waiting)
        gauge("memory_bytes", "Bytes of arrays on the device: weights and states.", memory_bytes)

    def refused(self) -> None:
        """The queue was full."""
        self._requests.labels("refused").inc()

    def admitted(self, times: Times, prompt: int, reused: int) -> None:
        """A request got a slot; of its prompt's tokens some need not be read again."""
        self._queue.observe(times.admitted - times.submitted)
        self._prompt.labels("reused").inc(reused)
        self._prompt.labels("read").inc(prompt - reused)

    def delivered(self, times: Times) -> None:
        """New tokens came, the last of `times.pieces`."""
        now, count = times.pieces[-1]
        self._generated.inc(count)
        if len(times.pieces) == 1:
            self._ttft.observe(now - times.submitted)
        else:
            self._itl.observe(now - times.pieces[-2][0])

    def speculated(self, counts: Counts) -> None:
        """What some rounds came to, as NumPy arrays."""
        self._rounds.inc(int(counts.rounds.sum()))
        self._drafted.inc(int(counts.drafted.sum()))
        self._accepted.inc(int(counts.accepted.sum()))

    def ended(self, times: Times, outcome: str) -> None:
        """A request has ended: its finish reason, "cancelled" or "failed"."""
        self._requests.labels(outcome).inc()
        tpot = tpot_s(times)
        if outcome in ENDED_BY_ITSELF and tpot is not None:
            self._tpot.observe(tpot)


def tpot_s(times: Times) -> float | None:
    """(latency - TTFT) / (tokens - 1): seconds for a token after the first; None without one."""
    later = sum(count for _, count in times.pieces) - 1
    return (times.pieces[-1][0] - times.pieces[0][0]) / later if later > 0 else None


def memory_bytes() -> int:
    """Bytes of arrays on the first device; where it does not count them, of all live arrays."""
    counted = jax.devices()[0].memory_stats()
    return counted["bytes_in_use"] if counted else sum(a.nbytes for a in jax.live_arrays())
