# SPDX-License-Identifier: MIT
"""The report of replace_norms: every module that may normalise, and where its own forward runs."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional  # noqa: E402

from cunorm.torch import replace_norms  # noqa: E402
from tests.support.torch_norms import (  # noqa: E402
    BF16,
    F32,
    WIDTH,
    Formula,
    GateRequiredNorm,
    LlamaNorm,
    T5Norm,
    norm,
    rms,
    x_of,
)


class CastNorm(nn.LayerNorm):
    """timm's norm: under autocast it first rounds x to autocast's dtype."""

    def forward(self, x):
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class CastFormula(Formula):
    """A CastNorm with a formula of its own."""

    def forward(self, x):
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return (rms(x.float(), self.eps) * self.weight.float()).to(x.dtype)


class NormAct(nn.LayerNorm):
    """timm's norm with an activation: the norm contains other modules."""

    def __init__(self):
        super().__init__(WIDTH)
        self.drop, self.act = nn.Identity(), nn.SiLU()

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


class RowsNorm(Formula):
    """A norm that accepts only two or three axes."""

    def forward(self, x):
        batch, width = x.flatten(0, x.dim() - 2).shape if x.dim() < 4 else x.shape
        return (rms(x.reshape(batch, width), self.eps) * self.weight).reshape(x.shape)


class OptionalGate(Formula):
    """A norm whose gate has a formula that cunorm lacks."""

    def forward(self, x, gate=None):
        return rms(x, self.eps) * self.weight * (1.0 if gate is None else gate.cos())


class Affine(nn.Module):
    """A module that calls torch's norm, but has neither the name nor the eps of a norm."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return functional.layer_norm(x, (WIDTH,)) * self.scale


class Block(nn.Module):
    """A module that is no norm, although the name of one of its modules suggests it."""

    def __init__(self):
        super().__init__()
        self.layer_norm, self.attention = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.attention(self.layer_norm(x))


HALF = "bfloat16, float16, bfloat16/float32, float16/float32"  # in these, rms(x) rounds each step
RUNS = {
    "torch's norm, rounded under autocast": (
        lambda: CastNorm(WIDTH),
        "for bfloat16/float32, float16/float32, under autocast",
    ),
    "a formula, rounded under autocast": (CastFormula, "under autocast"),
    "some numbers of axes": (RowsNorm, f"for {HALF}, for an x of 4 or 5 axes"),
    "some pairs of dtypes": (T5Norm, "for float32/bfloat16, float32/float16"),
    "without a gate": (OptionalGate, f"for {HALF} without a gate, with a gate"),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_report_says_where_the_own_forward_runs(name):
    make, condition = RUNS[name]
    runs = replace_norms(make()).replaced[0].runs
    assert runs.split("; ")[-1] == f"its own forward {condition}"
    assert "own forward" not in replace_norms(LlamaNorm()).replaced[0].runs


def test_with_exact_a_report_names_the_dtypes_that_are_not_replaced():
    runs = replace_norms(GateRequiredNorm(), exact=True).replaced[0].runs
    assert "; its own forward for bfloat16, float16" in runs


@pytest.mark.parametrize("kind", [lambda: CastNorm(WIDTH), CastFormula])
def test_a_norm_that_rounds_under_autocast_still_does(kind):
    module, own = kind(), kind()
    assert replace_norms(module).replaced
    with torch.autocast("cpu", dtype=BF16):
        y = module(x_of())
        assert y.dtype == BF16 and torch.equal(y, own(x_of()))
    assert module(x_of()).dtype == F32


LEFT = {
    "children": (NormAct, "it has submodules: drop, act"),
    "a name that ends otherwise": (
        lambda: type("RMSNormGated2", (nn.Module,), {"forward": lambda m, x: x})(),
        "it has no eps: no number ",
    ),
    "small letters": (
        lambda: type("mynorm", (nn.Module,), {"forward": lambda m, x: x})(),
        "it has no eps: no number ",
    ),
    "eps alone": (
        type("Scaled", (Formula,), {"forward": lambda m, x: x * m.weight}),
        "its results in float32 are no recipe's",
    ),
    "a call of torch's norm": (Affine, "it has no eps: no number "),
    "a script": (lambda: torch.jit.script(nn.LayerNorm(WIDTH)), "it is a ScriptModule"),
}


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("name", LEFT)
def test_whatever_may_normalise_is_reported(name):
    make, reason = LEFT[name]
    model = nn.Sequential(nn.Linear(2, 2), make())
    done = replace_norms(model)
    (left,) = done.left
    assert not done.replaced
    assert left.name == "1" and left.reason.startswith(reason)
    assert left.kind == ("LayerNorm" if name == "a script" else type(model[1]).__name__)


def test_nothing_else_is_reported():
    """CosineSimilarity, which has an eps, and a compiled module around a norm are no norms."""
    done = replace_norms(
        nn.ModuleList(
            [Block(), nn.CosineSimilarity(), torch.compile(norm(rms_of)(), backend="eager")]
        )
    )
    assert [one.name for one in done.replaced] == ["0.layer_norm", "2._orig_mod"]
    assert not done.left


def rms_of(m, x):
    return rms(x.float(), m.eps).to(x.dtype) * m.weight
