"""How an op chooses among its implementations, and whose gradient it has."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from h200_lowering import lower_for_h200
from jax.experimental.pallas import mosaic_gpu as plgpu

import pallas_kernels
from pallas_kernels import PartialSums, Unsupported, dispatch, summed


def takes_everything(x, scale=1):
    return x * scale


def refuses(x, scale=1):
    raise Unsupported(f"x {x.shape} is not a multiple of 64")


def breaks(x, scale=1):
    raise ZeroDivisionError("a fault of its own")


X = jnp.arange(3.0)
INTERPRET = plgpu.InterpretGPUParams()


@pytest.mark.parametrize("name", [None, "first", "xla"])
def test_none_takes_the_first_and_a_name_that_one(name):
    implementations = {"first": takes_everything, "xla": lambda x, scale: -x * scale}
    out = dispatch.run(implementations, name, X, scale=2)
    assert out.tolist() == ([0, -2, -4] if name == "xla" else [0, 2, 4])


def test_none_passes_over_those_that_refuse():
    implementations = {"a": refuses, "b": refuses, "c": takes_everything, "xla": breaks}
    assert dispatch.run(implementations, None, X, scale=3).tolist() == [0, 3, 6]


def test_a_named_one_never_falls_back():
    with pytest.raises(Unsupported) as error:
        dispatch.run({"a": refuses, "xla": takes_everything}, "a", X)
    assert str(error.value) == "x (3,) is not a multiple of 64"


def test_when_all_refuse_every_reason_is_told():
    with pytest.raises(Unsupported, match=r"a: x \(3,\) is not .*; xla: x \(3,\) is not"):
        dispatch.run({"a": refuses, "xla": refuses}, None, X)


@pytest.mark.parametrize("name", ["c", ""])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    known = "take 'a', 'xla'"
    with pytest.raises(ValueError, match=f"implementation='{name}' does not exist: {known}"):
        dispatch.run({"a": refuses, "xla": takes_everything}, name, X)


def test_a_fault_is_not_taken_for_a_refusal():
    with pytest.raises(ZeroDivisionError):
        dispatch.run({"a": breaks, "xla": takes_everything}, None, X)


@pytest.mark.parametrize("name", [None, "kernel", "xla"])
def test_the_gradient_is_that_of_the_reference(name):
    """Through positional and named arrays, past None, integers and what is static."""

    def reference(x, nothing, n, *, weight, power):
        return (x**power * weight).sum() + n.sum()

    def kernel(x, nothing, n, *, weight, power):
        out = reference(x, nothing, n, weight=weight, power=power)
        return jax.lax.stop_gradient(out) + 0.5  # no gradient of its own, other values

    def f(x, weight):
        implementations = {"kernel": kernel, "xla": reference}
        n = jnp.arange(2)
        return dispatch.run(implementations, name, x, None, n, weight=weight, power=3)

    weight = jnp.asarray([1.0, -2.0, 0.5])
    value, (of_x, of_weight) = jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(X, weight)
    x, w = np.arange(3.0), np.asarray(weight)
    assert value == (x**3 * w).sum() + 1 + (0 if name == "xla" else 0.5)
    np.testing.assert_allclose(of_x, 3 * x**2 * w)
    np.testing.assert_allclose(of_weight, x**3)


@pytest.mark.parametrize("pieces", [0, 2])
def test_the_gradient_of_a_sum_is_that_of_each_of_its_pieces(pieces):
    """Where an implementation leaves in pieces what the reference has in one, or in others."""

    def reference(x, weight):
        y = x * weight
        if pieces:
            parts = jnp.stack([y / pieces] * pieces)
            return x.sum(), PartialSums(parts, jnp.dtype(jnp.bfloat16))
        return x.sum(), y.astype(jnp.bfloat16)

    def kernel(x, weight):
        y = x * weight
        return x.sum(), PartialSums(jnp.stack([y / 4, y / 2, y / 4]), jnp.dtype(jnp.bfloat16))

    def loss(x, weight):
        total, y = dispatch.run({"kernel": kernel, "xla": reference}, "kernel", x, weight)
        return 5 * total + (summed(y).astype(jnp.float32) * jnp.asarray([1.0, 2.0, -4.0])).sum()

    weight = jnp.asarray([1.0, -2.0, 0.5])
    of_x, of_weight = jax.grad(loss, argnums=(0, 1))(X, weight)
    np.testing.assert_array_equal(of_x, [5 + 1, 5 - 4, 5 - 2])
    np.testing.assert_array_equal(of_weight, [0, 2, -8])


def test_a_hopper_gpu_is_known_by_the_device_that_is_lowered_for():
    seen = []
    lower_for_h200(lambda x: seen.append(dispatch.require_hopper()) or x, X)
    assert seen == [132]


def test_any_other_device_is_named():
    cpu = jax.devices("cpu")[0]
    refused = pytest.raises(Unsupported, match=r"Hopper GPU .*, not 'cpu'")
    with jax.default_device(cpu), refused:
        dispatch.require_hopper()


def test_the_interpreter_takes_the_blocks_given_and_a_gpu_its_multiprocessors():
    seen = [dispatch.thread_blocks(3, INTERPRET)]
    lower_for_h200(lambda x: seen.append(dispatch.thread_blocks(None, None)) or x, X)
    assert seen == [3, 132]


@pytest.mark.parametrize(
    ("blocks", "interpret", "message"),
    [
        (None, INTERPRET, "blocks=None with interpret: give how many"),
        (0, INTERPRET, "blocks=0 with interpret: .* at least 1"),
        (66, None, "blocks=66 without interpret: leave it out"),
    ],
)
def test_blocks_go_with_the_interpreter(blocks, interpret, message):
    with pytest.raises(ValueError, match=message):
        dispatch.thread_blocks(blocks, interpret)


def test_unsupported_can_be_caught_as_not_implemented():
    assert issubclass(pallas_kernels.Unsupported, NotImplementedError)
    assert not issubclass(pallas_kernels.Unsupported, ValueError)
