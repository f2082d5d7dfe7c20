# SPDX-License-Identifier: MIT
"""The handlers that XLA calls, with XLA, the GPU and its launcher faked."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import numpy as np
import pytest

from tests.support.jax_frames import CONTEXT, STREAM, Api, Call
from tests.support.operands import draw

jax = pytest.importorskip("jax", reason="JAX is not installed")

from cunorm import _backend, _cuda, reference  # noqa: E402
from cunorm._arrays import Device  # noqa: E402
from cunorm._features import NONE  # noqa: E402
from cunorm._plan import MOST_SMS  # noqa: E402
from cunorm.group_norm import _run  # noqa: E402
from cunorm.jax import _frame, _handler, _target  # noqa: E402
from cunorm.jax._kinds import settle  # noqa: E402
from cunorm.jax._op import Array, Op  # noqa: E402
from cunorm.row_norm._variant import Numbers, Variant  # noqa: E402

ROWS, WIDTH = 6, 32
X, ROW, STATISTIC = (Array(s, "float32") for s in ((ROWS, WIDTH), (WIDTH,), (ROWS,)))
NUMBERS = Numbers(None, 0.0, 1e-6).bits()
FORWARD = Op(
    "row_forward",
    ("rms_norm", *Variant(), False, None, None, True, False),
    NUMBERS,
    (X, None, None, ROW, None),
)
BACKWARD = Op(
    "row_backward",
    ("rms_norm", *Variant(), False, "float32", ("weight", "x")),
    NUMBERS,
    (X, X, STATISTIC, None, None, None, ROW, None),
)
GROUP = Op(
    "group_backward",
    ("group_norm", 2, "silu", -1, ("bias", "weight", "x")),
    b"",
    (
        *(Array((2, 300, 8), "float32"),) * 2,
        *(Array((2, 2), "float32"),) * 2,
        *(Array((8,), "float32"),) * 2,
    ),
)


def arrays_of(op):
    """Draw the inputs of an op, and make room for its results."""
    inputs = [draw(str(i), a.shape, a.dtype) for i, a in enumerate(op.inputs) if a is not None]
    return inputs, [np.full(form.shape, np.nan, np.float32) for _, form in settle(op).made]


def call_of(api, op, inputs, results, **more):
    at = [array.ctypes.data for array in inputs], [array.ctypes.data for array in results]
    return Call(api, op.text(), *at, **more)


def run_on_cpu(call):
    return _handler.handler(_handler.run_on_cpu)(call.address)


@pytest.fixture(autouse=True)
def no_api_known(monkeypatch):
    """XLA's lies where it does for good; of these, a later one may lie where an earlier did."""
    monkeypatch.setattr(_handler, "_checked", set())


# --- on a CPU -------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_compiler", [True, False])
def test_the_kernels_or_the_reference_read_and_write_the_frames_arrays(has_compiler, monkeypatch):
    monkeypatch.setattr(_backend, "has_compiler", lambda: has_compiler)
    inputs, results = arrays_of(FORWARD)
    call = call_of(Api(), FORWARD, inputs, results)
    assert run_on_cpu(call) is None
    exact = reference.rms_norm_forward(*inputs)
    np.testing.assert_allclose(results[0], exact.y, rtol=1e-6)
    np.testing.assert_allclose(results[1], exact.rstd, rtol=1e-6)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_nothing_runs_before_the_stage_in_which_there_are_values(stage):
    call = Call(Api(), "not even looked at", [1], [1], stage=stage)
    assert run_on_cpu(call) is None


def test_an_exception_becomes_an_error_of_xlas_and_goes_no_further():
    for text, message in (
        ("no text", "JSONDecodeError"),
        (FORWARD.text().replace("[1, ", "[99, ", 1), "text version 99, expected 1"),
        (FORWARD._replace(inputs=(X, None, None, X, None)).text(), "weight has shape (6, 32)"),
    ):
        api = Api()
        assert run_on_cpu(Call(api, text, [1], [1])) == 0xE1
        assert api.errors[0].startswith("cunorm: ")
        assert message in api.errors[0]


