# SPDX-License-Identifier: MIT
"""A launch of a call may begin while the call's previous launch runs, if the GPU supports that."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

import cunorm
from tests import softgpu
from tests.emulation.machine import machine, needs_softgpu
from tests.support.gpu_arrays import OnCupy
from tests.support.internals import _driver, source_text
from tests.support.operands import draw
from tests.support.remembered import clear_plans

pytestmark = [pytest.mark.gpu, needs_softgpu]

FEATURE = "programmatic_launches"


@pytest.fixture
def dependent(monkeypatch) -> Iterator[list[str]]:
    """Return a list that gets the kernel of each launch that may begin early."""
    kernels, launch = [], _driver.launch_dependent

    def noted(cupy, function, planned, *rest):
        kernels.append(planned.build.kernel)
        launch(cupy, function, planned, *rest)

    monkeypatch.delenv("CUNORM_FEATURES", raising=False)
    monkeypatch.setattr(_driver, "launch_dependent", noted)
    clear_plans()
    yield kernels
    clear_plans()


def rows(gpu, count=5):
    """Call a backward on rows, and return its gradients."""
    x, rstd = (gpu.put(draw(name, (count, 33)[:n], "float32")) for name, n in (("x", 2), ("r", 1)))
    return cunorm.rms_norm_backward(x, x, gpu.put(draw("w", (33,), "float32")), rstd=rstd)


def samples(gpu, count=2):
    """Call a group norm's forward and backward, of several launches each; return all results."""
    x = gpu.put(draw("x", (count, 8193, 2), "float32"))
    weight = gpu.put(draw("w", (8193,), "float32"))
    norm = {"num_groups": 1, "channel_axis": 1}
    f = cunorm.group_norm_forward(x, weight=weight, **norm)
    statistics = {"mean": f.mean, "rstd": f.rstd}
    return *f, *cunorm.group_norm_backward(x, x, weight=weight, **statistics, **norm)


def test_later_launches_begin_early_and_give_the_same_bits(dependent):
    gpu, found = OnCupy(), []
    for features in ("", FEATURE):
        with machine(features) as launches:
            results = (*rows(gpu), *samples(gpu))
            found.append([gpu.get(one).tobytes() for one in results if one is not None])
    assert [(one.build.kernel, one.dependent) for one in launches] == [
        *(("row_norm_backward", False), ("param_grad", True)),
        *(("group_norm_forward", False), ("group_norm_forward", True)),
        *(("group_norm_backward", False), ("group_norm_backward", True), ("param_grad", True)),
    ]
    assert dependent == ["param_grad", "group_norm_forward", "group_norm_backward", "param_grad"]
    assert found[0] == found[1]


@pytest.mark.parametrize("call", [rows, samples])
def test_the_first_launch_of_a_call_does_not_begin_early(call, dependent):
    """The previous kernel on the stream may be another library's, and must end first."""
    with machine(FEATURE) as launches:
        call(OnCupy(), count=0)
    assert [one.build.kernel for one in launches] == ["param_grad"]
    assert dependent == []


WITHOUT = ["an older GPU", "an older driver", "the driver's function", "none", "clusters"]


@pytest.mark.parametrize("without", [None, *WITHOUT])
def test_launches_begin_early_by_default_except_where_impossible(without, dependent, monkeypatch):
    """`none` and `clusters` are features that do not include early launches."""
    gpu = OnCupy()
    if without == "an older driver":
        monkeypatch.setattr(gpu.cupy.cuda.runtime, "driverGetVersion", lambda: 12020)
    elif without == "the driver's function":
        monkeypatch.setattr(_driver, "library", SimpleNamespace)
    elif without in ("none", "clusters"):
        monkeypatch.setenv("CUNORM_FEATURES", without)
    with softgpu.settings(capability=80 if without == "an older GPU" else 90):
        rows(gpu)
    assert dependent == ([] if without else ["param_grad"])


def test_launches_begin_early_in_a_graph_and_on_another_device(dependent):
    gpu = OnCupy()
    cupy = gpu.cupy
    with softgpu.settings(devices=2), cupy.cuda.Device(1):
        x, weight, rstd = (gpu.put(draw("x", (5, 33), "float32")[at]) for at in (..., 0, (..., 0)))
        out = cunorm.NormGrads(dx=cupy.empty_like(x), dweight=cupy.empty_like(weight))
        size = cunorm.workspace_size("rms_norm_backward", x, weight)
        given = {"out": out, "workspace": cupy.empty(size, "uint8"), "rstd": rstd}

        def step():
            with cupy.cuda.Device(0):
                cunorm.rms_norm_backward(x, x, weight, **given)

        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            step()
            right = gpu.get(out.dweight)
            out.dweight.fill(0)
            stream.synchronize()
            stream.begin_capture()
            step()
            stream.end_capture().launch(stream)
            np.testing.assert_array_equal(gpu.get(out.dweight), right)
    assert dependent == 2 * ["param_grad"]


@pytest.mark.parametrize(
    ("kernel", "call"),
    [("param_grad", rows), ("group_norm_forward", samples), ("group_norm_backward", samples)],
)
def test_a_kernel_that_does_not_wait_is_detected_if_it_begins_early(kernel, call, dependent):
    """The error shows that the launcher asked the driver for an early start."""
    text = source_text(kernel)
    wrong = text.replace(" wait_for_prerequisites();", " ")
    assert wrong != text
    gpu = OnCupy()
    with machine("", sources={kernel: wrong}):
        call(gpu)
    error = rf"(?s)does not launch {kernel}: .*before griddepcontrol.wait.*PTX line"
    with machine(FEATURE, sources={kernel: wrong}), pytest.raises(RuntimeError, match=error):
        call(gpu)
