# SPDX-License-Identifier: MIT
"""Cases of calls: their description for `warmup`, the calls, and the builds that they load."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any

import pytest

import cunorm
from tests.support.calls import BACKWARDS, FORWARDS, QUANTIZED, empty_call_cache
from tests.support.calls import GROUP_NORMS as GROUPS
from tests.support.covers import Case, pairwise
from tests.support.internals import (
    KernelBuild,
    OnceMap,
    _compile,
    _cuda,
    _driver,
    _loading,
    _memo,
    _warmup,
)

Make = Callable[[tuple[int, ...], str], Any]

LARGE = 32 << 20  # bytes of a bfloat16 result that bypasses the caches of any CPU
COMMON = {
    "x": ["bfloat16", "float32", "float64"],
    "weight": ["auto", False, "float32"],
    "bias": [False, True],
    "dtype": [None, "float32"],
    "accumulate": [False, True],
}
FACTORS = COMMON | {
    "op": [*FORWARDS, *BACKWARDS],
    "shape": [(3, 64), (3, 100), (5, 8192), (LARGE // 128, 64), (LARGE // 8192, 4096)],
    "residual": ["auto", False, "float32"],
    "residual_dtype": [None, "float32"],
    "gate": [None, True, "float32"],
    "d_residual": ["auto", False, True],
    "center": [False, True],
    "groups": [1, 4],
    "weight_offset": [0.0, 1.0],
    "round_before_weight": [False, True],
    "gate_activation": ["silu", "gelu_tanh"],
    "gate_position": ["pre", "post"],
    "needs": [("x", "weight", "bias", "gate"), ("x",), ("weight", "bias"), ("gate",)],
}
# Samples, positions and channels. With some of these shapes, cores of a CPU share samples; with
# others, results bypass the caches.
SAMPLES = [(3, 7, 20), (2, 900, 40), (20, 64, 64), (2, LARGE // 256, 128), (LARGE // 8192, 64, 64)]
GROUP_FACTORS = COMMON | {
    "op": GROUPS,
    "shape": SAMPLES,
    "num_groups": [1, 4],
    "layout": ["channels_last", "channels_first"],
    "activation": [None, "swish", "gelu"],
    "needs": [("x", "weight", "bias"), ("x",), ("weight", "bias"), ("bias",)],
}
QUANTIZED_FACTORS = {name: FACTORS[name] for name in FACTORS if name not in ("needs", "dtype")} | {
    "op": QUANTIZED,
    "dtype": [None, "float8_e5m2", "int8"],
    "scale": [None, 0.5],
    "block": [None, 64],
    "scale_dtype": ["float32", "float8_e8m0fnu"],
    "absmax_bound": [None, 3.0],
    "return_y": [False, True],
}
DESCRIBED = ("residual", "weight", "bias", "gate")


# --- loaded builds --------------------------------------------------------------------------------


def loads(monkeypatch: pytest.MonkeyPatch) -> list[KernelBuild]:
    """Return a list that gets each loaded build; builds are not compiled and compute nothing."""
    with_empty_caches(monkeypatch)
    monkeypatch.setattr(_warmup, "compiler", lambda: "some")
    monkeypatch.setattr(_loading, "has_compiler", lambda: True)
    kernel = _compile.Entry(lambda tasks, count, threads: None, 0), False
    return _loads(monkeypatch, _compile, kernel)


def cuda_loads(monkeypatch: pytest.MonkeyPatch) -> list[KernelBuild]:
    """Return a list that gets each build loaded for a GPU; every cluster fits."""
    monkeypatch.setattr(_cuda, "fits_cluster", lambda launch, device: True)
    monkeypatch.setattr(_driver, "launch_dependent", lambda *given: None)
    return _loads(monkeypatch, _cuda, lambda grid, block, arguments, **options: None)


def _loads(monkeypatch: pytest.MonkeyPatch, module: Any, kernel: Any) -> list[KernelBuild]:
    found: list[KernelBuild] = []

    def load(build: KernelBuild) -> Any:
        found.append(build)
        return kernel

    monkeypatch.setattr(module, "_load", load)
    monkeypatch.setattr(module, "loaded", OnceMap())
    return found


def loaded_builds(macro: str) -> list[KernelBuild]:
    """Return the builds that are loaded for a CPU and define a macro."""
    return [build for build in _compile.loaded.values if macro in dict(build.macros)]


def stores_past_caches(build: KernelBuild) -> bool:
    """Return whether a CPU's build has non-temporal stores, which large calls use."""
    return "NON_TEMPORAL" in dict(build.macros)


def with_empty_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give a test empty caches of builds and calls; restore the former caches after the test."""
    monkeypatch.setattr(_compile, "loaded", OnceMap())
    empty_call_cache(monkeypatch)


def clear_all() -> None:
    """Clear all caches, also that of loaded builds."""
    _memo.clear_all()


# --- described calls ------------------------------------------------------------------------------


def cases() -> list[Case]:
    """Return a pairwise cover, without the options that a case's function does not take."""
    found = []
    quantized = map(_with_one_kind_of_scale, pairwise(QUANTIZED_FACTORS))
    for case in [*pairwise(FACTORS), *pairwise(GROUP_FACTORS), *quantized]:
        accepted = _parameters(case) | {"op", "x", "shape", "layout", "dtype"}
        if "d_residual" in accepted:  # `warmup` also takes the forward's options
            accepted |= {"residual", "residual_dtype"}
        if not case.get("gate"):
            case |= {"gate_activation": "silu", "gate_position": "post"}
        found.append({name: case[name] for name in case if name in accepted})
    return found


