"""How many tokens to propose: chosen while generating, from measured acceptance and times.

Pure Python without a clock: what is measured goes in, the next call comes out, and the same
measurements give the same calls. K = 0 is plain decoding: what a drafter that loses comes to.
"""

import bisect
import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Protocol

LADDER = (0, 1, 2, 4, 8, 15)  # each is a program of its own, compiled when it is first chosen
START = 4
TIMED_ROUNDS = 4  # of a call that is timed
START_CALLS = 3  # timed calls of the first K, so that acceptance is judged by some rounds
TRIAL_SHARE = 0.02  # of the time may be lost by trying a K that is not the best one known
TRIAL_DISTANCE = 64  # rounds from one trial to the next, at least
MEMORY = 32  # rounds after which an observed acceptance weighs half
FADED = 16  # observations that the past is worth at least, however long ago
GAIN, GAIN_UNTRIED = 0.02, 0.10  # what another K must promise; the untried may need compiling
PRIOR = 0.5  # acceptance before anything is known, worth one observation


@dataclasses.dataclass(frozen=True)
class Call:
    """What to dispatch next.

    Attributes:
      num_proposals: K.
      rounds: at most so many.
      timed: nothing else may be under way, and the time is to be told.
    """

    num_proposals: int
    rounds: int
    timed: bool = False


class Policy(Protocol):
    """Says how many proposals the rounds of the next call make."""

    def next(self, steps: int) -> Call:
        """The next call, for `steps` tokens at best unless it is for finding something out."""

    def observe(
        self, call: Call, tries: int, accepted: Sequence[int], rounds: int, seconds: float | None
    ) -> None:
        """Tells what came of a call; of a timed one, before the next is asked for.

        Args:
          call: as `next` gave it.
          tries: rounds, summed over the rows that took part in them.
          accepted: K numbers: in how many of the tries the i-th proposal stood.
          rounds: passes of the model.
          seconds: what they took; None where that was not measured.
        """


class Fixed(Policy):
    """Always the same K."""

    def __init__(self, num_proposals: int) -> None:
        self._num_proposals = num_proposals

    def next(self, steps: int) -> Call:
        """See `Policy.next`."""
        return _call_for(steps, self._num_proposals)


