# SPDX-License-Identifier: MIT
"""The OpDef of combine_moments: statistics of whole rows from the moments of their parts."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from cunorm._core import validate
from cunorm._core.build import ArgsWriter, KernelBuild, Launch, cuda_bool, cuda_type, numbers_of
from cunorm._core.calls import by_name
from cunorm._core.caps import Caps, CpuCaps
from cunorm._core.dtypes import FLOAT32, FLOAT64
from cunorm._core.operands import Specs, arguments, dtypes_of, present
from cunorm._core.plan import Alignments, InputCopy, KernelCall, Lowered, OpDef, OutputSpec, Plan
from cunorm._core.tensor import (
    WHOLE,
    OptionalSpec,
    OptionalSpecs,
    RowAxes,
    TensorSpec,
    contiguous,
)
from cunorm._row_norm.split_kernels import COMBINED_TABLE
from cunorm._row_norm.split_spec import COMBINE_CHECKS, CombineSpec
from cunorm.reference import combine_moments
from cunorm.reference.rows import Float64, store
from cunorm.results import Moments, Statistics

_THREADS = 128  # of a GPU's block, each with a row
_CPU_ROWS = 256  # of a CPU's thread


def plan_combine(spec: CombineSpec, specs: OptionalSpecs) -> Plan:
    inputs, given = by_name(_Combined, specs)  # type: ignore[arg-type]  # it has the slots
    m2 = present(inputs["m2"])
    _check_parts(spec, inputs, m2)
    results = dict(given)
    dtypes, outputs = spec.result_dtypes(dtypes_of(inputs)), []
    for slot, (name, one) in enumerate(given.items(), len(inputs)):
        argument = spec.output_names[slot - len(inputs)]
        if name not in dtypes:
            validate.absent(spec.function, argument, one, "moments.mean is None")
        elif one is not None:
            validate.output(spec.function, argument, one, m2.shape[1:], WHOLE)
            _check_dtype(spec, argument, one, m2)
        else:
            results[name] = new = contiguous(m2.shape[1:], m2.dtype, m2.device)
            outputs.append(OutputSpec(slot, new))
    names = (*(f"moments.{name}" for name in _Combined.names), *spec.output_names)
    arrays = (*inputs.values(), *given.values())
    validate.same_device(spec.function, m2, zip(names, arrays, strict=True), of="moments.m2")
    copies = tuple(
        InputCopy(slot)
        for slot, (name, one) in enumerate(inputs.items())
        if one is not None and name != "count" and RowAxes(1).layout(one) is None
    )
    return Plan(
        specs=(*inputs.values(), *results.values()),
        outputs=tuple(outputs),
        copies=copies,
        aliases={},
        shared=(),
        lower=partial(_lower_combined, spec, inputs | results),
        workspace_bound=lambda caps: 0,
        is_empty=prod(m2.shape[1:]) == 0,
    )


class _Combined:
    """The arrays of combine_moments."""

    inputs, results = COMBINED_TABLE.forward_inputs, COMBINED_TABLE.forward_results
    names = tuple(slot.name for slot in inputs)


def _check_parts(spec: CombineSpec, inputs: Specs, m2: TensorSpec) -> None:
    """Check the arrays of moments: of each part, stacked on a new first axis."""
    function = spec.function
    if not m2.shape or not m2.shape[0]:
        raise ValueError(
            f"{function}: moments.m2 has shape {m2.shape}, expected a first axis with an element "
            "for each part of the rows"
        )
    if m2.dtype not in (FLOAT32, FLOAT64):
        raise TypeError(f"{function}: moments.m2 has dtype {m2.dtype}, expected float32 or float64")
    if inputs["mean"] is None:
        reason = "moments.mean is None"
        validate.absent(function, "moments.correction", inputs["correction"], reason)
    for name, one in inputs.items():
        if one is not None:
            shape = m2.shape[:1] if name == "count" else m2.shape
            validate.shape_of(function, f"moments.{name}", one, shape)
            _check_dtype(spec, f"moments.{name}", one, m2)


def _check_dtype(spec: CombineSpec, argument: str, one: TensorSpec, m2: TensorSpec) -> None:
    if one.dtype is not m2.dtype:
        raise TypeError(
            f"{spec.function}: {argument} has dtype {one.dtype}, expected {m2.dtype}, that of "
            "moments.m2"
        )


def _lower_combined(
    spec: CombineSpec, operands: Specs, caps: Caps, alignments: Alignments
) -> Lowered:
    m2 = present(operands["m2"])
    parts, rows = m2.shape[0], prod(m2.shape[1:])
    threads, rows_of_thread = (1, _CPU_ROWS) if isinstance(caps, CpuCaps) else (_THREADS, 1)
    macros = (
        ("COMPUTE_T", cuda_type(m2.dtype)),
        ("CENTER", cuda_bool(operands["mean"] is not None)),
        ("THREADS", str(threads)),
        ("ROWS", str(rows_of_thread)),
    )
    grid = -(-rows // (threads * rows_of_thread))
    launch = Launch(KernelBuild("combine_moments", macros), grid, threads)

    def calls() -> list[KernelCall]:
        slots = {name: slot for slot, (name, one) in enumerate(operands.items()) if one is not None}
        writer = ArgsWriter(slots)
        for name in _Combined.names:
            writer.pointer(name)
            writer.integers(_stride(operands[name]))
        for name in ("mean_out", "rstd", "correction_out"):
            writer.pointer(name)
        writer.integers(parts, rows)
        numbers = numbers_of(FLOAT64, (spec.eps, spec.count or 0))
        return [KernelCall(launch, writer.finish(numbers), work=parts * rows)]

    return Lowered((launch,), calls, 0)


def _stride(spec: OptionalSpec) -> int:
    """Return the elements from one part to the next, in the array or in its copy."""
    if spec is None:
        return 0
    is_copied = len(spec.shape) > 1 and RowAxes(1).layout(spec) is None
    return (spec.dense() if is_copied else spec).strides[0]


# --- the reference --------------------------------------------------------------------------------


def in_two(mean: Float64, dtype: Any) -> tuple[Float64, Float64]:
    """Return a mean as its rounded value and the rest."""
    rounded = mean.astype(dtype).astype(np.float64)
    return rounded, mean - rounded


def _combined_by_reference(spec: CombineSpec, arrays: Sequence[Any]) -> None:
    given, results = arguments(_Combined.inputs, _Combined.results, arrays)
    inputs = {name: given[f"moments.{name}"] for name in _Combined.names}
    count = inputs.pop("count")
    moments = Moments(**inputs, count=spec.count if count is None else count)
    exact = combine_moments(moments, eps=spec.eps)
    if exact.mean is not None:
        mean, correction = in_two(exact.mean, results["mean"].dtype)
        exact = Statistics(mean, exact.rstd, correction)
    store(results, exact)


COMBINE_MOMENTS = OpDef(
    name="combine_moments",
    input_slots=_Combined.inputs,
    result_slots=_Combined.results,
    spec_type=CombineSpec,
    checks=COMBINE_CHECKS,
    plan=plan_combine,
    reference=_combined_by_reference,
)
