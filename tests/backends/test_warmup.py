# SPDX-License-Identifier: MIT
"""`warmup` compiles exactly the builds that calls need, on a CPU and on CUDA."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

import numpy as np
import pytest

import cunorm
from tests import softgpu
from tests.support import described
from tests.support.caches import compiled, compiles, fresh_process, posix
from tests.support.covers import each
from tests.support.internals import _cuda
from tests.support.operands import DTYPES

RMS = ("rms_norm_forward", "rms_norm_backward")
GROUP = ("group_norm_forward", "group_norm_backward")


@pytest.fixture
def cuda_loads(monkeypatch):
    return described.cuda_loads(monkeypatch)


def on_cpu(shape, dtype):
    return np.empty(shape, DTYPES[dtype])


def on_cuda(shape, dtype):
    import cupy

    return cupy.empty(shape, f"u{DTYPES[dtype].itemsize}").view(DTYPES[dtype])


def check_warmup(case, device, loads):
    """Check that a warmup and a call load the same builds, and that `rows=None` loads these too."""
    make = on_cpu if device == "cpu" else on_cuda
    done = described.warm_up(case, device, rows=case["shape"][0])
    warmed = set(loads)
    assert done.builds == len(warmed) == len(loads)
    described.call(case, make)
    assert set(loads) == warmed, "the call loads other builds"
    described.clear_all()
    loads.clear()
    described.call(case, make)
    assert set(loads) == warmed, "the call needs less than was loaded"
    described.clear_all()
    loads.clear()
    described.warm_up(case, device)
    assert set(loads) >= warmed, "a warmup for any number of rows lacks builds"


@each(described.cases())
def test_a_warmup_loads_exactly_what_a_call_on_a_cpu_needs(case, loads):
    check_warmup(case, "cpu", loads)


@pytest.mark.gpu
@each(described.cases())
def test_a_warmup_loads_exactly_what_a_call_on_cuda_needs(case, cuda_loads):
    few = tuple(map(min, case["shape"], (20, 9000, 128)))
    check_warmup(case | {"shape": few}, "cuda", cuda_loads)


def test_a_warmup_of_split_rows_loads_exactly_what_their_pieces_need(loads):
    ops = ("layer_norm_forward", "layer_norm_backward")
    options = {"device": "cpu", "rows": 8, "bias": True, "split_rows": True, "progress": False}
    done = cunorm.warmup(ops, 24, "float32", **options)
    warmed = set(loads)
    assert done.builds == len(warmed) == len(loads) == 6
    described.clear_all()
    loads.clear()
    x, weight = on_cpu((8, 24), "float32"), on_cpu((24,), "float32")
    mean, m2, count, *_ = cunorm.row_moments(x, center=True)
    stacked = [np.stack([one, one]) for one in (mean, m2)]
    statistics = cunorm.combine_moments(cunorm.Moments(*stacked, count), eps=1.0)._asdict()
    cunorm.layer_norm(x, weight, weight, **statistics)
    sums = cunorm.normalize_backward_sums(x, x, weight, **statistics, center=True)
    cunorm.layer_norm_backward(x, x, weight, weight, **statistics, sums=sums, count=48)
    assert set(loads) == warmed


def test_a_warmup_of_tangents_loads_exactly_what_calls_need(loads):
    options = {"device": "cpu", "rows": 8, "bias": True, "progress": False}
    cunorm.warmup("layer_norm_jvp", 24, "float32", needs=("x", "weight"), **options)
    cunorm.warmup("group_norm_jvp", 24, "float32", num_groups=3, positions=5, **options)
    warmed = set(loads)
    assert len(warmed) == len(loads) == 2
    described.clear_all()
    loads.clear()
    x, weight = on_cpu((8, 24), "float32"), on_cpu((24,), "float32")
    one, tangents = x[:, 0].copy(), {"x_tangent": x, "weight_tangent": weight}
    cunorm.layer_norm_jvp(x, weight, weight, **tangents, mean=one, rstd=one)
    image, one = on_cpu((8, 5, 24), "float32"), on_cpu((8, 3), "float32")
    tangents |= {"x_tangent": image, "bias_tangent": weight}
    cunorm.group_norm_jvp(image, 3, weight, weight, **tangents, mean=one, rstd=one)
    assert set(loads) == warmed


# The width decides up to how many rows threads share each row, and from how many rows on stores
# bypass the caches. Shared rows and such stores have builds of their own.
WIDTHS = [65_600, 393_216, *(768 * round(200 * 1.3**step) for step in range(9))]
# If x is larger than the caches, both passes over short rows prefetch.
SHORT, MANY = [240, 1152], [round(17 * 1.3**step) for step in range(37)]


@pytest.mark.parametrize("groups", [1, 2, 3, 16])
def test_a_warmup_without_rows_serves_few_long_rows_and_many(groups, loads):
    widths = [width for width in WIDTHS if width % groups == 0]
    cunorm.warmup(RMS, widths + SHORT, "float32", device="cpu", groups=groups, progress=False)
    warmed = len(loads)
    for rows, width in [*product(range(1, 17), widths), *product(MANY, SHORT)]:
        x, weight = np.empty((rows, width), np.float32), np.empty(width, np.float32)
        saved = cunorm.rms_norm_forward(x, weight, groups=groups)
        cunorm.rms_norm_backward(x, x, weight, rstd=saved.rstd, groups=groups)
        assert len(loads) == warmed, (rows, width)


@pytest.mark.parametrize("layout", ["channels_last", "channels_first"])
@pytest.mark.parametrize("sizes", [(64, 48, 3), (500, 64, 8), (9000, 16, 1), (40_000, 512, 32)])
def test_a_warmup_of_group_norms_without_rows_serves_any_number_of_samples(sizes, layout, loads):
    positions, channels, num_groups = sizes
    options = {"positions": positions, "num_groups": num_groups, "layout": layout, "device": "cpu"}
    warm_up = partial(cunorm.warmup, GROUP, channels, "float32", **options, progress=False)
    samples = [*range(1, 200), *range(200, 10_000, 97), 1 << 20, (1 << 31) - 1]
    assert warm_up().builds == len(loads) == warm_up(rows=samples).builds == len(loads)


def test_lists_of_arguments_are_crossed_and_shared_builds_are_loaded_once(loads):
    options = {"device": "cpu", "rows": 8, "progress": False}
    assert cunorm.warmup(RMS, 256, "float32", **options).builds == 3
    ops = ("rms_norm", *RMS)  # the first two have the same builds
    both = cunorm.warmup(ops, [256, 512], ["float32", "float64"], gate=(False, True), **options)
    assert both.builds == len(loads) == 4 * 2 + 2  # param_grad does not depend on gates


# --- parameters of samples and rows, gates on the branch ------------------------------------------

LAYER = ("layer_norm_forward", "layer_norm_backward")
PARAMETERS = [("sample", "sample"), ("sample", "all"), ("row", "sample"), ("row", "row")]
GATES = ["all", "sample", "row", "sample scalar", "row scalar"]
SHARING = [
    *({"weight": weight, "bias": bias} for weight, bias in PARAMETERS),
    *({"weight": "all", "bias": "all", "gate": gate} for gate in GATES),
    *({"weight": "sample", "bias": "row", "gate": gate} for gate in GATES),
]
# Samples and rows of a sample. Of wide rows, a CPU's threads share few; many bypass the caches.
FEW = [(samples, rows) for samples in range(1, 16) for rows in range(1, 15 // samples + 1)]
WIDE = [64, 49_152, 100_000, 1_000_000]
BRANCH = {"gate_position": "branch", "gate_activation": "tanh"}


def warm_up_modulated(sharing, widths, device, **more):
    """Warm up training, with a residual if there is a gate."""
    options = {f"{name}_per": per for name, per in sharing.items()} | {"bias": True}
    if "gate" in sharing:
        options |= {"gate": True, "residual": True} | BRANCH
    given = {"device": device, "weight_offset": 1.0, "progress": False}
    return cunorm.warmup(LAYER, widths, "float32", **given | options | more)


def train_modulated(sharing, lead, width, make, needs=("x", "weight", "bias", "gate")):
    """Make the calls of a warmup, with x of shape (samples, rows, width)."""
    leads = {"all": (), "sample": (lead[0], 1), "row": lead}
    given = {"weight_offset": 1.0} | (BRANCH if "gate" in sharing else {})
    for name, per in sharing.items():
        shared, _, scalar = per.partition(" ")
        given[name] = make((*leads[shared], 1 if scalar else width), "float32")
    x, statistic = make((*lead, width), "float32"), make(lead, "float32")
    ofs = ({"residual": x}, {"d_residual": x, "branch": x}) if "gate" in sharing else ({}, {})
    cunorm.layer_norm_forward(x, **given, **ofs[0])
    cunorm.layer_norm_backward(x, x, mean=statistic, rstd=statistic, needs=needs, **given, **ofs[1])


@pytest.mark.parametrize("sharing", SHARING, ids=lambda one: ", ".join(one.values()))
def test_a_warmup_of_modulated_norms_serves_any_samples_and_rows_on_a_cpu(sharing, loads):
    warm_up_modulated(sharing, WIDE, "cpu")
    warmed = len(loads)
    for width in WIDE:
        for lead in [*FEW, (1, 16), (5, 7), (40, 1), *[(5, 9000), (9000, 1)] * (width == 64)]:
            train_modulated(sharing, lead, width, on_cpu)
            assert len(loads) == warmed, (lead, width)


@pytest.mark.gpu
@pytest.mark.parametrize("sharing", SHARING, ids=lambda one: ", ".join(one.values()))
def test_a_warmup_of_modulated_norms_serves_any_samples_and_rows_on_cuda(sharing, cuda_loads):
    warm_up_modulated(sharing, 72, "cuda")
    warmed = len(cuda_loads)
    for lead in [(1, 1), (1, 9), (9, 1), (2, 3), (5, 40)]:
        train_modulated(sharing, lead, 72, on_cuda)
        assert len(cuda_loads) == warmed, lead


@pytest.mark.parametrize("lead", [(1, 6), (3, 2), (6, 1), (2, 24), (3, 16)])
@pytest.mark.parametrize("width", [64, 49_152])
def test_a_warmup_for_a_number_of_rows_serves_any_samples_that_have_these(lead, width, loads):
    """Of few gradients, too; a backward whose gate needs no gradient reads no branch."""
    sharing = {"weight": "sample", "bias": "all", "gate": "sample scalar"}
    for needs in (("x", "gate"), ("weight",), ("x", "bias")):
        warm_up_modulated(sharing, width, "cpu", rows=lead[0] * lead[1], needs=needs)
        warmed = len(loads)
        train_modulated(sharing, lead, width, on_cpu, needs)
        assert len(loads) == warmed, needs


@pytest.mark.gpu
@pytest.mark.parametrize("lead", [(1, 24), (2, 12), (3, 8), (24, 1)])
def test_a_warmup_for_a_number_of_rows_serves_any_samples_that_have_these_on_cuda(lead, cuda_loads):
    sharing = {"weight": "sample", "bias": "sample", "gate": "sample"}
    warm_up_modulated(sharing, 72, "cuda", rows=24)
    warmed = len(cuda_loads)
    train_modulated(sharing, lead, 72, on_cuda)
    assert len(cuda_loads) == warmed


GROUP_SHAPES = [(64, 48), (9000, 16), (40_000, 512)]


def check_group_warmup(layout, shapes, device, loads, make):
    """Check that a warmup for "sample" serves parameters of shapes (N, C), (1, C) and (C,)."""
    for positions, channels in shapes:
        options = {"positions": positions, "num_groups": 4, "layout": layout, "device": device}
        per = {"bias": True, "weight_per": "sample", "bias_per": ("sample", "all")}
        cunorm.warmup(GROUP, channels, "float32", **options, **per, progress=False)
        warmed = len(loads)
        for samples in (1, 2, 5, 40):
            is_last = layout == "channels_last"
            sizes = (positions, channels) if is_last else (channels, positions)
            x, statistic = make((samples, *sizes), "float32"), make((samples, 4), "float32")
            for lead in ((samples,), (1,), ()):
                weight, bias = (make((*one, channels), "float32") for one in ((samples,), lead))
                given = {"weight": weight, "bias": bias, "channel_axis": -1 if is_last else 1}
                cunorm.group_norm_forward(x, 4, **given)
                statistics = {"mean": statistic, "rstd": statistic}
                cunorm.group_norm_backward(x, x, 4, **given, **statistics)
                assert len(loads) == warmed, (positions, channels, samples, lead)


@pytest.mark.parametrize("layout", ["channels_last", "channels_first"])
def test_a_warmup_of_group_norms_with_parameters_of_samples_serves_any_samples(layout, loads):
    check_group_warmup(layout, GROUP_SHAPES, "cpu", loads, on_cpu)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["channels_last", "channels_first"])
def test_a_warmup_of_group_norms_with_parameters_of_samples_serves_cuda(layout, cuda_loads):
    check_group_warmup(layout, GROUP_SHAPES[:1], "cuda", cuda_loads, on_cuda)


# --- with a compiler ------------------------------------------------------------------------------

SMALL = [one for one in described.cases() if one["op"].startswith("layer_norm_") and one["gate"]]


@posix
@compiles
def test_after_a_warmup_calls_compile_nothing_even_if_only_the_files_are_left(
    tmp_path, monkeypatch
):
    """`test_cache.py` has the same of another process."""
    case = min((one for one in SMALL if one["groups"] > 1), key=lambda one: one["shape"])
    found = compiled(monkeypatch)
    with fresh_process(CUNORM_CACHE_DIR=tmp_path):
        done = described.warm_up(case, "cpu", rows=case["shape"][0])
        assert done.compiled == len(found) > 0
        for _ in range(2):
            described.call(case, on_cpu)
            described.clear_all()
        assert described.warm_up(case, "cpu", rows=case["shape"][0]).compiled == 0
    assert done.compiled == len(found), "a call compiled"


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_only_one_of_parallel_warmups_compiles_a_build(device, cuda_loads, folder, monkeypatch):
    found, load, together = compiled(monkeypatch), _cuda._load, threading.Barrier(4)
    monkeypatch.setattr(_cuda, "_load", lambda build: (time.sleep(0.1), load(build))[1])

    def warm_up(_):
        together.wait(timeout=30)
        return cunorm.warmup("l2_norm", 4, "float32", device=device, rows=1, progress=False)[:2]

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(warm_up, range(4))) == [(1, 0), (1, 0), (1, 0), (1, 1)]
    assert len(found if device == "cpu" else cuda_loads) == 1


# --- on CUDA --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not softgpu.is_loaded(), reason="needs several GPUs, as the software GPU has")
def test_cuda_is_the_current_device_unless_it_has_a_number(cuda_loads):
    import cupy

    def compiled(device):
        return cunorm.warmup("l2_norm", 64, "float32", device=device, progress=False).compiled

    with softgpu.settings(devices=3), cupy.cuda.Device(1):
        assert [compiled(f"cuda{number}") for number in ("", ":1", ":2", ":2")] == [1, 0, 1, 0]
        assert cupy.cuda.runtime.getDevice() == 1
    assert len(cuda_loads) == 2


@pytest.mark.exhaustive
@pytest.mark.gpu
def test_a_warmup_counts_and_keeps_any_number_of_kernels(cuda_loads):
    def compiled(first, last):
        widths, more = list(range(first, last)), {"workers": 2, "progress": False}
        return cunorm.warmup("l2_norm", widths, "float32", device="cuda", **more).compiled

    assert compiled(1, 1061) == 1060
    assert compiled(1, 1061) == 0, "some kernels were forgotten"
    assert cunorm.cache_info().cuda_kernels == len(cuda_loads) == 1060
