# SPDX-License-Identifier: MIT
"""Norms of published models, written in PyTorch as in the models' sources, and their gradients.

A formula in float64 agrees with the oracle to 12 digits, and the kernels' errors are within their
bounds. A formula in the models' own dtypes gives the same bits as the kernels, except for numbers
so near a tie that some ulps of float32 change their rounding.
"""

import numpy as np
import pytest

import cunorm
from cunorm import reference
from tests.support.bounds import check_backward, check_forward
from tests.support.gpu_arrays import OnTorchCpu, get_all
from tests.support.operands import DTYPES, draw

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

on = OnTorchCpu()
SHAPE, EPS = (64, 480), 1e-5
ULP = 2.0**-23  # the largest relative size of an ulp of float32


def llama(x, weight):
    """LlamaRMSNorm of transformers, and Qwen's: round to x's dtype, then multiply by weight."""
    promoted = x.to(torch.promote_types(x.dtype, torch.float32))
    promoted = promoted * torch.rsqrt(promoted.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * promoted.to(x.dtype)


def gemma(x, weight):
    """GemmaRMSNorm of transformers: multiply by 1 + weight, then round."""
    promoted = x.to(torch.promote_types(x.dtype, torch.float32))
    promoted = promoted * torch.rsqrt(promoted.pow(2).mean(-1, keepdim=True) + EPS)
    return (promoted * (1.0 + weight.to(promoted.dtype))).type_as(x)


def mamba(x, weight, gate, group_size=None, norm_before_gate=True):
    """Mamba-2's rms_norm_ref (state-spaces/mamba, layernorm_gated.py), in float32 or float64."""
    promoted = x.to(torch.promote_types(x.dtype, torch.float32))
    g = torch.nn.functional.silu(gate.to(promoted.dtype))
    if not norm_before_gate:
        promoted = promoted * g
    groups = promoted.unflatten(-1, (-1, group_size or x.shape[-1]))
    rstd = 1 / torch.sqrt(groups.square().mean(-1, keepdim=True) + EPS)
    promoted = (groups * rstd).flatten(-2) * weight.to(promoted.dtype)
    return (promoted * g if norm_before_gate else promoted).to(x.dtype)


def drawn(*names):
    """Draw operands by name; a weight has a row's shape and is about 0, like Gemma's."""
    return [draw(n, SHAPE[-1:] if n == "weight" else SHAPE, "bfloat16") for n in names]


# --- in float64, and gradients --------------------------------------------------------------------

MAMBA = {
    f"mamba, {'before' if before else 'after'} the gate, groups of {size}": (
        lambda x, weight, gate, size=size, before=before: mamba(x, weight, gate, size, before),
        {"groups": SHAPE[-1] // (size or SHAPE[-1]), "gate_position": "post" if before else "pre"},
    )
    for before in (True, False)
    for size in (None, 96)
}
FORMULAS = {"llama": (llama, {}), "gemma": (gemma, {"weight_offset": 1.0}), **MAMBA}


@pytest.mark.parametrize("name", FORMULAS)
def test_a_published_norm_and_its_gradients_are_those_of_torchs_autograd(name):
    formula, options = FORMULAS[name]
    x, weight, gate, dy = drawn("x", "weight", "gate", "dy")
    arrays = [x, weight, gate] if "gate_position" in options else [x, weight]
    leaves = [torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in arrays]
    exact = formula(*leaves)
    exact.backward(torch.from_numpy(dy.astype(np.float64)))

    options = options | ({"gate": gate} if "gate_position" in options else {})
    oracle = reference.rms_norm_forward(x, weight, eps=EPS, **options)
    agree(oracle.y, exact.detach())
    oracle = reference.rms_norm_backward(dy, x, weight, rstd=oracle.rstd, **options)
    gradients = (oracle.dx, oracle.dweight, oracle.dgate)
    for gradient, leaf in zip(gradients, leaves, strict=False):
        agree(gradient, leaf.grad)

    theirs = options | ({"gate": on.put(gate)} if "gate" in options else {})
    operands = [on.put(array) for array in (x, weight)]
    forward = cunorm.rms_norm_forward(*operands, eps=EPS, **theirs)
    grads = cunorm.rms_norm_backward(on.put(dy), *operands, rstd=forward.rstd, **theirs)
    check_forward(get_all(on, forward), x, weight, None, eps=EPS, **options)
    check_backward(get_all(on, grads), dy, x, weight, None, eps=EPS, **options)


def agree(oracle, exact):
    """Check the oracle against torch; `atol` is for numbers that are small because terms cancel."""
    scale = abs(oracle).max()
    np.testing.assert_allclose(oracle, exact.numpy(), rtol=1e-12, atol=1e-14 * scale)


# --- in the models' own dtypes --------------------------------------------------------------------


LLAMAS = [("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")]


@pytest.mark.parametrize(("x_dtype", "weight_dtype"), LLAMAS)
def test_llamas_order_of_casts_is_that_of_transformers_to_the_bit(x_dtype, weight_dtype):
    """Both compute x * rstd within 4 ulp of float32, so both round it alike far from ties."""
    x, weight = draw("x", SHAPE, x_dtype), draw("weight", SHAPE[-1], weight_dtype)
    expected = on.get(llama(on.put(x), on.put(weight)))
    y = cunorm.rms_norm(x, weight, eps=EPS, round_before_weight=True)
    assert y.dtype == expected.dtype
    normalised = reference.rms_norm(x, eps=EPS)
    assert (y == expected)[far_from_ties(normalised, DTYPES[x_dtype], 4 * ULP)].all()
    plain = cunorm.rms_norm(x, weight, eps=EPS, dtype=y.dtype)
    assert np.count_nonzero(plain != expected) > y.size / 10  # so the order of casts matters


@pytest.mark.parametrize("name", ["gemma", *MAMBA])
def test_other_published_norms_equal_their_references_to_the_bit(name):
    """The bound is 4 ulp for x * rstd plus 8 ulp for the products with weight and the gate."""
    formula, options = FORMULAS[name]
    x, weight, *gate = drawn("x", "weight", *(["gate"] if name in MAMBA else []))
    expected = on.get(formula(*(on.put(array) for array in (x, weight, *gate))))
    options = options | {"eps": EPS, "gate": gate[0] if gate else None}
    y, exact = (norm(x, weight, **options) for norm in (cunorm.rms_norm, reference.rms_norm))
    assert y.dtype == expected.dtype
    assert (y == expected)[far_from_ties(exact, y.dtype, 12 * ULP)].all()


def far_from_ties(exact, dtype, distance):
    """Return a mask of numbers that round alike after relative changes up to `distance`."""
    low, high = (reference.round_to(exact * (1 + by), dtype) for by in (-distance, distance))
    far = low == high
    assert np.count_nonzero(far) > 0.99 * far.size
    return far
