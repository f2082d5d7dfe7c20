# SPDX-License-Identifier: MIT
"""Weight and bias that vary over rows, and the blocks of published models that have them."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product

import pytest

from tests.support.calls import record_launches

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
functional = torch.nn.functional

import cunorm.torch as ct  # noqa: E402
from tests.support.torch_cases import Watch, factors, gradients, tensor  # noqa: E402

SHAPES = {  # of x, and of weight and bias
    (3, 4): [(4,), (1, 4), (3, 4)],
    (2, 3, 4): [(4,), (1, 4), (1, 1, 4), (2, 1, 4), (1, 3, 4), (3, 4), (2, 3, 4)],
    (2, 3, 2, 4): [(2, 3, 1, 4), (2, 1, 1, 4), (3, 1, 4)],
}
PAIRS = [(x, *pair) for x, some in SHAPES.items() for pair in product(some, repeat=2)]


def modulated(x, weight, bias):
    return ct.layer_norm(x, weight, bias, weight_offset=1.0)


def formula(x, weight, bias):
    return functional.layer_norm(x, x.shape[-1:]) * (1 + weight) + bias


def assert_close(found, expected):
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("x", "weight", "bias"), PAIRS)
def test_gradients_of_every_shape_of_weight_and_bias_are_those_of_the_formula(x, weight, bias):
    given = tensor("x", *x), tensor("weight", *weight), tensor("bias", *bias)
    torch.testing.assert_close(modulated(*given), formula(*given), rtol=1e-12, atol=1e-12)
    calls = [lambda *given, one=one: (one(*given),) for one in (modulated, formula)]
    found, expected = (gradients(call, given) for call in calls)
    assert_close(found, expected)
    found, expected = (gradients(call, given, create_graph=True) for call in calls)
    assert_close(found, expected)
    twice = [  # of dx and dweight: dbias has no derivatives
        torch.autograd.grad([one.sin().sum() for one in firsts[:2]], given[:2])
        for firsts in (found, expected)
    ]
    assert_close(*twice)


@pytest.mark.parametrize(("weight", "bias"), [*product([(4,), (1, 4), (2, 4)], repeat=2)])
def test_gradients_of_group_norms_are_those_of_the_formula(weight, bias):
    given = tensor("x", 2, 4, 3), tensor("weight", *weight), tensor("bias", *bias)

    def formula(x, weight, bias):
        y = functional.group_norm(x, 2)
        return functional.silu(y * weight[..., None] + bias[..., None])

    def found(x, weight, bias):
        return ct.group_norm(x, 2, weight, bias, activation="silu")

    calls = [lambda *given, one=one: (one(*given),) for one in (found, formula)]
    assert_close(*(gradients(call, given) for call in calls))
    first = [gradients(call, given, create_graph=True) for call in calls]
    assert_close(*first)
    assert_close(*(torch.autograd.grad([y.sin().sum() for y in one], given) for one in first))


@pytest.mark.parametrize(("x", "shape"), [(x, one) for x, some in SHAPES.items() for one in some])
def test_gradients_of_every_shape_are_those_of_finite_differences(x, shape):
    given = tensor("x", *x), tensor("weight", *shape), tensor("bias", *shape)
    assert torch.autograd.gradcheck(modulated, given, rtol=1e-5)
    assert torch.autograd.gradgradcheck(modulated, given, rtol=1e-5, atol=1e-6, fast_mode=True)


@pytest.mark.parametrize("mode", [nullcontext, Watch], ids=["recorded", "operator"])
@pytest.mark.parametrize("shape", [(2, 24), (2, 1, 24), (2, 3, 24)])
def test_chunks_of_an_embedding_are_read_where_they_lie(shape, mode, monkeypatch):
    seen = record_launches(monkeypatch)  # copying an operand fails
    x, embedding = tensor("x", 2, 3, 4), tensor("e", *shape)
    chunks = embedding.chunk(6, dim=-1)
    chunks = [one[:, None] for one in chunks] if len(shape) == 2 else chunks
    weight, bias = chunks[1:3]
    with mode():
        y = modulated(x, weight, bias)
        (found,) = torch.autograd.grad(y, embedding, factors(y))
    for call in seen:
        assert call.weight.pointer == weight.data_ptr()
    assert seen[0].bias.pointer == bias.data_ptr()
    y = formula(x, weight, bias)
    assert_close([found], torch.autograd.grad(y, embedding, factors(y)))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_and_exported_calls_have_the_bits_of_eager_calls(dynamic):
    class Block(torch.nn.Module):
        def forward(self, x, embedding):
            shift, scale = embedding[:, None].chunk(2, dim=-1)
            return modulated(x, scale, shift)

    def results(call, rows):
        given = tensor("x", rows, 3, 4), tensor("e", rows, 8)
        return [call(*given), *gradients(lambda *given: (call(*given),), given)]

    block = Block()
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True, dynamic=dynamic)
    rows = {0: torch.export.Dim("rows", min=2)} if dynamic else None
    given = tensor("x", 2, 3, 4), tensor("e", 2, 8)
    exported = torch.export.export(block, given, dynamic_shapes=(rows, rows)).module()
    for count in (2, 5) if dynamic else (2,):
        expected = results(block, count)
        for call in (compiled, exported):
            assert all(map(torch.equal, results(call, count), expected))


# --- vmap -----------------------------------------------------------------------------------------

BATCHES = [  # the shapes of an item's weight and bias, and the axes of the batch of all operands
    ((4,), (4,), (0, 0, None)),
    ((4,), (4,), (None, 1, 0)),
    ((4,), (3, 4), (2, None, None)),
    ((2, 1, 4), (4,), (1, 3, 0)),
    ((3, 4), (2, 3, 4), (None, None, 2)),
    ((1, 1, 4), (2, 3, 4), (0, 1, None)),
]
GROUP_BATCHES = [  # also the calls of the function, and those of it and its gradient
    ((4,), (4,), (0, None, None), 1, 6),
    ((4,), (1, 4), (0, 0, None), 1, 6),
    ((2, 4), (2, 4), (0, 1, None), 1, 2),
    ((2, 4), (2, 4), (None, None, 2), 1, 2),
    ((2, 4), (4,), (1, 0, None), 1, 6),
]


def items(call, dims, tensors):
    """Return the results of a loop over the items of a batch."""

    def item(one, dim, index):
        return one if dim is None else one.select(dim, index)

    calls = [call(*(item(*one, i) for one in zip(tensors, dims, strict=True))) for i in range(5)]
    return map(torch.stack, zip(*calls, strict=True))


@pytest.mark.parametrize(("weight", "bias", "dims"), BATCHES)
@pytest.mark.parametrize("axis", [-1, 2])
def test_vmap_over_weight_and_bias_is_one_call_with_the_results_of_a_loop(weight, bias, dims, axis):
    def call(*tensors):
        return (ct.layer_norm(*tensors, weight_offset=1.0, axis=axis),)

    check_batch(call, ((2, 3, 4), weight, bias), dims, 1, 2)


@pytest.mark.parametrize(("weight", "bias", "dims", "calls", "with_gradient"), GROUP_BATCHES)
def test_vmap_of_group_norms_has_the_results_of_a_loop(weight, bias, dims, calls, with_gradient):
    def call(x, weight, bias):
        return (ct.group_norm(x, 2, weight, bias, activation="silu"),)

    check_batch(call, ((2, 4, 3), weight, bias), dims, calls, with_gradient)


def check_batch(call, shapes, dims, *counts):
    """Compare with a loop, and count the calls of operators, also in a vmap of the gradient."""

    def batch(name, shape, dim):
        shape = shape if dim is None else (*shape[:dim], 5, *shape[dim:])
        return tensor(name, *shape, grad=False)

    gradient = torch.func.grad(lambda *tensors: call(*tensors)[0].sin().sum(), (0, 1, 2))
    tensors = [batch(*one) for one in zip(("x", "weight", "bias"), shapes, dims, strict=True)]
    for function, calls in zip((call, gradient), counts, strict=True):
        with Watch() as watch:
            found = torch.func.vmap(function, dims)(*tensors)
        assert len(watch.seen) == calls
        assert_close(found, items(function, dims, tensors))


def test_a_batch_whose_axes_alternate_too_often_for_one_call_is_a_loop():
    def call(x, weight, bias):
        return (modulated(x, weight, bias),)

    check_batch(call, ((2, 3, 2, 4), (3, 1, 4), (4,)), (0, 0, None), 6, 12)


def test_a_vmap_in_a_vmap_is_one_call():
    x, weight, bias = tensor("x", 2, 3, 6, 4), tensor("weight", 2, 4), tensor("bias", 3, 6, 4)
    call = torch.func.vmap(torch.func.vmap(modulated, (0, None, 0)), (0, 0, None))
    with Watch() as watch:
        found = call(x, weight, bias)
    assert len(watch.seen) == 1
    assert torch.equal(found, modulated(x, weight[:, None, None], bias))


@pytest.mark.parametrize("shape", [(5,), (3, 4), (1, 4)])
@pytest.mark.parametrize("dim", [None, 0])
def test_a_wrong_weight_of_an_item_is_an_error_that_has_the_items_shape(shape, dim):
    """An item's x has no axis for the rows of a weight of two axes."""
    weight = tensor("weight", *([] if dim is None else [3]), *shape, grad=False)
    refused = rf"^rms_norm: weight has shape \({shape[0]},.*expected \(4,\) to match x.shape"
    with pytest.raises(ValueError, match=refused):
        torch.func.vmap(ct.rms_norm, (0, dim))(tensor("x", 3, 4, grad=False), weight)


