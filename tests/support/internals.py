# SPDX-License-Identifier: MIT
"""The one place where tests import private names of cunorm: a change of the package ends here."""

from cunorm import _again, _arrays, _backend, _cluster_fit, _cpu, _cuda, _plan, _scratch
from cunorm._arrays import CPU, Device, contiguous_form, describe, numpy_view
from cunorm._arrays._cupy import Cupy
from cunorm._arrays._dlpack import DLPack, read_capsule
from cunorm._arrays._numpy import Numpy
from cunorm._arrays._torch import Torch
from cunorm._builds import Build, Launch
from cunorm._cpu import _compile, compiler
from cunorm._dtypes import BFLOAT16, DTYPES, FLOAT32, FLOAT64
from cunorm._features import NONE, Features, features_of
from cunorm._loaded import Cached, Loaded
from cunorm._plan import MOST_SMS
from cunorm._sources import source_text
from cunorm.group_norm import _backward as _group_backward
from cunorm.group_norm import _forward as _group_forward
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
    "Device",
    "Features",
    "Launch",
    "Loaded",
    "_again",
    "_arrays",
    "_backend",
    "_cluster_fit",
    "_compile",
    "_cpu",
    "_cuda",
    "_plan",
    "_scratch",
    "compiler",
    "contiguous_form",
    "describe",
    "features_of",
    "host_frameworks",
    "numpy_view",
    "read_capsule",
    "runners",
    "source_text",
]

runners = (_forward, _backward, _group_forward, _group_backward)  # that plan a call and run it
host_frameworks = (Numpy, Torch, DLPack)
