# SPDX-License-Identifier: MIT
"""What `warmup` compiles is exactly what calls need then, on a CPU and on CUDA."""

from __future__ import annotations

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from itertools import count

import numpy as np
import pytest

import cunorm
from cunorm import _arrays, _cpu, _cuda
from cunorm._arrays import Device, Framework, Operand, contiguous_form
from cunorm._builds import Build
from cunorm._dtypes import DTYPES as STORAGE
from cunorm._loaded import Loaded
from tests.backends.test_cpu_build import ANSWERS, posix, script
from tests.backends.test_cuda_backend import FakeCupy
from tests.support import described
from tests.support.covers import label
from tests.support.operands import DTYPES
from tests.support.processes import in_process

compiles = pytest.mark.skipif(_cpu.compiler() is None, reason="needs a C++ compiler")
each_case = pytest.mark.parametrize("case", described.cases(), ids=label)
RMS = ("rms_norm_forward", "rms_norm_backward")


# --- what is compiled, on a CPU -------------------------------------------------------------------


@pytest.fixture
def loads(monkeypatch) -> list[Build]:
    return described.loads(monkeypatch)


def empty(shape, dtype):
    return np.empty(shape, DTYPES[dtype])


@each_case
def test_a_warmup_loads_exactly_what_a_call_on_a_cpu_needs(case, loads):
    described.warm(case, "cpu", rows=case["shape"][0])
    warmed = set(loads)
    assert len(warmed) == len(loads)
    described.call(case, empty)
    assert set(loads) == warmed, "the call had to load something else"
    described.forget()
    loads.clear()
    described.call(case, empty)
    assert set(loads) == warmed, "the call needs less than was loaded"


@each_case
def test_a_warmup_that_is_told_no_rows_serves_any_number_of_them(case, loads):
    described.warm(case, "cpu")
    warmed = len(loads)
    described.call(case, empty)
    assert len(loads) == warmed


@pytest.mark.parametrize("width", [65_600, 1 << 18])
def test_a_warmup_that_is_told_no_rows_serves_few_long_rows_and_many(width, loads):
    functions = ["rms_norm_forward", "rms_norm_backward"]
    cunorm.warmup(functions, width, "float32", device="cpu", progress=False)
    warmed = len(loads)
    for rows in (1, 4, 5, 15, 16):
        x = np.ones((rows, width), np.float32)
        weight = np.ones(width, np.float32)
        saved = cunorm.rms_norm_forward(x, weight)
        cunorm.rms_norm_backward(x, x, weight, rstd=saved.rstd)
    assert len(loads) == warmed


def test_several_are_crossed_and_what_they_share_is_loaded_once(loads):
    options = {"device": "cpu", "rows": 8, "progress": False}
    once = cunorm.warmup(RMS, 256, "float32", **options).builds
    ops = ("rms_norm", "rms_norm_forward", "rms_norm_backward")  # the first two are the same
    both = cunorm.warmup(ops, [256, 512], ["float32", "float64"], gate=(False, True), **options)
    assert once == 3
    assert both.builds == len(loads) == 4 * 2 + 2  # param_grad knows nothing of gates


@pytest.mark.parametrize("layout", ["channels_last", "channels_first"])
@pytest.mark.parametrize("sizes", [(64, 48, 3), (500, 64, 8), (9000, 16, 1), (40_000, 512, 32)])
def test_a_warmup_of_group_norms_that_is_told_no_rows_serves_any_number_of_samples(
    sizes, layout, loads
):
    positions, channels, num_groups = sizes
    told = {"positions": positions, "num_groups": num_groups, "layout": layout, "device": "cpu"}
    ops = ("group_norm_forward", "group_norm_backward")
    warm = partial(cunorm.warmup, ops, channels, "float32", **told, progress=False)
    done = warm(activation="silu")
    assert done.builds == len(loads)
    samples = [*range(1, 200), *range(200, 10_000, 97), 1 << 20, (1 << 31) - 1]
    assert warm(activation="silu", rows=samples).builds == done.builds == len(loads)


