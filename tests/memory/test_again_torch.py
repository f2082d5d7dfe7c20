# SPDX-License-Identifier: MIT
"""Calls on tensors that are made again: what a tensor's form does not tell is seen as before."""

from functools import partial

import pytest

from tests.support.calls import (
    FUNCTIONS,
    anew,
    arrays_of,
    assert_refused,
    assert_same,
    call_of,
    nothing_known,
    planning_forbidden,
)
from tests.support.operands import at

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def known(monkeypatch):
    return nothing_known(monkeypatch)


# --- tensors that are not their memory ------------------------------------------------------------


class Logged(torch.Tensor):
    pass


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


STATES = {  # of the same memory, where there is any
    "requires grad": lambda tensor: tensor.detach().requires_grad_(),
    "negative": torch._neg_view,
    "sparse": lambda tensor: tensor.to_sparse(),
    "meta": lambda tensor: tensor.to("meta"),
    "freed": freed,
    "subclass": lambda tensor: tensor.as_subclass(Logged),
}
TRANSFORMS = {
    "vmap": lambda function, tensor: torch.vmap(function)(torch.stack([tensor, tensor])),
    "grad": lambda function, tensor: torch.func.grad(function)(tensor),
    "functionalize": lambda function, tensor: torch.func.functionalize(function)(tensor),
}
of_every_sort = pytest.mark.parametrize(
    "name", ["normalize_forward", "normalize_backward", "group_norm_forward", "group_norm_backward"]
)


def places(name):
    """Yield calls that are remembered, each with one of its arguments and how errors call that."""
    call = call_of(name, kind="torch")
    if call.workspace is not None:
        call.workspace = call.workspace.view(torch.float32)  # as bytes cannot require grad
    call.make()
    call.run()
    for run in (call.make, call.run):
        for argument in arrays_of(call.arrays):
            yield run, call.arrays, argument, argument
    for field in call.out:
        yield call.run, call.out, field, f"out.{field}"
    if call.workspace is not None:
        yield call.run, vars(call), "workspace", "workspace"


@pytest.mark.parametrize("state", STATES)
@of_every_sort
def test_a_tensor_that_is_not_its_memory_is_refused_as_when_planned_anew(name, state):
    for run, arguments, key, argument in places(name):
        plain = arguments[key]
        arguments[key] = STATES[state](plain)
        with at(argument):
            assert_refused(run, (TypeError, ValueError), f"{name}: {argument} ")
        arguments[key] = plain
        with planning_forbidden():
            run()


@pytest.mark.parametrize("transform", TRANSFORMS)
@of_every_sort
def test_a_tensor_inside_a_transform_is_refused_as_when_planned_anew(name, transform):
    for run, arguments, key, argument in places(name):

        def inside(run, arguments, key, tensor):
            arguments[key] = tensor
            run()

        plain = arguments[key]
        call = partial(TRANSFORMS[transform], partial(inside, run, arguments, key), plain)
        with at(argument):
            assert_refused(call, TypeError, f"{name}: {argument} is a tensor inside a torch.func ")
        arguments[key] = plain


# --- autograd -------------------------------------------------------------------------------------


def test_a_parameter_is_a_tensor_where_no_gradient_is_recorded():
    call = call_of("layer_norm_backward", kind="torch")
    call.make()
    call.arrays["weight"] = torch.nn.Parameter(call.arrays["weight"])
    with torch.no_grad():
        expected = anew(call.make)
        with planning_forbidden():
            grads = call.make()
    assert_same(grads, expected)
    assert type(grads.dweight) is torch.Tensor
    assert not grads.dweight.requires_grad
    assert_refused(call.make, ValueError, "layer_norm_backward: weight requires grad")


def versions(tensors):
    return {name: tensor._version for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_only_results_that_are_given_are_marked_as_changed(name):
    """Once in each call, whether it is planned or made again."""
    call = call_of(name, kind="torch")
    read = arrays_of(call.arrays) | arrays_of({"workspace": call.workspace})
    for part in (None, *call.out):
        for turn in ("planned", "again"):
            unchanged, before = versions(read), versions(call.out)
            with at(part, turn):
                if turn == "planned":
                    call.run(without=part)
                else:
                    with planning_forbidden():
                        call.run(without=part)
                assert versions(read) == unchanged
                after = {field: before[field] + (field != part) for field in call.out}
                assert versions(call.out) == after


def test_a_tensor_that_autograd_saved_cannot_be_written_to_unseen():
    call = call_of("rms_norm", kind="torch")
    call.run()
    leaf = torch.ones_like(call.out["y"], requires_grad=True)
    product = (leaf * call.out["y"]).sum()
    with planning_forbidden():
        call.run()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
