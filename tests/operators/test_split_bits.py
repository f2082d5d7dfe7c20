# SPDX-License-Identifier: MIT
"""Exact claims about the pieces of norms of split rows: bits, constant rows, NaNs and `out`."""

from __future__ import annotations

from fractions import Fraction
from typing import Any
from unittest import mock

import numpy as np
import pytest

import cunorm
from cunorm import Moments, NormGrads, Statistics, Sums
from tests.support.operands import assert_same_bits, assert_same_fields, draw
from tests.support.split import Parts, SplitCall, added, stacked
from tests.support.ulps import assert_within, ulp

FAR = {"mean": 1e4, "apart": 100.0}


def results(call: SplitCall) -> dict[str, Any]:
    """Return the results of all pieces, joined or, if they are of a part, stacked."""
    moments = stacked(call.moments(), np.asarray)
    f, found = call.forward()
    sums = call.sums(found)
    grads = call.gradients(found, added(sums))
    return {
        **{f"moments.{name}": getattr(moments, name) for name in ("mean", "m2", "correction")},
        **{f"statistics.{name}": array for name, array in found._asdict().items()},
        "y": f.y,
        "sum_dr": np.stack([one.sum_dr for one in sums]),
        "sum_r_dr": np.stack([one.sum_r_dr for one in sums]),
        "dx": call.parts.join([one.dx for one in grads]),
    }


def of_rows(call: SplitCall, rows: Any) -> SplitCall:
    """Return a call of some rows of a call, in any order."""
    fewer = SplitCall(call.case)
    for name in ("x", "dy"):
        fewer.arrays[name] = np.ascontiguousarray(call.arrays[name][rows])
    return fewer


@pytest.mark.parametrize("rows", [[3], [2, 3], slice(None, None, -1), [4, 0, 4]], ids=str)
def test_no_bit_depends_on_other_rows(rows):
    call = SplitCall(FAR)
    whole, some = results(call), results(of_rows(call, rows))
    for name, array in whole.items():
        of_parts = name.startswith(("moments", "sum_"))
        assert_same_bits(some[name], array[:, rows] if of_parts else array[rows], name)


def test_no_bit_depends_on_strides():
    """The parts of rows are views, x[:, a:b]; here they are copies, or lie in longer rows."""
    expected, cut = results(SplitCall(FAR)), Parts.cut
    for step in (1, 3):

        def copied(part: Any, step: int = step) -> Any:
            if part is None or part.ndim == 1:
                return part
            memory = np.zeros((len(part), step, part.shape[1]), part.dtype)
            memory[:, 0] = part
            return memory[:, 0]

        with mock.patch.object(Parts, "cut", lambda *given: [*map(copied, cut(*given))]):
            got = results(SplitCall(FAR))
        for name, array in expected.items():
            assert_same_bits(got[name], array, name)


def test_statistics_are_the_same_from_gathered_messages():
    """A message has a part's count and moments, side by side; in memory, rows may come first."""
    moments = stacked(SplitCall(FAR).moments(), np.asarray)
    expected = cunorm.combine_moments(moments, eps=1e-5)
    parts, rows = moments.m2.shape
    names = ("mean", "m2", "correction")
    messages = np.zeros((parts, 4 * rows + 3), np.float32)
    messages[:, 0] = moments.count
    gathered = {}
    for i, name in enumerate(names):
        gathered[name] = messages[:, 3 + i * rows : 3 + (i + 1) * rows]
        gathered[name][...] = getattr(moments, name)
    got = cunorm.combine_moments(Moments(**gathered, count=messages[:, 0]), eps=1e-5)
    assert_same_fields(got, expected)
    of_rows = {name: np.asfortranarray(getattr(moments, name)) for name in names}
    counts = np.repeat(moments.count, 2)[::2]
    assert_same_fields(cunorm.combine_moments(Moments(**of_rows, count=counts), eps=1e-5), expected)
    backwards = {name: np.ascontiguousarray(getattr(moments, name)[::-1]) for name in names}
    got = Moments(**{name: array[::-1] for name, array in backwards.items()}, count=counts)
    assert_same_fields(cunorm.combine_moments(got, eps=1e-5), expected)


def test_a_count_for_all_parts_is_an_array_of_equal_counts():
    call = SplitCall(FAR | {"sizes": (11, 11, 11)})
    moments = stacked(call.moments(), np.asarray)
    expected = cunorm.combine_moments(moments, eps=1e-5)
    for count in (11, np.int64(11)):
        assert_same_fields(
            cunorm.combine_moments(moments._replace(count=count), eps=1e-5), expected
        )


def test_a_correction_of_none_is_zero():
    moments = stacked(SplitCall({"sizes": (8, 8)}).moments(), np.asarray)
    zero = moments._replace(correction=np.zeros_like(moments.m2))
    got = cunorm.combine_moments(moments._replace(correction=None), eps=1e-5)
    assert_same_fields(got, cunorm.combine_moments(zero, eps=1e-5))
    call = SplitCall({})
    x, weight, bias = (call.arrays[name] for name in ("x", "weight", "bias"))
    mean, rstd = x.mean(-1), np.ones(len(x), np.float32)
    one, other = (
        cunorm.layer_norm(x, weight, bias, mean=mean, rstd=rstd, correction=correction)
        for correction in (None, np.zeros_like(mean))
    )
    assert_same_bits(one, other)