def test_a_frame_that_has_other_arrays_than_the_text_is_refused():
    api = Api()
    inputs, results = arrays_of(FORWARD)
    assert run_on_cpu(call_of(api, FORWARD, inputs[:1], results))
    assert "XLA gives 1 arguments and 2 results, expected 2 and 2" in api.errors[0]
    assert np.isnan(results[0]).all()


@pytest.mark.parametrize("version", [(0, 2), (1, 0), (-1, -1)])
def test_an_api_of_another_version_is_refused_before_anything_is_read(version):
    api = Api(version)
    assert run_on_cpu(Call(api, "never read", [1], [1]))
    assert f"is of version {version[0]}.{version[1]}, expected 0.3 or a later 0.x" in api.errors[0]


def test_an_api_of_a_later_minor_version_is_taken():
    inputs, results = arrays_of(FORWARD)
    api = Api((0, 4))
    assert run_on_cpu(call_of(api, FORWARD, inputs, results)) is None
    assert not api.errors


def test_a_library_of_another_version_is_refused_when_the_targets_are_registered(monkeypatch):
    monkeypatch.setattr(_target, "_version", lambda: (0, 1))
    with pytest.raises(ImportError, match=r"^cunorm\.jax: .* of version 0\.1, expected 0\.3 or a"):
        _target.register.__wrapped__()


def test_the_version_is_read_from_the_header(tmp_path):
    assert _frame.library_version(str(tmp_path)) == (-1, -1)
    header = tmp_path / "xla" / "ffi" / "api" / "c_api.h"
    header.parent.mkdir(parents=True)
    header.write_text("#define XLA_FFI_API_MAJOR 7\n\n#define XLA_FFI_API_MINOR 12\n")
    assert _frame.library_version(str(tmp_path)) == (7, 12)


def test_metadata_says_which_version_the_handler_is_of():
    metadata = _frame._Metadata()
    extension = _frame._Extension(type=1, metadata=ctypes.addressof(metadata))
    other = _frame._Extension(type=9, next=ctypes.addressof(extension))
    frame = _frame.Frame(extension=ctypes.addressof(other))
    assert _handler.handler(_handler.run_on_cpu)(ctypes.addressof(frame)) is None
    assert (metadata.version.major, metadata.version.minor, metadata.traits) == (0, 3, 0)


def test_the_structs_have_the_fields_of_jaxlibs_header_in_their_order():
    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h").read_text()
    for struct, name, first in (
        (_frame._Version, "XLA_FFI_Api_Version", 4),
        (_frame._Buffer, "XLA_FFI_Buffer", 6),
        (_frame._Arrays, "XLA_FFI_Args", 5),
        (_frame._Arrays, "XLA_FFI_Rets", 5),
        (_frame._Attributes, "XLA_FFI_Attrs", 6),
        (_frame.Frame, "XLA_FFI_CallFrame", 8),
        (_frame._ErrorCreate, "XLA_FFI_Error_Create_Args", 4),
        (_frame._StreamGet, "XLA_FFI_Stream_Get_Args", 4),
        (_frame._Metadata, "XLA_FFI_Metadata", 3),
    ):
        body = re.search(rf"struct {name} {{(.*?)\n}}", header, re.S)[1]
        fields = re.findall(r"^  [\w\s*]*?[\s*](\w+);", re.sub(r"//.*", "", body), re.M)
        own = [_RENAMED.get(field, field) for field, _ in struct._fields_]
        assert fields[:first] == [
            fields[first - 1] if field == "values" else field for field in own
        ]
    api = re.search(r"struct XLA_FFI_Api {(.*?)\n};", header, re.S)[1]
    functions = re.findall(r"STRUCT_FIELD\(XLA_FFI_(\w+)\)", api)
    assert functions[:5] == [
        "Error_Create",
        "Error_GetMessage",
        "Error_Destroy",
        "Handler_Register",
        "Stream_Get",
    ]


_RENAMED = {
    "extension": "extension_start",
    "major": "major_version",
    "minor": "minor_version",
    "version": "api_version",
    "context": "ctx",
    "arguments": "args",
    "results": "rets",
    "attributes": "attrs",
    "code": "errc",
}


@pytest.mark.parametrize("op", [FORWARD, BACKWARD, GROUP])
def test_a_text_says_all_of_an_op(op):
    assert Op.parse(op.text().encode()) == op
    negative = Numbers(-0.0, -0.0, 0.0, eps_of_sum=True)
    assert str(Numbers.of_bits(negative.bits())) == str(negative)


