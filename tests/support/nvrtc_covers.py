# SPDX-License-Identifier: MIT
"""Pairwise covers of NVRTC's builds: any two choices occur together in some case."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from tests.support.cases import own_shape
from tests.support.covers import Case, pairwise
from tests.support.gpus import limits_of
from tests.support.internals import (
    ACTIVATIONS,
    DTYPES,
    FLOAT32,
    FLOAT64,
    ROW_BACKWARD,
    ROW_FORWARD,
    BackwardTypes,
    Device,
    Features,
    Formula,
    ForwardTypes,
    GpuCaps,
    GroupBackwardTypes,
    GroupForwardTypes,
    Launch,
    ParamGradTypes,
    RowShape,
    Samples,
    _row_spec,
    compute_type,
    cuda_backward,
    cuda_forward,
    cuda_param_grad,
    cuda_schedule,
    optional_contiguous,
    parse,
)

ROWS = 1 << 20  # enough for all blocks of a GPU

# The choices. An operand has x's dtype ("x") or a named dtype; None means absent.
COMMON = {
    "x": tuple(DTYPES),
    "activation": tuple(dict.fromkeys(ACTIVATIONS.values())),
    "weight": (None, "x", "float32"),
    "access": (1, 2, 16),
    # No features; all features of the GPU; all features, but clusters have at most 8 blocks.
    "features": ("none", "all", "clusters of 8"),
}
SUMS = {"sums": ((), ("dbias",), ("dweight",), ("dweight", "dbias"))}
BIAS, DY = {"bias": (None, "x", "float32")}, {"dy": ("x", "float16")}
OF_ROWS = COMMON | {
    "gate": (None, "x", "float32"),
    "position": ("post", "pre"),
    "offset": (False, True),
    "rounded": (False, True),
    "center": (False, True),
    # Widths for each kind of plan: teams in a warp, of a block and of a cluster; rows that a block
    # streams; rows that a cluster streams, with and without sums in shared memory; odd widths.
    "width": (1, 100, 1000, 1538, 4096, 5003, 5120, 16384, 20001, 65536, 100003, 262144, 1 << 20),
    "groups": (1, 3, 8),
    "axes": (1, 3),  # leading axes of operands
}
FORWARD = OF_ROWS | BIAS | {"residual": (None, "x", "float32"), "y": ("x", "float32")}
BACKWARD = {
    **(OF_ROWS | DY | SUMS),
    "dresidual_out": (None, "x"),
    "outputs": ("dx", "bfloat16 dx and dresidual", "neither"),
    "dgate": (False, True),
}
PARAM_GRAD = {
    "compute": ("float32", "float64"),
    "dweight": (None, *DTYPES),
    "dbias": (None, *DTYPES),
    "accumulate": (False, True),
}
# Positions, channels and groups: one position, one group, small groups that share a block, larger
# groups, long samples, odd sizes, and groups with more channels than threads. One block, one
# cluster or two launches make the passes, depending on dtypes and GPU.
SHAPES = (
    *((1, 96, 2), (49, 96, 1), (500, 320, 32), (1024, 256, 2), (16384, 320, 32)),
    *((1000, 33, 11), (7, 4096, 1), (14, 1000, 1), (1000, 8192, 1)),
)
OF_GROUPS = COMMON | BIAS | {"shape": SHAPES, "channels_last": (True, False)}
GROUP_FORWARD = OF_GROUPS | {"y": ("x", "float16")}
GROUP_BACKWARD = OF_GROUPS | DY | SUMS | {"dx": (True, False)}
# Parameters with several rows, and gates on the branch; `cases` says what _own means.
OWN = (None, "100", "101", "111")
MODULATED = {
    **{"x": tuple(DTYPES), "activation": tuple(ACTIVATIONS), "features": COMMON["features"]},
    **{"weight": (None, "x", "float32"), "bias": (None, "x", "float32")},
    **{"weight_own": OWN, "bias_own": OWN, "gate_own": (*OWN, "100 scalar", "111 scalar")},
    **{"gate": (None, "x", "float32"), "stream": (None, "x", "float32"), "alignment": (0, 8, 2)},
    **{"offset": (0.0, 1.0), "rounded": (False, True), "center": (False, True), "groups": (1, 3)},
    **{"width": (100, 1000, 4096, 5003, 16384, 20001, 65536, 100003), "axes": (1, 3)},
}
MODULATED_FORWARD = MODULATED | {"y": ("x", "float32")}
MODULATED_BACKWARD = MODULATED | {
    **{"dy": ("x", "float16"), "accumulate": (False, True)},
    "needs": (("x", "weight", "bias", "gate"), ("x",), ("weight", "bias"), ("gate",)),
}
MODULATED_ROWS, SUMMED = (64, 128, 128), ("weight", "bias")
PLAIN_WIDTHS = (16384, 32768, 65536, 131072)  # clusters of every size


def dtypes(case: Case, *names: str) -> dict:
    """Return the dtypes of operands."""
    dtype = {"x": DTYPES[case["x"]], None: None, **DTYPES}
    return {name: dtype[case[name]] for name in names}


def formula(case: Case, compute) -> Formula:
    gated, x = case["gate"] is not None, DTYPES[case["x"]]
    return Formula(
        center=case["center"],
        activation=case["activation"] if gated else "identity",
        pre_gate=gated and case["position"] == "pre",
        weight_offset=case["offset"] and case["weight"] is not None,
        rounded=x if case["rounded"] and x is not compute else None,
    )


def features(case: Case, architecture: str) -> Features:
    """Return the features of a case that the architecture has."""
    if case["features"] == "none":
        return Features()
    number, largest = int(architecture), 8 if case["features"] == "clusters of 8" else 16
    return Features(number >= 90, number >= 80, largest)


def make_plan(plan, types, case: Case, gpu: GpuCaps) -> Launch:
    """Return the launch of a case of FORWARD or BACKWARD."""
    row_shape = RowShape(case.get("rows", ROWS), case["width"], case["groups"])
    return plan(types, row_shape, case["access"], gpu, case["axes"])


def gpu_of(case: Case, architecture: str) -> GpuCaps:
    return limits_of(architecture, features(case, architecture))


def forward_launch(
    case: Case, architecture: str, types_of: type[ForwardTypes] = ForwardTypes
) -> Launch:
    """Return the launch of a case of FORWARD."""
    operands = dtypes(case, "residual", "gate", "weight", "bias", "y") | {"x": DTYPES[case["x"]]}
    compute = FLOAT64 if FLOAT64 in (operands["x"], operands["residual"]) else FLOAT32
    operands |= {"residual_out": operands["residual"], "formula": formula(case, compute)}
    types = types_of(compute, **operands)
    return make_plan(cuda_forward, types, case, gpu_of(case, architecture))


def backward_launch(
    case: Case,
    architecture: str,
    gpu: GpuCaps | None = None,
    types_of: type[BackwardTypes] = BackwardTypes,
) -> Launch:
    """Return the launch of a case of BACKWARD, by default on a GPU with the case's features."""
    x = DTYPES[case["x"]]
    compute = FLOAT64 if x is FLOAT64 else FLOAT32
    operands = dtypes(case, "dy", "dresidual_out", "weight", "gate")
    operands["formula"] = formula(case, compute)
    operands["dgate"] = operands["gate"] if case["dgate"] else None
    needs_bias = operands["dgate"] is not None and not operands["formula"].pre_gate
    operands |= {"x": x, "bias": x if needs_bias else None}
    operands["dx"], operands["dresidual"] = {
        "dx": (x, None),
        "bfloat16 dx and dresidual": (DTYPES["bfloat16"], x),
        "neither": (None, None),
    }[case["outputs"]]
    operands |= {name: name in case["sums"] for name in ("dweight", "dbias")}
    types = types_of(compute, **operands)
    return make_plan(cuda_backward, types, case, gpu or gpu_of(case, architecture))