# --- blocks of models, with the formulas of their authors -----------------------------------------


class Formulas:
    """The functions of cunorm.torch that the blocks below call, by operations of PyTorch."""

    @staticmethod
    def layer_norm(x, weight=None, bias=None, *, weight_offset=0.0):
        y = functional.layer_norm(x, x.shape[-1:], eps=1e-5)
        y = y if weight is None else y * (weight + weight_offset)
        return y if bias is None else y + bias

    @staticmethod
    def group_norm(x, groups, weight, bias, *, activation=None):
        y = functional.group_norm(x, groups) * weight[..., None] + bias[..., None]
        return functional.silu(y) if activation else y

    @staticmethod
    def rms_norm(x, weight, *, bias=None, weight_offset=0.0):
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * (weight + weight_offset)
        return y if bias is None else y + bias


def ada_layer_norm_zero(norms, x, embedding):
    """AdaLayerNormZero of diffusers."""
    shift, scale, gate, *others = embedding[:, None].chunk(6, dim=-1)
    return norms.layer_norm(x, scale, shift, weight_offset=1.0) * gate + sum(others)


def ada_layer_norm_continuous(norms, x, embedding):
    """AdaLayerNormContinuous of diffusers with a norm of its own affine, which the caller folds."""
    scale, shift, weight, bias = embedding[:, None].chunk(6, dim=-1)[:4]
    weight, bias = weight[0, 0], bias[0, 0]
    return norms.layer_norm(x, weight * (1 + scale), bias * (1 + scale) + shift)


