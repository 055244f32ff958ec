"""How an op chooses among its implementations."""

import jax.numpy as jnp
import pytest

import pallas_kernels
from pallas_kernels import Unsupported, dispatch


def takes_everything(x, scale=1):
    return x * scale


def refuses(x, scale=1):
    raise Unsupported(f"x {x.shape} is not a multiple of 64")


def breaks(x, scale=1):
    raise ZeroDivisionError("a fault of its own")


X = jnp.arange(3.0)


@pytest.mark.parametrize("name", [None, "first", "second"])
def test_none_takes_the_first_and_a_name_that_one(name):
    implementations = {"first": takes_everything, "second": lambda x, scale: -x * scale}
    out = dispatch.run(implementations, name, X, scale=2)
    assert out.tolist() == ([0, -2, -4] if name == "second" else [0, 2, 4])


def test_none_passes_over_those_that_refuse():
    implementations = {"a": refuses, "b": refuses, "c": takes_everything, "d": breaks}
    assert dispatch.run(implementations, None, X, scale=3).tolist() == [0, 3, 6]


def test_a_named_one_never_falls_back():
    with pytest.raises(Unsupported, match=r"^x \(3,\) is not a multiple of 64$"):
        dispatch.run({"a": refuses, "b": takes_everything}, "a", X)


def test_when_all_refuse_every_reason_is_told():
    with pytest.raises(Unsupported, match=r"a: x \(3,\) is not .*; b: x \(3,\) is not"):
        dispatch.run({"a": refuses, "b": refuses}, None, X)


@pytest.mark.parametrize("name", ["c", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match=f"implementation='{name}' does not exist: take 'a', 'b'"):
        dispatch.run({"a": refuses, "b": takes_everything}, name, X)


def test_a_fault_is_not_taken_for_a_refusal():
    with pytest.raises(ZeroDivisionError):
        dispatch.run({"a": breaks, "b": takes_everything}, None, X)


def test_unsupported_can_be_caught_as_not_implemented():
    assert issubclass(pallas_kernels.Unsupported, NotImplementedError)
    assert not issubclass(pallas_kernels.Unsupported, ValueError)
