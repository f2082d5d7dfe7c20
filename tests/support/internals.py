# SPDX-License-Identifier: MIT
"""The one place where tests import private names of cunorm: a change of the package ends here."""

from cunorm import _again, _arrays, _backend, _cluster_fit, _cpu, _cuda, _plan, _scratch
from cunorm._arrays import CPU, Device, contiguous_form, describe, numpy_view
from cunorm._arrays import _numpy as numpy_arrays
from cunorm._arrays._cupy import Cupy
from cunorm._arrays._dlpack import DLPack, read_capsule
from cunorm._arrays._numpy import Numpy
from cunorm._arrays._torch import Torch
from cunorm._builds import Build, Launch
from cunorm._cpu import _compile, compiler, thread_count
from cunorm._demo import _group_tolerance as group_tolerance
from cunorm._demo import _tolerance as demo_tolerance
from cunorm._demo._group_operators import GroupOracle, group_operators_of
from cunorm._demo._operators import Oracle, operators_of
from cunorm._demo._ulps import worst_error
from cunorm._dtypes import BFLOAT16, DTYPES, FLOAT32, FLOAT64
from cunorm._features import NONE, Features, features_of
from cunorm._layout import collapsed
from cunorm._loaded import Cached, Loaded
from cunorm._plan import MOST_SMS
from cunorm._sources import kernel_folder, source_text
from cunorm.group_norm import _backward as _group_backward
from cunorm.group_norm import _forward as _group_forward
from cunorm.group_norm import _plan as _group_plan
from cunorm.row_norm import _backward, _forward

__all__ = [
    "BFLOAT16",
    "CPU",
    "DTYPES",
    "FLOAT32",
    "FLOAT64",
    "MOST_SMS",
    "NONE",
    "Build",
    "Cached",
    "Cupy",
    "DLPack",
    "Device",
    "Features",
    "GroupOracle",
    "Launch",
    "Loaded",
    "Numpy",
    "Oracle",
    "Torch",
    "_again",
    "_arrays",
    "_backend",
    "_cluster_fit",
    "_compile",
    "_cpu",
    "_cuda",
    "_group_plan",
    "_plan",
    "_scratch",
    "collapsed",
    "compiler",
    "contiguous_form",
    "demo_tolerance",
    "describe",
    "features_of",
    "group_operators_of",
    "group_tolerance",
    "host_frameworks",
    "kernel_folder",
    "numpy_arrays",
    "numpy_view",
    "operators_of",
    "read_capsule",
    "runners",
    "source_text",
    "thread_count",
    "worst_error",
]

runners = (_forward, _backward, _group_forward, _group_backward)  # that plan a call and run it
host_frameworks = (Numpy, Torch, DLPack)