@posix
@compiles
def test_after_a_warmup_calls_compile_nothing_in_this_process_and_the_next(tmp_path):
    log = tmp_path / "log"
    compiler = script(tmp_path, f'{ANSWERS}echo "$@" >> "{log}"\nexec $real "$@" -O0')
    warm = f"""
log = {str(log)!r}
compiled = lambda: len(open(log).readlines()) if os.path.exists(log) else 0
options = {{"device": "cpu", "rows": 8, "progress": False, "residual": "float32"}}
first = cunorm.warmup({RMS}, 64, "float16", **options)
options |= {{"groups": 4, "gate": True, "gate_activation": "gelu", "bias": "float16"}}
second = cunorm.warmup(["layer_norm_forward", "layer_norm_backward"], 64, "float32", **options)
options = {{"device": "cpu", "rows": 8, "progress": False, "positions": 9, "num_groups": 4}}
options |= {{"activation": "relu", "layout": "channels_first", "bias": "float32"}}
third = cunorm.warmup(("group_norm_forward", "group_norm_backward"), 64, "float16", **options)
done = first.compiled + second.compiled + third.compiled
"""
    check = "assert done == compiled() == 9, (first, second, third)\n"
    call = """
x, stream = np.ones((8, 64), np.float16), np.ones((8, 64), np.float32)
weight, bias = np.ones(64, np.float32), np.ones(64, np.float16)
before = compiled()
saved = cunorm.rms_norm_forward(x, x[0], residual=stream)
rest = {"d_residual": stream, "x_dtype": "float16"}
cunorm.rms_norm_backward(x, saved.residual, x[0], rstd=saved.rstd, **rest)
rest = {"groups": 4, "gate": stream, "gate_activation": "gelu"}
saved = cunorm.layer_norm_forward(stream, weight, bias, residual=stream, **rest)
rest |= {"rstd": saved.rstd, "mean": saved.mean, "d_residual": stream}
grads = cunorm.layer_norm_backward(stream, saved.residual, weight, bias, **rest)
images = np.ones((8, 64, 3, 3), np.float16)
rest = {"weight": x[0], "bias": weight, "activation": "relu", "channel_axis": 1}
saved = cunorm.group_norm_forward(images, 4, **rest)
rest |= {"mean": saved.mean, "rstd": saved.rstd}
sums = cunorm.group_norm_backward(images, images, 4, **rest)
assert compiled() == before, "a call compiled"
np.testing.assert_allclose(sums.dbias, 8 * 9)
np.testing.assert_allclose(grads.dbias, 8 * 0.8413, rtol=1e-3)  # 8 gelu(1)
"""
    environment = {"CXX": compiler, "CUNORM_CACHE_DIR": str(tmp_path / "cache")}
    in_process(warm + check + call, **environment)
    in_process(warm + "assert done == 0\n" + call, **environment)


# --- what is compiled, on CUDA --------------------------------------------------------------------


class Cupy(FakeCupy):
    """Notes what is compiled, by its options too."""

    def __init__(self) -> None:
        super().__init__()
        self.compiled: list[tuple[str, tuple[str, ...], int]] = []

    def RawKernel(self, source, name, options):
        self.compiled.append((name, options, self.current))
        return super().RawKernel(source, name, options)


class OnCuda(Framework):
    """Arrays that are nothing but their form, at addresses of their own."""

    name = "fake"
    addresses = count(1 << 40, 1 << 36)

    def accepts(self, function, argument, kind):
        return True

    def describe(self, function, argument, array):
        return array

    def allocate(self, form):
        return Operand(next(self.addresses), form, None, self, True, True)

    def contiguous(self, operand):
        raise AssertionError("they are contiguous")

    def stream(self, device):
        return 0

    def device_scope(self, device):
        return nullcontext()

    def make(self, shape, dtype):
        operand = self.allocate(contiguous_form(shape, STORAGE[dtype], Device("cuda", 0)))
        operand.owner = operand
        return operand


@pytest.fixture
def cupy(monkeypatch):
    fake = Cupy()
    monkeypatch.setattr(_cuda, "_loaded", Loaded())
    caches = (
        _cuda._cupy,
        _cuda.nvrtc_version,
        _cuda.cuda_include_folders,
        _cuda.device_limits,
    )
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setitem(_arrays._FRAMEWORKS, Operand, OnCuda())
    yield fake
    for cache in caches:
        cache.cache_clear()


