# SPDX-License-Identifier: MIT
"""Norms of published models, written in PyTorch as in the models' sources, give the same bits.

The exceptions are numbers so near a tie that some ulps of float32 change their rounding. The
gradients are the oracle's, which are those of torch's autograd (numerics/test_reference_torch.py).
"""

import numpy as np
import pytest

import cunorm
from cunorm import reference
from tests.support.gpu_arrays import OnTorchCpu
from tests.support.operands import DTYPES, draw

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

on = OnTorchCpu()
SHAPE, EPS = (64, 480), 1e-5
ULP = 2.0**-23  # the largest relative size of an ulp of float32


def llama(x, weight):
    """LlamaRMSNorm of transformers, and Qwen's: round to x's dtype, then multiply by weight."""
    promoted = x.float()
    promoted = promoted * torch.rsqrt(promoted.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * promoted.to(x.dtype)


def gemma(x, weight):
    """GemmaRMSNorm of transformers: multiply by 1 + weight, then round."""
    promoted = x.float()
    promoted = promoted * torch.rsqrt(promoted.pow(2).mean(-1, keepdim=True) + EPS)
    return (promoted * (1.0 + weight.float())).type_as(x)


def mamba(x, weight, gate, groups, gate_position):
    """Mamba-2's rms_norm_ref (state-spaces/mamba, layernorm_gated.py)."""
    promoted, g = x.float(), torch.nn.functional.silu(gate.float())
    if gate_position == "pre":
        promoted = promoted * g
    rows = promoted.unflatten(-1, (groups, -1))
    rstd = 1 / torch.sqrt(rows.square().mean(-1, keepdim=True) + EPS)
    promoted = (rows * rstd).flatten(-2) * weight.float()
    return (promoted * g if gate_position == "post" else promoted).to(x.dtype)


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


MAMBAS = [{"gate_position": p, "groups": g} for p in ("post", "pre") for g in (1, 5)]


@pytest.mark.parametrize("options", [{"weight_offset": 1.0}, *MAMBAS], ids=str)
def test_gemma_and_mamba_equal_their_references_to_the_bit(options):
    """The bound is 4 ulp for x * rstd plus 8 ulp for the products with weight and the gate."""
    # A weight is about 0, like Gemma's.
    x, gate, weight = (draw(n, SHAPE, "bfloat16") for n in ("x", "gate", "weight"))
    operands = [on.put(array) for array in (x, weight[0].copy(), gate)]
    if "groups" in options:
        expected, options = on.get(mamba(*operands, **options)), options | {"gate": gate}
    else:
        expected = on.get(gemma(*operands[:2]))
    options = options | {"eps": EPS}
    y, exact = (norm(x, weight[0], **options) for norm in (cunorm.rms_norm, reference.rms_norm))
    assert y.dtype == expected.dtype
    assert (y == expected)[far_from_ties(exact, y.dtype, 12 * ULP)].all()


def far_from_ties(exact, dtype, distance):
    """Return a mask of numbers that round alike after relative changes up to `distance`."""
    low, high = (reference.round_to(exact * (1 + by), dtype) for by in (-distance, distance))
    far = low == high
    assert np.count_nonzero(far) > 0.99 * far.size
    return far
