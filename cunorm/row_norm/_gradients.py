# SPDX-License-Identifier: MIT
"""Which inputs the wanted gradients need, and the form of the kernels' call for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from cunorm._arrays import Form
from cunorm._builds import BackwardTypes, ParamGradTypes
from cunorm._calls import BackwardForm
from cunorm._checks import Geometry
from cunorm._dtypes import DType
from cunorm._operands import input_layout, optional_dtype, output_layout
from cunorm.row_norm._variant import Variant

if TYPE_CHECKING:
    from cunorm.row_norm._backward_plan import Asked, Forms

Results = Mapping[str, Form | None]


class Reads(NamedTuple):
    """The forms of the inputs that the kernels read."""

    dy: Form
    x: Form | None
    rstd: Form | None
    mean: Form | None
    d_residual: Form | None
    gate: Form | None
    weight: Form | None
    bias: Form | None


def read_inputs(variant: Variant, inputs: Forms, results: Results) -> Reads:
    """Return the inputs that the kernels read; the others are None.

    ::

        dbias                   dy                    and gate, where that is applied to n
        dweight                 the same, and what n is made of before weight
        dgate, of a post-gate   the same, and weight and bias
        all else                all but bias
    """
    wanted = {name for name, form in results.items() if form is not None}
    post_gate = variant.gate_position == "post"
    of_x = bool(wanted & {"dx", "dresidual"})
    needs_n = post_gate and "dgate" in wanted
    needs_dp = of_x or ("dgate" in wanted and not post_gate)
    needs_r = needs_dp or needs_n or "dweight" in wanted
    needed = {
        "x": needs_r,
        "rstd": needs_r,
        "mean": needs_r and variant.center,
        "d_residual": of_x,
        "gate": needs_r or post_gate,
        "weight": needs_dp or needs_n,
        "bias": needs_n,
    }
    read = {
        name: getattr(inputs, name) if is_needed else None for name, is_needed in needed.items()
    }
    return Reads(inputs.dy, **read)


def backward_form(
    asked: Asked,
    reads: Reads,
    results: Results,
    where: Geometry,
    x_dtype: DType,
    compute: DType,
) -> BackwardForm:
    """Return the form of the call that reads and writes these."""
    variant = asked.variant
    formula = variant.formula(
        gate=reads.gate,
        offset=asked.has_offset and reads.weight is not None,
        x_dtype=x_dtype,
        compute=compute,
    )
    if results["dweight"] is None and (results["dgate"] is None or formula.pre_gate):
        formula = formula._replace(rounded=None)  # nothing but those has n
    types = BackwardTypes(
        compute=compute,
        dy=reads.dy.dtype,
        **{name: optional_dtype(getattr(reads, name)) for name in _OPTIONAL},
        **{name: optional_dtype(results[name]) for name in _WRITTEN},
        dweight=results["dweight"] is not None,
        dbias=results["dbias"] is not None,
        formula=formula._replace(center=variant.center and reads.mean is not None),
    )
    param_types = ParamGradTypes(
        compute,
        optional_dtype(results["dweight"]),
        optional_dtype(results["dbias"]),
        asked.accumulate,
    )
    layouts = (
        *(input_layout(getattr(reads, name), where.rows) for name in _WITH_ROWS),
        *(output_layout(results[name], where.rows) for name in _WRITTEN),
    )
    return BackwardForm(where, types, param_types, layouts)


_WITH_ROWS = ("dy", "x", "d_residual", "gate")
_OPTIONAL = ("x", "d_residual", "gate", "weight", "bias")
_WRITTEN = ("dx", "dresidual", "dgate")
