"""Reuse of what was read before: the same as a cold run, and it does happen."""

import by_hand
import jax
import numpy as np
import pytest
import small_model

from carat_jax import generate
from carat_jax.engine import Cancelled, Request
from carat_jax.speculative import Ngram

W, R = small_model.CONFIG.sliding_window, 128
AT_THE_WINDOW = [W // 2, W, W + 1, 3 * W]
V = small_model.CONFIG.vocab_size
GEMMA = by_hand.small_gemma()
BASE = np.random.default_rng(0).integers(0, V, 400).tolist()


@pytest.fixture
def read(monkeypatch) -> list[int]:
    """How many tokens of prompts each call of the model has read."""
    counts, inner = [], generate.prefill_chunk

    def counting(params, config, tokens, state, new, last):
        counts.append(int(new.sum()))
        return inner(params, config, tokens, state, new, last)

    monkeypatch.setattr(generate, "prefill_chunk", counting)
    return counts


def other(ids: list[int]) -> list[int]:
    """Ids that differ from these everywhere."""
    return [(i + 1) % V for i in ids]


def check(s, prompt: list[int], read: list[int], reused: int, n: int = 9) -> list[int]:
    """Runs a prompt of which so many tokens are not to be read; returns what it gets, as alone."""
    cold = GEMMA.generate(prompt, max_new_tokens=n, logprobs=True)
    read.clear()
    out = by_hand.run(s, GEMMA, prompt, max_new_tokens=n, logprobs=True)
    assert out.tokens == cold.tokens
    np.testing.assert_allclose(out.logprobs, cold.logprobs, atol=1e-4)
    assert sum(read) == len(prompt) - reused
    return cold.tokens


@pytest.mark.parametrize("drafter", [None, Ngram()], ids=["plain", "drafted"])
@pytest.mark.parametrize("shared", [*AT_THE_WINDOW, R - 1, R, R + 1, 250])
def test_the_next_turn_goes_on_where_the_last_ended(read, shared, drafter):
    s = by_hand.scheduler(GEMMA, 2, drafter)
    prompt = BASE[:shared]
    for turn in range(3):
        reply = check(s, prompt, read, 0 if turn == 0 else len(prompt) - 6)
        prompt = [*prompt, *reply, *other(BASE[turn : turn + 5])]  # the reply's last is not read


@pytest.mark.parametrize("drafter", [None, Ngram()], ids=["plain", "drafted"])
@pytest.mark.parametrize("shared", AT_THE_WINDOW)
@pytest.mark.parametrize("beyond", [1, 100])
def test_a_prompt_that_parts_from_another_at_the_window(read, shared, beyond, drafter):
    """Of little of a past the rest is forgotten; where that is most of it, it stays beside."""
    s = by_hand.scheduler(GEMMA, 2, drafter)
    first = BASE[: shared + beyond]
    said = check(s, first, read, 0, n=2)
    check(s, [*BASE[:shared], *other(BASE[shared : shared + 30])], read, shared)
    assert len(s.pasts) == (1 if beyond == 1 else 2)
    check(s, [*first, *said], read, shared if beyond == 1 else len(first) + 1)


@pytest.mark.parametrize("drafter", [None, Ngram()], ids=["plain", "drafted"])
def test_a_turn_that_a_stop_string_ended_is_gone_on_from(read, drafter):
    """The device was past it already, by a call that was in flight then."""
    s = by_hand.scheduler(GEMMA, 1, drafter)
    whole = GEMMA.generate(BASE[:50], max_new_tokens=40, logprobs=True)
    stop = {"stop": next(c for c in whole.text[4:] if c not in whole.text[:4]), "logprobs": True}
    alone = GEMMA.generate(BASE[:50], max_new_tokens=40, **stop)
    cut = by_hand.run(s, GEMMA, BASE[:50], max_new_tokens=40, **stop)
    assert cut.tokens == alone.tokens and cut.finish_reason == "stop"
    said = [*BASE[:50], *cut.tokens]
    after = whole.tokens[len(cut.tokens) : len(cut.tokens) + 3]
    check(s, [*said, *other(after)], read, len(said))


@pytest.mark.parametrize(("drafter", "ahead"), [(None, 1), (Ngram(), 5)], ids=["plain", "drafted"])
@pytest.mark.parametrize("beyond", [0, 1])
@pytest.mark.parametrize("total", [W, 300])
def test_what_a_past_can_forget(read, total, beyond, drafter, ahead):
    """A ring of R slots has the last R positions written, and a token looks back at W - 1."""
    s = by_hand.scheduler(GEMMA, 1, drafter)
    reply = check(s, BASE[:total], read, 0)
    past = [*BASE[:total], *reply[:-1]]
    # Where nothing was overwritten, the very first token is enough.
    shared = 1 if total == W else len(past) + ahead - R + (W - 1)
    shared -= beyond
    reused = 0 if beyond else shared
    check(s, past[:shared] + other(past[shared : shared + 40]), read, reused)


def test_what_was_forgotten_has_taken_places(read):
    """A short past may have been a long one: its ring holds what came after, not before."""
    s = by_hand.scheduler(GEMMA, 1)
    check(s, BASE[:300], read, 0, n=1)
    check(s, [*BASE[:190], *other(BASE[190:192])], read, 190, n=1)
    check(s, [*BASE[:85], *other(BASE[85:88])], read, 0)


def test_a_snapshot_of_what_was_a_longer_past(read):
    s = by_hand.scheduler(GEMMA, 2)
    check(s, BASE[:300], read, 0, n=1)
    by_hand.snapshot(s, BASE[:190])
    check(s, [*BASE[:190], *other(BASE[190:200])], read, 190)
    check(s, [*BASE[:85], *other(BASE[85:88])], read, 0)


def test_the_same_prompt_again(read):
    """Its last token is always read: the first token of the reply comes from it."""
    s = by_hand.scheduler(GEMMA, 1)
    check(s, BASE[:40], read, 0)
    check(s, BASE[:40], read, 39)
    check(s, BASE[:1], read, 0)


def test_the_past_of_a_cancelled_request_serves_too(read):
    s = by_hand.scheduler(GEMMA, 1)
    request = by_hand.submit(s, GEMMA, BASE[:100], max_new_tokens=200, logprobs=True)
    for _ in range(5):
        s.step()
    request.cancel()
    s.step()
    with pytest.raises(Cancelled) as cancelled:
        request.result(0)
    said = cancelled.value.generation.tokens
    check(s, [*BASE[:100], *said, 3, 4], read, 100 + len(said) - 1)


def test_the_past_of_a_request_that_another_thread_cancels_in_between(read):
    """What is in flight then has taken places of the rings too."""

    class Late(Request):
        """Is cancelled right after the engine has looked whether it is."""

        looks = 0

        @property
        def cancelling(self) -> bool:
            self.looks += 1
            return self.looks > 1

    s = by_hand.scheduler(GEMMA, 1)
    request = by_hand.submit(s, GEMMA, BASE[:R], max_new_tokens=60, logprobs=True)
    for _ in range(3):
        s.step()
    request.__class__ = Late
    by_hand.work_off(s)
    with pytest.raises(Cancelled):
        request.result(0)
    (past,) = s.pasts._kept
    shared = len(past.ids) + 1 - R + (W - 1)  # as far back as can be gone
    check(s, [*BASE[:shared], *other(BASE[shared : shared + 9])], read, shared)


def test_conversations_do_not_take_each_others_pasts(read):
    """All prompts begin alike, with <bos> if nothing else."""
    s = by_hand.scheduler(GEMMA, 3)
    a, b = [2, *BASE[:60]], [2, *other(BASE[:60])]
    said = check(s, a, read, 0)
    check(s, b, read, 1)
    check(s, [*a, *said, 5], read, len(a) + len(said) - 1)


# --- Snapshots -----------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [None, Ngram()], ids=["plain", "drafted"])
@pytest.mark.parametrize("length", [3, 3 * W, R + W, 250])
def test_a_snapshot_serves_any_number_of_prompts(read, length, drafter):
    s = by_hand.scheduler(GEMMA, 1, drafter)
    system = BASE[:length]
    read.clear()
    snapshot = by_hand.snapshot(s, system)
    assert sum(read) == length
    for turn in (BASE[length:], other(BASE[length:])):
        check(s, [*system, *turn[:9]], read, length)
    s.pasts.drop(snapshot)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(snapshot.kv))
    s.pasts.drop_oldest()  # the last reply's
    check(s, BASE[: length + 1], read, 0)


