# SPDX-License-Identifier: MIT
"""cunorm.torch on tensors that are not plain memory, as operands and as gradients."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
functional = torch.nn.functional

import cunorm.torch as ct  # noqa: E402
from cunorm.torch._tensors import refusal  # noqa: E402
from tests.support.torch_cases import CASES, Watch, case, factors, tensor  # noqa: E402
from tests.support.torch_norms import WIDTH, Mixer  # noqa: E402

# PyTorch warns about prototypes and in forward mode
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),
]


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


ALIKE = {  # tensors of the same numbers
    "of a class of parameters": Parameter,
    "of a trivial class": lambda x: x.as_subclass(Trivial),
    "of a class that sees functions": lambda x: x.as_subclass(Seen),
    "a wrapper": Wrapper,
    "lazily negated": negated,
}


def found(call, tensors):
    """Return results and gradients of a call."""
    results = call(*tensors)
    arriving = [factors(one.detach()) for one in results]
    return [*results, *torch.autograd.grad(results, tensors, arriving)]


@pytest.mark.parametrize("name", ["add_normalize", "layer_norm", "group_norm", "channels last"])
def test_a_wrapper_of_the_same_numbers_gives_the_same_results(name):
    call, tensors = case(name)
    for one, other in zip(
        call(*(Wrapper(one.detach()) for one in tensors)), call(*tensors), strict=True
    ):
        assert torch.equal(one.as_subclass(torch.Tensor), other)


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
    gradients = torch.autograd.grad(results, tensors, [factors(one) for one in results])
    assert all(map(torch.equal, [*results, *gradients], expected))


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
        model, x = Mixer(), torch.ones(3, WIDTH, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.is_meta and y.shape == x.shape
    assert all(p.grad.is_meta and p.grad.shape == p.shape for p in (x, *model.parameters()))


# --- tensors that are refused ---------------------------------------------------------------------


LENGTHS = [torch.ones(2, 8), torch.ones(3, 8)]
REFUSED = {
    "nested": lambda: torch.nested.nested_tensor(LENGTHS),
    "jagged": lambda: torch.nested.nested_tensor(LENGTHS, layout=torch.jagged),
    "sparse": lambda: torch.eye(8).to_sparse(),
    "compressed": lambda: torch.eye(8).to_sparse_csr(),
    "complex": lambda: torch.ones(3, 8, dtype=torch.complex64),
    "conjugated": lambda: torch.ones(3, 8, dtype=torch.complex64).conj(),
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(3, 8), 0.1, 0, torch.qint8),
    "whole numbers": lambda: torch.ones(3, 8, dtype=torch.int64),
    "without a shape yet": torch.nn.parameter.UninitializedParameter,
    "an array": lambda: np.ones((3, 7)),
    "a list": lambda: [1.0],
    "nothing": lambda: None,
}
FUNCTIONS = [ct.rms_norm, lambda x: ct.group_norm(x, 2), lambda x: ct.rms_norm(X, gate=x)]
MODULES = [ct.RMSNorm(8), ct.LayerNorm(8), ct.AddRMSNorm(8), ct.GatedRMSNorm(8)]
MODULES += [ct.GroupNorm(2, 8)]


@pytest.mark.parametrize("what", REFUSED)
def test_functions_and_modules_refuse_what_cannot_be_an_operand_by_name(what):
    wrong = REFUSED[what]()
    assert not isinstance(wrong, torch.Tensor) or refusal(None, torch.ones(1), wrong)
    calls = [*(FUNCTIONS[:2] if wrong is None else FUNCTIONS)]
    calls += [] if what == "without a shape yet" else MODULES  # PyTorch raises its own errors
    for call in calls:
        with pytest.raises(
            (TypeError, ValueError), match=r"^\w+_norm: (x|gate) (has|is) (?!shape)"
        ):
            call(wrong)


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
