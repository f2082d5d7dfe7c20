# SPDX-License-Identifier: MIT
"""Errors of all front ends name the function, the argument, the given and the expected value.

Before each wrong call of a plain function, valid calls are made on the same arrays.
"""

from __future__ import annotations

from functools import partial, reduce

import pytest

from tests.arguments.wrong_input import MAKE, NO_ARRAY, TABLE
from tests.arguments.wrong_memory import TABLE as MEMORY
from tests.support.calls import arrays_of, call_of, to
from tests.support.internals import SCALARS, _dispatch
from tests.support.operands import at
from tests.support.refused import RIGHT, check_error, check_refused, rows_of


@rows_of(TABLE | MEMORY)
def test_wrong_input_of_the_plain_functions_is_named_and_nothing_is_written(cases):
    check_refused(cases)


@pytest.mark.parametrize(("op", "scalars"), SCALARS.values(), ids=SCALARS)
def test_parsers_refuse_missing_and_further_scalars(op, scalars):
    assert _dispatch.parse(op, scalars) is _dispatch.parse(op, scalars)
    for wrong in ((*scalars, None), (*scalars, "junk", "more"), scalars[:-1]):
        with pytest.raises((TypeError, ValueError)):
            _dispatch.parse(op, wrong)


# --- the differentiable front ends ----------------------------------------------------------------

ARRAYS = {"x", "residual", "gate", "weight", "bias"}


def front_ends_have(case):
    """Return whether the front ends have the function and can take the arrays."""
    found = [array for key, array in arrays_of(case.change).items() if key in ARRAYS]
    is_odd = any(a.size > 1 << 20 or a.dtype.name.startswith("float8") for a in found)
    return not (is_odd or case.name.endswith(("forward", "backward")))


OF_FRONTS = {title: [*filter(front_ends_have, cases)] for title, cases in TABLE.items()}
OF_FRONTS = {title: cases for title, cases in OF_FRONTS.items() if cases}


def check_front(front, cases, convert, words, run=lambda call, arrays: call(**arrays)):
    """Check that a front end has the errors of the plain functions, with `words` replaced."""
    for case in cases:
        kwargs = call_of(case.name, **RIGHT).arrays | case.change
        arrays = {key: convert(kwargs.pop(key)) for key in ARRAYS & arrays_of(kwargs).keys()}
        call = partial(run, partial(getattr(front, case.name), **kwargs), arrays)
        with at(case):
            text = reduce(lambda text, pair: text.replace(*pair), words.items(), case.text)
            check_error(case._replace(text=text), call)


@pytest.mark.parametrize("grad", [False, True], ids=["plain", "recorded"])
@rows_of(OF_FRONTS)
def test_wrong_input_of_cunorm_torch_is_the_plain_functions_error(cases, grad):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    import cunorm.torch

    def convert(array):
        tensor = to("torch", array)
        return tensor.requires_grad_() if grad and tensor.is_floating_point() else tensor

    words = {NO_ARRAY: "a torch.Tensor", MAKE: "torch.as_tensor", ".astype('float32')": ".float()"}
    words["x.to_numpy()"] = "torch.as_tensor(x.to_numpy())"
    check_front(cunorm.torch, cases, convert, words)


@pytest.mark.parametrize("traced", [False, True], ids=["eager", "traced"])
@rows_of(OF_FRONTS)
def test_wrong_input_of_cunorm_jax_is_the_plain_functions_error(cases, traced):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import cunorm.jax

    def run(call, arrays):
        return (jax.jit(call) if traced else call)(**arrays)

    check_front(cunorm.jax, cases, jax.numpy.asarray, {NO_ARRAY: "a JAX or NumPy array"}, run)