def test_many_rows_are_combined_as_a_few_are():
    moments = stacked(SplitCall(FAR).moments(), np.asarray)
    few = cunorm.combine_moments(moments, eps=1e-5)
    names = ("mean", "m2", "correction")
    times = 120  # 600 rows
    many = moments._replace(**{name: np.tile(getattr(moments, name), times) for name in names})
    expected = Statistics(*(np.tile(array, times) for array in few))
    assert_same_fields(cunorm.combine_moments(many, eps=1e-5), expected)


def exact_mean(moments: Moments[Any], row: int) -> Fraction:
    """Return the mean of a row, as a fraction."""
    parts = zip(moments.mean[:, row], moments.correction[:, row], moments.count, strict=True)
    total = sum(Fraction(int(n)) * (Fraction(float(a)) + Fraction(float(b))) for a, b, n in parts)
    return total / sum(Fraction(int(n)) for n in moments.count)


@pytest.mark.parametrize(("dtype", "far"), [("float32", 1e4), ("float64", 1e4), ("float64", 1e14)])
def test_combined_means_have_twice_the_digits_of_their_dtype(dtype, far):
    """The error is at most 2**-103 of the mean and 2**-50 of the deviation, then rounded once."""
    rng = np.random.default_rng(3)
    mean = far * np.sign(rng.standard_normal(9)) + rng.standard_normal((5, 9))
    spread = np.abs(mean - mean[0]).max()
    correction = 2.0**-25 * rng.standard_normal((5, 9))
    moments = Moments(*(a.astype(dtype) for a in (mean, np.abs(mean), np.arange(1, 6))))
    moments = moments._replace(correction=correction.astype(dtype))
    found = cunorm.combine_moments(moments, eps=1e-5)
    for row in range(9):
        exact = exact_mean(moments, row)
        got = Fraction(float(found.mean[row])) + Fraction(float(found.correction[row]))
        bound = 2.0**-103 * abs(float(exact)) + 2.0**-50 * spread
        if dtype == "float32":
            bound += float(np.spacing(np.abs(found.correction[row]))) / 2
        assert abs(float(got - exact)) <= bound
        assert abs(float(found.correction[row])) <= 0.51 * np.spacing(np.abs(found.mean[row]))


@pytest.mark.parametrize("value", [0.0, 1e4 + 0.3, -3e-5, 123456.7, 1e-20])
def test_constant_rows_are_exactly_bias(value):
    call = SplitCall({"sizes": (13, 1, 20, 300)})
    call.arrays["x"][:3] = value
    f, found = call.forward()
    assert (f.y[:3] == call.arrays["bias"]).all()
    assert (found.mean[:3] == np.float32(value)).all()
    assert not found.correction[:3].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_poisons_its_row_only(value):
    call, poisoned = SplitCall(FAR), SplitCall(FAR)
    poisoned.arrays["x"][2, 20] = value
    others = [0, 1, 3, 4]
    expected, got = results(call), results(poisoned)
    for name, array in expected.items():
        if name.startswith(("moments", "sum_")):
            array, got[name] = array.T, got[name].T
        assert_same_bits(got[name][others], array[others], name)
    for name in ("statistics.rstd", "y", "dx"):  # rstd may be 0, of an infinite variance
        assert np.isnan(got[name][2]).any(), name
    for part in (0, 1):  # which have only finite numbers
        assert_same_bits(got["moments.m2"][2, part], expected["moments.m2"][part, 2])


def like(result: Any, **extra: Any) -> Any:
    """Return a result with other arrays of NaNs in the fields that have arrays."""
    made = (np.full_like(a, np.nan) if isinstance(a, np.ndarray) else None for a in result)
    return type(result)(*made)._replace(**extra)


def check_given(function: Any, *arguments: Any, **more: Any) -> Any:
    """Check that a function writes the arrays in `out`, and returns them; return its results."""
    expected = function(*arguments, **more)
    out = like(expected)
    got = function(*arguments, **more, out=out)
    for name, array, given, right in zip(expected._fields, got, out, expected, strict=True):
        if given is None:
            assert array is None or isinstance(array, int), name
        else:
            assert array is given, name
            assert_same_bits(array, right, name)
    return expected


