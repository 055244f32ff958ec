"""The choice of K in made-up worlds, whose best K is found by trying all of them."""

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from carat_jax.speculative.auto import LADDER, Auto, Call, Fixed, Profiled

STEPS = 64  # tokens that a call is to bring at best


@dataclasses.dataclass
class World:
    """What a drafter is worth in it, and what rounds cost.

    Attributes:
      chances: how probable it is that the i-th proposal stands if those before it do.
      round_s: seconds of a round with K proposals.
    """

    chances: list[float]
    round_s: Callable[[int], float]

    def rate(self, K: int) -> float:
        return (1 + sum(np.prod(self.chances[:i]) for i in range(1, K + 1))) / self.round_s(K)

    def best(self, most: int = 15) -> int:
        return max((k for k in LADDER if k <= most), key=self.rate)


@dataclasses.dataclass
class Done:
    """A call, and what came of it."""

    call: Call
    tokens: int
    seconds: float


def play(world: World, policy, rounds: int, *, rows: int = 1, noise: float = 0.0, seed: int = 0):
    """Calls of a generation of so many rounds; untimed ones are told after the next is asked for.

    `noise`: the spread of measured times.
    """
    draw = np.random.default_rng(seed)
    done, untold = [], None
    while rounds > 0:
        call = policy.next(STEPS)
        if untold is not None:
            policy.observe(*untold)
        K = call.num_proposals
        stands = draw.random((rows * call.rounds, K)) < world.chances[:K]
        accepted = np.cumprod(stands, axis=1).sum(0).tolist()
        seconds = call.rounds * world.round_s(K)
        measured = seconds * (1 + noise * draw.standard_normal())
        untold = (call, rows * call.rounds, accepted, call.rounds, None)
        if call.timed:
            policy.observe(*untold[:-1], measured)
            untold = None
        done.append(Done(call, call.rounds * rows + sum(accepted), seconds))
        rounds -= call.rounds
    return done


def chosen(done: list[Done]) -> int:
    """The K of most of the last rounds."""
    late = [d.call.num_proposals for d in done[-20:] for _ in range(d.call.rounds)]
    return max(set(late), key=late.count)


def geometric(p: float) -> list[float]:
    return [p] * 15


def assistant_on_a_gpu(K: int) -> float:
    """Seconds like those of a large model with a small assistant."""
    return 13e-3 if K == 0 else 13.7e-3 + 0.38e-3 * K


# --- Where it ends -------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.05, 0.5, 0.8, 0.95, 1.0])
@pytest.mark.parametrize("step", [0.0, 0.03, 0.15, 0.6, 1.2])
def test_it_ends_at_the_best_k_or_nearly(p, step):
    """`step`: what a proposal costs, in steps of the model; the first one half as much again."""
    world = World(geometric(p), lambda K: 0.01 * (1 + step * (K + (K > 0) / 2)))
    for rows, noise in ((1, 0.0), (4, 0.01)):
        done = play(world, Auto(15), 4000, rows=rows, noise=noise)
        best = world.rate(world.best())
        # What has not been tried must promise 10 % more; acceptance is known to some per cent.
        assert world.rate(chosen(done)) > 0.85 * best
        total = sum(d.tokens for d in done) / rows / sum(d.seconds for d in done)
        assert total > 0.85 * best


def test_it_ends_at_the_best_k_where_that_is_clearly_better():
    """Proposals that stand up to some position, and then hardly ever."""
    draw, ends = np.random.default_rng(5), set()
    for _ in range(800):
        sure = draw.integers(0, 16)
        chances = np.where(np.arange(15) < sure, draw.uniform(0.8, 1), draw.uniform(0, 0.2))
        fixed, each = draw.uniform(0, 0.3), draw.uniform(0, 0.4)
        world = World(chances.tolist(), lambda K, a=fixed, b=each: 1 + a * (K > 0) + b * K)
        others = [world.rate(k) for k in LADDER if k != world.best()]
        if world.rate(world.best()) > 1.15 * max(others):
            ends.add(world.best())
            assert chosen(play(world, Auto(15), 1500)) == world.best()
    assert ends == set(LADDER)


def test_a_drafter_that_is_always_wrong_is_switched_off_after_few_rounds():
    done = play(World(geometric(0.0), assistant_on_a_gpu), Auto(15), 3000)
    drafting = [d.call for d in done if d.call.num_proposals]
    assert {c.num_proposals for c in drafting} == {4}
    assert [d.call.num_proposals for d in done[:6]] == [4] * 4 + [0] * 2
    assert sum(c.rounds for c in drafting[:4]) == 13
    assert [d.call for d in done[6:8]] == [Call(0, rounds=64)] * 2  # then comes a trial
    assert chosen(done) == 0


