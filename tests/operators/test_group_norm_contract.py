# SPDX-License-Identifier: MIT
"""What group norms promise besides their formulas: what a sample depends on, and special groups."""

from typing import NamedTuple

import numpy as np
import pytest

import cunorm
from cunorm import GroupNormGrads
from cunorm._arrays import CPU
from cunorm._cpu import compiler
from cunorm.group_norm import _forward
from cunorm.group_norm._run import schedule_of
from tests.support.calls import anew
from tests.support.described import loaded_builds, stores_past_caches, with_empty_caches
from tests.support.group_bounds import check_group_forward
from tests.support.group_norm_cases import EPS, check, laid_out, run
from tests.support.operands import assert_same_bits, assert_same_fields, at, draw, optional

OF_SAMPLES = ("y", "mean", "rstd", "dx")


class Case(NamedTuple):
    """Samples that are planned in several ways, by how many there are."""

    memory: str
    positions: int
    channels: int
    groups: int
    counts: tuple[int, ...]

    @property
    def channel_axis(self):
        return {"last": -1, "first": 1}[self.memory]

    def arrays(self, samples):
        shape = (samples, self.positions, self.channels)
        if self.memory == "first":
            shape = (samples, self.channels, self.positions)
        return [draw(name, shape, "float32", mean=name == "x") for name in ("x", "dy")]

    def run(self, x, dy, **more):
        return run(x, dy, self.groups, self.channel_axis, **more)


CASES = {
    "few, last": Case("last", 300, 40, 8, (1, 2, 3, 40)),
    "few, first": Case("first", 300, 40, 4, (1, 2, 3, 40)),
    "whole lines, last": Case("last", 700, 48, 8, (1, 2, 3, 40)),
    "packs of lines, last": Case("last", 700, 256, 8, (1, 3)),
    "chunks, last": Case("last", 4900, 72, 4, (1, 11)),
    "chunks, first": Case("first", 4900, 72, 1, (1, 11)),
}
cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def plan_of(case, x, monkeypatch):
    """Return how a forward of x is launched: passes, whether in chunks, groups of a block."""
    forms = []
    with monkeypatch.context() as patch:
        patch.setattr(_forward, "run", lambda call: forms.append(call.form))
        anew(cunorm.group_norm_forward, x, case.groups, channel_axis=case.channel_axis)
    schedule = schedule_of(forms[0], CPU)
    return len(schedule.passes), schedule.chunk < len(x), schedule.block_groups


# --- a sample's results are its own ---------------------------------------------------------------


@cases
def test_a_samples_results_do_not_depend_on_the_others(case):
    most = max(case.counts)
    x, dy = case.arrays(most)
    whole = case.run(x, dy)
    for count in case.counts:
        for first in {0, most - count}:
            part = slice(first, first + count)
            results = case.run(x[part], dy[part])
            with at(count, first):
                for field in OF_SAMPLES:
                    assert_same_bits(getattr(results, field), getattr(whole, field)[part], field)


@pytest.mark.skipif(compiler() is None, reason="without a compiler nothing is planned")
def test_the_samples_above_are_planned_in_several_ways(monkeypatch):
    """Else the test above would say little."""
    plans = {
        (case.memory, *plan_of(case, case.arrays(count)[0], monkeypatch))
        for case in CASES.values()
        for count in case.counts
    }
    for memory in ("last", "first"):
        kinds = {plan[1:] for plan in plans if plan[0] == memory}
        assert {passes for passes, *_ in kinds} == {1, 3}
        assert {chunks for _, chunks, _ in kinds} == {False, True}
        assert len(kinds) >= 3


@cases
def test_results_do_not_depend_on_the_order_of_samples(case):
    x, dy = case.arrays(max(case.counts))
    expected, turned = case.run(x, dy), case.run(x[::-1], dy[::-1])
    for field in OF_SAMPLES:
        assert_same_bits(getattr(turned, field)[::-1], getattr(expected, field), field)


@cases
def test_results_ignore_alignment_strides_and_places(case):
    x, dy = case.arrays(max(case.counts))
    expected = case.run(x, dy)
    for shift in (1, 3):
        moved = [shifted(array, shift) for array in (x, dy)]
        assert_same_fields(case.run(*moved), expected)
    padded = [np.pad(array, ((0, 0), (2, 0), (0, 3)))[:, 2:, :-3] for array in (x, dy)]
    assert_same_fields(case.run(*padded), expected)
    for place in ("x", "dy"):
        copies = {"x": x.copy(), "dy": shifted(dy, 1)}
        out = {"out": GroupNormGrads(dx=copies[place])}
        assert_same_fields(case.run(*copies.values(), backward=out), expected)
    copy = shifted(x, 5)
    told = {"activation": "silu", "channel_axis": case.channel_axis}
    parameters = [optional(name, case.channels, "float32") for name in ("weight", "bias")]
    cunorm.group_norm(copy, case.groups, *parameters, **told, out=copy)
    assert_same_bits(copy, expected.y)


