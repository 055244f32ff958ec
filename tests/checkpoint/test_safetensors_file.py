"""Reading safetensors files: what the format's own library wrote, and what no one should."""

import io
import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st
from small_checkpoint import TINY, join_file, split_file, write

from carat_jax.checkpoint import CheckpointError, load_params
from carat_jax.checkpoint.safetensors_file import DTYPES, read_box, read_header
from carat_jax.config import GemmaConfig

RNG = np.random.default_rng(0)
TENSORS = {
    "a": RNG.standard_normal((3, 4)).astype(np.float32),
    "b": RNG.standard_normal((2, 5, 2)).astype(ml_dtypes.bfloat16),
    "empty": np.zeros((0, 7), np.float32),
    "scalar": np.array(2.5, np.float32),
}


@pytest.fixture
def file(tmp_path) -> Path:
    safetensors.numpy.save_file(TENSORS, tmp_path / "x.safetensors", metadata={"format": "pt"})
    return tmp_path / "x.safetensors"


def test_what_the_library_wrote(file):
    infos = read_header(file)
    assert infos.keys() == TENSORS.keys()
    for name, expected in TENSORS.items():
        info = infos[name]
        assert info.shape == expected.shape and info.nbytes == expected.nbytes
        values = np.empty(info.shape, DTYPES[info.dtype])
        read_box(info, info.shape, (0,) * len(info.shape), values)
        assert values.dtype == expected.dtype
        assert values.tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    ("name", "view", "box"),
    [
        ("a", (3, 4), np.s_[1:3, :]),
        ("a", (3, 4), np.s_[0:3, 1:3]),
        ("a", (3, 2, 2), np.s_[1:2, 0:2, 1:2]),
        ("b", (2, 5, 2), np.s_[1:2, 2:5, :]),
        ("b", (20,), np.s_[3:9,]),
    ],
)
def test_a_box_of_a_view(file, name, view, box):
    expected = TENSORS[name].reshape(view)[box]
    values = np.empty(expected.shape, expected.dtype)
    read_box(read_header(file)[name], view, tuple(s.start or 0 for s in box), values)
    assert values.tobytes() == expected.tobytes()


def test_nothing_but_the_box_is_read(file, monkeypatch):
    info, seen = read_header(file)["a"], []

    class Spy(io.FileIO):
        def readinto(self, buffer):
            seen.append((self.tell() - info.offset, len(buffer)))
            return super().readinto(buffer)

    monkeypatch.setattr(type(file), "open", lambda self, *_, **__: Spy(self))
    read_box(info, (3, 4), (1, 2), np.empty((2, 2), np.float32))
    assert seen == [(24, 8), (40, 8)]


def test_a_file_cut_after_its_header_was_read(file):
    info = read_header(file)["a"]
    with file.open("r+b") as stream:
        stream.truncate(info.offset + 20)
    with pytest.raises(CheckpointError, match="ended early"):
        read_box(info, (3, 4), (0, 0), np.empty((3, 4), np.float32))


def test_every_truncation(file):
    content = file.read_bytes()
    for length in range(len(content)):
        file.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"x\.safetensors"):
            read_header(file)


def entry(**change: object) -> dict:
    return {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | change}


