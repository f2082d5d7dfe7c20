# SPDX-License-Identifier: MIT
"""Group norms on several threads, and one after the other in the same memory, mix nothing up."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from tests.support.group_norm_cases import check, run
from tests.support.operands import assert_same_fields, at, draw

# Of one launch on a CPU and of several, and so with less and more to hand on; groups; channel_axis.
SHAPES = [
    ((2, 300, 40), 8, -1),
    ((3, 7, 10), 5, -1),
    ((2, 4900, 10), 5, -1),
    ((2, 10, 4900), 5, 1),
    ((40, 30, 40), 4, -1),
    ((1, 40, 31), 8, 1),
]


def drawn(shape, name=""):
    return [draw(f"{operand}{name}", shape, "float32") for operand in ("x", "dy")]


def test_calls_of_any_sizes_may_follow_each_other():
    """What their passes hand on lies in memory that a thread keeps for its next call."""
    expected = [run(*drawn(shape), *told) for shape, *told in SHAPES]
    for result, (shape, *told) in zip(expected, SHAPES, strict=True):
        check(result, *drawn(shape), *told)
    order = np.random.default_rng(0).permutation(list(range(len(SHAPES))) * 5)
    for number in order:
        shape, *told = SHAPES[number]
        with at(shape):
            assert_same_fields(run(*drawn(shape), *told), expected[number])


def test_several_threads_calling_at_once_get_their_own_right_answers():
    start = threading.Barrier(4)

    def work(number):
        cases = [(drawn(shape, number), told) for shape, *told in SHAPES]
        expected = [run(*arrays, *told) for arrays, told in cases]
        start.wait()
        for _ in range(20):
            for (arrays, told), right in zip(cases, expected, strict=True):
                assert_same_fields(run(*arrays, *told), right)
        for (arrays, told), right in zip(cases, expected, strict=True):
            check(right, *arrays, *told)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