@each_case
def test_a_warmup_compiles_exactly_what_a_call_on_cuda_needs(case, cupy):
    done = described.warm(case, "cuda", workers=1)
    warmed = set(cupy.compiled)
    assert done.compiled == done.builds == len(warmed) == len(cupy.compiled)
    described.call(case, OnCuda().make)
    assert set(cupy.compiled) == warmed, "the call had to compile something else"
    _cuda.forget()
    cupy.compiled.clear()
    described.call(case, OnCuda().make)
    assert set(cupy.compiled) == warmed, "the call needs less than was compiled"


def test_cuda_is_the_current_device_unless_it_has_a_number(cupy):
    cupy.current = 2
    cunorm.warmup("l2_norm", 64, "float32", device="cuda", workers=1, progress=False)
    assert cunorm.warmup("l2_norm", 64, "float32", device="cuda:2", progress=False).compiled == 0
    cunorm.warmup("l2_norm", 64, "float32", device="cuda:3", workers=1, progress=False)
    assert [device for *_, device in cupy.compiled] == [2, 3]
    assert cupy.current == 2


def test_a_warmup_counts_and_keeps_any_number_of_kernels(cupy):
    def compiled(first, last):
        widths, more = list(range(first, last)), {"workers": 2, "progress": False}
        return cunorm.warmup("l2_norm", widths, "float32", device="cuda", **more).compiled

    assert compiled(1, 1301) == 1300
    assert compiled(1301, 1401) == 100
    assert compiled(1, 1401) == 0, "some of them were forgotten"
    assert cunorm.cache_info().cuda_kernels == len(cupy.compiled) == 1400


def test_of_warmups_at_once_one_compiles_for_cuda_and_counts_it(cupy, monkeypatch):
    make, together = cupy.RawKernel, threading.Barrier(4)
    monkeypatch.setattr(cupy, "RawKernel", lambda *told: (time.sleep(0.1), make(*told))[1])

    def warm(_):
        together.wait(timeout=30)
        return cunorm.warmup("l2_norm", 64, "float32", device="cuda", progress=False).compiled

    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(warm, range(4))) == [0, 0, 0, 1]
    assert len(cupy.compiled) == 1


@pytest.mark.gpu
def test_after_a_warmup_calls_on_a_gpu_compile_nothing():
    import cupy

    cunorm.warmup(RMS, 1000, "float16", device="cuda", residual="float32", progress=False)
    loaded = _cuda.loaded_count()
    x, stream = cupy.ones((8, 1000), np.float16), cupy.ones((8, 1000), np.float32)
    saved = cunorm.rms_norm_forward(x, x[0].copy(), residual=stream)
    rest = {"d_residual": stream, "x_dtype": "float16", "rstd": saved.rstd}
    cunorm.rms_norm_backward(x, saved.residual, x[0].copy(), **rest)
    assert _cuda.loaded_count() == loaded


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["channels_last", "channels_first"])
def test_after_a_warmup_group_norms_on_a_gpu_compile_nothing(layout):
    import cupy

    axis = -1 if layout == "channels_last" else 1
    told = {"num_groups": 32, "activation": "silu"}
    ops = ("group_norm_forward", "group_norm_backward")
    more = {"positions": 400, "layout": layout, "bias": True, "progress": False}
    cunorm.warmup(ops, 320, "float16", device="cuda", **told, **more)
    loaded = _cuda.loaded_count()
    x = cupy.ones((2, 20, 20, 320) if axis == -1 else (2, 320, 20, 20), np.float16)
    weight, bias = cupy.ones(320, np.float16), cupy.ones(320, np.float16)
    rest = {"weight": weight, "bias": bias, "channel_axis": axis} | told
    saved = cunorm.group_norm_forward(x, **rest)
    cunorm.group_norm_backward(x, x, **rest, mean=saved.mean, rstd=saved.rstd)
    assert _cuda.loaded_count() == loaded