def gemma_post_norms(norms, x, embedding):
    """Gemma 2's layer: x + norm(f(norm(x))); the residual is the bias of the second norm."""
    weight, after = embedding[0].chunk(6)[:2]
    y = torch.tanh(norms.rms_norm(x, weight, weight_offset=1.0))
    return norms.rms_norm(y, after, bias=x, weight_offset=1.0)


def resnet_block(norms, x, embedding):
    """ResnetBlock2D of diffusers with time_embedding_norm="scale_shift"; x has 3 channels."""
    weight, bias, scale, shift = embedding.chunk(8, dim=-1)[:4]
    y = norms.group_norm(x, 3, weight[0], bias[0], activation="silu")
    weight, bias = weight[1] * (1 + scale), bias[1] * (1 + scale) + shift
    return x + torch.tanh(norms.group_norm(y * 2, 3, weight, bias, activation="silu"))


BLOCKS = [ada_layer_norm_zero, ada_layer_norm_continuous, gemma_post_norms, resnet_block]


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.__name__)
def test_blocks_of_models_have_the_values_and_gradients_of_their_formulas(block):
    given = tensor("x", 2, 3, 4), tensor("embedding", 2, 24)
    found, expected = (
        [y, *torch.autograd.grad(y, given, factors(y))]
        for y in (block(norms, *given) for norms in (ct, Formulas))
    )
    assert_close(found, expected)
