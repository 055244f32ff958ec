"""What objects show of themselves, in a notebook and as plain text."""

import dataclasses
import sys
import time
from html.parser import HTMLParser
from types import SimpleNamespace

import jax
import pytest
import small_model
from flax import struct
from scripted_model import TOKENIZER

import carat_jax as carat
from carat_jax import display
from carat_jax.generation import Stream
from carat_jax.speculative import Drafter, Model, Ngram


class Page(HTMLParser):
    """The text of some HTML, and its bars: [width in %, colour] of their pieces."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.bars: list[tuple[float, str]] = []
        self.open: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.open.append(tag)
        style = dict(p.split(":") for p in dict(attributes).get("style", "").split(";") if p)
        if "float" in style:
            self.bars.append((float(style["width"].removesuffix("%")), style["background"]))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(self.words)


def shown(thing) -> Page:
    return Page(thing._repr_html_())


STATS = carat.Stats(
    ttft_s=0.25,
    tpot_s=0.0125,
    drafted=40,
    accepted=10,
    per_position=[0.75, 0.25],
    acceptance_length=1.5,
    rounds={2: 20},
)
GENERATION = carat.Generation(
    text="a < b &\n<script>x</script>",
    tokens=[5, 6, 7],
    finish_reason="length",
    prompt_tokens=2,
    logprobs=None,
    top_logprobs=None,
    stats=STATS,
)


def test_stats_show_times_and_what_stood():
    page = shown(STATS)
    for part in ("250 ms", "12.5 ms (80 tokens/s)", "10 accepted, 30 rejected", "1.50"):
        assert part in page.text
    assert page.bars == [
        (25.0, display.ACCEPTED), (75.0, display.REJECTED),
        (75.0, display.ACCEPTED), (25.0, display.ACCEPTED),
    ]  # fmt: skip
    assert "queue" not in page.text
    assert repr(STATS) == (
        "Stats(ttft_s=0.25, tpot_s=0.0125, drafted=40, accepted=10, per_position=[0.75, 0.25], "
        "acceptance_length=1.5, rounds={2: 20})"
    )


def test_stats_without_a_drafter_and_of_a_single_token():
    page = shown(carat.Stats(ttft_s=12.0, tpot_s=None, queue_s=0.5))
    assert "12 s" in page.text and "500 ms" in page.text
    assert page.bars == []
    nothing_proposed = dataclasses.replace(STATS, drafted=0, accepted=0, per_position=[])
    assert [width for width, _ in shown(nothing_proposed).bars] == [0.0, 0.0]


def test_a_generation_shows_its_text_escaped():
    page = shown(GENERATION)
    assert GENERATION.text in page.words
    assert "script" not in GENERATION._repr_html_().replace("&lt;script", "").replace(
        "/script&gt;", ""
    )
    assert "3, after a prompt of 2" in page.text
    assert repr(GENERATION) == (
        r"Generation('a < b &\n<script>x</script>', 3 tokens after 2, 'length')"
    )
    assert len(repr(dataclasses.replace(GENERATION, text="x" * 10_000))) < 120


def test_a_generation_shows_thought_and_what_went_wrong():
    odd = dataclasses.replace(
        GENERATION, thinking="<hm>", finish_reason="non_finite", non_finite_step=3
    )
    page = shown(odd)
    assert "<hm>" in page.words
    assert "no finite logits for token 3" in page.text


def test_a_model_shows_its_size():
    gemma = small_model.gemma()
    page = shown(gemma)
    c = gemma.config
    assert f"{sum(x.size for x in jax.tree.leaves(gemma.params)):,} in float32" in page.text
    assert f"1 × window of {c.sliding_window}, 1 × global" in page.text
    assert "no tokenizer" in page.text


def test_a_state_shows_its_arrays_and_how_full_they_are():
    state = carat.init_state(small_model.CONFIG, 2, 256)
    state = state.replace(length=state.length.at[1].set(192))
    ring, slots = (kv.v.shape[2] for kv in state.layers)
    page = shown(state)
    assert "RingKV(k=float32[2, 2, 128, 8], v=float32[2, 2, 128, 8])" in page.text
    assert "GlobalKV(v=float32[2, 1, 256, 16], k_rotated=float32[2, 1, 256, 4])" in page.text
    assert f"{ring} of {ring} slots" in page.text
    assert f"192 of {slots} slots" in page.text
    assert [width for width, _ in page.bars] == [0.0, 100.0, 0.0, 75.0]
    assert repr(state) == "KVState(2 layers, length=[0, 192])"


class Table(Drafter):
    """A drafter of one's own."""

    rows: jax.Array
    note: dict = struct.field(pytree_node=False)
    depth: int = struct.field(pytree_node=False, default=2)


def test_drafters_show_sizes():
    ids = jax.numpy.zeros((4, 300), jax.numpy.int32)
    assert repr(Table(ids, {})) == "Table(rows=int32[4, 300], depth=2)"
    assert repr(Ngram()) == "Ngram(max_ngram=3, min_ngram=1)"
    params = {"a": ids, "b": {"c": ids}}
    model = Model(params, small_model.CONFIG)
    assert repr(model) == "Model(params=2 arrays, 9.6 kB, temperature=0.0)"
    assert repr(Table(None, {})) == "Table(rows=None, depth=2)"


def test_a_tokenizer_shows_its_ids():
    assert repr(TOKENIZER) == "Tokenizer(365 ids, bos_id 2, eos_id 1, pad_id 0)"


def test_a_state_without_values_shows_shapes():
    state = carat.init_state(small_model.CONFIG, 1, 64)
    seen = []
    jax.jit(lambda state: seen.append((repr(state), shown(state))))(state)
    assert seen[0][0] == "KVState(2 layers, length=int32[1])"
    assert seen[0][1].bars == []
    assert "None" in repr(jax.tree.map(lambda _: None, state))
    for leaf in jax.tree.leaves(state):
        leaf.delete()
    assert repr(state) == "KVState(2 layers, length=int32[1])"
    assert "RingKV" in shown(state).text


def test_a_stream_prints_itself_in_a_notebook(capsys):
    pieces = [carat.Piece("one", [5]), carat.Piece(" two", [6, 7], GENERATION)]
    stream = Stream(piece for piece in pieces)
    assert repr(stream) == "Stream(not started, 0 tokens)"
    stream._ipython_display_()
    assert capsys.readouterr().out == "one two\n"
    assert list(stream) == []
    assert repr(stream) == "Stream(ended, 3 tokens)"


@pytest.mark.parametrize(("count", "words"), [(0, "0 B"), (999, "999 B"), (6_630_000, "6.63 MB")])
def test_sizes(count, words):
    assert display.size(count) == words


@pytest.fixture
def notebook(monkeypatch):
    """Makes this process look like a Jupyter kernel, with short patience; bars go to stderr."""
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setattr(display, "_PATIENCE", 0.02)


def test_a_notebook_says_what_takes_long(notebook, capsys):
    with display.waiting("compiling"):
        time.sleep(0.2)
    assert "compiling 00:00" in capsys.readouterr().err
    with display.waiting("compiling"):
        pass
    assert capsys.readouterr().err == ""
    with display.progress_bar(100, "loading", True) as bar:
        time.sleep(0.15)
        bar.update(50)
    assert "loading:  50%" in capsys.readouterr().err


def test_elsewhere_nothing_is_said(capsys, monkeypatch):
    monkeypatch.setattr(display, "_PATIENCE", 0.0)
    with display.waiting("compiling"), display.progress_bar(100, "loading", True) as bar:
        time.sleep(0.02)
        bar.update(100)
    assert capsys.readouterr() == ("", "")
