# SPDX-License-Identifier: MIT
"""Gradients of cunorm.torch's functions in every mode of autograd, and the saved tensors."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest

from tests.support.calls import record_launches

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
functional = torch.nn.functional

import cunorm.torch as ct  # noqa: E402
from cunorm.results import GroupNormGrads, NormGrads  # noqa: E402
from tests.support.bounds import check_backward  # noqa: E402
from tests.support.group_bounds import check_group_backward  # noqa: E402
from tests.support.operands import draw  # noqa: E402
from tests.support.torch_cases import (  # noqa: E402
    CASES,
    Watch,
    case,
    factors,
    gradients,
    operands,
    tensor,
)

modes = pytest.mark.parametrize("mode", [nullcontext, Watch], ids=["recorded", "operator"])


@pytest.mark.parametrize("name", CASES)
def test_first_and_second_derivatives_are_those_of_finite_differences(name):
    call, tensors = case(name)
    assert torch.autograd.gradcheck(call, tensors, rtol=1e-5)
    recorded = gradients(call, tensors, create_graph=True)
    for mine, kernels in zip(recorded, gradients(call, tensors), strict=True):
        np.testing.assert_allclose(mine.detach(), kernels, rtol=1e-10, atol=1e-12)
    assert torch.autograd.gradgradcheck(call, tensors, rtol=1e-5, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("mean", [0.0, 1e2, 1e4, 1e6])
@pytest.mark.parametrize("shape", [(16, 8), (4, 1000), (4, 32, 9, 11)])
def test_with_create_graph_gradients_far_from_0_are_within_the_kernels_bounds(shape, mean):
    is_rows, options = len(shape) == 2, {"eps": 1e-5}
    arrays = draw("x", shape, "float32", mean=mean), draw("dy", shape, "float32")
    parameters = [draw(name, shape[1], "float32") for name in ("weight", "bias")]
    x, dy, *rest = map(torch.tensor, (*arrays, *parameters))
    leaves = [one.requires_grad_() for one in (x, *rest)]
    y = ct.layer_norm(*leaves) if is_rows else ct.group_norm(x, 8, *rest)
    found = torch.autograd.grad(y, leaves, dy, create_graph=True)
    found = [one.detach().numpy() for one in found]
    if is_rows:
        grads = NormGrads(*found, None, None)
        check_backward(grads, *arrays[::-1], *parameters, center=True, **options)
    else:
        given = (*arrays[::-1], 8, *parameters)
        check_group_backward(GroupNormGrads(*found), *given, channel_axis=1, **options)


@pytest.mark.parametrize("name", ["add_normalize", "group_norm"])
def test_the_gradient_of_one_operand_is_the_same_alone_and_among_all(name):
    call, tensors = case(name)
    for index, expected in enumerate(gradients(call, tensors)):
        others = [other.detach() for other in tensors]

        def call_on_one(one, index=index, others=others):
            return call(*others[:index], one, *others[index + 1 :])

        for mode in (nullcontext(), Watch()):
            with mode:
                assert torch.equal(*gradients(call_on_one, (tensors[index],)), expected)


def test_only_gradients_that_are_required_are_computed(monkeypatch):
    seen = record_launches(monkeypatch)
    x, weight, bias = tensor("x", 4, 8, grad=False), tensor("weight", 8), tensor("bias", 8)
    ct.layer_norm(x, weight, bias.detach()).backward(torch.ones_like(x))
    backward = seen[-1]
    assert backward.dweight is not None
    assert (backward.dx, backward.dbias, backward.dgate) == (None, None, None)
    assert x.grad is None


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)])
def test_one_of_two_results_is_enough_for_a_backward(used):
    def grads(function):
        _, tensors = case("add_rms_norm")
        results = function(*tensors)
        torch.autograd.backward([results[n] for n in used], [factors(results[n]) for n in used])
        return [one.grad for one in tensors]

    def formula(x, residual, weight):
        stream = x + residual
        return functional.rms_norm(stream, weight.shape, weight, 1e-6), stream

    found = grads(ct.add_rms_norm)
    assert found[0].data_ptr() != found[1].data_ptr()  # each has its own memory
    for one, other in zip(found, grads(formula), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-13)


def test_a_tensor_that_is_two_operands_gets_both_gradients():
    x = tensor("x", 4, 8)
    y = ct.rms_norm(x, gate=x)
    (expected,) = torch.autograd.grad(
        (functional.rms_norm(x, (8,), eps=1e-6) * functional.silu(x)).sum(), x
    )
    for recorded in (True, False):
        (found,) = torch.autograd.grad(y.sum(), x, create_graph=recorded, retain_graph=True)
        np.testing.assert_allclose(found.detach(), expected, rtol=1e-12, atol=1e-12)


def test_the_gradient_of_x_is_not_rounded_to_the_streams_dtype_on_the_way():
    x, residual = tensor("x", 4, 64, dtype="float32"), tensor("r", 4, 64, dtype="float16")
    small = (x.detach() / 1000).requires_grad_()
    y, stream = ct.add_rms_norm(small, residual * 0, eps=1e-12)
    factors = [100 * torch.ones_like(y), torch.ones_like(stream)]
    (kernels,) = torch.autograd.grad((y, stream), small, factors, retain_graph=True)
    (recorded,) = torch.autograd.grad((y, stream), small, factors, create_graph=True)
    assert kernels.abs().max() > torch.finfo(torch.float16).max / 8
    error = (kernels - recorded.detach()).abs().max() / kernels.abs().max()
    assert error < 64 * 2**-24  # some float32 roundings, none of float16


@modes
def test_a_stream_of_operands_without_gradients_has_none(mode):
    x, residual, weight = tensor("x", 4, 8), tensor("residual", 4, 8), tensor("weight", 8)
    with mode():
        y, stream = ct.add_rms_norm(x.detach(), residual.detach(), weight)
        assert (y.requires_grad, stream.requires_grad) == (True, False)
        assert ct.add_rms_norm(x.detach(), residual, weight).residual.requires_grad


@pytest.mark.parametrize("name", ["add_normalize", "layer_norm", "channels last"])
def test_a_batch_of_gradients_equals_the_gradients_of_its_items(name):
    """torch.autograd.functional.jacobian(vectorize=True) makes such batches."""
    call, tensors = case(name)
    results = call(*tensors)
    batches = [torch.stack([one.detach().cos(), one.detach().sin()]) for one in results]
    options = {"retain_graph": True}
    found = torch.autograd.grad(results, tensors, batches, is_grads_batched=True, **options)
    for item in range(2):
        expected = torch.autograd.grad(results, tensors, [b[item] for b in batches], **options)
        assert all(torch.equal(mine[item], its) for mine, its in zip(found, expected, strict=True))


@modes
@pytest.mark.parametrize("name", ["add_rms_norm", "group_norm"])
def test_gradients_that_are_negated_views_are_read_correctly(name, mode):
    call, (x, *rest) = case(name)
    numbers = torch.complex(tensor("re", *x.shape, grad=False), tensor("im", *x.shape, grad=False))
    dy, plain = numbers.conj().imag, -numbers.imag
    assert dy.is_neg()
    with mode():
        results = call(x, *rest)
        found, expected = (
            torch.autograd.grad(results, x, [one] * len(results), retain_graph=True)[0]
            for one in (dy, plain)
        )
    assert torch.equal(found, expected)


def test_dtypes_of_results_and_gradients_are_those_of_their_operands():
    dtypes = {"x": "bfloat16", "residual": "float32", "weight": "float32", "gate": "float16"}
    narrow = {n: tensor(n, *[4, 64][n == "weight" :], dtype=d) for n, d in dtypes.items()}
    wider = {name: one.detach().double().requires_grad_() for name, one in narrow.items()}
    y, stream = ct.add_rms_norm(**narrow)
    assert (y.dtype, stream.dtype) == (torch.bfloat16, torch.float32)
    (y.float().sum() + stream.sum()).backward()
    sum(one.sum() for one in ct.add_rms_norm(**wider)).backward()
    for name, one in narrow.items():
        assert one.grad.dtype is one.dtype
        # The bound is a few float32 roundings plus half an ulp of the gradient's own dtype.
        tolerance = torch.finfo(one.dtype).eps / 2 + 64 * 2**-24
        exact = wider[name].grad
        assert (one.grad.double() - exact).abs().max() <= tolerance * exact.abs().max()
    for spec in (torch.float32, "float32", np.float32):
        y = ct.rms_norm(narrow["x"], dtype=spec)
        assert y.dtype is torch.float32
        assert torch.autograd.grad(y.sum(), narrow["x"])[0].dtype is torch.bfloat16


def test_gradients_of_transposed_and_of_expanded_tensors_are_right():
    x, weight = tensor("x", 4, 3, 8), tensor("weight", 8)
    assert torch.autograd.gradcheck(ct.rms_norm, (x.transpose(0, 1), weight))
    assert torch.autograd.gradcheck(lambda x: ct.rms_norm(x[:, :1].expand(4, 5, 8)), x)


# --- memory ---------------------------------------------------------------------------------------

# Each case, and the shapes of its saved statistics.
KEPT = {
    "rms_norm": [(2, 4)],
    "groups": [(2, 4, 2)],
    "add_rms_norm": [(2, 4)],
    "layer_norm": [(2, 4)] * 2,
    "l2_norm": [(2, 4, 3)],
    "group_norm": [(2, 2)] * 2,
    "channels last": [(2, 2)] * 2,
}
kept = pytest.mark.parametrize("name", KEPT)


class RecordedCall:
    """A call with its operands, its results, the results' gradients, and its backward."""

    def __init__(self, name):
        self.operands = operands(name)
        self.results = case(name)[0](*self.operands.values())
        self.arriving = list(map(factors, self.results))
        # the normalised tensor: x, or the new stream
        self.normalised = self.results[1] if len(self.results) > 1 else self.operands["x"]

    def backward(self):
        found = torch.autograd.grad(self.results, list(self.operands.values()), self.arriving)
        return dict(zip(self.operands, found, strict=True))