def _with_one_kind_of_scale(case: Case) -> Case:
    """Leave out the options that do not go with others."""
    if case["scale"] is not None:
        case |= {"block": None, "scale_dtype": "float32", "absmax_bound": None}
    if case["x"] == "float64" or case["shape"][1] % (4 * case["groups"]):
        case["block"] = None
    if case["dtype"] == "int8":
        case["scale_dtype"] = "float32"
    return case


def _parameters(case: Case) -> set[str]:
    return set(signature(getattr(cunorm, case["op"])).parameters)


def warm_up(case: Case, device: str, **more: Any) -> Any:
    """Call `warmup` for a case."""
    options = {name: case[name] for name in case if name not in ("op", "x", "shape")}
    if case["op"] in GROUPS:
        options["positions"] = case["shape"][1]
    width = case["shape"][-1]
    return cunorm.warmup(
        case["op"], width, case["x"], device=device, progress=False, **options | more
    )


def call(case: Case, make: Make) -> None:
    """Make the call of a case; `make` allocates an array of a shape and a dtype."""
    given = _group_arrays(case, make) if case["op"] in GROUPS else _row_arrays(case, make)
    options = {name: case[name] for name in case if name not in (*DESCRIBED, "d_residual", "dtype")}
    given = {"residual": None} | options | {k: a for k, a in given.items() if a is not None}
    if not case["op"].endswith("_backward"):
        given["dtype"] = (
            case["dtype"] or signature(getattr(cunorm, case["op"])).parameters["dtype"].default
        )
    elif case.get("accumulate"):
        parameters = {"weight", "bias"} & set(given) & set(case["needs"])
        kind = cunorm.GroupNormGrads if case["op"] in GROUPS else cunorm.NormGrads
        grads = {f"d{name}": make(case["shape"][-1:], _compute(case)) for name in parameters}
        given["out"] = kind(**grads)
    takes = _parameters(case)
    getattr(cunorm, case["op"])(**{name: given[name] for name in given if name in takes})


def _row_arrays(case: Case, make: Make) -> dict[str, Any]:
    """Return a row norm's arrays; None for absent operands."""
    shape, x, dtypes = case["shape"], case["x"], _dtypes(case)
    shapes = {"residual": shape, "gate": shape, "weight": shape[1:], "bias": shape[1:]}
    given = {name: make(shapes[name], dtype) for name, dtype in dtypes.items()}
    if not case["op"].endswith("_backward"):
        return given | {"x": make(shape, x), "residual_dtype": case.get("residual_dtype")}
    residual, groups = dtypes.get("residual"), case["groups"]
    stream = case.get("residual_dtype") or residual or x
    has_more = case.get("d_residual", False)
    has_more = (residual is not None or stream != x) if has_more == "auto" else has_more
    statistic = make((shape[0], groups) if groups > 1 else shape[:1], _compute(case))
    centered = case.get("center") or case["op"] == "layer_norm_backward"
    return given | {
        "dy": make(shape, _y(case, dtypes)),
        "x": make(shape, stream),
        "x_dtype": None if stream == x else x,
        "d_residual": make(shape, stream) if has_more else None,
        "rstd": statistic,
        "mean": statistic if centered else None,
    }


def _group_arrays(case: Case, make: Make) -> dict[str, Any]:
    samples, positions, channels = case["shape"]
    is_last = case["layout"] == "channels_last"
    shape = (samples, positions, channels) if is_last else (samples, channels, positions)
    statistic = make((samples, case.get("num_groups", channels)), _compute(case))
    given = {name: make((channels,), dtype) for name, dtype in _dtypes(case).items()}
    given |= {"x": make(shape, case["x"]), "dy": make(shape, case["dtype"] or case["x"])}
    return given | {"mean": statistic, "rstd": statistic, "channel_axis": -1 if is_last else 1}


def _dtypes(case: Case) -> dict[str, str]:
    """Return the dtypes of the optional operands that a case has."""
    auto = {"weight": True, "residual": case["op"].startswith("add_")}
    options = {
        name: auto[name] if case.get(name) == "auto" else case.get(name) for name in DESCRIBED
    }
    return {name: case["x"] if kind is True else kind for name, kind in options.items() if kind}


def _compute(case: Case) -> str:
    return "float64" if case["x"] == "float64" else "float32"


def _y(case: Case, dtypes: dict[str, str]) -> str:
    """Return the dtype of the forward's y."""
    x, weight = case["x"], dtypes.get("weight", case["x"])
    if case["dtype"] is not None or not case.get("round_before_weight") or x == weight:
        return case["dtype"] or x
    return "float64" if "float64" in (x, weight) else "float32"
