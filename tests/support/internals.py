# SPDX-License-Identifier: MIT
"""Private names of cunorm that tests use; `jax_frames` has those of `cunorm.jax`."""
# ruff: noqa: F401  # other files import these names

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace

from cunorm import __main__ as _command
from cunorm import _cache, _demo, _dispatch, _info, _row_norm, _warmup
from cunorm.__main__ import main
from cunorm._arrays import numpy as numpy_arrays
from cunorm._arrays import registry as _registry
from cunorm._arrays.cupy import CupyAdapter
from cunorm._arrays.dlpack import DLPackAdapter, read_capsule
from cunorm._arrays.numpy import NumpyAdapter, numpy_view
from cunorm._arrays.registry import view as describe
from cunorm._backends import cpu as _cpu
from cunorm._backends import cpu as _scratch
from cunorm._backends import cuda as _cuda
from cunorm._backends import driver as _driver
from cunorm._backends.cpu import Program
from cunorm._backends.cpu import compile as _compile
from cunorm._backends.cpu import compiler as _compiler
from cunorm._backends.cpu import files as _files
from cunorm._backends.cpu import processes as _processes
from cunorm._backends.cpu import threads as _caches
from cunorm._backends.cpu import threads as _threads
from cunorm._backends.cpu.compiler import compiler
from cunorm._backends.cpu.files import cache_folder
from cunorm._backends.cpu.threads import thread_count
from cunorm._backends.sources import source_text
from cunorm._core import build as _build
from cunorm._core import memo as _memo
from cunorm._core import types as _types
from cunorm._core.build import ArgsWriter, KernelArgs, KernelBuild, Launch
from cunorm._core.caps import MAX_SMS, NONE, CpuCaps, Features, GpuCaps, features_of
from cunorm._core.dtypes import DTYPES, FLOAT32, FLOAT64, compute_type
from cunorm._core.memo import OnceMap
from cunorm._core.operands import Kind
from cunorm._core.param_grad import ParamGradTypes, param_grad_launch
from cunorm._core.plan import GRID_LIMIT, KernelCall
from cunorm._core.tensor import Device, optional_contiguous
from cunorm._core.validate import ACTIVATIONS
from cunorm._demo import operators as _demo_operators
from cunorm._demo import plot as _demo_plot
from cunorm._demo.operators import operators, row_operands, text
from cunorm._dispatch import dispatch, parse
from cunorm._dispatch import loading as _loading
from cunorm._dispatch.executable import Loaded
from cunorm._group_norm import schedule as _group_plan
from cunorm._group_norm import spec as _group_spec
from cunorm._group_norm import tiling as _group_tiling
from cunorm._group_norm.builds import LAYOUTS
from cunorm._group_norm.kernels import GroupBackwardTypes, GroupForwardTypes, GroupJvpTypes
from cunorm._group_norm.layout import Samples
from cunorm._group_norm.plan import GROUP_BACKWARD, GROUP_FORWARD
from cunorm._group_norm.schedule import SOME_GPUS, cuda_schedule
from cunorm._row_norm import cpu_launches as _cpu_plan
from cunorm._row_norm import launches as _cuda_plan
from cunorm._row_norm import spec as _row_spec
from cunorm._row_norm.combine_plan import COMBINE_MOMENTS
from cunorm._row_norm.geometry import Geometry
from cunorm._row_norm.jvp_kernel import JvpTypes, SecondTypes
from cunorm._row_norm.jvp_plan import ROW_JVP, ROW_SECOND
from cunorm._row_norm.jvp_spec import jvp_scalars
from cunorm._row_norm.kernels import BackwardTypes, Formula, ForwardTypes
from cunorm._row_norm.plan import ROW_BACKWARD, ROW_FORWARD, workspace_bound
from cunorm._row_norm.shape import RowShape
from cunorm._row_norm.split_kernels import GivenSumsTypes, GivenTypes, MomentsTypes, SumsTypes
from cunorm._row_norm.tiling import strided_team
from cunorm.reference.jvp import normalize_backward_jvp

# By operator name: the OpDef, and scalars that a public function passes to it.
SCALARS = {
    op.name: (op, scalars)
    for op, scalars in (
        (ROW_FORWARD, _row_spec.forward_scalars("rms_norm", _row_spec.RowOptions(-1, 1))),
        (ROW_BACKWARD, _row_spec.backward_scalars("rms_norm", _row_spec.RowOptions(-1, 1))),
        (GROUP_FORWARD, _group_spec.forward_scalars("group_norm", 2, None, -1)),
        (GROUP_BACKWARD, _group_spec.backward_scalars("group_norm", 2, None, -1)),
    )
}


def contiguous_plan(op, rng):
    """Draw a call on contiguous arrays; return a function that plans it for any number of rows."""
    width, groups = rng.choice([1, 8, 72, 1000, 4096, 9000, 40_000]), 1
    if rng.random() < 0.3:
        groups = rng.choice([one for one in (2, 4, 8) if width % one == 0] or [1])
    options = _row_spec.RowOptions(-1, groups)
    if op is ROW_FORWARD:
        scalars = _row_spec.forward_scalars("f", options, 0.0, None, None, saves=rng.random() < 0.5)
    else:
        needs = tuple(name for name in _row_spec.NEEDS if rng.random() < 0.7) or ("weight",)
        scalars = _row_spec.backward_scalars("f", options, needs=needs)
    spec = parse(op, scalars)
    # These rows have no mean and no gate on a branch. Statistics are float64 if x is.
    x = rng.choice([*DTYPES.values()])
    dtypes = {
        slot.name: rng.choice([*DTYPES.values()])
        for slot in op.input_slots
        if slot.name not in ("mean", "branch") and (slot.is_required or rng.random() < 0.5)
    }
    dtypes["x"] = x
    if "rstd" in dtypes:
        dtypes["rstd"] = compute_type(x)

    def plan_of(rows):
        shapes = {
            Kind.LIKE_X: (rows, width),
            Kind.PARAMETER: (width,),
            Kind.STATISTIC: (rows, groups) if groups > 1 else (rows,),
        }
        specs = [
            optional_contiguous(shapes[slot.kind], dtypes.get(slot.name), Device("meta", 0))
            for slot in op.input_slots
        ]
        return op.plan(spec, (*specs, *op.no_outputs))

    return plan_of


_CPU = CpuCaps(last_cache_bytes=32 << 20)


def cpu_forward(types, shape):
    return _cpu_plan.cpu_launch(types, shape, _CPU).launch


def cuda_forward(*arguments):
    return _cuda_plan.cuda_forward(*arguments).launch


def cuda_backward(*arguments):
    return _cuda_plan.cuda_backward(*arguments).launch


def runner(calls, array_count):
    return Program(calls, array_count).run()


def start(launch, arguments, device, stream):
    """Start a kernel with the bytes of its arguments."""
    call = KernelCall(launch, KernelArgs(arguments, ()))
    _cuda.Launcher.load([call], device)([], stream)


cuda_param_grad = partial(param_grad_launch, caps=SOME_GPUS[0])


def host_frameworks():
    """Return the adapters of host arrays; torch's only if torch is installed."""
    torch = [import_module("cunorm._arrays.torch").TorchAdapter] if find_spec("torch") else []
    return (NumpyAdapter, DLPackAdapter, *torch)


def workspace_size(compute, rows, sm_count):
    """Bound the bytes of one parameter's partial sums; on a CPU if sm_count is None."""
    caps = CpuCaps(0) if sm_count is None else SimpleNamespace(sm_count=sm_count)
    return workspace_bound(Geometry((), compute, 0, rows), 1, None, caps)