# --- on CUDA --------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """Say that all memory is a GPU's, and collect launches instead of making them."""
    launches = []

    def launch(launch, arguments, device, stream):
        launches.append((launch, arguments, device, stream))

    limits = _cuda.DeviceLimits(132, "90", 2048, 48 << 10, NONE)
    monkeypatch.setattr(_cuda, "launch", launch)
    monkeypatch.setattr(_cuda, "device_limits", lambda device: limits)
    monkeypatch.setattr(_handler, "_device", lambda pointer: Device("cuda", 1))
    monkeypatch.setattr(_handler.OnStream, "device_scope", _handler.Framework.device_scope)
    return launches


def run_on_cuda(api, op, workspace):
    inputs, results = arrays_of(op)
    results += [np.empty(workspace, np.uint8)] if workspace else []
    assert _handler.handler(_handler.run_on_cuda)(call_of(api, op, inputs, results).address) is None
    return inputs, results


def addresses(arguments):
    return set(np.frombuffer(arguments, np.int64).tolist())


def test_a_forward_is_launched_on_xlas_stream_and_reads_and_writes_its_memory(gpu):
    api = Api()
    inputs, results = run_on_cuda(api, FORWARD, settle(FORWARD).workspace)
    ((launch, arguments, device, stream),) = gpu
    assert (launch.build.kernel, device, stream) == ("row_norm_forward", ("cuda", 1), STREAM)
    assert api.contexts == [CONTEXT]
    for array in (*inputs, *results):
        assert array.ctypes.data in addresses(arguments)


def test_a_backward_sums_in_the_workspace_that_xla_gives(gpu):
    size = settle(BACKWARD).workspace
    assert size
    _, results = run_on_cuda(Api(), BACKWARD, size)
    (backward, arguments, *_), (params, param_arguments, *_) = gpu
    assert (backward.build.kernel, params.build.kernel) == ("row_norm_backward", "param_grad")
    for given in (arguments, param_arguments):
        assert results[-1].ctypes.data in addresses(given)
    assert backward.sums_size * 4 <= size


def test_a_group_norms_backward_hands_on_in_the_workspace_that_xla_gives(gpu):
    size = settle(GROUP).workspace
    assert size
    _, results = run_on_cuda(Api(), GROUP, size)
    assert [launch.build.kernel for launch, *_ in gpu][-1] == "param_grad"
    begin = results[-1].ctypes.data
    for _, arguments, _, stream in gpu:
        assert stream == STREAM
        assert any(begin <= address < begin + size for address in addresses(arguments))


def test_without_its_workspace_a_call_is_refused(gpu):
    api = Api()
    inputs, results = arrays_of(BACKWARD)
    call = call_of(api, BACKWARD, inputs, results)
    assert _handler.handler(_handler.run_on_cuda)(call.address)
    assert "4 arguments and 2 results, expected 4 and 3" in api.errors[0]
    assert not gpu


@pytest.mark.parametrize("rows", [1, 31, 5000, 10**6])
@pytest.mark.parametrize("width", [8, 1024, 5000, 70000])
@pytest.mark.parametrize("sms", [1, 132, 188, MOST_SMS, 1000])
def test_no_gpu_needs_more_workspace_than_is_planned_when_it_is_not_known(rows, width, sms):
    x, statistic, row = (Array(s, "float32") for s in ((rows, width), (rows,), (width,)))
    op = BACKWARD._replace(inputs=(x, x, statistic, None, None, None, row, None))
    settled = settle(op, Device("cuda", 0))
    form = settled.call(*[None] * settled.arrays).form
    launch = _backend._plan.cuda_backward(form.types, form.where.walk, 1, sms)
    assert launch.sums_size * form.types.compute.itemsize <= settled.workspace


def test_the_workspace_of_a_group_norm_depends_on_no_alignment():
    form = settle(GROUP).call(*[None] * settle(GROUP).arrays).form
    sizes = {
        _run.workspace_elements(form, _run.schedule_of(form, Device("cuda", 0), access)) * 4
        for access in (None, 1, 4)
    }
    assert sizes == {settle(GROUP).workspace}
