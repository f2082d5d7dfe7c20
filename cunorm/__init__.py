# SPDX-License-Identifier: MIT
"""cunorm: fast normalization kernels, forward and backward, for every array framework.

`normalize` documents what the row norms have in common: rows, dtypes, rounding, strides and errors;
`group_norm` does so for the group norms.

On CUDA, arithmetic treats subnormals of float32, and therefore of bfloat16, as zeros, because
CuPy compiles all kernels with flush-to-zero. On a CPU they are kept, and the caller's
floating-point mode is never changed.
"""

# ruff: noqa: F403, F405  (`import *` brings names of __all__)

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `__getattr__` imports these names when they are first used
    from cunorm import reference
    from cunorm._backends.cpu.threads import set_num_threads
    from cunorm._cache import CacheInfo, Cleared, cache_info, clear_cache
    from cunorm._group_norm import *
    from cunorm._row_norm import *
    from cunorm._warmup import Warmup, warmup
    from cunorm._workspace import workspace_size
    from cunorm.results import (
        AddNorm,
        GroupNormForward,
        GroupNormGrads,
        Moments,
        NormForward,
        NormGrads,
        QuantizedNorm,
        Statistics,
        Sums,
    )

__version__ = "0.1.0"

__all__ = [
    "AddNorm",
    "CacheInfo",
    "Cleared",
    "GroupNormForward",
    "GroupNormGrads",
    "Moments",
    "NormForward",
    "NormGrads",
    "QuantizedNorm",
    "Statistics",
    "Sums",
    "Warmup",
    "add_layer_norm",
    "add_normalize",
    "add_rms_norm",
    "cache_info",
    "clear_cache",
    "combine_moments",
    "group_norm",
    "group_norm_backward",
    "group_norm_forward",
    "group_norm_jvp",
    "instance_norm",
    "l2_norm",
    "l2_norm_backward",
    "l2_norm_forward",
    "l2_norm_jvp",
    "layer_norm",
    "layer_norm_backward",
    "layer_norm_forward",
    "layer_norm_jvp",
    "layer_norm_quantized",
    "normalize",
    "normalize_backward",
    "normalize_backward_sums",
    "normalize_forward",
    "normalize_jvp",
    "normalize_quantized",
    "reference",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_forward",
    "rms_norm_jvp",
    "rms_norm_quantized",
    "row_moments",
    "set_num_threads",
    "warmup",
    "workspace_size",
]

_MODULES = {  # the modules of all names but `reference` and those of `_row_norm`
    "results": (
        *("AddNorm", "GroupNormForward", "GroupNormGrads", "Moments", "NormForward", "NormGrads"),
        *("QuantizedNorm", "Statistics", "Sums"),
    ),
    "_backends.cpu.threads": ("set_num_threads",),
    "_cache": ("CacheInfo", "Cleared", "cache_info", "clear_cache"),
    "_group_norm": (
        *("group_norm", "group_norm_backward", "group_norm_forward", "group_norm_jvp"),
        "instance_norm",
    ),
    "_warmup": ("Warmup", "warmup"),
    "_workspace": ("workspace_size",),
}
_SUBMODULES = ("jax", "results", "torch")  # `__getattr__` imports none of them
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


if not TYPE_CHECKING:  # else a type checker would accept every name

    def __getattr__(name: str) -> Any:
        """Import a public name when it is first used."""
        if name not in __all__:
            hint = f": import {__name__}.{name} first" if name in _SUBMODULES else ""
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{hint}")
        if name == "reference":
            return import_module("cunorm.reference")
        module = import_module(f"cunorm.{_MODULE_OF.get(name, '_row_norm')}")
        return globals().setdefault(name, getattr(module, name))


def __dir__() -> list[str]:
    """List the public names, the special names, and the front ends that are imported."""
    front_ends = ("jax", "torch")
    return sorted({*__all__, *(n for n in globals() if n.startswith("__") or n in front_ends)})
