# SPDX-License-Identifier: MIT
"""cunorm.torch in all modes: eager, through the dispatcher, and in torch.func."""

import re
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

import cunorm

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.autograd import forward_ad  # noqa: E402
from torch.library import opcheck  # noqa: E402

import cunorm.torch as ct  # noqa: E402
from tests.support.torch_cases import (  # noqa: E402
    CASES,
    GROUPS,
    Watch,
    case,
    factors,
    gradients,
    tensor,
)

# PyTorch warns in forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")


def detached(tensors):
    return [one.detach() for one in tensors]


@pytest.mark.parametrize("name", CASES)
def test_every_mode_of_a_call_gives_the_same_bits(name):
    call, tensors = case(name)
    recorded = call(*tensors)
    with Watch() as watch:
        watched, seen = call(*tensors), gradients(call, tensors)
    family = "group_norm" if name in GROUPS else "row_norm"
    operators = {operator.name() for operator, _ in watch.seen}
    assert operators == {f"cunorm::{family}_{direction}" for direction in ("forward", "backward")}
    plain, _ = case(name, cunorm)
    with torch.no_grad():
        others = [call(*tensors), call(*detached(tensors)), watched, plain(*detached(tensors))]
        for other in others:
            assert all(map(torch.equal, recorded, other))
    assert all(map(torch.equal, gradients(call, tensors), seen))


@pytest.mark.parametrize("name", CASES)
def test_torch_func_gives_the_same_results_for_a_batch_and_for_its_items(name):
    """Gradients of a batch may differ by roundings; items share parameters or have their own."""
    call, tensors = case(name)
    x, *rest = tensors = [one.detach().contiguous() for one in tensors]
    batch = torch.stack([x, -x], 1)
    found = torch.func.vmap(call, (1, *(None for _ in rest)))(batch, *rest)
    items = [call(batch[:, item], *rest) for item in range(2)]
    assert all(map(torch.equal, found, map(torch.stack, zip(*items, strict=True))))

    def total(*tensors):
        return sum(one.sin().sum() for one in call(*tensors))

    def expected(*tensors):
        leaves = [one.detach().requires_grad_() for one in tensors]
        return torch.autograd.grad(total(*leaves), leaves)

    of_item = torch.func.grad(total, tuple(range(len(tensors))))
    assert all(map(torch.equal, of_item(*tensors), expected(*tensors)))
    for own in {1, len(tensors)}:  # the first `own` tensors differ by item
        given = [torch.stack([one, 2 * one]) for one in tensors[:own]] + tensors[own:]
        found = torch.func.vmap(of_item, (0,) * own + (None,) * len(tensors[own:]))(*given)
        for item in range(2):
            right = expected(*(one[item] for one in given[:own]), *tensors[own:])
            for mine, its in zip(found, right, strict=True):
                np.testing.assert_allclose(mine[item], its, rtol=1e-12, atol=1e-13)


def test_operators_refuse_tangents_which_they_would_drop():
    x = torch.ones(3, 4)
    with Watch() as watch:
        ct.rms_norm(x)
    ((operator, (_, *rest)),) = watch.seen
    refusal = r"^rms_norm: x has a forward-mode tangent.*\.detach\(\)$"
    with forward_ad.dual_level(), pytest.raises(ValueError, match=refusal):
        operator(forward_ad.make_dual(x, x), *rest)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.functionalize, torch.func.vmap])
def test_the_backward_of_an_earlier_call_runs_in_a_transform(transform):
    call, tensors = case("add_normalize")
    results, found = call(*tensors), []
    arriving = [factors(one) for one in results]

    def backward():
        return torch.autograd.grad(results, tensors, arriving, retain_graph=True)

    transform(lambda x: found.append(backward()) or x.sum())(torch.ones(3, 2))
    assert all(map(torch.equal, found[0], backward()))


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_no_items_has_results_and_gradients_of_no_items(name):
    call, tensors = case(name)
    tensors = detached(tensors)

    def total(*tensors):
        first, *others = (one.sin().sum() for one in call(*tensors))
        return sum(others, first)  # torch itself cannot add 0 to a batch of no numbers

    of_item = torch.func.grad(total, tuple(range(len(tensors))))
    for own in {1, len(tensors)}:  # the first `own` tensors differ by item
        dims = (0,) * own + (None,) * len(tensors[own:])
        one = [tensor[None] for tensor in tensors[:own]] + tensors[own:]
        none = [tensor[:0] for tensor in one[:own]] + tensors[own:]
        for function in (call, of_item):
            expected = torch.func.vmap(function, dims)(*one)
            found = torch.func.vmap(function, dims)(*none)
            for mine, its in zip(found, expected, strict=True):
                assert (mine.shape, mine.dtype) == (its[:0].shape, its.dtype)


