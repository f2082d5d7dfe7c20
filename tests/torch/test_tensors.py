# SPDX-License-Identifier: MIT
"""cunorm.torch on tensors that are not plain memory, as operands and as gradients."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
functional = torch.nn.functional

import cunorm.torch as ct  # noqa: E402
from cunorm.torch._tensors import refusal  # noqa: E402
from tests.support.torch_cases import CASES, Watch, case, factors, tensor  # noqa: E402

# PyTorch warns about prototypes and in forward mode
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),
]

NAMES = ["add_normalize", "layer_norm", "group_norm", "channels last"]


class Parameter(torch.nn.Parameter):
    """A parameter class like those that libraries define to recognise their parameters."""


class Trivial(torch.Tensor):
    """A tensor class that adds nothing."""


class Seen(torch.Tensor):
    """A tensor class that sees the functions that are called on its tensors."""

    names: list[str] = []  # noqa: RUF012  # one list, for all

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.names.append(str(func))
        return super().__torch_function__(func, types, args, kwargs or {})


class Wrapper(torch.Tensor):
    """A tensor class that stores its numbers in another tensor."""

    @staticmethod
    def __new__(cls, elem):
        options = {"dtype": elem.dtype, "strides": elem.stride()}
        return torch.Tensor._make_wrapper_subclass(cls, elem.shape, **options)

    def __init__(self, elem):
        self.elem = elem

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        plain = [one.elem if isinstance(one, cls) else one for one in args]
        return func(*plain, **kwargs or {})


def negated(plain):
    """Return a tensor with these numbers; its memory holds their negatives."""
    return torch.complex(torch.zeros_like(plain), -plain).conj().imag


def left_by_a_transform(plain):
    left = []
    torch.func.grad(lambda x: left.append(x) or x.sum())(plain)
    return left[0]


ALIKE = {  # tensors of the same numbers
    "of a class of parameters": lambda x: Parameter(x, requires_grad=x.requires_grad),
    "of a trivial class": lambda x: x.as_subclass(Trivial),
    "of a class that sees functions": lambda x: x.as_subclass(Seen),
    "a wrapper": Wrapper,
    "lazily negated": negated,
    "left by a transform": left_by_a_transform,
}
alike = pytest.mark.parametrize("kind", ALIKE)


def found(call, tensors, douts=None, **options):
    """Return results and gradients of a call; `douts` converts the incoming gradients."""
    results = call(*tensors)
    arriving = [(douts or (lambda one: one))(factors(one.detach())) for one in results]
    return [*results, *torch.autograd.grad(results, tensors, arriving, **options)]


def assert_same(actual, expected):
    for one, other in zip(actual, expected, strict=True):
        assert torch.equal(one.detach().as_subclass(torch.Tensor), other.detach())


@alike
@pytest.mark.parametrize("name", NAMES)
def test_operands_of_the_same_numbers_give_the_same_results_and_gradients(name, kind):
    call, tensors = case(name)
    values = [one.detach() for one in tensors]
    expected = found(call, tensors)
    if kind == "a wrapper":
        assert_same(call(*map(ALIKE[kind], values)), expected[: -len(tensors)])
        return
    given = [one.clone().requires_grad_() for one in values]

    def convert(*plain):
        return call(*map(ALIKE[kind], plain))

    if kind == "of a class of parameters":  # parameters are leaves
        given = [ALIKE[kind](one).requires_grad_() for one in values]
        convert = call
    assert_same(found(convert, given), expected)


@alike
@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_the_same_numbers_may_arrive_in_any_form(name, kind):
    call, tensors = case(name)
    for given in (None, ALIKE[kind]):
        with torch.autograd.set_multithreading_enabled(False):
            results = found(call, tensors, given)
        if given is None:
            expected = results
    assert_same(results, expected)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_gradient_of_zeros_without_memory_is_zeros(name, create_graph):
    call, tensors = case(name)
    results = call(*tensors)
    zeros = [torch._efficientzerotensor(one.shape, dtype=one.dtype) for one in results]
    for one in torch.autograd.grad(results, tensors, zeros, create_graph=create_graph):
        assert not one.any()


@pytest.mark.parametrize("name", NAMES)
def test_expanded_gradients_are_read_where_they_are(name):
    call, tensors = case(name)

    def expanded(one):
        return one.flatten()[1].expand(one.shape)

    dense = found(call, tensors, lambda one: expanded(one).clone())
    assert_same(found(call, tensors, expanded), dense)


def test_a_sparse_gradient_is_refused_by_name():
    table = tensor("x", 5, 6)
    y = functional.embedding(torch.tensor([1, 3]), ct.rms_norm(table), sparse=True)
    with pytest.raises(ValueError, match=r"^rms_norm: dy has layout torch\.sparse_coo, expected"):
        y.sum().backward()


@pytest.mark.parametrize("kind", ["of a trivial class", "a wrapper", "lazily negated"])
def test_hooks_may_unpack_another_form_of_a_saved_tensor(kind):
    call, tensors = case("add_normalize")
    expected = found(call, tensors)
    hooks = (lambda one: one.detach().clone(), ALIKE[kind])
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        results = call(*tensors)
    arriving = [factors(one) for one in results]
    gradients = torch.autograd.grad(results, tensors, arriving)
    assert_same([*results, *gradients], expected)


def test_a_mode_sees_the_backward_of_a_call_that_it_did_not_see():
    x = tensor("x", 4, 8)
    y = ct.rms_norm(x)
    with Watch() as watch:
        (found,) = torch.autograd.grad(y, x, factors(y))
    assert [operator.name() for operator, _ in watch.seen] == ["cunorm::row_norm_backward"]
    assert torch.equal(found, torch.autograd.grad(ct.rms_norm(x), x, factors(y))[0])


def test_results_have_the_class_that_torchs_norms_have():
    for kind in (Parameter, Trivial, Seen):
        given = tensor("x", 4, 8, grad=False).as_subclass(kind)
        assert type(ct.layer_norm(given)) is type(functional.layer_norm(given, (8,)))
    Seen.names.clear()
    ct.rms_norm(tensor("x", 4, 8, grad=False).as_subclass(Seen))
    assert any("cunorm.row_norm_forward" in name for name in Seen.names)


@pytest.mark.parametrize("kind", ["of a class of parameters", "lazily negated"])
def test_second_derivatives_do_not_depend_on_the_form_of_a_parameter(kind):
    x, weight = tensor("x", 4, 6), tensor("weight", 6)

    def second(weight):
        y = ct.layer_norm(x, weight)
        (dx,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        return torch.autograd.grad(dx.square().sum(), x)[0]

    np.testing.assert_allclose(second(ALIKE[kind](weight)), second(weight), rtol=1e-12)


# --- meta tensors, which have shapes alone --------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_meta_tensors_have_the_shapes_and_dtypes_of_results_and_gradients(name):
    call, tensors = case(name)
    empty = [one.detach().to("meta").requires_grad_() for one in tensors]
    for one, other in zip(found(call, empty), found(call, tensors), strict=True):
        assert (one.is_meta, one.dtype, one.shape) == (True, other.dtype, other.shape)
        assert one.stride() == other.stride()


def test_wrong_meta_operands_are_errors_that_name_them():
    x = torch.ones(3, 8, device="meta")
    for call, text in {
        lambda: ct.rms_norm(x, torch.ones(7, device="meta")): r"rms_norm: weight has shape \(7,\)",
        lambda: ct.rms_norm(x, torch.ones(8)): "rms_norm: weight is on cpu, expected meta",
        lambda: ct.rms_norm(torch.ones(3, 8), x[0]): "rms_norm: weight is on meta, expected cpu",
        lambda: ct.group_norm(x, 3): "group_norm: num_groups is 3, expected a divisor of 8",
        lambda: ct.rms_norm(x, x[0].int()): "rms_norm: weight is int32, expected float16",
    }.items():
        with pytest.raises((TypeError, ValueError), match=f"^{text}"):
            call()


def test_modules_that_are_made_on_meta_run_there():
    with torch.device("meta"):
        norms = ct.RMSNorm(8), ct.LayerNorm(8), ct.GroupNorm(2, 8), ct.AddRMSNorm(8)
        x = torch.ones(3, 8, requires_grad=True)
    for norm in (*norms, ct.GatedRMSNorm(8).to("meta")):
        y = norm(x)
        y = y if isinstance(y, torch.Tensor) else y.y
        y.sum().backward()
        assert y.is_meta and y.shape == (3, 8)
        assert all(p.grad.is_meta and p.grad.shape == p.shape for p in (x, *norm.parameters()))


# --- tensors that are refused ---------------------------------------------------------------------


def jagged(*lengths):
    return torch.nested.nested_tensor([torch.ones(n, 8) for n in lengths], layout=torch.jagged)


REFUSED = {
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)]),
    "jagged": lambda: jagged(2, 3),
    "sparse": lambda: torch.eye(8).to_sparse(),
    "compressed": lambda: torch.eye(8).to_sparse_csr(),
    "complex": lambda: torch.ones(3, 8, dtype=torch.complex64),
    "conjugated": lambda: torch.ones(3, 8, dtype=torch.complex64).conj(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3, 8), 0.1, 0, torch.qint8),
    "whole numbers": lambda: torch.ones(3, 8, dtype=torch.int64),
    "without a shape yet": torch.nn.parameter.UninitializedParameter,
}


@pytest.mark.parametrize("what", REFUSED)
def test_tensors_that_cannot_be_operands_are_refused_by_name(what):
    wrong = REFUSED[what]()
    assert refusal(None, torch.ones(1), wrong)
    for call in (ct.rms_norm, lambda x: ct.group_norm(x, 2), lambda x: ct.rms_norm(X, gate=x)):
        with pytest.raises((TypeError, ValueError), match=r"^(rms|group)_norm: (x|gate) (has|is) "):
            call(wrong)


OWN = {"RMSNorm": (8,), "LayerNorm": (8,), "AddRMSNorm": (8,), "GatedRMSNorm": (8,)}
WRONG = {**REFUSED, "an array": lambda: np.ones((3, 7)), "a list": lambda: [1.0]}
del WRONG["without a shape yet"]  # PyTorch raises its own errors


@pytest.mark.parametrize("kind", [*OWN, "GroupNorm"])
@pytest.mark.parametrize("what", [*WRONG, "nothing"])
def test_modules_refuse_wrong_tensors_as_the_functions_do(what, kind):
    wrong = WRONG[what]() if what in WRONG else None
    with pytest.raises((TypeError, ValueError), match=r"^\w+_norm: x (has|is) (?!shape)"):
        getattr(ct, kind)(*OWN.get(kind, (2, 8)))(wrong)


@pytest.mark.parametrize("what", ["nested", "jagged", "sparse", "compressed"])
def test_an_error_names_a_conversion_to_a_dense_tensor(what):
    wrong = REFUSED[what]()
    with pytest.raises(ValueError, match="expected a dense tensor: pass ") as caught:
        ct.rms_norm(wrong)
    dense = eval(str(caught.value).split(": pass ")[1], {"torch": torch, "x": wrong})
    assert ct.rms_norm(dense).shape == dense.shape


X = torch.ones(3, 8)


def test_tensors_that_kernels_can_read_are_not_refused():
    taken = [*(make(torch.ones(3, 8)) for kind, make in ALIKE.items() if kind != "a wrapper")]
    taken += [X.to("meta"), X.bfloat16(), torch._efficientzerotensor((3, 8))]
    assert refusal(*taken) is None
    assert all(ct.rms_norm(one).shape == (3, 8) for one in taken)
    assert "Wrapper" in refusal(Wrapper(X))  # its operators may do anything
