# SPDX-License-Identifier: MIT
"""replace_norms on norms of torch.nn and on custom norms, one of each kind.

`test_replace_models` has models of transformers.
"""

from __future__ import annotations

import re

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402

from cunorm.torch import replace_norms  # noqa: E402
from tests.support.torch_norms import (  # noqa: E402
    ALL_NORMS,
    BF16,
    CUSTOM_NORMS,
    F32,
    Gated,
    GateRequiredNorm,
    LastAxis,
    LlamaNorm,
    arguments,
    drawn,
    norm,
    results,
    rms,
    x_of,
)


def own_forwards(patch, *kinds):
    """Replace the forwards of classes; return a list that gets their arguments."""
    calls = []
    for kind in kinds:
        patch.setattr(kind, "forward", lambda self, *given: calls.append((type(self), *given)))
    return calls


# Norms that round in different places. In bfloat16, the tests of all others are exhaustive.
ROUNDING = ("Llama's", "Gemma's", "T5's", "Qwen3-Next's")
IN_BFLOAT16 = [
    pytest.param(name, BF16, marks=() if name in ROUNDING else pytest.mark.exhaustive)
    for name in CUSTOM_NORMS
]


@pytest.mark.parametrize("name, dtype", [*((name, F32) for name in ALL_NORMS), *IN_BFLOAT16])
def test_a_replaced_norm_runs_the_kernels_of_its_formula(name, dtype, monkeypatch):
    """Float32 agrees within 32 roundings, 16 of each side; bfloat16 bits of y agree except at ties.

    An error of 2**-20 of a row's largest number changes a rounding to bfloat16 only near a tie: for
    a number that is a tenth of the largest, with probability 2**-8. Qwen3-Next's norm rounds once
    more, so up to half of its elements are a unit off. In bfloat16, PyTorch rounds the intermediate
    results of a gradient, some four times one after another, by half a unit each.
    """
    make, runs = ALL_NORMS[name]
    module, given = make().to(dtype), arguments(name, dtype)
    kind, before = type(module), results(module, *given)
    done = replace_norms(module)
    assert [(one.name, one.kind) for one in done.replaced] == [("", kind.__name__)]
    assert not done.left
    if dtype == F32:
        assert done.replaced[0].runs == runs
    after, unit = results(module, *given), torch.finfo(dtype).eps
    for number, (actual, expected) in enumerate(zip(after, before, strict=True)):
        assert actual.dtype == expected.dtype
        off = (actual.double() - expected.double()).abs()
        if dtype == F32:
            assert (off <= 32 * unit / 2 * expected.abs().max()).all()
        elif number == 0:
            assert (off <= unit * expected.double().abs()).all()
            assert (off > 0).sum() <= (off.numel() / 2 if name == "Qwen3-Next's" else 8)
        else:
            assert (off <= 4 * unit * expected.double().abs().max()).all()
    calls = own_forwards(monkeypatch, kind)
    module(*given)
    assert not calls


@pytest.mark.parametrize("x_dtype, weight_dtype", [(F32, BF16), (BF16, F32)])
@pytest.mark.parametrize("name", ["Llama's", "Gemma's", "T5's"])
def test_dtypes_are_those_of_the_modules_own_forward(name, x_dtype, weight_dtype):
    module, (x,) = CUSTOM_NORMS[name][0]().to(weight_dtype), arguments(name, x_dtype)
    expected = module(x)
    replace_norms(module)
    actual = module(x)
    assert actual.dtype == expected.dtype
    unit = torch.finfo(actual.dtype).eps
    assert (actual - expected).abs().max() <= 16 * unit * expected.abs().max()


def test_dtypes_that_the_own_forward_refuses_are_refused():
    module, x = LastAxis().to(BF16), x_of()
    with pytest.raises(RuntimeError) as own:
        module(x)
    replace_norms(module)
    with pytest.raises(RuntimeError, match=re.escape(str(own.value))):
        module(x)