@pytest.mark.parametrize("drafter", [None, Ngram()], ids=["plain", "drafted"])
@pytest.mark.parametrize("shared", AT_THE_WINDOW)
@pytest.mark.parametrize("beyond", [0, 1, 100])
def test_prompts_that_part_from_a_snapshot_at_the_window(read, shared, beyond, drafter):
    s = by_hand.scheduler(GEMMA, 1, drafter)
    by_hand.snapshot(s, BASE[: shared + beyond])
    rest = other(BASE[shared : shared + 30])
    for turn in (rest, other(rest)):
        check(s, [*BASE[:shared], *turn], read, shared)


def test_a_snapshot_stays_while_pasts_come_and_go(read):
    s = by_hand.scheduler(GEMMA, 2)
    system = [7, *BASE[:90]]
    by_hand.snapshot(s, system)
    for start in range(100, 300, 40):
        check(s, BASE[start : start + 30], read, 0)
    check(s, [*system, 1, 2], read, len(system))
    assert len(s.pasts) <= 2
    s.abandon(Cancelled(None))
    assert len(s.pasts._kept) == 0


def test_a_snapshot_can_be_released_once():
    s = by_hand.scheduler(GEMMA, 1)
    snapshot = by_hand.snapshot(s, BASE[:10])
    s.pasts.drop(snapshot)
    with pytest.raises(ValueError, match="released already"):
        s.pasts.drop(snapshot)
