# SPDX-License-Identifier: MIT
"""The one place where tests import private names of cunorm: a change of the package ends here."""

from cunorm import (
    _again,
    _arrays,
    _backend,
    _cache,
    _cluster_fit,
    _cpu,
    _cpu_plan,
    _cuda,
    _cuda_plan,
    _info,
    _scratch,
    _warmup,
    _warmup_command,
)
from cunorm.__main__ import main
from cunorm._activations import ACTIVATIONS
from cunorm._arrays import Device, describe, numpy_view
from cunorm._arrays import _numpy as numpy_arrays
from cunorm._arrays._cupy import Cupy
from cunorm._arrays._dlpack import DLPack, read_capsule
from cunorm._arrays._numpy import Numpy
from cunorm._arrays._torch import Torch
from cunorm._builds import BackwardTypes, Build, Formula, ForwardTypes, Launch, ParamGradTypes
from cunorm._cpu import (
    Task,
    _caches,
    _compile,
    _compiler,
    _threads,
    cache_folder,
    compiler,
    runner,
    thread_count,
)
from cunorm._cpu_plan import cpu_forward
from cunorm._cuda_plan import MOST_SMS, cuda_backward, cuda_forward, cuda_param_grad
from cunorm._demo.operators import operators_of, worst_error
from cunorm._dtypes import DTYPES, FLOAT32, FLOAT64
from cunorm._features import NONE, DeviceLimits, Features, features_of
from cunorm._loaded import Cached, Loaded
from cunorm._plan import GRID_LIMIT, Walk
from cunorm._sources import source_text
from cunorm.group_norm import _backward as _group_backward
from cunorm.group_norm import _forward as _group_forward
from cunorm.group_norm import _plan as _group_plan
from cunorm.group_norm import _run as _group_run
from cunorm.group_norm import _tiling as _group_tiling
from cunorm.group_norm._builds import GroupBackwardTypes, GroupForwardTypes
from cunorm.group_norm._calls import workspace_elements
from cunorm.group_norm._plan import cuda_schedule
from cunorm.group_norm._tiling import Samples
from cunorm.row_norm import _backward, _forward
from cunorm.row_norm._workspace import workspace_size

__all__ = [
    "ACTIVATIONS",
    "DTYPES",
    "FLOAT32",
    "FLOAT64",
    "GRID_LIMIT",
    "MOST_SMS",
    "NONE",
    "BackwardTypes",
    "Build",
    "Cached",
    "Cupy",
    "DLPack",
    "Device",
    "DeviceLimits",
    "Features",
    "Formula",
    "ForwardTypes",
    "GroupBackwardTypes",
    "GroupForwardTypes",
    "Launch",
    "Loaded",
    "ParamGradTypes",
    "Samples",
    "Task",
    "Walk",
    "_again",
    "_arrays",
    "_backend",
    "_cache",
    "_caches",
    "_cluster_fit",
    "_compile",
    "_compiler",
    "_cpu",
    "_cpu_plan",
    "_cuda",
    "_cuda_plan",
    "_group_plan",
    "_group_run",
    "_group_tiling",
    "_info",
    "_scratch",
    "_threads",
    "_warmup",
    "_warmup_command",
    "cache_folder",
    "compiler",
    "cpu_forward",
    "cuda_backward",
    "cuda_forward",
    "cuda_param_grad",
    "cuda_schedule",
    "describe",
    "features_of",
    "host_frameworks",
    "main",
    "numpy_arrays",
    "numpy_view",
    "operators_of",
    "read_capsule",
    "runner",
    "runners",
    "source_text",
    "thread_count",
    "workspace_elements",
    "workspace_size",
    "worst_error",
]

runners = (_forward, _backward, _group_forward, _group_backward)  # that plan a call and run it
host_frameworks = (Numpy, Torch, DLPack)
