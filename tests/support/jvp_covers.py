# SPDX-License-Identifier: MIT
"""A pairwise cover of NVRTC's builds for the kernels of forward mode."""

from __future__ import annotations

from functools import cache

from tests.support.covers import Case, pairwise
from tests.support.internals import (
    DTYPES,
    FLOAT32,
    FLOAT64,
    GroupJvpTypes,
    JvpTypes,
    Launch,
    Samples,
    SecondTypes,
    cuda_forward,
    cuda_schedule,
)
from tests.support.nvrtc_covers import (
    BIAS,
    DY,
    OF_GROUPS,
    OF_ROWS,
    dtypes,
    formula,
    gpu_of,
    make_plan,
)

_TANGENT = (None, "x", "float32")
JVP = {
    **(OF_ROWS | BIAS | {"y": ("x", "float32"), "x_tangent": _TANGENT}),
    **{f"{name}_tangent": (False, True) for name in ("weight", "bias", "gate")},
}
SECOND = OF_ROWS | DY | {"gate": (None,), "position": ("post",), "rounded": (False,)}
GROUP_JVP = {
    **(OF_GROUPS | {"y": ("x", "float16"), "x_tangent": ("x", "float32")}),
    **{f"{name}_tangent": (False, True) for name in ("weight", "bias")},
}


def jvp_launch(case: Case, architecture: str) -> Launch:
    """Return the launch of a case of JVP or SECOND."""
    x = DTYPES[case["x"]]
    compute = FLOAT64 if x is FLOAT64 else FLOAT32
    operands = dtypes(case, "weight", "gate") | {"x": x, "formula": formula(case, compute)}
    if "dy" in case:
        operands |= {**dtypes(case, "dy"), "x_tangent": x, "y_tangent": x}
        types: JvpTypes = SecondTypes(compute, **operands)
    else:
        operands |= dtypes(case, "bias", "x_tangent")
        has = {name: case[f"{name}_tangent"] for name in ("weight", "bias", "gate")}
        operands |= {f"{name}_tangent": operands[name] for name, given in has.items() if given}
        if not (operands.get("gate_tangent") and case["position"] == "post"):
            operands["bias"] = None
        types = JvpTypes(compute, **operands, y_tangent=dtypes(case, "y")["y"])
    return make_plan(cuda_forward, types, case, gpu_of(case, architecture))


def group_jvp_launches(case: Case, architecture: str) -> tuple[Launch, ...]:
    x = DTYPES[case["x"]]
    operands = dtypes(case, "weight", "bias", "x_tangent")
    operands |= {"x": x, "activation": case["activation"], "y_tangent": dtypes(case, "y")["y"]}
    for name in ("weight", "bias"):
        operands[f"{name}_tangent"] = operands[name] if case[f"{name}_tangent"] else None
    types = GroupJvpTypes(FLOAT64 if x is FLOAT64 else FLOAT32, **operands)
    samples = Samples(4, *case["shape"], case["channels_last"])
    return cuda_schedule(types, samples, case["access"], gpu_of(case, architecture)).passes


@cache
def jvp_cover(architecture: str) -> list[Launch]:
    """Return the launches of forward mode, one for each build."""
    found = [jvp_launch(case, architecture) for kind in (JVP, SECOND) for case in pairwise(kind)]
    for case in pairwise(GROUP_JVP):
        found += group_jvp_launches(case, architecture)
    found.sort(key=lambda launch: launch.shared)  # the dict keeps a build's largest launch
    return list({launch.build: launch for launch in found}.values())
