# SPDX-License-Identifier: MIT
"""Group norms whose weight or bias has a row for each sample (AdaGN, FiLM)."""

from itertools import product

import numpy as np
import pytest

import cunorm
from cunorm import GroupNormGrads
from tests.support.gpu_arrays import OnNumpy
from tests.support.modulated_groups import (
    SHAPES,
    Modulated,
    check_against_samples_alone,
    run,
)
from tests.support.norm_checks import copies
from tests.support.operands import assert_same_bits, at, draw
from tests.support.placed import Samples

LAST, FIRST = Samples(3, (5, 7), 16, 4), Samples(3, (5, 8), 6, 2, False, 1)
# Samples for each way in which a CPU's threads share them.
ON_CPU = {
    "last, threads have samples": Samples(17, (90,), 24, 3),
    "last, threads share samples of several parts": Samples(3, (600,), 25, 5),
    "last, several launches": Samples(3, (3300,), 64, 2),
    "first, threads have groups": Samples(4, (2100,), 8, 4, False, 1),
    "first, threads share samples of several parts": Samples(3, (5003,), 4, 2, False, 1),
}


@pytest.mark.parametrize("samples", [LAST, FIRST], ids=["last", "first"])
def test_results_are_those_of_the_formulas_in_float64(device, samples):
    """With a few dozen terms, an error is some ulp of the largest terms, 1e-16 of about 10."""
    given = [*product(SHAPES, SHAPES), ("N, C", None), (None, "N, C")]
    for weight, bias in given if samples is LAST else [("N, C", "C"), ("1, C", "N, C")]:
        call = Modulated(samples, weight, bias, ("float64",) * 3)
        exact = formulas(call)
        with at(weight, bias):
            for name, got in call.run(device).items():
                assert got.shape == exact[name].shape
                assert np.abs(got - exact[name]).max() < 1e-13, name


