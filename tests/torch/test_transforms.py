# SPDX-License-Identifier: MIT
"""The ways in which cunorm.torch is called: eagerly, by a dispatcher, in torch.func."""

from __future__ import annotations

import numpy as np
import pytest

import cunorm

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
ct = pytest.importorskip("cunorm.torch")
cases = pytest.importorskip("tests.support.torch_cases")

tensor = cases.tensor


def several(results):
    return results if isinstance(results, tuple) else (results,)


def detached(tensors):
    return [one.detach() for one in tensors]


@pytest.mark.parametrize("name", cases.NAMES)
def test_every_way_of_a_call_gives_the_same_bits(name):
    call, tensors = cases.case(name)
    recorded = several(call(*tensors))
    gradients = torch.autograd.grad(sum(one.sum() for one in recorded), tensors)
    with cases.Watch() as watch:
        watched = several(call(*tensors))
        seen = torch.autograd.grad(sum(one.sum() for one in watched), tensors)
    family = "group_norm" if name in cases.GROUP_NORMS else "row_norm"
    assert {f"cunorm::{family}_{way}" for way in ("forward", "backward")} < {*watch.seen}
    plain, _ = cases.case(name, cunorm)
    with torch.no_grad():
        others = [call(*tensors), call(*detached(tensors)), watched, plain(*detached(tensors))]
        for other in map(several, others):
            assert all(map(torch.equal, recorded, other))
    assert all(map(torch.equal, gradients, seen))


@pytest.mark.parametrize("name", cases.NAMES)
def test_a_batch_of_torch_func_is_as_its_items(name):
    call, tensors = cases.case(name)
    tensors = detached(tensors)
    x, rest = tensors[0], tensors[1:]
    batch = torch.stack([x, 2 * x + 1, -x], 1)
    dims = (1, *(None for _ in rest))
    found = several(torch.func.vmap(call, dims)(batch, *rest))
    expected = [several(call(batch[:, item], *rest)) for item in range(3)]
    assert all(map(torch.equal, found, map(torch.stack, zip(*expected, strict=True))))


@pytest.mark.parametrize("name", cases.NAMES)
def test_torch_func_finds_the_same_gradients_of_one_call_and_of_each_item_of_a_batch(name):
    """Of x and of parameters, which are the batch's together or differ from item to item."""
    call, tensors = cases.case(name)
    places = tuple(range(len(tensors)))

    def total(*tensors):
        return sum(one.sin().sum() for one in several(call(*tensors)))

    def expected(tensors):
        leaves = [one.detach().requires_grad_() for one in tensors]
        return torch.autograd.grad(total(*leaves), leaves)

    of_item, tensors = torch.func.grad(total, places), detached(tensors)
    assert all(map(torch.equal, of_item(*tensors), expected(tensors)))
    batches = [torch.stack([one, 2 * one, -one]) for one in tensors]
    for shared in (0, len(tensors) - 1):  # how many of them, the last ones
        own = len(tensors) - shared
        given, dims = [*batches[:own], *tensors[own:]], (0,) * own + (None,) * shared
        found = torch.func.vmap(of_item, dims)(*given)
        for item in range(3):
            one = [g if d is None else g[item] for g, d in zip(given, dims, strict=True)]
            for mine, right in zip(found, expected(one), strict=True):
                np.testing.assert_allclose(mine[item], right, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["rms_norm", "group_norm"])
def test_second_derivatives_that_there_are_not_are_an_error(name):
    call, tensors = cases.case(name)
    first = torch.func.grad(lambda *tensors: call(*tensors).square().sum())
    with pytest.raises(RuntimeError, match=r"no second derivatives under torch\.func"):
        torch.func.grad(lambda *tensors: first(*tensors).square().sum())(*detached(tensors))
    with cases.Watch():
        y = call(*tensors).square().sum()
        (gradient,) = torch.autograd.grad(y, tensors[0], create_graph=True)
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            torch.autograd.grad(gradient.square().sum(), tensors[0])


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's, in jvp
@pytest.mark.parametrize("name", ["rms_norm", "group_norm"])
def test_forward_mode_derivatives_are_an_error(name):
    call, tensors = cases.case(name)
    x, *rest = detached(tensors)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda x: call(x, *rest), (x,), (x,))
    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        call(x, *rest)
        with pytest.raises(RuntimeError, match="jvp"):
            call(torch.autograd.forward_ad.make_dual(x, x), *rest)


def test_a_saved_tensor_that_is_written_to_is_an_error():
    x, weight = tensor("x", 2, 6), tensor("weight", 6)
    scaled = x * 1
    y = ct.rms_norm(scaled, weight)
    scaled.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("grad", [False, True])
def test_no_rows_give_no_results_and_zero_gradients(grad):
    x, weight = tensor("x", 0, 6, grad=grad), tensor("weight", 6)
    y = ct.rms_norm(x, weight)
    y.sum().backward()
    assert y.shape == (0, 6)
    assert torch.equal(weight.grad, torch.zeros(6, dtype=torch.float64))
    assert (x.grad is not None) is grad
