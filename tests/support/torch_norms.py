# SPDX-License-Identifier: MIT
"""Norms in plain PyTorch, as models write them, and their arguments."""

import pytest
import torch
from torch import nn

import cunorm.torch as ct

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64
WIDTH, EPS = 32, 1e-5


def drawn(*shape, seed=0, dtype=F32):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) + 0.25).to(dtype)


def assert_near(actual, exact):
    """Check that a result is off by at most 32 u of its largest element plus the store's rounding.

    Kernels are within 8 u of the largest term for y, and 16 u for a gradient. In these sums of
    random numbers, the largest term is at most about twice the largest result.
    """
    dtype = actual.dtype
    u = torch.finfo(torch.promote_types(dtype, F32)).eps / 2
    store = torch.finfo(dtype).eps / 2 if dtype in (BF16, F16) else 0.0
    bound = 32 * u * exact.abs().max() + store * exact.abs()
    off = (actual.double() - exact).abs()
    assert (off <= bound).all(), f"{(off / bound).max():.3g} times the bound"


def rms(x, eps=EPS):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


class Formula(nn.Module):
    """A norm that has an eps, and a weight of one axis."""

    def __init__(self, width=WIDTH, eps=EPS):
        super().__init__()
        self.weight = nn.Parameter(drawn(width, seed=1))
        self.eps = eps


def norm(forward):
    """Return the class of a norm with this `forward(self, x)`."""
    return type("SomeNorm", (Formula,), {"forward": forward})


class LlamaNorm(Formula):
    def forward(self, x):
        return self.weight * rms(x.float(), self.eps).to(x.dtype)


class Scale(nn.Module):
    """torchtune's norm: other names for all attributes, and no "norm" in the class name."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(drawn(WIDTH, seed=1))
        self.epsilon = EPS

    def forward(self, hidden):
        return rms(hidden.float(), self.epsilon).type_as(hidden) * self.scale


class T5Norm(Formula):
    def forward(self, x):
        y = x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + self.eps)
        y = y.to(self.weight.dtype) if self.weight.dtype in (F16, BF16) else y
        return self.weight * y


class LastAxis(nn.LayerNorm):
    """A LayerNorm of the last axis or, with `first`, of axis 1, as in vision models."""

    def __init__(self, first=False):
        super().__init__(WIDTH)
        self.first = first
        with torch.no_grad():
            self.weight.copy_(drawn(WIDTH, seed=1))
            self.bias.copy_(drawn(WIDTH, seed=2))

    def forward(self, x):
        if self.first:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(x)


class GateRequiredNorm(Formula):
    """Qwen3-Next's norm, which also rounds the product with weight."""

    def forward(self, hidden_states, gate):
        y = self.weight * rms(hidden_states.float(), self.eps).to(hidden_states.dtype)
        return (y * nn.functional.silu(gate.float())).to(hidden_states.dtype)


GATES = {"silu": nn.functional.silu, "sigmoid": torch.sigmoid}


class Options(nn.Module):
    """A norm of a formula with these options; `names` are those of its parameters."""

    def __init__(self, center=False, names=("weight",), offset=0.0, rounds=False, group_size=0):
        super().__init__()
        self.center, self.offset, self.rounds = center, offset, rounds
        self.group_size, self.eps = group_size, EPS
        for seed, name in enumerate(("weight", "bias"), 1):
            values = nn.Parameter(drawn(WIDTH, seed=seed)) if name in names else None
            self.register_parameter(name, values)

    def forward(self, x):
        return self.computed(x, 1.0, 1.0).to(x.dtype)

    def computed(self, x, pre, post):
        compute = torch.promote_types(x.dtype, F32)
        y = (x.to(compute) * pre).unflatten(-1, (-1, self.group_size or x.shape[-1]))
        y = rms(y - y.mean(-1, keepdim=True) if self.center else y, self.eps).flatten(-2)
        y = y.to(x.dtype).to(compute) if self.rounds else y
        y = y if self.weight is None else y * (self.weight.to(compute) + self.offset)
        return (y if self.bias is None else y + self.bias.to(compute)) * post


class Gated(Options):
    """A norm with an optional gate, before or after it."""

    def __init__(self, *options, gate="silu", position="post", **named):
        super().__init__(*options, **named)
        self.gate, self.position = gate, position

    def forward(self, x, gate=None):
        g = 1.0 if gate is None else GATES[self.gate](gate.to(torch.promote_types(x.dtype, F32)))
        return self.computed(x, *((g, 1.0) if self.position == "pre" else (1.0, g))).to(x.dtype)