@pytest.mark.parametrize(
    "header",
    [
        [],
        "text",
        None,
        5,
        {"t": []},
        {"t": None},
        {"t": {}},
        entry(dtype="F33"),
        entry(dtype=None),
        entry(dtype=["F32"]),
        entry(dtype={"F32": 1}),
        entry(shape=None),
        entry(shape=2),
        entry(shape="2"),
        entry(shape=[2.0]),
        entry(shape=[-2]),
        entry(shape=[True, 2]),
        entry(shape=[[2]]),
        entry(shape=[2, 2]),
        entry(shape=[2**62, 4]),
        entry(shape=[2**61] * 9),
        entry(shape=[10**400]),
        entry(data_offsets=None),
        entry(data_offsets=[0]),
        entry(data_offsets=[0, 8, 8]),
        entry(data_offsets=[8, 0]),
        entry(data_offsets=[-8, 0]),
        entry(data_offsets=[0, 4]),
        entry(data_offsets=[4, 12]),
        entry(data_offsets=["0", "8"]),
        entry(data_offsets=[0.0, 8.0]),
        entry(data_offsets=[2**63, 2**63 + 8]),
        entry() | {"u": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}},  # overlap
        entry() | {"u": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},  # the same bytes
        entry(shape=[1], data_offsets=[0, 4]),  # four bytes belong to no tensor
        b"",
        b"{",
        b"{}x",
        b"\xff\xff\xff\xff",
        b"\xff\xfe{\x00}\x00",  # UTF-16
        b"[" * 50_000,
        b'{"t":' * 50_000,
        b'{"t": {"dtype": "F32", "shape": [' + b"9" * 5_000 + b'], "data_offsets": [0, 8]}}',
        b'{"t": {"dtype": "F32", "shape": [NaN], "data_offsets": [0, 8]}}',
        b'{"t": {"dtype": "F32", "shape": [2], "data_offsets": [0, Infinity]}}',
        json.dumps(entry()).encode()[:-1] + b"," + json.dumps(entry()).encode()[1:],  # "t" twice
    ],
    ids=lambda header: str(header)[:70],
)
def test_lying_headers(tmp_path, header):
    file = tmp_path / "x.safetensors"
    file.write_bytes(join_file(header, bytes(8)))
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_header(file)


def test_the_test_above_lies_about_a_sound_file(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(join_file(entry(), bytes(8)))
    assert read_header(tmp_path / "x.safetensors")["t"].shape == (2,)


@pytest.mark.parametrize("length", [0, 1, 9, 10**6, 100_000_001, 2**40, 2**63, 2**64 - 1])
def test_lying_header_lengths(tmp_path, length):
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", length) + b'{"a": 1}')
    with pytest.raises(CheckpointError, match=r"x\.safetensors"):
        read_header(tmp_path / "x.safetensors")


NUMBERS = st.integers(-2, 2**70) | st.integers(-2, 200) | st.floats() | st.booleans()
ANYTHING = st.recursive(
    st.none() | NUMBERS | st.text(max_size=5) | st.sampled_from(["F16", "BF16", "F32"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> tuple[Path, bytes]:
    folder = tmp_path_factory.mktemp("tiny")
    write(folder, TINY)
    return folder, (folder / "model.safetensors").read_bytes()


def load_or_refuse(folder: Path) -> None:
    try:
        params = load_params(folder, GemmaConfig.from_dict(TINY), progress=False)
    except CheckpointError as error:
        assert str(folder) in str(error)
    else:
        assert params["embed_tokens"].shape == (12, 8)


@given(data=st.data())
def test_a_changed_header_loads_or_is_refused(tiny, data):
    folder, content = tiny
    header, values = split_file(content)
    for _ in range(data.draw(st.integers(1, 3))):
        name = data.draw(st.sampled_from(sorted(header)))
        action = data.draw(st.sampled_from(["drop", "rename", "replace", "change", "nudge"]))
        if action in ("drop", "rename"):
            moved = header.pop(name)
            if action == "rename":
                header[data.draw(st.text(max_size=30))] = moved
        elif action == "replace" or not isinstance(header[name], dict) or not header[name]:
            header[name] = data.draw(ANYTHING)
        else:
            key = data.draw(st.sampled_from(sorted(header[name])))
            old = header[name][key]
            if action == "nudge" and isinstance(old, list) and old:
                old[data.draw(st.integers(0, len(old) - 1))] = data.draw(NUMBERS)
            else:
                header[name][key] = data.draw(ANYTHING)
        if not header:
            break
    (folder / "model.safetensors").write_bytes(join_file(header, values))
    load_or_refuse(folder)


@given(data=st.data())
def test_changed_bytes_load_or_are_refused(tiny, data):
    folder, content = tiny
    start = 8 + struct.unpack("<Q", content[:8])[0]
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 4))):
        changed[data.draw(st.integers(0, start - 1))] = data.draw(st.integers(0, 255))
    (folder / "model.safetensors").write_bytes(changed)
    load_or_refuse(folder)
