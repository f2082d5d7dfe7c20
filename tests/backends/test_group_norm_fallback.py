# SPDX-License-Identifier: MIT
"""Group norms where there is no C++ compiler: the reference answers, after one warning."""

import pytest

from tests.backends.test_fallback import WITHOUT_COMPILER
from tests.support.processes import in_process

SETUP = """
import sys, warnings
sys.path.insert(0, ".")
import numpy as np
import cunorm
from cunorm import GroupNormForward, GroupNormGrads
from tests.support.group_bounds import check_group_backward, check_group_forward
from tests.support.group_norm_cases import EPS, Results, check, check_backward_case
from tests.support.group_norm_cases import SMALL, check_forward_case, laid_out, run, strides
from tests.support.operands import draw, optional

assert cunorm._cpu.compiler() is None
"""


def without_compiler(script):
    in_process(script, setup=SETUP, **WITHOUT_COMPILER)


@pytest.mark.parametrize(
    "call",
    [
        "cunorm.group_norm(x, 2)",
        "cunorm.instance_norm(x)",
        "cunorm.group_norm_forward(x, 2)",
        "cunorm.group_norm_forward(x, 2, out=GroupNormForward(y=np.empty_like(x)))",
        "cunorm.group_norm_forward(x, 2, out=given, workspace=workspace)",
        "cunorm.group_norm_backward(x, x, 2, mean=mean, rstd=mean)",
    ],
)
def test_there_is_one_warning_and_it_points_to_the_caller(call):
    """A shape whose plan is not known yet, and again, takes no other path to it."""
    without_compiler(f"""
x, mean = np.ones((3, 5, 8), np.float32), np.ones((3, 2), np.float32)
given = GroupNormForward(np.empty_like(x), mean.copy(), mean.copy())
workspace = np.empty(10000, np.uint8)
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    {call}
    {call}
    cunorm.layer_norm(x)
(warning,) = seen
assert warning.category is RuntimeWarning
assert "no C++ compiler" in str(warning.message)
assert warning.filename == "<string>", warning.filename
""")


def test_every_dtype_and_activation_is_within_its_bounds():
    """The cover of `test_group_norm_formulas`; results have the same dtypes and layouts."""
    without_compiler("""
from tests.support.covers import pairwise
from tests.support.group_norm_cases import BACKWARD, FORWARD, telling

warnings.simplefilter("ignore")
for number, case in enumerate(pairwise(FORWARD)):
    check_forward_case(case, SMALL[1 + number % 3])
for number, case in enumerate(pairwise(BACKWARD, telling)):
    check_backward_case(case, SMALL[1 + number % 3])
""")


def test_layouts_places_and_no_samples_are_those_of_the_kernels():
    without_compiler("""
warnings.simplefilter("ignore")
x, dy = (draw(name, (3, 6, 4, 10), "float32") for name in ("x", "dy"))
for memory in ("last", "first"):
    given = [laid_out(array, -1, memory) for array in (x, dy)]
    results = run(*given, 5)
    check(results, x, dy, 5)
    assert strides(results.y) == strides(results.dx) == strides(given[0])
    for place in (0, 1):
        copies = [laid_out(array, -1, memory) for array in given]
        into = run(*copies, 5, backward={"out": GroupNormGrads(dx=copies[place])})
        assert into.dx is copies[place]
        np.testing.assert_array_equal(into.dx, results.dx)
    place = laid_out(given[0], -1, memory)
    assert cunorm.instance_norm(place, out=place) is place
    np.testing.assert_array_equal(place, cunorm.instance_norm(x))

strided = np.zeros((3, 6, 4, 20), np.float32)[..., ::2]
strided[...] = x
np.testing.assert_array_equal(run(strided, dy, 5).y, run(x, dy, 5).y)
image = np.moveaxis(x, -1, 1)
check(run(image, np.moveaxis(dy, -1, 1), 5, 1), image, np.moveaxis(dy, -1, 1), 5, 1)

none = run(x[:0], dy[:0], 5)
assert none.y.shape == none.dx.shape == (0, 6, 4, 10) and none.mean.shape == (0, 5)
assert not none.dweight.any() and not none.dbias.any()
""")


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_arrays_of_other_frameworks_are_served_too(framework):
    pytest.importorskip(framework, reason=f"{framework} is not installed")
    without_compiler(f"""
from tests.support.kinds import numbers, to

warnings.simplefilter("ignore")
for dtype in ("float32", "bfloat16"):
    x, dy = (draw(name, (3, 4, 10), dtype) for name in ("x", "dy"))
    given = [to({framework!r}, array) for array in (x, dy)]
    results = run(*given, 5)
    assert type(results.y) is type(results.dx) is type(given[0])
    check(Results(*map(numbers, results)), x, dy, 5)
""")