class Mixer(nn.Module):
    """Norms of cunorm.torch between linear layers; a stream bypasses the first layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = (nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.before, self.after = ct.RMSNorm(WIDTH, eps=1e-6), ct.LayerNorm(WIDTH)
        self.groups = ct.GroupNorm(4, WIDTH, activation="silu")
        self.added, self.gated = ct.AddRMSNorm(WIDTH, eps=1e-6), ct.GatedRMSNorm(WIDTH, groups=2)

    def forward(self, x):
        y, stream = self.added(self.first(self.before(x)), x)
        return self.after(self.second(self.gated(self.groups(y), y)) + stream)


def rounded_offset(m, x):
    return (rms(x.float(), m.eps) * (1.0 + m.weight).float()).type_as(x)


# For each name: what creates the module, and `runs` in the report of `replace_norms` in float32.
CUSTOM_NORMS = {
    "Llama's": (LlamaNorm, "rms_norm(eps=1e-05, round_before_weight=True)"),
    "torchtune's": (Scale, "rms_norm(eps=1e-05, round_before_weight=True)"),
    "Gemma's": (lambda: Options(offset=1.0), "rms_norm(eps=1e-05, weight_offset=1.0)"),
    "a rounded 1 + weight": (
        norm(rounded_offset),
        "rms_norm(eps=1e-05, weight_offset=1.0), weight + weight_offset rounded",
    ),
    "T5's": (
        T5Norm,
        "rms_norm(eps=1e-05, round_before_weight=True); "
        "rms_norm(eps=1e-05, dtype=float32) for bfloat16/float32, float16/float32; "
        "its own forward for float32/bfloat16, float32/float16",
    ),
    "without weight": (lambda: Options(names=()), "rms_norm(eps=1e-05)"),
    "Cohere's": (lambda: Options(center=True), "layer_norm(eps=1e-05)"),
    "torch's": (LastAxis, "layer_norm(eps=1e-05)"),
    "diffusers' with bias": (lambda: Options(names=("weight", "bias")), "normalize(eps=1e-05)"),
    "Mamba-2's": (
        lambda: Gated(group_size=8, position="pre"),
        "rms_norm(eps=1e-05, groups=4); rms_norm(eps=1e-05, groups=4, gate=silu pre)",
    ),
    "a gate after": (Gated, "rms_norm(eps=1e-05); rms_norm(eps=1e-05, gate=silu post)"),
    "Qwen3-Next's": (
        GateRequiredNorm,
        "rms_norm(eps=1e-05, round_before_weight=True, gate=silu post, dtype=x's) "
        "within a unit in the last place in bfloat16, float16",
    ),
}
TORCH_NORMS = {
    "RMSNorm": (lambda: nn.RMSNorm(WIDTH), "rms_norm(eps=machine epsilon)"),
    "RMSNorm of two axes": (lambda: nn.RMSNorm((8, WIDTH), eps=EPS), "rms_norm(eps=1e-05)"),
    "LayerNorm": (lambda: nn.LayerNorm(WIDTH), "layer_norm(eps=1e-05)"),
    "LayerNorm without bias": (lambda: nn.LayerNorm(WIDTH, bias=False), "layer_norm(eps=1e-05)"),
    "GroupNorm": (lambda: nn.GroupNorm(4, 8), "group_norm(4, eps=1e-05)"),
    "a subclass": (lambda: type("OneGroup", (nn.GroupNorm,), {})(1, 8), "group_norm(1, eps=1e-05)"),
}
ALL_NORMS = CUSTOM_NORMS | TORCH_NORMS


def x_of(dtype=F32):
    return drawn(4, 8, WIDTH, seed=3, dtype=dtype)


def arguments(name, dtype=F32):
    gated = name in ("Mamba-2's", "a gate after", "Qwen3-Next's")
    return (x_of(dtype), drawn(4, 8, WIDTH, seed=4, dtype=dtype)) if gated else (x_of(dtype),)


def results(module, *given, dy=None):
    """Return y, and the gradients of all inputs and parameters."""
    given = [x.detach().clone().requires_grad_() for x in given]
    y = module(*given)
    dy = drawn(*y.shape, seed=5, dtype=y.dtype) if dy is None else dy
    return [y.detach(), *torch.autograd.grad(y, [*given, *module.parameters()], dy)]


def check_results(module, given, monkeypatch, may_be_off=8):
    """Replace a norm, and compare its results with those of its own forward, which does not run.

    Float32 agrees within 32 roundings, 16 of each side. Bits of a bfloat16 y agree except at ties:
    an error of 2**-20 of a row's largest number changes a rounding only near a tie, for a number
    that is a tenth of the largest with probability 2**-8. In bfloat16, PyTorch rounds the
    intermediate results of a gradient, some four times one after another, by half a unit each.
    """
    kind, before = type(module), results(module, *given)
    done = ct.replace_norms(module)
    assert [(one.name, one.kind) for one in done.replaced] == [("", kind.__name__)]
    assert not done.left
    with monkeypatch.context() as patch:
        patch.setattr(kind, "forward", lambda *_: pytest.fail("its own forward ran"))
        after = results(module, *given)
    is_half = any(one.dtype == BF16 for one in before)
    for index, (one, own) in enumerate(zip(after, before, strict=True)):
        assert one.dtype == own.dtype
        off, size = (one.double() - own.double()).abs(), own.double().abs()
        if index == 0 and own.dtype == BF16:
            assert (off <= 2**-7 * size).all() and (off > 0).sum() <= may_be_off
        elif index > 0 and is_half:
            assert (off <= 4 * 2**-7 * size.max()).all()
        else:
            assert_near(one, own.double())
    return done.replaced[0].runs