def formulas(call):
    """Return results by the formulas of `cunorm.group_norm_backward`, with silu."""
    axis, given = call.samples.channel_axis, call.views(call.whole())
    x, dy = (np.moveaxis(a, axis, 1).astype(np.float64) for a in call.inputs())
    count, channels, *spatial = x.shape
    w, b = (
        np.broadcast_to(given.get(name, empty), (count, channels))[..., None]
        for name, empty in (("weight", 1.0), ("bias", 0.0))
    )

    def mean(values):  # over a group
        of_groups = values.reshape(count, call.samples.groups, -1).mean(-1)
        return np.repeat(of_groups, channels // call.samples.groups, axis=1)[..., None]

    x, dy = x.reshape(count, channels, -1), dy.reshape(count, channels, -1)
    rstd = 1 / np.sqrt(mean((x - mean(x)) ** 2) + 1e-5)
    r = (x - mean(x)) * rstd
    n = r * w + b
    gate = 1 / (1 + np.exp(-n))
    h = dy * gate * (1 + n * (1 - gate))
    sums = {"dweight": (h * r).sum(-1), "dbias": h.sum(-1)}
    for name, total in sums.items():
        shape = {"weight": call.weight, "bias": call.bias}[name[1:]]
        if shape != "N, C":
            sums[name] = total.sum(0, keepdims=shape == "1, C")
    dx = rstd * (w * h - mean(w * h) - r * mean(w * h * r))
    found = {"y": n * gate, "dx": dx}
    found = {
        k: np.moveaxis(a.reshape(count, channels, *spatial), 1, axis) for k, a in found.items()
    }
    of_groups = np.s_[:, :: channels // call.samples.groups, 0]
    return found | sums | {"mean": mean(x)[of_groups], "rstd": rstd[of_groups]}


def test_results_of_a_sample_are_those_of_the_sample_alone(device):
    for weight, bias in product(SHAPES, SHAPES):
        call = Modulated(LAST if device.is_gpu else FIRST, weight, bias)
        with at(weight, bias):
            check_against_samples_alone(call.run(device), call.alone(device))


@pytest.mark.parametrize("name", ON_CPU)
def test_results_of_a_sample_are_those_of_the_sample_alone_however_threads_share_samples(name):
    call = Modulated(ON_CPU[name], "N, C", "N, C" if "parts" in name else "C")
    check_against_samples_alone(call.run(OnNumpy()), call.alone(OnNumpy()))


def test_weight_and_bias_of_samples_have_dtypes_of_their_own(device):
    call = Modulated(LAST, "N, C", "1, C", ("bfloat16", "float16", "float64"))
    results = call.run(device)
    assert results["dweight"].dtype == np.float16
    assert results["dbias"].dtype == np.float64
    check_against_samples_alone(results, call.alone(device))


@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_of_samples_are_added_to_what_the_arrays_hold(device, shape):
    call = Modulated(LAST, shape, "N, C")
    before = {f"d{k}": draw(k, a.shape, "float32") for k, a in call.views(call.whole()).items()}
    out = GroupNormGrads(**{name: device.put(array.copy()) for name, array in before.items()})
    results = call.run(device, out=out, accumulate=True)
    assert_same_bits(device.get(out.dweight), results["dweight"])
    check_against_samples_alone(results, call.alone(device), before)


def test_each_gradient_is_the_same_if_it_alone_is_wanted():
    call = Modulated(LAST, "N, C", "C")
    results, of_forward = call.run(OnNumpy()), {"y", "mean", "rstd"}
    for needs in (("x",), ("weight",), ("x", "bias")):
        got = call.run(OnNumpy(), needs=needs)
        assert {*got} == of_forward | {f"d{name}" for name in needs}
        for name, array in got.items():
            assert_same_bits(array, results[name], name)
    plain = call._replace(activation=None)  # of weight and bias, only the shapes are needed
    got = plain.run(OnNumpy(), needs=("weight", "bias"))
    results = plain.run(OnNumpy())
    for name, array in got.items():
        assert_same_bits(array, results[name], name)


def test_rows_of_samples_are_read_where_they_lie_if_each_is_contiguous(monkeypatch):
    copied = copies(monkeypatch)
    wide = draw("weight", (6, 33), "float32")
    in_place = [
        wide[:3, :16],
        wide[::2, 1:17],
        wide[::-2, 17:],
        np.broadcast_to(wide[0, :16], (3, 16)),
    ]
    in_place += [wide[:1, :16], wide[5, 9:25]]
    (x, dy), options = Modulated(LAST).inputs(), Modulated(LAST).options
    for given in in_place:
        results = run(OnNumpy(), x, dy, 4, {"weight": given, "bias": given}, **options)
        assert not copied
        packed = {"weight": given.copy(), "bias": given.copy()}
        for name, array in run(OnNumpy(), x, dy, 4, packed, **options).items():
            assert_same_bits(results[name], array, name)
    for given in (wide[:3, ::2][:, :16], np.asfortranarray(wide[:3, :16])):
        results = run(OnNumpy(), x, dy, 4, {"weight": given}, **options)
        assert copied
        copied.clear()
        for name, array in run(OnNumpy(), x, dy, 4, {"weight": given.copy("C")}, **options).items():
            assert_same_bits(results[name], array, name)


def test_the_functions_that_return_only_y_take_a_row_for_each_sample(device):
    call = Modulated(LAST)
    x = device.put(call.inputs()[0])
    given = call.views({name: device.put(array) for name, array in call.whole().items()})
    y = device.get(cunorm.group_norm(x, 4, **given, **call.options))
    assert_same_bits(y, call.run(device)["y"])
    each = call._replace(samples=LAST._replace(groups=16))
    y = device.get(cunorm.instance_norm(x, **given, **call.options))
    assert_same_bits(y, each.run(device)["y"])


@pytest.mark.parametrize(
    "samples", [LAST, Samples(3, (5003,), 4, 2, False, 1)], ids=["small", "large"]
)
@pytest.mark.parametrize("shape", SHAPES)
def test_workspace_size_suffices_and_sums_need_no_more_for_rows_of_samples(samples, shape):
    call = Modulated(samples, shape, "N, C")
    x, dy = call.inputs()
    given, options = call.views(call.whole()), call.options
    sizes = {"num_groups": samples.groups, "channel_axis": samples.channel_axis}
    size = cunorm.workspace_size("group_norm_backward", x, **given, **sizes)
    of_channels = {name: array.reshape(-1, samples.channels)[0] for name, array in given.items()}
    assert size == cunorm.workspace_size("group_norm_backward", x, **of_channels, **sizes)
    saved = {name: call.run(OnNumpy())[name] for name in ("mean", "rstd")}
    memory = np.full(size + 64, 0xFF, np.uint8)
    results = cunorm.group_norm_backward(
        *(dy, x, samples.groups), **given, **saved, **options, workspace=memory[:size]
    )
    assert (memory[size:] == 0xFF).all()
    for name, array in results._asdict().items():
        assert_same_bits(array, call.run(OnNumpy())[name], name)


@pytest.mark.parametrize(("weight", "bias"), [("N, C", None), ("N, C", "C"), ("1, C", "N, C")])
def test_no_samples_have_no_rows_of_gradients_and_zeros_where_samples_share_a_row(
    device, weight, bias
):
    call = Modulated(LAST._replace(samples=0), weight, bias)
    results = call.run(device)
    for name, shape in (("dweight", weight), ("dbias", bias)):
        expected = {"N, C": (0, 16), "1, C": (1, 16), "C": (16,), None: None}[shape]
        if shape:
            assert_same_bits(results[name], np.zeros(expected, np.float32), name)


def test_one_sample_has_one_row():
    call = Modulated(LAST._replace(samples=1), "N, C", "C")
    results = call.run(OnNumpy())
    assert (results["dweight"].shape, results["dbias"].shape) == ((1, 16), (16,))
    check_against_samples_alone(results, call.alone(OnNumpy()))


@pytest.mark.parametrize(
    ("shape", "axis", "remedy"),
    [
        ((3, 8, 1), 1, ": pass weight.reshape(3, 8)"),
        ((3, 8, 1, 1), 1, ": pass weight.reshape(3, 8)"),
        ((3, 1, 8), -1, ": pass weight.reshape(3, 8)"),
        ((2, 8), 1, ""),
        ((8, 3), 1, ""),
        ((3, 8, 5), 1, ""),
        ((), 1, ""),
    ],
)
def test_other_shapes_are_refused_with_the_shapes_that_fit(shape, axis, remedy):
    x = np.ones((3, 8, 5) if axis == 1 else (3, 5, 8), np.float32)
    with pytest.raises(ValueError, match="weight has shape") as raised:
        cunorm.group_norm(x, 4, np.ones(shape, np.float32), channel_axis=axis)
    text = str(raised.value)
    assert f"weight has shape {shape}, expected (8,), one for each channel, " in text
    assert text.endswith(f"or (3, 8), a row for each sample{remedy}")


@pytest.mark.parametrize("wrong", [(16,), (1, 16), (2, 16), (3, 16, 1)], ids=str)
def test_an_array_for_a_gradient_has_the_shape_of_the_parameter(wrong):
    out = GroupNormGrads(dweight=np.zeros(wrong, np.float32))
    with pytest.raises(ValueError, match=r"out.dweight has shape .*, expected \(3, 16\)"):
        Modulated(LAST).run(OnNumpy(), out=out)
