# SPDX-License-Identifier: MIT
"""The handlers that XLA calls: calls on a GPU, with frames like XLA's; errors."""

from __future__ import annotations

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from tests import softgpu
from tests.support.gpu_arrays import OnCupy
from tests.support.operands import draw

pytest.importorskip("jax", reason="JAX is not installed")
import jax

import cunorm.jax
from tests.support.gpus import limits_of
from tests.support.internals import MAX_SMS, Device, _dispatch, _driver
from tests.support.jax_frames import (
    CONTEXT,
    Api,
    Call,
    Frame,
    _handler,
    _xla_structs,
    calls_of,
)


def rows(x, weight):
    return (cunorm.jax.rms_norm(x, weight) ** 2).sum()


def images(x, weight):
    return (cunorm.jax.group_norm(x, 2, weight, activation="silu") ** 2).sum()


def calls(function, *shapes, platform="cuda"):
    """Return the custom calls of forward and backward."""
    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
    found = calls_of(jax.grad(function, (0, 1)), *arrays, platform=platform)
    assert len(found) == 2
    return found


ROWS, IMAGES = (rows, (6, 32), (32,)), (images, (2, 300, 8), (8,))


# --- on a GPU -------------------------------------------------------------------------------------


def empty(spec):
    shape, dtype = spec
    return np.full(shape, 255 if dtype == "uint8" else np.nan, dtype)


def on_gpu(gpu, call, inputs=None, api=None):
    """Return a call's API, and its frame with results on a GPU; ones are the usual inputs."""
    api, inputs = api or Api(), inputs or [gpu.put(np.ones(*spec)) for spec in call.inputs]
    results = [gpu.put(empty(spec)) for spec in call.results]
    gpu.cupy.cuda.runtime.deviceSynchronize()
    frame = Frame(api, call.text, *([a.data.ptr for a in arrays] for arrays in (inputs, results)))
    frame.inputs, frame.results = inputs, results  # so that their memory is not freed
    return api, frame


def on_stream(gpu, call, inputs):
    """Make a call on a new stream; return its results."""
    stream = gpu.cupy.cuda.Stream(non_blocking=True)
    api, frame = on_gpu(gpu, call, inputs, Api(stream=stream.ptr))
    assert frame.handle(_handler.run_on_cuda) is None, api.errors
    stream.synchronize()
    assert api.contexts == [CONTEXT]
    return [gpu.get(one) for one in frame.results]


@pytest.mark.gpu
@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("norm", [ROWS, IMAGES], ids=["rows", "images"])
def test_a_call_reads_and_writes_xlas_memory_on_xlas_stream(norm, is_backward, monkeypatch):
    """Results are those of the same call on a CPU. A backward's second launch may begin early."""
    early, launch = [], _driver.launch_dependent
    noted = lambda *args: (early.append(args[2].build.kernel), launch(*args))  # noqa: E731
    monkeypatch.setattr(_driver, "launch_dependent", noted)
    gpu, call = OnCupy(), calls(*norm)[is_backward]
    with softgpu.settings(streams="late") if softgpu.is_loaded() else nullcontext():
        check_on_gpu(gpu, call)
        assert not softgpu.is_loaded() or early == is_backward * ["param_grad"]


def check_on_gpu(gpu, call):
    """Check that the results of a call on a GPU are those of the same call on a CPU."""
    inputs = [draw(f"{index}", *spec) for index, spec in enumerate(call.inputs)]
    expected = [empty(spec) for spec in call.results if spec[1] != "uint8"]  # not a workspace
    at = [[one.ctypes.data for one in arrays] for arrays in (inputs, expected)]
    assert Frame(Api(), call.text, *at).handle(_handler.run_on_cpu) is None
    results = on_stream(gpu, call, [gpu.put(one) for one in inputs])
    for one, right in zip(results, expected, strict=False):  # zip leaves the workspace out
        np.testing.assert_allclose(one, right, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_the_pieces_of_split_rows_are_those_of_a_cpu():
    mesh, columns = jax.sharding.AbstractMesh((2,), ("tp",)), jax.P(None, "tp")
    specs = (columns, jax.P("tp"), jax.P("tp"))

    def split(*arrays):
        norm = partial(cunorm.jax.layer_norm, axis_name="tp")
        return jax.shard_map(norm, mesh=mesh, in_specs=specs, out_specs=columns)(*arrays)

    def loss(*arrays):
        return (split(*arrays) ** 2).sum()

    arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in ((6, 64), (64,), (64,))]
    found = calls_of(jax.grad(loss, (0, 1, 2)), *arrays, platform="cuda")
    assert len(found) == 5
    for call in found:
        check_on_gpu(OnCupy(), call)


@pytest.mark.gpu
def test_a_call_on_a_gpu_without_its_workspace_is_refused():
    gpu, call = OnCupy(), calls(*ROWS)[1]
    *results, workspace = call.results
    assert workspace[1] == "uint8"
    api, frame = on_gpu(gpu, call._replace(results=results))
    assert frame.handle(_handler.run_on_cuda)
    assert "4 arguments and 2 results, expected 4 and 3" in api.errors[0]