def test_a_drafter_that_is_always_right_gets_the_largest_k_that_pays():
    assert chosen(play(World(geometric(1.0), assistant_on_a_gpu), Auto(15), 500)) == 15
    dear = World(geometric(1.0), lambda K: 1.0 if K <= 4 else 1.0 + K - 4)
    assert chosen(play(dear, Auto(15), 500)) == dear.best() == 4
    for most, largest in ((1, 1), (3, 2), (7, 4), (8, 8), (14, 8)):
        done = play(World(geometric(1.0), assistant_on_a_gpu), Auto(most), 500)
        assert chosen(done) == largest
        assert max(d.call.num_proposals for d in done) == largest


# --- What it costs -------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [0.0, 0.3, 0.7, 0.9, 1.0])
def test_trials_lose_two_per_cent_of_the_time_at_most(p):
    """Each against the true rate of the K in force at that time."""
    world = World(geometric(p), assistant_on_a_gpu)
    done = play(world, Auto(15), 20_000)
    trials, lost, in_force = 0, 0.0, 4
    for d in done:
        if not d.call.timed:
            in_force = d.call.num_proposals
        elif d.call.num_proposals != in_force:
            trials += 1
            lost += d.seconds - d.tokens / world.rate(in_force)
    assert trials > 10
    assert 0 < lost < 0.02 * sum(d.seconds for d in done)


def test_a_program_is_compiled_when_it_is_wanted_and_its_first_call_is_not_timed():
    for p in (0.0, 0.4, 0.8, 0.95, 1.0):
        done = play(World(geometric(p), lambda K: 1 + 0.05 * K), Auto(15), 3000)
        seen = set()
        for d in done:
            K = d.call.num_proposals
            if K not in seen:
                assert d.call == Call(K, rounds=1, timed=False)
            seen.add(K)
        assert {0, 4} <= seen <= set(LADDER)
        assert len(seen) <= {0.0: 2, 0.4: 4, 0.8: 4, 0.95: 4, 1.0: 4}[p]


# --- When the world changes ----------------------------------------------------------------------


def both_ways(first: World, then: World) -> tuple[int, int, int]:
    """K at the end of each, and rounds until the second K was in force."""
    policy = Auto(15)
    before = chosen(play(first, policy, 3000))
    done = play(then, policy, 3000, seed=1)
    after, rounds = chosen(done), 0
    for d in done:
        if d.call.num_proposals == after and not d.call.timed:
            break
        rounds += d.call.rounds
    return before, after, rounds


def test_it_is_switched_on_again_when_the_text_becomes_easy():
    hard, easy = (World(geometric(p), assistant_on_a_gpu) for p in (0.0, 0.97))
    before, after, rounds = both_ways(hard, easy)
    assert (before, after) == (0, easy.best())
    assert rounds < 300
    before, after, rounds = both_ways(easy, hard)
    assert (before, after) == (easy.best(), 0)
    assert rounds < 300


def test_it_follows_times_that_change():
    """As when others come to share the device: a round now costs its proposals in full."""
    free = World(geometric(0.6), lambda K: 1 + 0.01 * K)
    dear = World(geometric(0.6), lambda K: 1 + 0.9 * K)
    before, after, _ = both_ways(free, dear)
    assert (before, after) == (8, 0)


# --- Calls ---------------------------------------------------------------------------------------


def test_the_same_measurements_give_the_same_calls():
    world = World(geometric(0.7), assistant_on_a_gpu)
    one, two = (play(world, Auto(15), 2000, noise=0.1) for _ in range(2))
    assert one == two


def test_calls_bring_the_tokens_that_are_asked_for():
    assert Fixed(4).next(64) == Call(4, rounds=13)
    assert Fixed(0).next(64) == Call(0, rounds=64)
    policy = Auto(15)
    play(World(geometric(0.0), assistant_on_a_gpu), policy, 18)
    assert policy.next(1) == Call(0, rounds=1)
    assert policy.next(7) == Call(0, rounds=7)


def test_profiled_calls_are_timed_but_the_first_of_each_k():
    policy = Profiled(Fixed(3))
    assert [policy.next(8) for _ in range(3)] == [
        Call(3, rounds=1), Call(3, rounds=2, timed=True), Call(3, rounds=2, timed=True),
    ]  # fmt: skip
    world, seen = World(geometric(1.0), assistant_on_a_gpu), set()
    for d in play(world, Profiled(Auto(15)), 500):
        assert d.call.timed == (d.call.num_proposals in seen)
        seen.add(d.call.num_proposals)
    assert seen == {0, 4, 8, 15}