@kept
def test_only_the_normalised_tensor_statistics_gate_and_parameters_are_saved_unchanged(name):
    seen = []
    hooks = lambda one: seen.append(one) or one, lambda one: one
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        recorded = RecordedCall(name)
    named = [
        recorded.operands[key] for key in ("weight", "bias", "gate") if key in recorded.operands
    ]
    expected = {one.data_ptr() for one in (recorded.normalised, *named)}
    assert expected <= {one.data_ptr() for one in seen}
    statistics = [one for one in seen if one.data_ptr() not in expected]
    assert [one.shape for one in statistics] == KEPT[name]
    # No other array is saved, and no array is saved twice.
    size = sum(one.nbytes for one in (recorded.normalised, *named, *statistics))
    assert sum(one.nbytes for one in seen) == size

    given = [*recorded.arriving, *recorded.results]
    before = [(one, one.detach().clone(), one._version) for one in given]
    before += [(recorded.operands[key], one, one._version) for key, one in operands(name).items()]
    recorded.backward()
    for one, numbers, version in before:
        assert torch.equal(one, numbers)
        assert one._version == version


@kept
@modes
def test_kernels_get_the_callers_own_memory(name, mode, monkeypatch):
    seen = record_launches(monkeypatch)
    with mode():
        recorded = RecordedCall(name)
        gradients = recorded.backward()
    there, back = seen
    expected = {"y": recorded.results[0], **recorded.operands}
    read = {"dy": recorded.arriving[0], "x": recorded.normalised, "dx": gradients["x"]}
    for key in {"weight", "bias", "gate"} & recorded.operands.keys():
        read |= {key: recorded.operands[key], f"d{key}": gradients[key]}
    if len(recorded.results) > 1:
        expected["residual_out"], read["dresidual_out"] = recorded.results[1], recorded.arriving[1]
    for call, arrays in ((there, expected), (back, read)):
        for key, one in arrays.items():
            assert getattr(call, key).pointer == one.data_ptr(), key


@pytest.mark.parametrize("compiled", [False, True])
def test_the_streams_gradient_is_not_rounded_to_xs_dtype(compiled):
    norm = torch.compile(ct.add_rms_norm, backend="aot_eager") if compiled else ct.add_rms_norm
    x = torch.randn(5, 8, dtype=torch.bfloat16, requires_grad=True)
    residual, weight = torch.randn(5, 8, requires_grad=True), torch.ones(8)
    y, stream = norm(x, residual, weight)
    torch.autograd.backward([y, stream], [torch.randn_like(y), torch.randn_like(stream)])
    assert (residual.grad != residual.grad.bfloat16()).any()
    torch.testing.assert_close(x.grad, residual.grad.bfloat16(), rtol=0, atol=0)
