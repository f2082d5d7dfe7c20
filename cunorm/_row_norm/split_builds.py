# SPDX-License-Identifier: MIT
"""The plans of the pieces of a norm of split rows, whose parts have the width of x."""

from typing import Any

from cunorm._core.operands import arguments, present
from cunorm._core.plan import OpDef, Plan
from cunorm._core.tensor import OptionalSpec, OptionalSpecs, contiguous
from cunorm._row_norm.combine_plan import COMBINE_MOMENTS
from cunorm._row_norm.plan import ROW_BACKWARD, ROW_FORWARD
from cunorm._row_norm.spec import RowBackwardSpec, RowForwardSpec
from cunorm._row_norm.split_plan import ROW_GIVEN, ROW_GIVEN_SUMS, ROW_MOMENTS, ROW_SUMS
from cunorm._row_norm.split_spec import (
    combine_spec,
    given_spec,
    given_sums_spec,
    moments_spec,
    sums_spec,
)


def forward_pieces(spec: RowForwardSpec, whole: Plan) -> list[Plan]:
    """Plan what replaces a forward that saves its statistics."""
    inputs, results = arguments(ROW_FORWARD.input_slots, ROW_FORWARD.result_slots, whole.specs)
    x, rstd, position = present(inputs["x"]), present(results["rstd"]), spec.gate_position
    gate, mean, stream = inputs["gate"], results["mean"], results["residual"]
    part = contiguous((2, *rstd.shape), rstd.dtype, rstd.device)
    of_mean = None if mean is None else part
    of_moments: dict[str, OptionalSpec] = {
        "x": x,
        "gate": None if position == "post" else gate,
        "residual": inputs["residual"],
    }
    of_parts = {"moments.m2": part, "moments.mean": of_mean, "moments.correction": of_mean}
    of_norm = inputs | {"x": stream or x, "gate": None if position == "branch" else gate}
    of_norm |= {"mean": mean, "rstd": rstd, "correction": mean}
    return [
        _plan(ROW_MOMENTS, moments_spec(spec), of_moments),
        _plan(COMBINE_MOMENTS, combine_spec(spec, None, 1), of_parts),
        _plan(ROW_GIVEN, given_spec(spec, x.dtype, 1), of_norm),
    ]


def backward_pieces(spec: RowBackwardSpec, specs: OptionalSpecs) -> list[Plan]:
    """Plan what replaces a backward with these arrays."""
    inputs, given = arguments(ROW_BACKWARD.input_slots, ROW_BACKWARD.result_slots, specs)
    mean, rstd, is_branch = inputs["mean"], inputs["rstd"], spec.gate_position == "branch"
    inputs["correction"] = mean
    of_sums = inputs | {"gate": None if is_branch else inputs["gate"]}
    sums = {"sums.sum_dr": mean, "sums.sum_r_dr": rstd}
    return [
        _plan(ROW_SUMS, sums_spec(spec), of_sums),
        _plan(ROW_GIVEN_SUMS, given_sums_spec(spec, 1), inputs | sums, tuple(given.values())),
    ]


def _plan(
    op: OpDef[Any],
    spec: Any,
    inputs: dict[str, OptionalSpec],
    outputs: OptionalSpecs | None = None,
) -> Plan:
    return op.plan(spec, (*map(inputs.get, op.inputs), *(outputs or op.no_outputs)))
