# SPDX-License-Identifier: MIT
"""A wrong argument in an otherwise valid call raises an error that names it; nothing is written."""

from __future__ import annotations

import re
import warnings

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.fuzz.drawn import KERNELS, builds_of, cases
from tests.fuzz.test_examples import common
from tests.fuzz.wrong import wrong_arguments
from tests.support.cases import call_of
from tests.support.guarded import OnGuarded


def check(kernel, number, examples):
    @seed(number)
    @settings(common, max_examples=examples)
    @given(
        st.data(),
        cases(kernel, builds_of(kernel, 0)).filter(lambda case: case.get("kind") != "torch"),
    )
    def check_examples(data, case):
        call = call_of(kernel, case | {"kind": "numpy"}, OnGuarded())
        arguments = call.arguments()
        name, value = data.draw(wrong_arguments(arguments))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            with pytest.raises((TypeError, ValueError), match=rf"^\w+: {re.escape(name)}\b"):
                call.function(**(arguments | {name: value}))
        call.check_memory()

    check_examples()


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_wrong_argument_is_named_and_nothing_is_written(kernel):
    check(kernel, 0, 50)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kernel", KERNELS)
def test_thousands_of_wrong_arguments_are_named_and_nothing_is_written(kernel):
    check(kernel, 1, 5000)