@pytest.mark.parametrize("mode", [nullcontext, Watch], ids=["recorded", "operator"])
def test_the_gradient_of_a_stream_that_begins_wide_is_that_of_a_conversion(mode):
    x = tensor("x", 4, 8, dtype="bfloat16")
    with mode():
        stream = ct.add_rms_norm(x, None, residual_dtype="float32").residual
        (found,) = torch.autograd.grad(stream, x, factors(stream))
    assert (found.dtype, stream.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(found, factors(stream).bfloat16())


def test_a_stream_that_goes_on_wider_gives_residual_a_gradient_of_its_own_dtype():
    x, residual = (tensor(name, 4, 8, dtype="bfloat16") for name in ("x", "residual"))

    def loss(x, residual):
        y, stream = ct.add_rms_norm(x, residual, residual_dtype="float32")
        assert (y.dtype, stream.dtype) == (torch.bfloat16, torch.float32)
        return y.float().square().sum() + (stream * factors(stream)).sum()

    wide = residual.detach().float().requires_grad_()
    (exact,) = torch.autograd.grad(loss(x, wide), wide)
    for found in (
        torch.autograd.grad(loss(x, residual), residual)[0],
        torch.autograd.grad(loss(x, residual), residual, create_graph=True)[0].detach(),
        torch.func.grad(loss, argnums=1)(x.detach(), residual.detach()),
    ):
        assert found.dtype == torch.bfloat16
        assert (found != exact.bfloat16()).sum() <= 1  # a float32 rounding may change a tie


def test_after_a_transform_its_tensors_are_accepted_but_not_a_batch_of_vmaps():
    left = []
    x = tensor("x", 4, 8)
    torch.func.grad(lambda x: left.append(x) or x.sum())(x)
    torch.func.vmap(lambda x: left.append(x) or x)(x)
    made, batch = left
    for arguments in ({"x": made}, {"x": x, "gate": made}):
        y = ct.rms_norm(**arguments)
        assert torch.equal(y, ct.rms_norm(**dict.fromkeys(arguments, x)))
        y.sum().backward()
        refused = arguments | {[*arguments][-1]: batch}
        text = f"rms_norm: {[*arguments][-1]} is a tensor inside a torch.func"
        with pytest.raises(TypeError, match=text):
            ct.rms_norm(**refused)


@pytest.mark.parametrize("mode", [nullcontext, Watch], ids=["eager", "operator"])
def test_wrong_scalars_are_the_same_error_for_an_operator(mode):
    x = tensor("x", 4, 8)
    wrong = {
        "axis": 1.5,
        "eps": "0",
        "groups": None,
        "gate_position": "pre",
        "gate_activation": "?",
    }
    for name, value in wrong.items():
        with (
            mode(),
            pytest.raises((TypeError, ValueError), match=f"^rms_norm: {name} is {value!r}"),
        ):
            ct.rms_norm(x, **{name: value})


def test_wrong_axes_of_the_items_of_a_batch_are_an_error_that_has_an_items_shape():
    x, groups = tensor("x", 3, 2, 8), "expected at least two axes: samples and channels"
    for call, batch, text in (
        (ct.rms_norm, x[0, 0], "x has shape (), expected at least one axis"),
        (partial(ct.l2_norm, axis=-3), x, "axis is -3, expected -2 to 1 for x of shape (2, 8)"),
        (partial(ct.l2_norm, axis=2), x, "axis is 2, expected -2 to 1 for x of shape (2, 8)"),
        (partial(ct.group_norm, num_groups=1), x[0], f"x has shape (8,), {groups}"),
    ):
        with pytest.raises(ValueError, match=re.escape(text)):
            torch.func.vmap(call)(batch)


@pytest.mark.parametrize("grad", [False, True])
def test_no_rows_give_empty_results_and_zero_gradients(grad):
    x, weight = tensor("x", 0, 6, grad=grad), tensor("weight", 6)
    y = ct.rms_norm(x, weight)
    y.sum().backward()
    assert y.shape == (0, 6)
    assert torch.equal(weight.grad, torch.zeros(6, dtype=torch.float64))
    assert (x.grad is not None) is grad


# --- the operators' contract with torch's dispatcher ----------------------------------------------


def x_of(dtype, *shape):
    return tensor("x", *shape, dtype=dtype)


def rows(dtype="float64"):
    """Draw rows whose leading axes are transposed in memory."""
    return x_of(dtype, 3, 4, 6).transpose(0, 1)


def parameters(*dtypes):
    return [tensor(name, 6, dtype=dtype) for name, dtype in zip("wb", dtypes, strict=False)]


F64, MIXED = ("float64", "float64"), ("float32", "float16")
CALLS = {
    "one row": lambda: ct.rms_norm(x_of("float64", 6)),
    "a gate, groups": lambda: ct.normalize(
        rows("bfloat16"),
        *parameters(*MIXED),
        center=True,
        groups=2,
        gate=rows("float32"),
        dtype=torch.float32,
    ),
    "a narrow stream": lambda: ct.add_rms_norm(rows("float32"), rows("bfloat16"), groups=2),
    "a wide stream begins": lambda: ct.add_layer_norm(
        rows("bfloat16"), None, residual_dtype=torch.float32, axis=1
    ),
    "a stream goes on wider": lambda: ct.add_rms_norm(
        rows("bfloat16"), rows("bfloat16"), residual_dtype="float32"
    ),
    "rounded before weight": lambda: ct.rms_norm(
        rows("bfloat16"), *parameters("float32"), round_before_weight=True
    ),
    "only parameters": lambda: ct.layer_norm(rows().detach(), *parameters(*F64)),
    "channels last": lambda: ct.group_norm(
        x_of("bfloat16", 2, 6, 5, 7).to(memory_format=torch.channels_last),
        3,
        *parameters(*MIXED),
        channel_axis=1,
        dtype=torch.float32,
    ),
    "some columns, which are copied": lambda: ct.instance_norm(
        x_of("float64", 2, 6, 5, 7)[..., :5], channel_axis=1
    ),
    "no positions": lambda: ct.group_norm(x_of("float64", 2, 6).detach(), 3, *parameters(*F64)),
    "modulated": lambda: ct.layer_norm(
        rows("bfloat16"), x_of("float32", 4, 1, 12)[..., 6:], x_of("float16", 3, 6)
    ),
    "modulated channels": lambda: ct.group_norm(x_of("float64", 2, 6), 3, x_of("float64", 2, 6)),
    "the gate of a branch": lambda: ct.add_rms_norm(
        *(rows("bfloat16"), rows("float32"), *parameters("float32")),
        gate=x_of("float32", 4, 1, 1),
        gate_position="branch",
    ),
}


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # opcheck's copies have no .grad
@pytest.mark.parametrize("name", CALLS)
def test_the_operators_of_a_call_and_of_its_backward_keep_their_promises(name):
    with Watch() as watch:
        results = CALLS[name]()
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.backward(results, [torch.ones_like(one) for one in results])
    assert len(watch.seen) == 2
    for operator, arguments in watch.seen:
        opcheck(operator, [leaf(one, "forward" in operator.name()) for one in arguments])


def leaf(argument, is_recorded):
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.detach().requires_grad_(is_recorded and argument.requires_grad)


# --- tangents, which the plain functions refuse ---------------------------------------------------

X = torch.arange(12.0).reshape(3, 4)
PLAIN = {
    "x": lambda x: cunorm.rms_norm(x),
    "gate": lambda x: cunorm.rms_norm(X, gate=x),
    "out": lambda x: cunorm.rms_norm(X, out=x),
    "dy": lambda x: cunorm.rms_norm_backward(x, X, rstd=torch.ones(3)),
    "group_norm: x": lambda x: cunorm.group_norm(x, 2),
}


@pytest.mark.parametrize("argument", PLAIN)
def test_plain_functions_refuse_a_forward_mode_tangent(argument):
    call = PLAIN[argument]
    for _ in range(2):
        call(X.clone())  # cached, so that equal calls are not checked again
    refusal = rf"{argument} has a forward-mode tangent.* cunorm\.torch .*\.detach\(\)$"
    with forward_ad.dual_level(), torch.no_grad(), pytest.raises(ValueError, match=refusal):
        call(forward_ad.make_dual(X.clone(), torch.ones(3, 4)))


def test_tensors_with_and_without_a_tangent_may_be_mixed():
    expected = cunorm.rms_norm(X)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X.clone(), torch.ones(3, 4))
        for x in (X, dual.detach(), forward_ad.unpack_dual(dual).primal):
            assert torch.equal(cunorm.rms_norm(x), expected)
        with torch.inference_mode():  # where PyTorch's own functions drop tangents
            assert torch.equal(cunorm.rms_norm(dual), expected)
