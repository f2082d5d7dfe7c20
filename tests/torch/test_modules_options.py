# SPDX-License-Identifier: MIT
"""What the modules of cunorm.torch have that those of torch.nn have not."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cunorm.torch  # noqa: E402
from cunorm.torch import AddRMSNorm, GatedRMSNorm, GroupNorm, RMSNorm  # noqa: E402
from tests.support.torch_modules import BF16, F32, F64, assert_near, drawn, with_random_parameters  # noqa: E402

IMAGES = (3, 12, 4, 5)


def llama(x, weight, eps):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def test_weight_offset_is_gemmas_and_a_new_weight_counts_as_one():
    x = drawn(6, 32)
    new = RMSNorm(32, eps=1e-6, dtype=F64, weight_offset=1.0)
    assert (new.weight == 0).all()
    plain = torch.nn.RMSNorm(32, eps=1e-6, dtype=F64)
    assert_near(new(x).detach(), plain(x).detach())
    with torch.no_grad():
        new.weight.copy_(drawn(32, seed=2))
        plain.weight.copy_(1 + new.weight)
    assert_near(new(x).detach(), plain(x).detach())
    assert "weight_offset=1.0" in repr(new)
    with pytest.raises(ValueError, match=r"weight_offset is 1\.0, expected 0\.0"):
        RMSNorm(32, elementwise_affine=False, weight_offset=1.0)


@pytest.mark.parametrize("weight_dtype", [BF16, F32])
def test_round_before_weight_is_llamas_order_to_the_bit(weight_dtype):
    """But where what is rounded is so near a tie that float32 does not decide: here, nowhere."""
    x = drawn(16, 32, dtype=BF16)
    norm = with_random_parameters(
        RMSNorm(32, eps=1e-6, dtype=weight_dtype, round_before_weight=True)
    )
    expected = llama(x, norm.weight, 1e-6)
    assert norm(x).dtype == expected.dtype
    # A tie is within 2**-20 of a number of bfloat16 as often as 2**-11.
    assert (norm(x) != expected).sum() <= 2
    norm.round_before_weight = False
    assert (norm(x) != expected).sum() > 50


@pytest.mark.parametrize("activation", [None, "silu", "gelu"])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_group_norm_with_an_activation_keeps_the_memory_format(activation, layout):
    norm = with_random_parameters(GroupNorm(4, 12, activation=activation, dtype=F32))
    x = drawn(*IMAGES, dtype=F32).to(memory_format=layout)
    theirs = torch.nn.GroupNorm(4, 12, dtype=F64)
    theirs.load_state_dict(norm.state_dict())
    g = getattr(torch.nn.functional, activation) if activation else lambda n: n
    y = norm(x)
    assert y.is_contiguous(memory_format=layout)
    assert_near(y.detach(), g(theirs(x.double())).detach())
    assert (f"activation={activation!r}" in repr(norm)) == (activation is not None)


@pytest.mark.parametrize("residual_dtype", [F32, BF16])
def test_add_rms_norm_is_the_addition_and_then_the_norm(residual_dtype):
    norm = with_random_parameters(AddRMSNorm(32, eps=1e-6, dtype=BF16, weight_offset=1.0))
    plain = RMSNorm(32, eps=1e-6, weight_offset=1.0)
    plain.load_state_dict(norm.state_dict())
    x, residual = drawn(6, 32, dtype=BF16), drawn(6, 32, seed=3, dtype=residual_dtype)
    y, stream = norm(x, residual)
    assert torch.equal(stream, (x.float() + residual.float()).to(residual_dtype))
    assert y.dtype == BF16
    # The norm reads the stream as it was rounded: so the same bits, in a type that holds them.
    assert torch.equal(y, plain(stream.float()).to(BF16))


def test_add_rms_norm_hands_the_gradients_of_y_and_stream_to_both_summands():
    norm = with_random_parameters(AddRMSNorm(32, eps=1e-6, dtype=F64))
    x, residual = (drawn(6, 32, seed=seed).requires_grad_() for seed in (0, 3))
    dy, d_stream = drawn(6, 32, seed=4), drawn(6, 32, seed=5)
    y, stream = norm(x, residual)
    found = torch.autograd.grad((y, stream), (x, residual, norm.weight), (dy, d_stream))
    s = x + residual
    expected = (torch.nn.functional.rms_norm(s, (32,), norm.weight, 1e-6), s)
    exact = torch.autograd.grad(expected, (x, residual, norm.weight), (dy, d_stream))
    for actual, gradient in zip(found, exact, strict=True):
        assert_near(actual, gradient)


def test_add_rms_norm_begins_a_stream():
    x = drawn(6, 32, dtype=BF16)
    y, stream = AddRMSNorm(32, dtype=BF16)(x)
    assert stream is x
    wide = AddRMSNorm(32, dtype=BF16, residual_dtype=F32)
    y_wide, stream = wide(x, None)
    assert stream.dtype == F32 and y_wide.dtype == BF16
    assert torch.equal(stream, x.float()) and torch.equal(y, y_wide)
    assert "residual_dtype=torch.float32" in repr(wide)
    with pytest.raises(ValueError, match="residual_dtype"):
        wide(x, x)


@pytest.mark.parametrize("position", ["pre", "post"])
@pytest.mark.parametrize("groups", [1, 4])
def test_gated_rms_norm_is_mamba_2s(position, groups):
    norm = with_random_parameters(
        GatedRMSNorm(32, groups=groups, gate_position=position, dtype=F64)
    )
    x, gate = drawn(6, 5, 32), drawn(6, 5, 32, seed=3)
    g = torch.nn.functional.silu(gate)
    rows = (x * g if position == "pre" else x).unflatten(-1, (groups, -1))
    rows = (rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)).flatten(-2)
    expected = rows * norm.weight * (1 if position == "pre" else g)
    assert_near(norm(x, gate).detach(), expected.detach())
    alone = x.unflatten(-1, (groups, -1))
    alone = (alone * torch.rsqrt(alone.square().mean(-1, keepdim=True) + 1e-5)).flatten(-2)
    assert_near(norm(x).detach(), (alone * norm.weight).detach())


def test_what_changes_a_module_is_in_its_copy():
    """As defaults are the class's, a state without them is that of a module of torch.nn."""
    made = [
        RMSNorm(8, weight_offset=1.0, round_before_weight=True),
        GroupNorm(2, 8, activation="relu"),
        AddRMSNorm(8, residual_dtype=F32),
        GatedRMSNorm(8, groups=2, gate_activation="sigmoid", gate_position="pre"),
    ]
    for module in made:
        assert repr(pickle.loads(pickle.dumps(module))) == repr(module)
        assert repr(copy.deepcopy(module)) == repr(module)


def test_the_public_names_are_the_modules():
    for name in ("RMSNorm", "LayerNorm", "GroupNorm", "AddRMSNorm", "GatedRMSNorm"):
        assert name in cunorm.torch.__all__
