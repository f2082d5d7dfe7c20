# SPDX-License-Identifier: MIT
"""Row norms of axes that are not the last, against torch's norms of permuted tensors."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
import cunorm.torch as ct  # noqa: E402
from tests.support.operands import at  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script")
functional = torch.nn.functional
FORMATS = (torch.contiguous_format, torch.channels_last)
formats = pytest.mark.parametrize("memory_format", FORMATS, ids=["NCHW", "NHWC"])


def operands(dtype=torch.float64, memory_format=torch.contiguous_format):
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 6, 4, 5), (6,), (6,), (2, 6, 4, 5)
    x, weight, bias, dy = (torch.randn(s, generator=generator, dtype=dtype) for s in shapes)
    x, dy = (one.contiguous(memory_format=memory_format) for one in (x, dy))
    return x, weight, bias, dy


def norm(x, weight, bias):
    return ct.layer_norm(x, weight, bias, axis=(1,))


def permuted(x, weight, bias):
    y = functional.layer_norm(x.movedim(1, -1), weight.shape[-1:], weight, bias)
    return y.movedim(-1, 1)


def assert_close(found, expected, tolerance=1e-12):
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)


def sin_of(function):
    return lambda *arrays: function(*arrays).sin().sum()


@formats
def test_results_and_gradients_have_the_memory_format_of_x(memory_format):
    x, weight, bias, dy = operands(torch.float32, memory_format)
    leaves = [one.requires_grad_() for one in (x, weight, bias)]
    y = norm(*leaves)
    assert y.stride() == x.stride()
    found = torch.autograd.grad(y, leaves, dy)
    assert found[0].stride() == x.stride()
    exact = [one.detach().double().requires_grad_() for one in leaves]
    expected = permuted(*exact)
    assert_close(y.double(), expected, 4e-6)
    assert_close(
        [one.double() for one in found], torch.autograd.grad(expected, exact, dy.double()), 2e-5
    )
    assert_close(norm(x.detach(), weight.detach(), bias.detach()), y.detach(), 0)


@formats
def test_derivatives_of_every_kind_are_those_of_torchs_norm(memory_format):
    x, weight, bias, dy = operands(memory_format=memory_format)
    given, tangents = (x, weight, bias), (dy, weight * 2, bias + 1)
    jvp, grad, every = torch.func.jvp, torch.func.grad, (0, 1, 2)
    assert_close(grad(sin_of(norm), every)(*given), grad(sin_of(permuted), every)(*given))
    ours, theirs = (
        [
            jvp(one, given, tangents),
            jvp(grad(sin_of(one), every), given, tangents),
            grad(lambda *a, one=one: (grad(sin_of(one))(*a) * dy).sum(), every)(*given),
        ]
        for one in (norm, _formula)
    )
    assert_close(ours, theirs, 1e-11)
    leaves = [one.clone().requires_grad_() for one in given]
    assert torch.autograd.gradgradcheck(norm, leaves)


def _formula(x, weight, bias):
    """Return the norm in elementary operations: torch's own has wrong derivatives of tangents."""
    q = x - x.mean(1, keepdim=True)
    r = q * (q.square().mean(1, keepdim=True) + 1e-5).rsqrt()
    return r * weight[:, None, None] + bias[:, None, None]


def test_vmap_over_any_operand_is_that_of_torchs_norm():
    x, weight, bias, _ = operands()
    batches = (
        torch.stack([x, 2 * x + 1]),
        torch.stack([weight, weight - 1]),
        torch.stack([bias, -bias]),
    )
    for dims in ((0, 0, 0), (0, None, None), (None, 0, None), (None, None, 0), (0, 0, None)):
        pairs = zip(dims, batches, (x, weight, bias), strict=True)
        given = [one if dim is None else batch for dim, batch, one in pairs]
        with at(dims):
            found = torch.vmap(norm, dims)(*given)
            assert_close(found, torch.vmap(_formula, dims)(*given))
            found = torch.vmap(torch.func.grad(sin_of(norm), (0, 1, 2)), dims)(*given)
            expected = torch.vmap(torch.func.grad(sin_of(_formula), (0, 1, 2)), dims)(*given)
            assert_close(found, expected)


def test_gates_streams_and_parameters_of_samples_have_the_gradients_of_their_formula():
    x, _, _, residual = operands()
    weight, gate = torch.randn(2, 6, 1, 1, dtype=x.dtype), torch.randn(2, 6, 4, 5, dtype=x.dtype)

    def ours(x, residual, weight, gate):
        return ct.add_rms_norm(x, residual, weight, axis=(1,), gate=gate)

    def formula(x, residual, weight, gate):
        s = x + residual
        y = s * (s.square().mean(1, keepdim=True) + 1e-6).rsqrt() * weight
        return y * functional.silu(gate), s

    given = [one.requires_grad_() for one in (x, residual, weight, gate)]
    found, expected = ours(*given), formula(*given)
    assert_close(tuple(found), expected)
    totals = [sum(one.sin().sum() for one in results) for results in (found, expected)]
    assert_close(*(torch.autograd.grad(total, given) for total in totals))


@formats
def test_compiled_graphs_keep_the_memory_format(memory_format):
    x, weight, bias, dy = operands(torch.float32, memory_format)
    torch.compiler.reset()
    compiled = torch.compile(norm, backend="aot_eager", fullgraph=True)
    leaf = x.clone(memory_format=torch.preserve_format).requires_grad_()
    y = compiled(leaf, weight, bias)
    assert y.stride() == x.stride()
    assert_close(y, norm(x, weight, bias), 0)
    own = x.clone(memory_format=torch.preserve_format).requires_grad_()
    found = torch.autograd.grad(y, leaf, dy)
    assert_close(found, torch.autograd.grad(norm(own, weight, bias), own, dy), 0)
    assert found[0].stride() == x.stride()
