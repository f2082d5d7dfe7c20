# SPDX-License-Identifier: MIT
"""Forward mode and higher derivatives of cunorm.torch, in every way in which PyTorch takes them."""

from functools import partial
from itertools import permutations, product

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.autograd import forward_ad, functional  # noqa: E402
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap  # noqa: E402
from torch.utils.checkpoint import checkpoint  # noqa: E402

import cunorm.torch as ct  # noqa: E402
from tests.support.torch_cases import CASES, Watch, case, tensor  # noqa: E402
from tests.support.torch_derivatives import (  # noqa: E402
    all_of,
    assert_close,
    directions,
    formula_of,
    leaves,
    names,
    total,
    values,
)

# PyTorch warns in forward mode
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")

# --- mixes of both modes --------------------------------------------------------------------------


def forward(call, turn):
    """Return the derivative of a function along a direction in forward mode."""
    return lambda *given: jvp(call, given, directions(given, turn))[1]


def reverse(call, turn):
    """Return the derivative of a sum of results along a direction in reverse mode."""

    def derivative(*given):
        gradients = grad(partial(total, call), tuple(range(len(given))))(*given)
        pairs = zip(gradients, directions(given, turn), strict=True)
        return (sum((one * other).sum() for one, other in pairs),)

    return derivative


@names
@pytest.mark.parametrize("recorded", [False, True])
def test_every_mix_of_three_derivatives_is_that_of_the_formula(name, recorded):
    """Tensors may require gradients outside of the transforms."""
    given = tuple(one.requires_grad_(recorded) for one in values(name))
    for modes in product((forward, reverse), repeat=2 if recorded else 3):
        found, expected = case(name)[0], formula_of(name)
        for turn, mode in enumerate(modes):
            found, expected = mode(found, turn), mode(expected, turn)
        assert_close(found(*given), expected(*given))


@names
def test_dual_numbers_and_recorded_graphs_are_those_of_finite_differences(name):
    call, given = case(name)
    options = {"check_forward_ad": True, "check_batched_forward_grad": True}
    assert torch.autograd.gradcheck(call, given, rtol=1e-5, check_batched_grad=True, **options)
    options = {"check_fwd_over_rev": True, "check_rev_over_rev": True, "fast_mode": True}
    assert torch.autograd.gradgradcheck(call, given, rtol=1e-5, atol=1e-6, **options)


# --- the ways of PyTorch --------------------------------------------------------------------------


def recorded(given):
    return tuple(one.detach().requires_grad_() for one in given)


def third(call, given):
    """Take three derivatives of recorded graphs."""
    given, found = recorded(given), []
    loss = total(call, *given)
    for _ in range(3):
        firsts = torch.autograd.grad(loss, given, create_graph=True, allow_unused=True)
        found.append(firsts)
        loss = sum(one.sin().sum() for one in firsts if one is not None)
    return found


def second(loss, given):
    first = torch.autograd.grad(loss, given, create_graph=True)
    loss = sum(one.sin().sum() for one in first)
    return first, torch.autograd.grad(loss, given, allow_unused=True)


def checkpointed(call, given):
    given = recorded(given)
    return second(checkpoint(partial(total, call), *given, use_reentrant=False), given)


def hooked(call, given):
    given = recorded(given)
    with torch.autograd.graph.saved_tensors_hooks(lambda one: (one,), lambda kept: kept[0]):
        loss = total(call, *given)
    return second(loss, given)


def batched(call, given):
    """Record a batch of gradients, which PyTorch makes of batches of its own kind."""
    given = recorded(given)
    results = call(*given)
    dys = [torch.stack([one.detach().sin(), one.detach().cos()]) for one in results]
    options = {"is_grads_batched": True, "create_graph": True}
    first = torch.autograd.grad(results, given, dys, **options)
    loss = sum(one.sin().sum() for one in first)
    return first, torch.autograd.grad(loss, given, allow_unused=True)


def batched_twice(call, given):
    given = recorded(given)
    options = {"vectorize": True, "create_graph": True}
    found = functional.hessian(partial(total, call), given, **options)
    return found, torch.autograd.grad(sum(one.sin().sum() for one in leaves(found)), given)


def of_functional(name, call, given, **options):
    return getattr(functional, name)(partial(total, call), given, **options)


def of_duals(call, given):
    """Go backward through tangents."""
    given = recorded(given)
    with forward_ad.dual_level():
        duals = map(forward_ad.make_dual, given, directions(given, 0))
        tangents = [forward_ad.unpack_dual(one).tangent for one in call(*duals)]
    loss = sum(one.sin().sum() for one in tangents)
    return tangents, torch.autograd.grad(loss, given, allow_unused=True)


WAYS = {
    "third": third,
    "checkpointed": checkpointed,
    "hooked": hooked,
    "batched": batched,
    "batched twice": batched_twice,
    "duals": of_duals,
    "hessian": partial(of_functional, "hessian"),
    "vectorised": partial(of_functional, "hessian", vectorize=True),
    "vectorised, forward": partial(
        of_functional, "hessian", vectorize=True, outer_jacobian_strategy="forward-mode"
    ),
    "hvp": lambda call, given: of_functional("hvp", call, given, v=directions(given, 0)),
    "vhp": lambda call, given: of_functional("vhp", call, given, v=directions(given, 0)),
    "double backward": lambda call, given: functional.jvp(call, given, directions(given, 0)),
    "func.hessian": lambda call, given: hessian(partial(total, call), all_of(given))(*given),
    "jacfwd twice": lambda call, given: jacfwd(jacfwd(partial(total, call)))(*given),
    "jacrev twice": lambda call, given: jacrev(jacrev(partial(total, call)))(*given),
    "a batch": lambda call, given: vmap(jacfwd(grad(partial(total, call))))(
        *(torch.stack([one, 2 * one]) for one in given)
    ),
    "a shared batch": lambda call, given: vmap(
        jacfwd(partial(total, call), all_of(given)), (0, *[None] * (len(given) - 1))
    )(torch.stack([given[0], 2 * given[0]]), *given[1:]),
}


