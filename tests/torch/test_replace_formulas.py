# SPDX-License-Identifier: MIT
"""replace_norms on drawn formulas: norms run the reported calls, forward and backward.

In tests of drawn formulas, the float64 oracle replaces the kernels, as it does without a compiler:
these tests are about the choice of the call.
"""

from __future__ import annotations

import random
from itertools import product

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402

from cunorm.torch import replace_norms  # noqa: E402
from cunorm.torch._replace import probe as probing  # noqa: E402
from tests.support.internals import _dispatch, _loading  # noqa: E402
from tests.support.torch_norms import (  # noqa: E402
    BF16,
    EPS,
    F32,
    F64,
    WIDTH,
    LlamaNorm,
    assert_near,
    drawn,
    norm,
    results,
    rms,
    x_of,
)

GATES = {"silu": nn.functional.silu, "sigmoid": torch.sigmoid}


class Drawn(nn.Module):
    """A norm of a drawn formula; `parameters` lists the names of its parameters."""

    def __init__(self, center, parameters, offset, rounds, activation, position):
        super().__init__()
        self.center, self.offset, self.rounds = center, offset, rounds
        self.activation, self.position, self.eps = activation, position, EPS
        for seed, name in enumerate(("weight", "bias")):
            values = nn.Parameter(drawn(WIDTH, seed=seed)) if name in parameters else None
            self.register_parameter(name, values)

    def forward(self, x, gate=None):
        compute = torch.promote_types(x.dtype, F32)
        g = 1.0 if gate is None else GATES[self.activation](gate.to(compute))
        y = x.to(compute) * (g if self.position == "pre" else 1.0)
        y = rms(y - y.mean(-1, keepdim=True) if self.center else y)
        y = y.to(x.dtype).to(compute) if self.rounds else y
        y = y if self.weight is None else y * (self.weight.to(compute) + self.offset)
        y = y if self.bias is None else y + self.bias.to(compute)
        return (y * (g if self.position == "post" else 1.0)).to(x.dtype)


PARAMETERS = [((), 0.0, False)] + [
    (names, offset, rounds)
    for names in (("weight",), ("weight", "bias"))
    for offset, rounds in product((0.0, 1.0), (False, True))
]
FORMULAS = [
    (center, *parameters, *gate)
    for center, parameters in product((False, True), PARAMETERS)
    for gate in ((None, None), *product(GATES, ("pre", "post")))
]
SOME = random.Random(0).sample(FORMULAS, 12)


@pytest.fixture
def by_oracle(monkeypatch):
    monkeypatch.setattr(_loading, "has_compiler", lambda: False)
    _dispatch.clear_calls()
    yield
    _dispatch.clear_calls()


def check_formula(formula, monkeypatch):
    """Check a replaced module's results in several dtypes, and that its own forward does not run.

    In bfloat16, y has the bits of the module's own forward except at ties, and gradients differ by
    four roundings of that forward at most: see `test_replace`.
    """
    for x_dtype, dtype in ((F32, F32), (BF16, BF16), (BF16, F32)):
        module = Drawn(*formula).to(dtype)
        given = [x_of(x_dtype)]
        given += [drawn(4, 8, WIDTH, seed=4, dtype=x_dtype)] if module.activation else []
        oracle = Drawn(*formula).to(dtype).to(F64)
        exact = results(oracle, *(one.to(F64) for one in given))
        before = results(module, *given)
        done = replace_norms(module)
        assert len(done.replaced) == 1, done
        with monkeypatch.context() as patch:
            patch.setattr(Drawn, "forward", lambda *_: pytest.fail("its own forward ran"))
            after = results(module, *given)
        unit = torch.finfo(BF16).eps
        for index, (one, own, right) in enumerate(zip(after, before, exact, strict=True)):
            assert one.dtype == own.dtype
            off = (one.double() - own.double()).abs()
            if x_dtype == F32:
                assert_near(one, right)
            elif index == 0:
                assert (off <= unit * own.double().abs()).all() and (off > 0).sum() <= 8
            else:
                assert (off <= 4 * unit * own.double().abs().max()).all()


@pytest.mark.parametrize("formula", [*SOME, (False, ("weight", "bias"), 0.0, False, None, None)])
def test_a_norm_that_is_reported_as_replaced_runs_and_agrees(formula, by_oracle, monkeypatch):
    check_formula(formula, monkeypatch)


@pytest.mark.exhaustive
def test_every_norm_that_is_reported_as_replaced_runs_and_agrees(by_oracle, monkeypatch):
    for formula in FORMULAS:
        check_formula(formula, monkeypatch)


@pytest.mark.parametrize("broken", ["the call fails", "other results", "other gradients"])
def test_a_norm_that_cunorm_would_run_wrongly_is_left(broken, monkeypatch):
    """A fault of cunorm, here in the call of a recipe, is found before a class is swapped."""

    def call(recipe, *dtypes):
        function = usual(recipe, *dtypes)

        def wrong(x, *parameters, **options):
            if broken == "the call fails":
                return function(x, *parameters, x, x, x, **options)
            if broken == "other results":
                return function(2 * x + 1, *parameters, **options)
            return function(x + (x - x.detach()), *parameters, **options)

        return wrong

    usual = probing.Recipe.call
    monkeypatch.setattr(probing.Recipe, "call", call)
    kind = norm(LlamaNorm.forward)
    module = kind()
    done = replace_norms(module)
    assert type(module) is kind and not done.replaced
    assert "cunorm's rms_norm(round_before_weight=True) fails" in done.left[0].reason


@pytest.mark.parametrize("eps", [0, 1])
def test_eps_may_be_an_int(eps):
    module, own = (LlamaNorm(eps=eps) for _ in range(2))
    assert replace_norms(module).replaced[0].runs.startswith(f"rms_norm(eps={eps}, round")
    torch.testing.assert_close(module(x_of()), own(x_of()))


@pytest.mark.parametrize("eps", [True, None, "1e-5"])
def test_an_eps_that_is_no_number_counts_as_missing(eps):
    module = LlamaNorm()
    module.eps = eps
    (left,) = replace_norms(module).left
    assert left.reason.startswith("it has no eps: no number variance_epsilon, eps,")
