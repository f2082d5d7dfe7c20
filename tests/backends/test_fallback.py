# SPDX-License-Identifier: MIT
"""Without a C++ compiler, the reference computes the results, after one warning."""

from __future__ import annotations

import os
import random
import warnings
from typing import Any

import numpy as np
import pytest

import cunorm
from cunorm import GroupNormForward, NormForward
from tests.support import calls
from tests.support.bounds import check_forward
from tests.support.caches import fresh_process
from tests.support.calls import call_of, names
from tests.support.case_covers import FACTORS, arranged, cover
from tests.support.cases import Samples
from tests.support.cases import call_of as case_of
from tests.support.covers import label
from tests.support.gpu_arrays import OnNumpy
from tests.support.group_bounds import check_group_forward
from tests.support.internals import compiler
from tests.support.kinds import numbers, to
from tests.support.operands import draw
from tests.support.quantized import quantized_call


@pytest.fixture(autouse=True)
def without_compiler():
    with fresh_process(CXX="", PATH=os.devnull), warnings.catch_warnings():
        assert compiler() is None
        warnings.filterwarnings("ignore", "cunorm found no C")
        yield


X = np.ones((3, 5, 8), np.float32)


@names
def test_there_is_one_warning_and_it_points_to_the_caller(name):
    """A cached call and calls of other functions do not warn again."""
    call = call_of(name)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        call.make()
        call.make()
        cunorm.layer_norm(X)
    (warning,) = seen
    assert warning.category is RuntimeWarning
    for text in ("no C++ compiler", "install g++ or clang++", "CXX"):
        assert text in str(warning.message)
    assert warning.filename == calls.__file__


def covers():
    """Yield a pairwise cover of the first and last choices of each factor."""
    for kernel, factors in FACTORS.items():
        ends = {name: (choices[0], choices[-1]) for name, choices in factors.items()}
        for case in cover(kernel, ends | {"in_place": factors["in_place"]}):
            yield pytest.param(kernel, case, id=f"{kernel}-{label(case)}")


@pytest.mark.parametrize(("kernel", "case"), [*covers()])
def test_any_pair_of_choices_is_within_its_bounds(kernel, case):
    """Some cases write results over inputs, and arrays have random layouts."""
    draw = random.Random(label(case))
    shape = {"shape": (1, 3, 7, 33)}
    if "group" in kernel:
        shape = {"samples": Samples(2, (1, 3, 2, 5), 40, 8, *draw.choice([(True, -1), (False, 1)]))}
    case_of(kernel, arranged(kernel, draw, case | shape), OnNumpy()).check()


QUANTIZED: dict[str, dict[str, Any]] = {
    "rows": {"stream": "+ bfloat16", "x": "bfloat16", "out": ("q", "scale", "residual")},
    "MXFP8 of groups": {"block": 32, "scale_dtype": "float8_e8m0fnu", "groups": 2},
    "bounded, int8": {"q": "int8", "absmax_bound": 1.5, "center": True, "bias": "float32"},
    "given": {"given_scale": 0.02, "q": "float8_e5m2", "gate": "float32", "return_y": False},
    "given for rows of two axes": {"given_scale": "rows", "axis": -2, "scales": "apart"},
    "float64": {"x": "float64", "q": "float8_e5m2", "out": ("q", "y"), "layouts": "padded"},
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantised_results_have_the_bits_of_the_norm_and_then_the_oracle(name):
    quantized_call({"shape": (2, 1, 3, 100)} | QUANTIZED[name], OnNumpy()).check()


def test_without_rows_or_samples_parameters_have_zero_gradients():
    x, weight = np.empty((0, 6, 8), np.float32), np.ones(8, np.float32)
    row, group = x[..., 0], x[:, :2, 0]
    row_grads = cunorm.layer_norm_backward(x, x, weight, weight, rstd=row, mean=row)
    group_grads = cunorm.group_norm_backward(x, x, 2, weight, weight, rstd=group, mean=group)
    for grads in (row_grads, group_grads):
        assert grads.dx.shape == x.shape
        assert not grads.dweight.any() and not grads.dbias.any()


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_arrays_of_other_frameworks_are_served_too(framework):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    for dtype in ("float32", "bfloat16"):
        x = draw("x", (3, 4, 10), dtype)
        given = to(framework, x)
        y, group_y = cunorm.rms_norm(given), cunorm.group_norm(given, 5)
        assert type(y) is type(group_y) is type(given)
        check_forward(NormForward(numbers(y)), x, None, None, eps=1e-6)
        check_group_forward(GroupNormForward(numbers(group_y)), x, 5, None, None, eps=1e-5)