def test_the_recipe_of_a_class_is_not_used_for_an_object_with_other_settings():
    done = replace_norms(nn.ModuleList([LastAxis(), LastAxis(first=True)]))
    assert [one.name for one in done.replaced] == ["0"]
    assert [one.name for one in done.left] == ["1"]


def test_a_subclass_with_torchs_forward_is_a_norm_of_torchs():
    module = type("OneGroup", (nn.GroupNorm,), {})(1, 8)
    kind, expected = type(module), module(x_of())
    assert replace_norms(module).replaced[0].runs == "group_norm(1, eps=1e-05)"
    assert isinstance(module, kind)
    torch.testing.assert_close(module(x_of()), expected)


# --- calls that the probe did not cover -----------------------------------------------------------


def test_with_further_arguments_the_modules_own_forward_runs():
    def forward(m, x, gate=None, more=0.0):
        return rms(x, m.eps) * m.weight * (1.0 if gate is None else gate) + more

    module = norm(forward)()
    x, gate = x_of(), drawn(4, 8, 1)
    calls = [((x, None, 2.0), {}), ((x, gate), {}), ((x, gate, 1.0), {}), ((x,), {"more": 2.0})]
    expected, plain = [module(*call, **more) for call, more in calls], module(x)
    assert replace_norms(module).replaced
    for (call, more), y in zip(calls, expected, strict=True):
        assert torch.equal(module(*call, **more), y)
    torch.testing.assert_close(module(x), plain)


def test_x_and_gate_may_be_given_by_name():
    module = GateRequiredNorm()
    x, gate = arguments("Qwen3-Next's")
    replace_norms(module)
    expected = module(x, gate)
    assert torch.equal(module(gate=gate, hidden_states=x), expected)
    assert torch.equal(module(x, gate=gate), expected)


def test_an_x_that_is_given_twice_is_refused():
    module = Gated()
    replace_norms(module)
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        module(x_of(), x=x_of())


def test_with_a_gate_of_another_shape_or_dtype_the_own_forward_runs(monkeypatch):
    module = Gated()
    x, gate = arguments("a gate after", BF16)
    gates = [gate[..., :1], gate.float()]
    assert replace_norms(module).replaced
    calls = own_forwards(monkeypatch, Gated)
    for other in (gate, *gates):
        module(x, other)
    assert len(calls) == 2 and all(a[2] is b for a, b in zip(calls, gates, strict=True))


@pytest.mark.parametrize("shape", [(2, 16, 5, 16), (2, 16, 5, 7), (2, 16, 3, 5, 16), (3, 16)])
def test_with_an_unknown_number_of_axes_the_own_forward_runs(shape):
    """As in ConvNeXt, the norm is over axis 1 if x has `axes` axes, else over the last axis."""
    axes = max(len(shape), 4)

    def channels_first(m, x):
        rows = x.movedim(1, -1) if x.dim() == axes else x
        y = m.weight * rms(rows, m.eps)
        return y.movedim(-1, 1) if x.dim() == axes else y

    module, x = norm(channels_first)(16), torch.randn(shape)
    own = module(x)
    assert replace_norms(module).replaced
    assert (module(x) - own).abs().max() <= 16 * 2**-23 * own.abs().max()


def test_eps_is_read_at_each_call():
    module = LlamaNorm()
    replace_norms(module)
    module.eps = 4.0
    torch.testing.assert_close(module(x_of()), LlamaNorm.forward(module, x_of()))


def test_under_autocast_a_forward_that_calls_torchs_norm_still_does(monkeypatch):
    """Under autocast torch's norms change the dtype on CUDA; a formula does not."""
    of_torch, formula = LastAxis(), LlamaNorm()
    replace_norms(nn.ModuleList([of_torch, formula]))
    calls = own_forwards(monkeypatch, LastAxis, LlamaNorm)
    with torch.autocast("cpu", dtype=BF16):
        of_torch(x_of(BF16)), formula(x_of(BF16))
    assert [kind.__name__ for kind, _ in calls] == ["CunormLastAxis"]
