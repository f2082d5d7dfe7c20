# SPDX-License-Identifier: MIT
"""The same examples are within their bounds on a GPU, on a CPU, and without a C++ compiler.

Each result is checked against the oracle, so any two results differ by at most two bounds.
"""

from __future__ import annotations

import os
import warnings

import pytest
from hypothesis import given, seed, settings

from tests.fuzz.drawn import KERNELS, builds_of, cases
from tests.fuzz.test_examples import common
from tests.support.caches import fresh_process
from tests.support.cases import call_of
from tests.support.gpu_arrays import OnCupy
from tests.support.guarded import OnGuarded


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("seeds", "number", "examples"),
    [(0, 0, 2), *(pytest.param(1, n, 100, marks=pytest.mark.exhaustive) for n in range(1, 5))],
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_examples_are_within_their_bounds_on_every_device(kernel, seeds, number, examples):
    @seed(number)
    @settings(common, max_examples=examples)
    @given(cases(kernel, builds_of(kernel, seeds)))
    def check_examples(case):
        call_of(kernel, case, OnGuarded()).check()
        call_of(kernel, case, OnCupy()).check()
        with fresh_process(CXX="", PATH=os.devnull), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "cunorm found no C")
            call_of(kernel, case, OnGuarded()).check()

    check_examples()