class Profiled(Policy):
    """Another policy with every call timed, but the first of each K: that one may compile."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._compiled: set[int] = set()

    def next(self, steps: int) -> Call:
        """See `Policy.next`."""
        call = self._policy.next(steps)
        if call.num_proposals in self._compiled:
            return dataclasses.replace(call, timed=True)
        self._compiled.add(call.num_proposals)
        return Call(call.num_proposals, rounds=1)

    def observe(
        self, call: Call, tries: int, accepted: Sequence[int], rounds: int, seconds: float | None
    ) -> None:
        """See `Policy.observe`."""
        self._policy.observe(call, tries, accepted, rounds, seconds)


class Auto(Policy):
    """The K of `LADDER` with the most expected tokens per second, as far as is known.

    A generation begins with 1 + 12 rounds at K = 4 and 1 + 4 without proposals; the first call of
    a K, which may compile, is one round and counts for no time. From then on a K is taken that
    promises 2 % more than the one in force. It is one that has been timed, or the next up or down
    the ladder where that promises 10 %: with the acceptance of the positions before, and the time
    on the line through the nearest two that are known.

    Trials: now and then four rounds of the K in force and of another, the one timed longest ago,
    are timed anew. A round brings one token at least; at the rate in force that token would have
    taken a part of the round's time, and the rest of it is lost. Trials begin only while such
    losses, the steps without proposals at the beginning included, stay under 2 % of all time.
    """

    def __init__(self, most: int) -> None:
        """`most`: the largest K that drafter and rings allow, at least 1."""
        self._ladder = [k for k in LADDER if k <= most]
        self._current = max(k for k in self._ladder if k <= START)
        self._acceptance = Acceptance(self._ladder[-1])
        self._round_s: dict[int, float] = {}  # those timed longest ago come first
        self._elapsed_s = self._lost_s = 0.0
        self._since_trial = 0  # rounds
        self._planned = deque(_first(self._current) + [_timed(self._current)] * (START_CALLS - 1))
        self._planned += _first(0)

    def next(self, steps: int) -> Call:
        """See `Policy.next`."""
        if not self._planned:
            self._planned += self._decide(steps)
        return self._planned.popleft()

    def observe(
        self, call: Call, tries: int, accepted: Sequence[int], rounds: int, seconds: float | None
    ) -> None:
        """See `Policy.observe`."""
        K = call.num_proposals
        self._acceptance.observe(tries, accepted, rounds)
        self._since_trial += rounds
        if seconds is None or not rounds:
            self._elapsed_s += rounds * self._round_s.get(K, 0.0)
            return
        self._elapsed_s += seconds
        new = seconds / rounds
        if K != self._current:
            self._lost_s += rounds * self._loss(new)
            self._since_trial = 0
        self._round_s[K] = (self._round_s.pop(K, new) + new) / 2  # now the newest of the dict

    def rate(self, num_proposals: int) -> float:
        """Expected tokens per second of a row. Known once two Ks have been timed."""
        return self._acceptance.length(num_proposals) / self._seconds(num_proposals)

    def _decide(self, steps: int) -> list[Call]:
        self._current = self._best()
        if self._current not in self._round_s:
            return _first(self._current)
        rival = next(k for k in self._round_s if k != self._current)
        lost_s = self._lost_s + TIMED_ROUNDS * self._loss(self._round_s[rival])
        if self._since_trial >= TRIAL_DISTANCE and lost_s <= TRIAL_SHARE * self._elapsed_s:
            return [_timed(self._current), _timed(rival)]
        return [_call_for(steps, self._current)]

    def _loss(self, round_s: float) -> float:
        """Seconds that a round of another K loses at most, if it takes `round_s`."""
        return max(0.0, round_s - 1 / self.rate(self._current))

    def _best(self) -> int:
        def worth(k: int) -> float:
            if k == self._current:
                return self.rate(k)
            return self.rate(k) / (1 + (GAIN if k in self._round_s else GAIN_UNTRIED))

        # Tokens per second rise with K and then fall, so what has not been tried is looked for
        # one rung away only: of what is further off, too little is known.
        rung = self._ladder.index(self._current)
        near = self._ladder[max(rung - 1, 0) : rung + 2]
        return max(sorted({*near, *self._round_s}), key=worth)

    def _seconds(self, num_proposals: int) -> float:
        """Of a round: measured, or on the line through the nearest two that were."""
        known = self._round_s
        if num_proposals in known:
            return known[num_proposals]
        ks = sorted(known)
        right = min(max(bisect.bisect(ks, num_proposals), 1), len(ks) - 1)
        a, b = ks[right - 1], ks[right]
        # More proposals never take less time: where it looks so, it is noise.
        slope = max(0.0, (known[b] - known[a]) / (b - a))
        return known[a] + slope * (num_proposals - a)


class Acceptance:
    """How probable it is that a proposal stands, given that those before it in its round do.

    Old observations fade, down to a weight that a few new ones outweigh.
    """

    def __init__(self, most: int) -> None:
        self._tries = [0.0] * most
        self._hits = [0.0] * most

    def observe(self, tries: int, accepted: Sequence[int], rounds: int) -> None:
        """See `Policy.observe`."""
        fade = 0.5 ** (rounds / MEMORY)
        for i, old in enumerate(self._tries):
            keep = max(fade, min(1.0, FADED / old)) if old else 0.0
            self._tries[i] *= keep
            self._hits[i] *= keep
        reached = [tries, *accepted]
        for i, stood in enumerate(accepted):
            self._tries[i] += reached[i]
            self._hits[i] += stood

    def length(self, num_proposals: int) -> float:
        """Expected tokens of a round. A position little known is taken for the one before it."""
        total = all_stand = 1.0
        chance = PRIOR
        for tries, hits in zip(self._tries[:num_proposals], self._hits, strict=False):
            chance = (hits + chance) / (tries + 1)
            all_stand *= chance
            total += all_stand
        return total


def _first(num_proposals: int) -> list[Call]:
    """A call that may compile, then one that is timed."""
    return [Call(num_proposals, rounds=1), _timed(num_proposals)]


def _timed(num_proposals: int) -> Call:
    return Call(num_proposals, TIMED_ROUNDS, timed=True)


def _call_for(steps: int, num_proposals: int) -> Call:
    return Call(num_proposals, rounds=-(-steps // (num_proposals + 1)))
