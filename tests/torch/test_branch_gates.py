# SPDX-License-Identifier: MIT
"""A gate on the branch that is added to the residual stream: s = x * g(gate) + residual."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
functional = torch.nn.functional

import cunorm.torch as ct  # noqa: E402
from tests.support.torch_cases import Watch, factors, gradients, tensor  # noqa: E402

X, GATES = (2, 3, 4), [(4,), (2, 1, 4), (3, 4), (2, 3, 4), (2, 1, 1), (3, 1), (1, 1, 1), (1,)]
NAMES = ("x", "residual", "gate", "weight", "bias")
BRANCH = {"gate_activation": "tanh", "gate_position": "branch"}
modes = pytest.mark.parametrize("mode", [nullcontext, Watch], ids=["recorded", "operator"])


def gated(x, residual, gate, weight=None, bias=None):
    y, stream = ct.add_layer_norm(x, residual, weight, bias, gate=gate, **BRANCH)
    return y, stream


def formula(x, residual, gate, weight=None, bias=None):
    stream = x * torch.tanh(gate) + residual
    y = functional.layer_norm(stream, X[-1:])
    y = y if weight is None else y * weight
    return y if bias is None else y + bias, stream


def operands(gate, grad=True):
    shapes = dict(zip(NAMES, (X, X, gate, (2, 1, 4), X), strict=True))
    return [tensor(name, *shape, grad=grad) for name, shape in shapes.items()]


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("gate", GATES)
def test_first_and_second_derivatives_are_those_of_the_formula(gate):
    given = operands(gate)
    assert_close(gated(*given), formula(*given))
    assert_close(*(gradients(call, given) for call in (gated, formula)))
    first = [gradients(call, given, create_graph=True) for call in (gated, formula)]
    assert_close(*first)
    twice = [
        torch.autograd.grad([g.sin().sum() for g in one[:4]], given[:4]) for one in first
    ]  # not of bias, which has no second derivatives
    assert_close(*twice)


@pytest.mark.parametrize("gate", [(2, 1, 4), (2, 1, 1)])
def test_derivatives_are_those_of_finite_differences(gate):
    given = operands(gate)
    assert torch.autograd.gradcheck(gated, given, rtol=1e-5)
    assert torch.autograd.gradgradcheck(gated, given, rtol=1e-5, atol=1e-6, fast_mode=True)


@modes
@pytest.mark.parametrize("create_graph", [False, True])
@pytest.mark.parametrize("used", [0, 1])
def test_one_of_two_results_is_enough_for_a_backward(used, create_graph, mode):
    given = operands((2, 1, 4))[:3]
    with mode():
        y, expected = gated(*given)[used], formula(*given)[used]
        options = {"create_graph": create_graph}
        found = torch.autograd.grad(y, given, factors(y), **options)
    assert_close(found, torch.autograd.grad(expected, given, factors(y)))


@modes
@pytest.mark.parametrize("create_graph", [False, True])
def test_gradients_of_the_stream_alone_ignore_infinite_numbers_of_the_norm(create_graph, mode):
    given, weight = operands((2, 1, 4))[:3], torch.full((4,), torch.inf, dtype=torch.float64)
    with torch.no_grad():  # with an eps of 0, rstd is infinite, too
        given[0][0], given[1][0] = 0.0, 0.0
    with mode():
        _, stream = ct.add_layer_norm(*given[:2], weight, gate=given[2], eps=0.0, **BRANCH)
        found = torch.autograd.grad(stream, given, factors(stream), create_graph=create_graph)
    stream = formula(*given)[1]
    assert_close(found, torch.autograd.grad(stream, given, factors(stream)))


@modes
@pytest.mark.parametrize("create_graph", [False, True])
def test_the_stream_does_not_depend_on_weight_and_bias(create_graph, mode):
    given = operands((2, 1, 4))
    with mode():
        stream = gated(*given)[1]
        options = {"create_graph": create_graph, "allow_unused": True}
        found = torch.autograd.grad(stream.sum(), given, **options)
    assert [one is None for one in found] == [False, False, False, True, True]


@modes
@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_one_operand_is_the_same_alone_and_among_all(name, mode):
    given, index = operands((2, 1, 4)), NAMES.index(name)
    expected = gradients(gated, given)[index]
    alone = [one if i == index else one.detach() for i, one in enumerate(given)]
    with mode():
        assert gated(*alone)[1].requires_grad is (index < 3)
        results = [one for one in gated(*alone) if one.requires_grad]
        (found,) = torch.autograd.grad(results, alone[index], [factors(one) for one in results])
    assert_close([found], [expected])


@modes
@pytest.mark.parametrize("has_gradient", [False, True])
def test_the_branch_is_kept_only_for_the_gradient_of_its_gate(has_gradient, mode):
    """The gate of DropPath is a mask for each sample."""
    x, residual = tensor("x", *X), tensor("residual", *X)
    gate, seen = torch.tensor([0.0, 2.0]).double()[:, None, None], []
    gate.requires_grad_(has_gradient)
    hooks = lambda one: seen.append(one.data_ptr()) or one, lambda one: one
    with mode(), torch.autograd.graph.saved_tensors_hooks(*hooks):
        y, stream = gated(x, residual, gate)
    assert (x.data_ptr() in seen) is has_gradient
    assert residual.data_ptr() not in seen and stream.data_ptr() in seen
    (found,) = torch.autograd.grad(y.sin().sum() + stream.sin().sum(), x)
    assert not found[0].any() and found[1].all()


def test_dtypes_of_the_stream_and_of_gradients_are_those_of_their_operands():
    dtypes = {"x": "bfloat16", "residual": "float32", "gate": "float16"}
    given = [tensor(name, *X, dtype=dtype) for name, dtype in dtypes.items()]
    results = gated(*given)
    assert [one.dtype for one in results] == [torch.bfloat16, torch.float32]
    exact = [one.detach().double().requires_grad_() for one in given]
    expected = gradients(formula, exact)
    for recorded in (False, True):
        found = gradients(gated, given, create_graph=recorded)
        for one, right, operand in zip(found, expected, given, strict=True):
            assert one.dtype is operand.dtype
            # Half an ulp of the gradient's own dtype, that of y and some float32 roundings.
            bound = torch.finfo(one.dtype).eps + 2.0**-16
            assert (one.double() - right).abs().max() <= bound * right.abs().max()


def test_without_residual_the_stream_is_the_gated_branch():
    x, gate = tensor("x", *X), tensor("gate", 2, 1, 1)
    y, stream = gated(x, None, gate)
    assert_close((y, stream), formula(x, 0, gate))
    assert_close(
        *(
            gradients(lambda x, g, f=f, r=r: f(x, r, g), (x, gate))
            for f, r in ((gated, None), (formula, 0))
        )
    )


@pytest.mark.parametrize("dims", [(0, 0, None), (None, None, 0), (0, None, 0), (1, None, None)])
@pytest.mark.parametrize("gate", [(4,), (2, 1, 4), (2, 1, 1), (2, 3, 4)])
def test_vmap_is_one_call_with_the_results_of_a_loop(gate, dims):
    gradient = torch.func.grad(lambda *given: sum(y.sin().sum() for y in gated(*given)), (0, 1, 2))

    def item(one, dim, index):
        return one if dim is None else one.select(dim, index)

    given = []
    for name, shape, dim in zip(NAMES, (X, X, gate), dims, strict=False):
        shape = shape if dim is None else (*shape[:dim], 5, *shape[dim:])
        given.append(tensor(name, *shape, grad=False))
    for function, calls in ((gated, 1), (gradient, 2)):
        with Watch() as watch:
            found = torch.func.vmap(function, dims)(*given)
        assert len(watch.seen) == calls
        items = [
            function(*(item(*one, i) for one in zip(given, dims, strict=True))) for i in range(5)
        ]
        assert_close(found, map(torch.stack, zip(*items, strict=True)))


def test_functions_without_a_stream_refuse_the_gate_of_a_branch():
    x = tensor("x", *X)
    with pytest.raises(ValueError, match=r"^rms_norm: gate_position is 'branch', expected"):
        ct.rms_norm(x, gate=x, gate_position="branch")
    with pytest.raises(ValueError, match=r"^GatedRMSNorm: gate_position is 'branch', expected"):
        ct.GatedRMSNorm(4, gate_position="branch")


# --- the block of a diffusion transformer ---------------------------------------------------------


def dit_block(norms, x, embedding):
    """DiT's block with adaLN-Zero; the mean over tokens stands for attention."""
    shifts, scales, gates = (embedding[:, None, i::3] for i in range(3))
    (shift, later_shift), (scale, later_scale) = shifts.chunk(2, -1), scales.chunk(2, -1)
    (gate, later_gate) = gates.chunk(2, -1)
    y = norms.layer_norm(x, 1 + scale, shift)
    attended = torch.tanh(y + y.mean(1, keepdim=True))
    y, x = norms.add(attended, x, 1 + later_scale, later_shift, gate)
    return x + later_gate * torch.tanh(2 * y)


class Fused:
    layer_norm = ct.layer_norm

    @staticmethod
    def add(x, residual, weight, bias, gate):
        options = {"gate_activation": "identity", "gate_position": "branch"}
        return ct.add_layer_norm(x, residual, weight, bias, gate=gate, **options)


class Plain:
    @staticmethod
    def layer_norm(x, weight, bias):
        return functional.layer_norm(x, x.shape[-1:]) * weight + bias

    @staticmethod
    def add(x, residual, weight, bias, gate):
        stream = residual + gate * x
        return Plain.layer_norm(stream, weight, bias), stream


@pytest.mark.parametrize("compiled", [False, True])
def test_a_block_of_dit_has_the_values_and_gradients_of_its_formula(compiled):
    def fused(*given):
        return (dit_block(Fused, *given),)

    given = tensor("x", *X), tensor("embedding", 2, 24)
    if compiled:
        fused = torch.compile(fused, backend="aot_eager", fullgraph=True)
    expected = dit_block(Plain, *given)
    assert_close(fused(*given), [expected])
    assert_close(
        gradients(fused, given), gradients(lambda *given: (dit_block(Plain, *given),), given)
    )
