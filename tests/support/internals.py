# SPDX-License-Identifier: MIT
"""The one place where tests import private names of cunorm: a change of the package ends here."""

from cunorm import _again, _backend, _cuda, _plan, _scratch
from cunorm._arrays import CPU, Device, contiguous_form, describe, numpy_view
from cunorm._arrays._dlpack import DLPack
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
from cunorm._features import NONE, Features
from cunorm._layout import collapsed
from cunorm._loaded import Cached, Loaded
from cunorm._sources import kernel_folder, source_text

__all__ = [
    "BFLOAT16",
    "CPU",
    "DTYPES",
    "FLOAT32",
    "FLOAT64",
    "NONE",
    "Build",
    "Cached",
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
    "_backend",
    "_compile",
    "_cuda",
    "_plan",
    "_scratch",
    "collapsed",
    "compiler",
    "contiguous_form",
    "demo_tolerance",
    "describe",
    "group_operators_of",
    "group_tolerance",
    "kernel_folder",
    "numpy_view",
    "operators_of",
    "source_text",
    "thread_count",
    "worst_error",
]
