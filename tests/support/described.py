# SPDX-License-Identifier: MIT
"""Calls of the norms as `warmup` is told of them, and as they are made, with any arrays."""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from pathlib import Path
from typing import Any

import pytest

import cunorm
from cunorm import _again, _backend, _cpu
from cunorm._builds import Build
from cunorm._cpu import _compile
from cunorm._loaded import Cached, Loaded
from cunorm.group_norm import _run
from tests.support.calls import BACKWARDS, FORWARDS
from tests.support.covers import Case, pairwise

Make = Callable[[tuple[int, ...], str], Any]

LARGE = 32 << 20  # bytes of a float16 result that no CPU's cache holds
FACTORS = {
    "op": [*FORWARDS, *BACKWARDS],
    "x": ["bfloat16", "float32", "float64"],
    "shape": [(3, 64), (3, 100), (5, 8192), (LARGE // 128, 64), (LARGE // 8192, 4096)],
    "weight": ["auto", False, "float32"],
    "bias": [False, True],
    "residual": ["auto", False, "float32"],
    "residual_dtype": [None, "float32"],
    "gate": [None, True, "float32"],
    "d_residual": ["auto", False, True],
    "dtype": [None, "float32"],
    "center": [False, True],
    "groups": [1, 4],
    "weight_offset": [0.0, 1.0],
    "round_before_weight": [False, True],
    "gate_activation": ["silu", "gelu_tanh"],
    "gate_position": ["pre", "post"],
    "needs": [("x", "weight", "bias", "gate"), ("x",), ("weight", "bias"), ("gate",)],
    "accumulate": [False, True],
}
# Of shapes (samples, positions, channels), among which are those that are one launch on a CPU and
# those that are several, of which the results are too large for a cache or not.
GROUP_FACTORS = {
    "op": ["group_norm", "instance_norm", "group_norm_forward", "group_norm_backward"],
    "x": ["bfloat16", "float32", "float64"],
    "shape": [
        (3, 7, 20),
        (2, 900, 40),
        (20, 64, 64),
        (2, LARGE // 256, 128),
        (LARGE // 8192, 64, 64),
    ],
    "weight": ["auto", False, "float32"],
    "bias": [False, True],
    "dtype": [None, "float32"],
    "num_groups": [1, 4],
    "layout": ["channels_last", "channels_first"],
    "activation": [None, "swish", "gelu"],
    "needs": [("x", "weight", "bias"), ("x",), ("weight", "bias"), ("bias",)],
    "accumulate": [False, True],
}
GROUPS = tuple(GROUP_FACTORS["op"])
NUMBERS = ("groups", "weight_offset", "round_before_weight", "gate_activation", "gate_position")


def loads(monkeypatch: pytest.MonkeyPatch) -> list[Build]:
    """List the builds that are loaded; none of them is compiled, nor does it compute anything."""
    found: list[Build] = []

    def load(build: Build) -> Any:
        found.append(build)
        return _compile.Entry(lambda tasks, count, threads: None, 0), False

    monkeypatch.setattr(_compile, "_load", load)
    with_empty_caches(monkeypatch)
    monkeypatch.setattr(_cpu, "compiler", lambda: "some")
    monkeypatch.setattr(_backend, "has_compiler", lambda: True)
    return found


def loaded_builds(macro: str) -> list[Build]:
    """Return the builds that are loaded for a CPU and have such a macro."""
    return [build for build in _compile._loaded if macro in dict(build.macros)]


def stores_past_caches(build: Build) -> bool:
    """Whether a CPU's build writes large results."""
    return "NON_TEMPORAL" in dict(build.macros)


def with_empty_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let nothing be loaded before a test, and nothing of it remain."""
    monkeypatch.setattr(_compile, "_loaded", Loaded())
    monkeypatch.setattr(_again, "_known", {})
    kernels = [(_backend, "cpu_forward_kernels"), (_backend, "cpu_backward_kernels")]
    for module, name in (*kernels, (_run, "cpu_kernels")):
        monkeypatch.setattr(module, name, Cached(getattr(module, name).__wrapped__))


def forget() -> None:
    """Let nothing stay loaded."""
    _backend.forget()
    _run.forget()


def with_a_cache_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give this process an empty cache of its own."""
    monkeypatch.setattr(_cpu, "cache_folder", lambda: folder)
    monkeypatch.setattr(_compile, "cache_folder", lambda: folder)
    with_empty_caches(monkeypatch)
    return folder


def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """List the kernels that are compiled."""
    found: list[str] = []
    compile_it = _compile._compile
    monkeypatch.setattr(
        _compile,
        "_compile",
        lambda build, *rest: (found.append(build.kernel), compile_it(build, *rest)),
    )
    return found


def cases() -> list[Case]:
    """Return cases among which every two choices meet, those left out that no function takes."""
    found = []
    for case in pairwise(FACTORS):
        taken = set(signature(getattr(cunorm, case["op"])).parameters)
        if case["op"] in BACKWARDS:
            taken |= {"dtype"}  # of the forward
            taken |= {"residual", "residual_dtype"} if "d_residual" in taken else set()
        if case["residual"] == "auto" and case["op"].startswith("add_"):
            case["residual_dtype"] = None
        if "weight" not in taken or not case["weight"]:
            case["weight_offset"] = 0.0
        found.append({name: case[name] for name in case if name in taken | {"op", "x", "shape"}})
    for case in pairwise(GROUP_FACTORS):
        taken = set(signature(getattr(cunorm, case["op"])).parameters)
        taken |= {"op", "x", "shape", "layout", "dtype"}
        found.append({name: case[name] for name in case if name in taken})
    return found


def warm(case: Case, device: str, **more: Any) -> Any:
    """Describe a case to `warmup`."""
    said = dict(case)
    op, x, (*_, width) = said.pop("op"), said.pop("x"), said.pop("shape")
    if op in GROUPS:
        said["positions"] = case["shape"][1]
    return cunorm.warmup(op, width, x, device=device, progress=False, **said, **more)


def call(case: Case, make: Make) -> None:
    """Make the call, with arrays of a shape and a dtype's name from `make`."""
    op = case["op"]
    made = _group_norm if op in GROUPS else _backward if op in BACKWARDS else _forward
    made(getattr(cunorm, op), case, make)


def _forward(function: Any, case: Case, make: Make) -> None:
    (_, width), operands = case["shape"], _dtypes(case)
    shapes = dict.fromkeys(("residual", "gate"), case["shape"]) | dict.fromkeys(
        ("weight", "bias"), (width,)
    )
    more = {name: make(shapes[name], dtype) for name, dtype in operands.items()}
    more |= {name: case[name] for name in (*NUMBERS, "center", "dtype") if name in case}
    if "residual_dtype" in case:
        more["residual_dtype"] = case["residual_dtype"]
    streams = [more.pop("residual", None)] if function.__name__.startswith("add_") else []
    function(make(case["shape"], case["x"]), *streams, **more)


def _backward(function: Any, case: Case, make: Make) -> None:
    shape, x, operands = case["shape"], case["x"], _dtypes(case)
    residual = operands.pop("residual", None)
    stream = residual or case.get("residual_dtype") or x
    compute = "float64" if "float64" in (x, stream) else "float32"
    statistic = make((shape[0], case["groups"]) if case["groups"] > 1 else shape[:1], compute)
    more = {name: make(shape if name == "gate" else shape[1:], operands[name]) for name in operands}
    said = (*NUMBERS, "center", "needs", "accumulate")
    more |= {name: case[name] for name in said if name in case}
    has_stream = residual is not None or stream != x
    d_residual = case.get("d_residual", False)
    if has_stream if d_residual == "auto" else d_residual:
        more["d_residual"] = make(shape, stream)
    if case.get("center") or function is cunorm.layer_norm_backward:
        more["mean"] = statistic
    if stream != x:
        more["x_dtype"] = x
    if case.get("accumulate"):
        parameters = {"weight", "bias"} & set(operands) & set(case["needs"])
        sums = {f"d{name}": make(shape[1:], compute) for name in parameters}
        more["out"] = cunorm.NormGrads(**sums)
    function(make(shape, _y(case, operands)), make(shape, stream), rstd=statistic, **more)


def _group_norm(function: Any, case: Case, make: Make) -> None:
    samples, positions, channels = case["shape"]
    last = case["layout"] == "channels_last"
    shape = (samples, positions, channels) if last else (samples, channels, positions)
    more = {name: make((channels,), dtype) for name, dtype in _dtypes(case).items()}
    said = ("num_groups", "activation", "needs", "accumulate")
    more |= {name: case[name] for name in said if name in case}
    more["channel_axis"] = -1 if last else 1
    if "needs" not in case:
        function(make(shape, case["x"]), dtype=case["dtype"], **more)
        return
    compute = "float64" if case["x"] == "float64" else "float32"
    statistic = make((samples, case["num_groups"]), compute)
    if case["accumulate"]:
        parameters = {"weight", "bias"} & set(more) & set(case["needs"])
        sums = {f"d{name}": make((channels,), compute) for name in parameters}
        more["out"] = cunorm.GroupNormGrads(**sums)
    dy = make(shape, case["dtype"] or case["x"])
    function(dy, make(shape, case["x"]), mean=statistic, rstd=statistic, **more)


def _dtypes(case: Case) -> dict[str, str]:
    """Return the dtypes of the optional operands that a case has."""
    auto = {"weight": True, "residual": case["op"].startswith("add_")}
    found = {}
    for name in ("weight", "bias", "residual", "gate"):
        said = case.get(name)
        said = auto[name] if said == "auto" else said
        if said:
            found[name] = case["x"] if said is True else said
    return found


def _y(case: Case, operands: dict[str, str]) -> str:
    """Return the dtype of the forward's y."""
    x, weight = case["x"], operands.get("weight", case["x"])
    if case["dtype"] is not None or not case.get("round_before_weight") or x == weight:
        return case["dtype"] or x
    return "float64" if "float64" in (x, weight) else "float32"
