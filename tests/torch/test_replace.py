# SPDX-License-Identifier: MIT
"""replace_norms on norms of torch.nn, on custom norms and on drawn formulas.

`test_replace_models` has models of transformers.
"""

import random
from itertools import product

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from cunorm.torch import replace_norms  # noqa: E402
from cunorm.torch._replace import probe as probing  # noqa: E402
from tests.support.internals import _dispatch, _loading  # noqa: E402
from tests.support.torch_norms import (  # noqa: E402
    ALL_NORMS,
    BF16,
    CUSTOM_NORMS,
    F32,
    GATES,
    Gated,
    LlamaNorm,
    Options,
    arguments,
    check_results,
    x_of,
)

# Norms that round in different places. In bfloat16, the tests of all others are exhaustive.
ROUNDING = ("Llama's", "Gemma's", "T5's", "Qwen3-Next's")
DTYPES = [(name, F32, F32) for name in ALL_NORMS]
DTYPES += [(name, BF16, F32) for name in ROUNDING[:3]] + [
    (name, F32, BF16) for name in ROUNDING[:2]
]
DTYPES += [
    pytest.param(name, BF16, BF16, marks=() if name in ROUNDING else pytest.mark.exhaustive)
    for name in CUSTOM_NORMS
]


@pytest.mark.parametrize("name, x_dtype, dtype", DTYPES)
def test_a_replaced_norm_runs_the_kernels_of_its_formula(name, x_dtype, dtype, monkeypatch):
    make, expected = ALL_NORMS[name]
    given = arguments(name, x_dtype)
    # Qwen3-Next's norm rounds once more, so up to half of its elements are a unit off.
    may_be_off = given[0].numel() / 2 if name == "Qwen3-Next's" else 8
    runs = check_results(make().to(dtype), given, monkeypatch, may_be_off)
    assert dtype != F32 or runs == expected


PARAMETERS = [((), 0.0, False)] + [
    (names, offset, rounds)
    for names in (("weight",), ("weight", "bias"))
    for offset, rounds in product((0.0, 1.0), (False, True))
]
FORMULAS = [
    (center, *parameters, gate)
    for center, parameters in product((False, True), PARAMETERS)
    for gate in (None, *product(GATES, ("pre", "post")))
]
SOME = [*random.Random(0).sample(FORMULAS, 12), (False, ("weight", "bias"), 0.0, False, None)]


@pytest.mark.parametrize(
    "formula",
    [pytest.param(f, marks=() if f in SOME else pytest.mark.exhaustive) for f in FORMULAS],
)
def test_a_norm_of_a_drawn_formula_is_replaced_and_agrees(formula, monkeypatch):
    """The float64 oracle replaces the kernels: this test is about the choice of the call."""
    *options, gate = formula
    monkeypatch.setattr(_loading, "has_compiler", lambda: False)
    _dispatch.clear_calls()
    for x_dtype, dtype in ((F32, F32), (BF16, BF16), (BF16, F32)):
        module = Gated(*options, gate=gate[0], position=gate[1]) if gate else Options(*options)
        given = arguments("a gate after" if gate else "", x_dtype)
        check_results(module.to(dtype), given, monkeypatch)
    _dispatch.clear_calls()


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
    module = LlamaNorm()
    done = replace_norms(module)
    assert type(module) is LlamaNorm and not done.replaced
    assert "cunorm's rms_norm(round_before_weight=True) fails" in done.left[0].reason


@pytest.mark.parametrize("eps", [0, 1])
def test_eps_may_be_an_int_and_is_read_at_each_call(eps):
    module = LlamaNorm(eps=eps)
    assert replace_norms(module).replaced[0].runs.startswith(f"rms_norm(eps={eps}, round")
    for module.eps in (eps, 4.0):
        torch.testing.assert_close(module(x_of()), LlamaNorm.forward(module, x_of()))