def pieces(**case: Any) -> None:
    """Make each call of a norm of one part with all arrays in `out`, and without."""
    call = SplitCall(FAR | {"sizes": (34,)} | case)
    x, dy, weight, bias = (call.arrays[name] for name in ("x", "dy", "weight", "bias"))
    moments = check_given(cunorm.row_moments, x, center=True)
    given = Moments(moments.mean[None], moments.m2[None], moments.count, moments.correction[None])
    found = check_given(cunorm.combine_moments, given, eps=1e-5)._asdict()
    out = np.full_like(x, np.nan)
    y = cunorm.layer_norm(x, weight, bias, **found, out=out)
    assert y is out
    assert_same_bits(y, cunorm.layer_norm(x, weight, bias, **found))
    over = x.copy()
    assert_same_bits(cunorm.layer_norm(over, weight, bias, **found, out=over), y)
    sums = check_given(cunorm.normalize_backward_sums, dy, x, weight, **found, center=True)
    given = {**found, "sums": sums, "count": x.shape[-1]}
    grads = cunorm.layer_norm_backward(dy, x, weight, bias, **given)
    out = like(grads, dresidual=None)
    assert cunorm.layer_norm_backward(dy, x, weight, bias, **given, out=out).dx is out.dx
    assert_same_fields(out._replace(dresidual=out.dx), grads)


def test_each_result_may_be_given():
    pieces()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", ["x", "residual"])
def test_the_new_stream_may_overwrite_x_or_residual(name):
    call = SplitCall(FAR | {"residual": "float32"})
    x, residual = call.arrays["x"], call.arrays["residual"]
    expected = check_given(cunorm.row_moments, x, residual=residual, center=True)
    given = {"x": x.copy(), "residual": residual.copy()}
    got = cunorm.row_moments(**given, center=True, out=Moments(residual=given[name]))
    assert got.residual is given[name]
    assert_same_fields(got._replace(count=None), expected._replace(count=None))


def with_found(case: dict[str, Any]) -> tuple[SplitCall, dict[str, Any]]:
    call = SplitCall(FAR | {"sizes": (34,)} | case)
    _, found = call.forward()
    return call, {"found": found, "sums": added(call.sums(found))}


def test_parameter_gradients_of_parts_are_added_and_need_only_the_workspace():
    call, given = with_found({})
    (expected,) = call.gradients(**given)
    x, dy, weight, bias = (call.arrays[name] for name in ("x", "dy", "weight", "bias"))
    size = cunorm.workspace_size("layer_norm_backward", x, weight, bias)
    before = [np.full_like(array, 2.0) for array in (weight, bias)]
    out = NormGrads(np.full_like(x, np.nan), *before)
    more = given["found"]._asdict() | {"sums": given["sums"], "count": 34}
    cunorm.layer_norm_backward(
        *(dy, x, weight, bias), **more, out=out, accumulate=True, workspace=np.empty(size, np.uint8)
    )
    assert_same_bits(out.dx, expected.dx)
    for name in ("dweight", "dbias"):
        rounded = getattr(expected, name)
        total = rounded.astype(np.float64) + 2.0  # `accumulate` adds before it rounds
        bound = 0.5 * (ulp(rounded, "float32") + ulp(total, "float32"))
        assert_within(getattr(out, name), total, bound, name)


NEEDS = [("x",), ("weight",), ("bias",), ("weight", "bias"), ("gate",), ("x", "gate"), ()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("position", ["pre", "post", "branch"])
@pytest.mark.parametrize("needs", NEEDS, ids="-".join)
def test_a_gradient_is_the_same_whatever_else_is_needed(needs, position):
    gate = {"gate": "float32", "gate_position": position, "gate_activation": "tanh"}
    call, given = with_found(gate | {"residual": "float32"})
    (expected,) = call.gradients(**given)
    (got,) = call.gradients(**given, needs=needs)
    wanted = {f"d{name}" for name in needs} | ({"dresidual"} if "x" in needs else set())
    for name, array in got._asdict().items():
        assert (array is not None) == (name in wanted), name
        if array is not None:
            if name in ("dweight", "dbias") and position == "branch":
                continue  # a sum over rows has other parts if dgate is one, too
            assert_same_bits(array, getattr(expected, name), name)


@pytest.mark.parametrize("rows", [(0,), (2, 0)], ids=str)
def test_calls_of_no_rows_have_results_of_no_rows(rows):
    call = SplitCall({"rows": rows})
    f, grads = call.check()
    assert f.y.shape == (*rows, 34)
    assert not grads.dweight.any() and not grads.dbias.any()
    assert isinstance(call.statistics(call.moments()), Statistics)
    assert added(call.sums(call.statistics(call.moments()))).sum_dr.shape == rows
    assert isinstance(added(call.sums(call.statistics(call.moments()))), Sums)


def test_rows_of_a_stream_are_rounded_to_the_dtype_of_the_branch():
    branch, weight = draw("x", (5, 24), "float16"), draw("weight", (24,), "float32")
    options = {"round_before_weight": True}
    residual = draw("residual", (5, 24), "float32")
    whole = cunorm.rms_norm_forward(branch, weight, residual=residual, **options)
    options |= {"rstd": whole.rstd, "x_dtype": "float16"}
    assert cunorm.rms_norm(whole.residual, weight, **options).tobytes() == whole.y.tobytes()
    rounded = cunorm.rms_norm(whole.residual, rstd=whole.rstd, x_dtype="float16")
    assert rounded.dtype == np.float16
