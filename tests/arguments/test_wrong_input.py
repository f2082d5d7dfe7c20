# SPDX-License-Identifier: MIT
"""Errors of all front ends name the function, the argument, the given and the expected value.

Before each wrong call of a plain function, valid calls are made on the same arrays.
"""

from __future__ import annotations

from functools import partial, reduce
from inspect import signature
from itertools import chain

import numpy as np
import pytest

import cunorm
from tests.arguments import wrong_input, wrong_modulation
from tests.arguments.wrong_input import MAKE, NO_ARRAY
from tests.arguments.wrong_memory import TABLE as MEMORY
from tests.support.calls import arrays_of, call_of, functions_taking, to
from tests.support.internals import SCALARS, _dispatch
from tests.support.operands import at
from tests.support.refused import RIGHT, Case, check_error, check_refused, rows_of

TABLE = wrong_input.TABLE | wrong_modulation.TABLE


@rows_of(TABLE | wrong_modulation.BACKWARD | MEMORY)
def test_wrong_input_of_the_plain_functions_is_named_and_nothing_is_written(cases):
    check_refused(cases)


@pytest.mark.parametrize(("op", "scalars"), SCALARS.values(), ids=SCALARS)
def test_parsers_refuse_missing_and_further_scalars(op, scalars):
    assert _dispatch.parse(op, scalars) is _dispatch.parse(op, scalars)
    for wrong in ((*scalars, None), (*scalars, "junk", "more"), scalars[:-1]):
        with pytest.raises((TypeError, ValueError)):
            _dispatch.parse(op, wrong)


# --- other front ends -----------------------------------------------------------------------------

ARRAYS = {"x", "residual", "gate", "weight", "bias", "dy", "d_residual", "mean", "rstd"}


def is_ordinary(case):
    """Return whether other libraries have the arrays of a case; JAX's float64 is off by default."""
    found = [array for key, array in arrays_of(case.change).items() if key in ARRAYS]
    odd = ("float8", "float64")
    return not any(array.size > 1 << 20 or array.dtype.name.startswith(odd) for array in found)


ORDINARY = {title: [*filter(is_ordinary, cases)] for title, cases in TABLE.items()}
DIFFERENTIABLE = {
    title: [case for case in cases if not case.name.endswith(("forward", "backward"))]
    for title, cases in ORDINARY.items()
    if title != "dtype of statistics"
}


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
@rows_of(DIFFERENTIABLE)
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
@rows_of(DIFFERENTIABLE)
def test_wrong_input_of_cunorm_jax_is_the_plain_functions_error(cases, traced):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import cunorm.jax

    def run(call, arrays):
        return (jax.jit(call) if traced else call)(**arrays)

    check_front(cunorm.jax, cases, jax.numpy.asarray, {NO_ARRAY: "a JAX or NumPy array"}, run)


@rows_of(ORDINARY)
def test_wrong_jax_arrays_give_the_plain_functions_error_before_jax_traces_anything(cases):
    jax = pytest.importorskip("jax", reason="JAX is not installed")

    def run(call, arrays):
        try:
            call(**arrays)
        except (TypeError, ValueError) as error:
            assert not getattr(error, "__notes__", []), "JAX traced the call"
            raise

    check_front(cunorm, cases, jax.numpy.asarray, {}, run)


# --- workspace_size -------------------------------------------------------------------------------


def test_workspace_size_has_the_errors_of_the_functions_that_take_a_workspace():
    names, sized = functions_taking("workspace"), signature(cunorm.workspace_size).parameters
    checked = set()
    hints = TABLE["what to pass instead"]  # they depend on the function's name
    for case in chain(*(cases for cases in TABLE.values() if cases is not hints)):
        if case.name in names and case.change.keys() <= sized.keys():
            arrays = call_of(case.name, **RIGHT).arrays | case.change
            given = {key: arrays[key] for key in arrays.keys() & sized}
            with at(case):
                call = partial(cunorm.workspace_size, case.name, **given)
                check_error(case._replace(name="workspace_size"), call)
            checked |= case.change.keys()
    assert checked == sized.keys() - {"op"}


OPS = (
    "'normalize_backward', 'rms_norm_backward', 'layer_norm_backward', 'l2_norm_backward', "
    "'group_norm', 'instance_norm', 'group_norm_forward' or 'group_norm_backward'"
)
X = np.ones((5, 8), np.float32)
NOT_TAKEN = [
    ("l2_norm_backward", "bias", X[0], "given, expected None"),
    ("rms_norm_backward", "num_groups", 2, "given, expected None"),
    ("l2_norm_backward", "x_dtype", "float16", "given, expected None"),
    ("l2_norm_backward", "needs", ("bias",), "('bias',), expected the default"),
    ("l2_norm_backward", "channel_axis", 1, "1, expected the default"),
    ("instance_norm", "num_groups", 8, "given, expected None"),
    ("instance_norm", "groups", 2, "2, expected the default"),
    ("l2_norm_backward", "gate", X, "given, expected None"),
    ("instance_norm", "gate", X, "given, expected None"),
    ("instance_norm", "gate_position", "branch", "'branch', expected the default"),
]


def test_workspace_size_refuses_other_functions_and_options_that_a_function_does_not_have():
    wrong = [(op, f"op is {op!r}, expected {OPS}", {}) for op in ("rms_norm", "", None, ["x"])]
    wrong += [(op, f"{key} is {got}: {op} has none", {key: v}) for op, key, v, got in NOT_TAKEN]
    for op, text, change in wrong:
        case = Case("workspace_size", ValueError if isinstance(op, str) else TypeError, text, {})
        with at(text):
            check_error(case, partial(cunorm.workspace_size, op, X, **change))