def param_grad_launch(case: Case) -> Launch:
    """Return the launch of a case of PARAM_GRAD."""
    types = dtypes(case | {"x": "float32"}, "compute", "dweight", "dbias").values()
    return cuda_param_grad(ParamGradTypes(*types, case["accumulate"]), 2, 4096)


def plain_launches(architecture: str) -> list[Launch]:
    """Return launches of the common case: a weight or none, and no other optional operand."""
    plain = {name: choices[0] for name, choices in (FORWARD | BACKWARD).items()}
    plain |= {"x": "bfloat16", "features": "all", "access": 16}
    forward = [plain | {"width": width, "weight": "x"} for width in PLAIN_WIDTHS]
    backward = [case | {"sums": ("dweight",)} for case in forward] + [plain | {"width": 16384}]
    backward += [forward[0] | {"width": 4096, "sums": ("dweight", "dbias")}]
    return [forward_launch(case, architecture) for case in forward] + [
        backward_launch(case, architecture) for case in backward
    ]


def group_launches(case: Case, architecture: str) -> tuple[Launch, ...]:
    """Return the launches of a case of GROUP_FORWARD or GROUP_BACKWARD."""
    x = DTYPES[case["x"]]
    operands = dtypes(case, "weight", "bias") | {"x": x, "activation": case["activation"]}
    operands["compute"] = FLOAT64 if x is FLOAT64 else FLOAT32
    if "y" in case:
        types = GroupForwardTypes(**operands, **dtypes(case, "y"))
    else:
        operands |= {name: name in case["sums"] for name in ("dweight", "dbias")}
        dx = x if case["dx"] or not case["sums"] else None
        types = GroupBackwardTypes(**operands, **dtypes(case, "dy"), dx=dx)
    samples = Samples(4, *case["shape"], case["channels_last"])
    return cuda_schedule(types, samples, case["access"], gpu_of(case, architecture)).passes