@names
@pytest.mark.parametrize("way", WAYS)
def test_each_way_of_pytorch_gives_the_derivatives_of_the_formula(name, way):
    found = WAYS[way](case(name)[0], values(name))
    assert_close(found, WAYS[way](formula_of(name), values(name)))


@names
def test_each_operand_alone_has_its_second_derivative(name):
    """Autograd tells which gradients it uses."""
    call, given = case(name)[0], recorded(values(name))
    first = torch.autograd.grad(total(call, *given), given, create_graph=True)
    loss = sum(one.sin().sum() for one in first)
    of_all = torch.autograd.grad(loss, given, retain_graph=True, allow_unused=True)
    for one, right in zip(given, of_all, strict=True):
        found = torch.autograd.grad(loss, one, retain_graph=True, allow_unused=True)
        assert_close(found, (right,))


AGAIN = {
    "jacrev": jacrev,
    "hessian": hessian,
    "grad of jacrev": lambda h: grad(lambda one: jacrev(h)(one).sin().sum()),
}


@pytest.mark.parametrize(
    "name",
    [
        one if one == "sigmoid gate" else pytest.param(one, marks=pytest.mark.exhaustive)
        for one in CASES
    ],
)
@pytest.mark.parametrize("again", AGAIN)
def test_the_gradient_of_one_operand_is_differentiated_again_by_another(name, again):
    """Autograd keeps tensors of transforms that have ended."""
    given = values(name)
    for inner, outer in permutations(all_of(given), 2):

        def derivative(call, inner=inner, outer=outer):
            def square(one):
                moved = (*given[:outer], one, *given[outer + 1 :])
                return grad(partial(total, call), inner)(*moved).square().sum()

            return AGAIN[again](square)(given[outer])

        assert_close(derivative(case(name)[0]), derivative(formula_of(name)))


def test_a_hessian_vector_product_of_x_is_one_call():
    x, weight, dy = tensor("x", 3, 8), tensor("weight", 8), tensor("dy", 3, 8, grad=False)
    (dx,) = torch.autograd.grad(ct.rms_norm(x, weight), x, dy, create_graph=True)
    with Watch() as watch:
        torch.autograd.grad(dx, x, dy)
    assert [operator.name() for operator, _ in watch.seen] == ["cunorm::row_norm_second"]


# --- roundings ------------------------------------------------------------------------------------

MIXED = {
    "rms_norm": (ct.rms_norm, "bfloat16", {"weight": "float32"}, {}),
    "Llama": (ct.rms_norm, "bfloat16", {"weight": "float32"}, {"round_before_weight": True}),
    "a gate": (ct.layer_norm, "bfloat16", {"weight": "float32", "gate": "float16"}, {}),
    "a wide stream": (
        ct.add_layer_norm,
        "bfloat16",
        {"residual": "float32", "bias": "float16"},
        {},
    ),
    "a narrow stream": (ct.add_layer_norm, "float64", {"residual": "float32"}, {}),
    "a narrow stream, a weight": (
        ct.add_rms_norm,
        "float64",
        {"residual": "float32", "weight": "float32"},
        {},
    ),
    "groups of channels": (ct.group_norm, "float16", {"weight": "float32"}, {"num_groups": 2}),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MIXED)
def test_derivatives_of_mixed_dtypes_have_their_operands_dtypes_and_are_near_those_of_float64(name):
    function, dtype, operands, options = MIXED[name]
    dtypes = {"x": dtype} | operands
    shapes = {key: (6,) if key in ("weight", "bias") else (4, 6) for key in dtypes}
    given = {n: tensor(n, *shapes[n], dtype=dtypes[n], grad=False) for n in dtypes}

    def call(*tensors):
        found = function(**dict(zip(dtypes, tensors, strict=True)), **options)
        return tuple(found) if isinstance(found, tuple) else (found,)

    def run(convert):
        tensors = tuple(map(convert, given.values()))
        moved = tuple(
            convert(tensor(f"{n}'", *shapes[n], dtype=dtypes[n], grad=False)) for n in dtypes
        )

        def loss(*tensors):
            return sum(one.double().sin().sum() for one in call(*tensors))

        def tangents(*tensors):
            return sum(one.double().sin().sum() for one in jvp(call, tensors, moved)[1])

        first, second = (grad(one, all_of(tensors)) for one in (loss, tangents))
        return *jvp(call, tensors, moved)[1], *jvp(first, tensors, moved)[1], *second(*tensors)

    results, plain = call(*given.values()), run(lambda one: one)
    kinds = [one.dtype for one in (*results, *given.values(), *given.values())]
    eps = max(torch.finfo(one).eps for one in kinds)
    assert [one.dtype for one in plain] == kinds
    for one, exact in zip(plain, run(torch.Tensor.double), strict=True):
        # A few roundings of intermediate results in the narrowest dtype.
        bound = 8 * eps * max(1.0, float(exact.abs().max()))
        assert (one.double() - exact).abs().max() <= bound