LARGE = [(rows, shape) for shape in product((1, 31, 5000, 10**6), (8, 1024, 5000, 70000))]
LARGE += [(images, s) for s in ((3, 1, 4096), (2, 49, 2048), (2, 4096, 64), (1, 5003, 8))]


@pytest.mark.parametrize(("function", "shape"), LARGE)
def test_no_gpu_needs_more_workspace_than_xla_reserves(function, shape):
    for called in calls(function, shape, shape[-1:]):
        call = Call.parse(called.text, Device("cuda", 0))
        for capability, sms in product(("75", "86", "90"), (1, 132, 188, MAX_SMS, 1000)):
            for alignment in (0, 4):
                gpu = limits_of(capability, sm_count=sms)
                lowered = call.plan.lower(gpu, (alignment,) * call.op.array_count)
                assert lowered.workspace <= call.plan.workspace_bound(None)


@pytest.mark.gpu
def test_a_workspace_that_does_not_suffice_is_refused(monkeypatch):
    plan_of = Call.plan.fget

    def plan(call):
        plan = plan_of(call)
        return replace(plan, lower=lambda *args: plan.lower(*args)._replace(workspace=1 << 32))

    _dispatch.clear_calls()
    monkeypatch.setattr(Call, "plan", property(plan))
    api, frame = on_gpu(OnCupy(), calls(*IMAGES)[1])
    assert frame.handle(_handler.run_on_cuda)
    assert "a group norm has " in api.errors[0]
    assert "bytes of workspace, and takes 4294967296 on this GPU" in api.errors[0]


@pytest.mark.gpu
def test_a_call_on_a_gpu_is_planned_once_for_each_alignment(monkeypatch):
    """All calls give the same numbers; each call runs on another stream of XLA."""
    gpu, call, loads, found = OnCupy(), calls(*ROWS)[0], [], []
    launcher = _handler.cuda.Launcher
    load = launcher.load
    monkeypatch.setattr(launcher, "load", lambda *args: loads.append(args) or load(*args))
    _dispatch.clear_calls()
    x, weight = (gpu.put(draw(f"{index}", *spec)) for index, spec in enumerate(call.inputs))
    room = gpu.put(np.zeros(x.size + 1, "float32"))
    for offset in (0, 0, 1, 1, 0):
        given = room[offset : offset + x.size].reshape(x.shape)
        given[...] = x
        found.append(on_stream(gpu, call, [given, weight]))
    assert len(loads) == 2
    for one in found[1:]:
        np.testing.assert_equal(one, found[0])


# --- errors ---------------------------------------------------------------------------------------

TEXT = calls(*ROWS, platform="cpu")[0].text


@pytest.mark.parametrize(
    ("text", "counts", "message"),
    [
        ("no text", (2, 2), "JSONDecodeError"),
        (TEXT.replace('"version": 4', '"version": 99'), (2, 2), "text version 99, expected 4"),
        (f"[2, {TEXT[1:]}".replace('"version": 4, ', ""), (2, 2), "text version None, expected 4"),
        (TEXT.replace("[[32]", "[[5, 32]"), (2, 2), "weight has shape (5, 32)"),
        (TEXT, (1, 2), "XLA gives 1 arguments and 2 results, expected 2 and 2"),
        (TEXT, (2, 1), "XLA gives 2 arguments and 1 results, expected 2 and 2"),
    ],
)
def test_a_frame_that_does_not_match_its_text_becomes_an_error_of_xla(text, counts, message):
    api = Api()
    frame = Frame(api, text, *([1] * count for count in counts))
    assert frame.handle(_handler.run_on_cpu) == 0xE1
    assert api.errors[0].startswith("cunorm: ")
    assert message in api.errors[0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nothing_is_read_before_the_stage_in_which_there_are_values(stage):
    assert Frame(Api((0, 4)), "not read", [1], [1], stage).handle(_handler.run_on_cpu) is None


@pytest.mark.parametrize("version", [(0, 2), (1, 0), (-1, -1)])
def test_an_api_of_another_version_is_refused_before_anything_is_read(version):
    api = Api(version)
    assert Frame(api, "not read", [1], [1]).handle(_handler.run_on_cpu)
    assert f"is of version {version[0]}.{version[1]}, expected 0.3 or a later 0.x" in api.errors[0]


def test_fields_that_no_call_on_a_cpu_reads_are_where_jaxlibs_header_says():
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    body = re.search(r"struct XLA_FFI_Stream_Get_Args {(.*?)\n}", header, re.S)[1]
    fields = re.findall(r"^  [\w\s*]*?[\s*](\w+);", re.sub(r"//.*", "", body), re.M)
    assert fields == ["struct_size", "extension_start", "ctx", "stream"]
    assert len(_xla_structs._StreamGet._fields_) == 4
    api = re.search(r"struct XLA_FFI_Api {(.*?)\n};", header, re.S)[1]
    functions = re.findall(r"STRUCT_FIELD\(XLA_FFI_(\w+)\)", api)
    fields = [name for name, _ in _xla_structs._Api._fields_]
    first = fields.index("error_create")
    for name in ("Error_Create", "Stream_Get"):  # other functions have changed their names
        assert functions.index(name) == fields.index(name.lower()) - first