def modulated_launches(case: Case, architecture: str) -> tuple[Launch, ...]:
    """Return the launches of a case of MODULATED_FORWARD or MODULATED_BACKWARD."""
    gate = (case["activation"], "branch") if case["gate"] else ("silu", "post")
    options = _row_spec.RowOptions(-1, case["groups"], case["offset"], case["rounded"], *gate)
    more: dict[str, Any] = {"center": case["center"]}
    if "y" in case:
        op, make, more["saves"] = ROW_FORWARD, _row_spec.forward_scalars, True
    else:
        op, make = ROW_BACKWARD, _row_spec.backward_scalars
        names = {name: None for name in case["needs"] if name == "x" or case[name]}
        more |= {"needs": tuple(names) or ("x",), "accumulate": case["accumulate"]}
    slots = (*op.input_slots, *op.result_slots)
    specs = [_modulated_spec(slot.name, case, more.get("needs", ())) for slot in slots]
    plan = op.plan(parse(op, make("f", options, **more)), tuple(specs))
    gpu, alignments = gpu_of(case, architecture), (case["alignment"],) * op.array_count
    return plan.lower(gpu, alignments).launches


def _modulated_spec(name: str, case: Case, needs: Collection[str]) -> Any:
    """Return the spec of an operand, or None; of three axes, two are swapped in memory."""
    x, *leading = DTYPES[case["x"]], *MODULATED_ROWS
    operand = name.removeprefix("d") if name in ("dweight", "dbias") else name
    of_stream = dtypes(case, "stream")["stream"]
    dtype = dtypes(case, "weight", "bias", "gate") | {"x": x, **dtypes(case, *({"y"} & {*case}))}
    dtype |= {"residual": of_stream, "dresidual_out": of_stream}
    if "dy" in case:
        dtype |= {**dtypes(case, "dy"), "rstd": compute_type(x)}
        dtype |= {"mean": compute_type(x)} if case["center"] else {}
        dtype |= {"branch": x} if case["gate"] and "gate" in needs else {}
        dtype |= {f"d{one}": FLOAT32 for one in needs if case["accumulate"] and one in SUMMED}
    shape = (*leading, case["width"] * case["groups"])
    if name in ("mean", "rstd"):
        shape = (*leading, *([case["groups"]] if case["groups"] > 1 else []))
    elif operand in SUMMED:
        shape = shape[-1:]
    sized = case | {"shape": (*leading, case["width"])}
    spec = optional_contiguous(
        own_shape(sized, operand) or shape, dtype.get(name), Device("meta", 0)
    )
    if spec and case["axes"] == 3 and len(spec.shape) == 4 and operand == name:
        spec = spec.dense((1, 0, 2, 3))
    return spec


@cache
def modulated_cover(architecture: str) -> list[Launch]:
    """Return the launches of parameters with several rows and gates, one for each build.

    Builds that other calls have are left out.
    """
    found = [
        launch
        for kind in ("MODULATED_BACKWARD", "MODULATED_FORWARD")
        for case in cases(kind)
        for launch in modulated_launches(case, architecture)
        if {"BRANCH_GATE", "PARAMETER_AXES", "SEGMENTED"} & dict(launch.build.macros).keys()
    ]
    return list({launch.build: launch for launch in found}.values())


@cache
def cases(kind: str) -> list[Case]:
    """Return a pairwise cover of a kernel's choices."""
    return pairwise(globals()[kind], _relevant)


def _relevant(case: Case) -> Case:
    """Return the choices of a case, or of part of a case, that have an effect."""
    idle = {f"{name}_own" for name in (*SUMMED, "gate") if case.get(name, True) is None}
    return {name: choice for name, choice in case.items() if name not in idle}


@cache
def row_cover(architecture: str) -> list[Launch]:
    """Return the launches of all cases of the row norms, one for each build."""
    found = [forward_launch(case, architecture) for case in cases("FORWARD")]
    found += [backward_launch(case, architecture) for case in cases("BACKWARD")]
    found += map(param_grad_launch, cases("PARAM_GRAD"))
    found += plain_launches(architecture)
    return list({launch.build: launch for launch in found}.values())


@cache
def group_cover(architecture: str) -> list[Launch]:
    """Return the launches of all cases of the group norms, one for each build."""
    found = [
        launch
        for kind in ("GROUP_FORWARD", "GROUP_BACKWARD")
        for case in cases(kind)
        for launch in group_launches(case, architecture)
    ]
    found.sort(key=lambda launch: launch.shared)  # the dict keeps a build's largest launch
    return list({launch.build: launch for launch in found}.values())