def shifted(array, elements):
    """Return a copy that begins so many elements after an address of any alignment."""
    memory = np.full(array.size + elements + 16, np.nan, array.dtype)
    aligned = -memory.ctypes.data % 64 // array.itemsize
    copy = memory[aligned + elements :][: array.size].reshape(array.shape)
    copy[...] = array
    return copy


# --- threads and repetition -----------------------------------------------------------------------


@pytest.fixture
def default_threads():
    yield
    cunorm.set_num_threads(None)


@cases
def test_results_do_not_depend_on_the_number_of_threads(case, default_threads):
    for count in case.counts:
        x, dy = case.arrays(count)
        cunorm.set_num_threads(1)
        expected = case.run(x, dy)
        for threads in (2, 3, 7):
            cunorm.set_num_threads(threads)
            with at(count, f"{threads} threads"):
                assert_same_fields(case.run(x, dy), expected)


@cases
def test_results_are_the_same_every_time(case):
    x, dy = case.arrays(3)
    expected = case.run(x, dy)
    for _ in range(10):
        assert_same_fields(case.run(x, dy), expected)


# --- special groups -------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("memory", ["last", "first"])
@pytest.mark.parametrize(
    ("positions", "channels", "groups"), [(1, 10, 5), (31, 10, 1), (3007, 40, 4), (4900, 24, 24)]
)
def test_a_constant_group_gives_the_activation_of_bias(
    positions, channels, groups, memory, activation
):
    """To the bit, whatever the constant: some have a mean that is not exactly a sum's rounding."""
    rng = np.random.default_rng(positions)
    constants = rng.uniform(-1, 1, (5, 1, groups)) * 10.0 ** rng.integers(-3, 5, (5, 1, groups))
    x = np.repeat(constants.astype(np.float32), channels // groups, axis=-1)
    x = np.repeat(x, positions, axis=1)
    weight, bias = (optional(name, channels, "float32") for name in ("weight", "bias"))
    told = {"activation": activation}
    f = cunorm.group_norm_forward(laid_out(x, -1, memory), groups, weight, bias, **told)
    zeros = laid_out(np.zeros_like(x), -1, memory)
    of_bias = cunorm.group_norm(zeros, groups, weight, bias, **told)
    assert_same_bits(f.y, of_bias)
    assert_same_bits(f.mean, constants[:, 0].astype(np.float32), "mean")
    if activation is None:
        assert_same_bits(of_bias, np.broadcast_to(bias, x.shape))
    check_group_forward(f, x, groups, weight, bias, eps=EPS, **told)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@cases
def test_what_is_not_finite_stays_in_its_group_of_its_sample(case, value):
    for count in (2, 3):
        x, dy = case.arrays(count)
        expected = case.run(x, dy)
        size = case.channels // case.groups
        group = case.groups - 1
        poisoned, channels = x.copy(), slice(group * size, None)
        sample = np.moveaxis(poisoned[1], case.channel_axis % 3 - 1, -1)
        sample[case.positions // 2, -1] = value
        results = case.run(poisoned, dy)
        for field in ("y", "dx"):
            result, right = (
                np.moveaxis(getattr(r, field), case.channel_axis, -1) for r in (results, expected)
            )
            assert np.isnan(result[1, :, channels]).all()
            result = result.copy()
            result[1, :, channels] = right[1, :, channels]
            assert_same_bits(result, np.ascontiguousarray(right), field)
        for field in ("mean", "rstd"):
            result, right = getattr(results, field).copy(), getattr(expected, field)
            assert not np.isfinite(result[1, group]) or field == "rstd"
            result[1, group] = right[1, group]
            assert_same_bits(result, right, field)
        for field in ("dweight", "dbias"):
            result, right = getattr(results, field), getattr(expected, field)
            assert np.isnan(result[channels]).all()
            assert_same_bits(result[: group * size], right[: group * size], field)


@cases
def test_a_gradient_that_is_not_finite_stays_in_its_group_and_its_channel(case):
    x, dy = case.arrays(3)
    expected = case.run(x, dy)
    poisoned = dy.copy()
    np.moveaxis(poisoned[1], case.channel_axis % 3 - 1, -1)[7, 0] = np.nan
    results = case.run(x, poisoned)
    size = case.channels // case.groups
    dx, right = (np.moveaxis(r.dx, case.channel_axis, -1).copy() for r in (results, expected))
    assert np.isnan(dx[1, :, :size]).all()
    dx[1, :, :size] = right[1, :, :size]
    assert_same_bits(dx, right)
    for field in ("dweight", "dbias"):
        result, right = getattr(results, field), getattr(expected, field)
        assert np.isnan(result[0])
        assert_same_bits(result[1:], right[1:], field)


@pytest.mark.parametrize("groups", [1, 5, 10])
@pytest.mark.parametrize("shape", [(1, 10), (1, 1, 10), (1, 1, 1, 10)], ids=str)
def test_one_sample_of_one_position_is_within_the_bounds(shape, groups):
    x, dy = (draw(name, shape, "float32") for name in ("x", "dy"))
    check(run(x, dy, groups), x, dy, groups)


@pytest.mark.parametrize("value", [60000.0, 65504.0])
def test_large_finite_float16_values_do_not_overflow(value):
    rng = np.random.default_rng(0)
    x = (rng.choice([-1.0, 1.0], (2, 3007, 10)) * value).astype(np.float16)
    for channel_axis in (-1, 1):
        x = np.ascontiguousarray(np.moveaxis(x, -1, channel_axis))
        f = cunorm.group_norm_forward(x, 2, channel_axis=channel_axis)
        assert np.isfinite(f.y).all()
        check_group_forward(f, x, 2, None, None, eps=EPS, channel_axis=channel_axis)


@pytest.mark.parametrize("mean", [1e4, -1e6])
@cases
def test_a_mean_far_from_0_costs_no_digits(case, mean):
    x, dy = case.arrays(1)
    x = x + np.float32(mean)
    check(case.run(x, dy), x, dy, case.groups, case.channel_axis)


@pytest.mark.parametrize(("positions", "channels", "groups"), [(64, 64, 4), (2048, 32, 1)])
def test_a_first_channel_far_from_the_others_costs_no_digits(positions, channels, groups):
    """What the others are measured from: in float64, doubles have no digits to spare."""
    size = (2, positions, groups, channels // groups)
    x = np.random.default_rng(0).standard_normal(size) * 1e-3
    x[..., 0] += 1000
    x = x.reshape(2, positions, channels)
    f = cunorm.group_norm_forward(x, groups)
    check_group_forward(f, x, groups, None, None, eps=EPS, channel_axis=-1)


@pytest.mark.parametrize("channel_axis", [-1, 1])
@pytest.mark.parametrize("positions", [8, 1000])
def test_groups_whose_squares_overflow_give_what_ieee_gives(positions, channel_axis):
    x = np.full((1, positions, 64), 1e30, np.float32)
    x[:, ::2] *= -1
    x = np.ascontiguousarray(np.moveaxis(x, -1, channel_axis))
    f = cunorm.group_norm_forward(x, 4, channel_axis=channel_axis)
    np.testing.assert_array_equal(f.rstd, np.zeros_like(f.rstd))
    np.testing.assert_array_equal(f.y, np.zeros_like(x))


@pytest.mark.parametrize("noise", [0, 1e-3, 0.1])
@pytest.mark.parametrize("share", [4, 8])
@pytest.mark.parametrize("positions", [256, 1000])
def test_a_beginning_unlike_the_rest_costs_no_digits(positions, share, noise):
    """Equal elements lose equal parts in a sum: of many runs, that would add up."""
    channels, rng = 256, np.random.default_rng(0)
    x = rng.standard_normal((1, positions, channels)) * noise
    x[:, : positions // share] += 1e4 * np.exp(rng.uniform(-1, 1, channels))
    x = x.astype(np.float32)
    f = cunorm.group_norm_forward(x, channels)
    check_group_forward(f, x, channels, None, None, eps=EPS, channel_axis=-1)


# Results of more than 32 MiB, of samples of less than 8: large ones begin somewhere between these.
LARGE = {"last": (6, 12000, 128), "first": (6, 128, 12000)}


@pytest.mark.skipif(compiler() is None, reason="without a compiler nothing is stored past caches")
@pytest.mark.parametrize("memory", LARGE)
def test_results_do_not_show_that_large_ones_are_stored_past_the_caches(memory, monkeypatch):
    shape, channel_axis = LARGE[memory], {"last": -1, "first": 1}[memory]
    x, dy = (draw(name, shape, "float32") for name in ("x", "dy"))
    with_empty_caches(monkeypatch)
    whole = run(x, dy, 32, channel_axis)
    assert all(stores_past_caches(build) for build in loaded_builds("WRITE"))
    for part in (slice(0, 1), slice(5, 6)):
        results = run(x[part], dy[part], 32, channel_axis)
        for field in OF_SAMPLES:
            assert_same_bits(getattr(results, field), getattr(whole, field)[part], field)
    assert not all(stores_past_caches(build) for build in loaded_builds("WRITE"))
