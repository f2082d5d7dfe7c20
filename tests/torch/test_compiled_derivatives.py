# SPDX-License-Identifier: MIT
"""Derivatives of functions with norms that torch.compile compiles."""

from functools import partial
from itertools import product

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.autograd import forward_ad  # noqa: E402
from torch.func import grad, hessian, jvp, vmap  # noqa: E402

import cunorm.torch as ct  # noqa: E402
from tests.support.torch_cases import case, tensor  # noqa: E402
from tests.support.torch_derivatives import (  # noqa: E402
    all_of,
    assert_close,
    directions,
    formula_of,
    names,
    total,
    values,
)

# PyTorch warns in forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")
COMPILED = {
    "grad": lambda call, given: grad(partial(total, call), all_of(given))(*given),
    "jvp": lambda call, given: jvp(call, given, directions(given, 0))[1],
    "hessian": lambda call, given: hessian(lambda *tensors: total(call, *tensors))(*given),
    "a batch": lambda call, given: vmap(grad(partial(total, call)))(
        *(torch.stack([one, 2 * one]) for one in given)
    ),
}


@names
@pytest.mark.parametrize("way", COMPILED)
def test_compiled_transforms_have_the_derivatives_of_the_formula(name, way):
    torch.compiler.reset()
    call, given = case(name)[0], values(name)
    moved = directions(given, 0)

    def run(*given):
        if way == "jvp":
            return jvp(call, given, moved)[1]
        return COMPILED[way](call, given)

    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    assert_close(compiled(*given), COMPILED[way](formula_of(name), given))


@pytest.mark.filterwarnings("ignore:.*Dynamo")
def test_compiled_functions_are_transformed_or_refuse_tangents_that_they_would_drop():
    x = tensor("x", 2, 4, 6, grad=False)
    weight = tensor("weight", 6, grad=False)

    def norm(x):
        return ct.rms_norm(x, weight)

    torch.compiler.reset()
    compiled = torch.compile(norm, backend="aot_eager")
    compiled(x)
    with forward_ad.dual_level(), pytest.raises(ValueError, match="x has a forward-mode tangent"):
        compiled(forward_ad.make_dual(x, x.cos()))
    assert_close(jvp(compiled, (x,), (x.cos(),)), jvp(norm, (x,), (x.cos(),)))


def test_a_compiled_transform_checks_its_operands():
    def loss(x):
        return ct.rms_norm(x, torch.ones(1)).sum()

    compiled = torch.compile(grad(loss), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"rms_norm: weight has shape \(1,\), expected \(8,\)"):
        compiled(torch.ones(3, 8))


def test_modules_have_hessians_of_their_parameters():
    norm, x = ct.LayerNorm(6).double(), tensor("x", 2, 4, 6, grad=False)
    own = {name: one.detach() for name, one in norm.named_parameters()}

    def loss(parameters, x):
        return torch.func.functional_call(norm, parameters, (x,)).sin().sum()

    def exact(parameters, x):
        return torch.nn.functional.layer_norm(x, (6,), **parameters).sin().sum()

    found, expected = (hessian(one)(own, x) for one in (loss, exact))
    for name, other in product(own, own):
        assert_close(found[name][other], expected[name][other])
