# SPDX-License-Identifier: MIT
"""The builds that calls of row norms need; they are planned as calls are, but without arrays."""

import math
from typing import Any

from cunorm._core.build import KernelBuild
from cunorm._core.calls import backward_specs
from cunorm._core.operands import arguments, present
from cunorm._core.plan import Plan
from cunorm._core.tensor import (
    Device,
    OptionalSpec,
    OptionalSpecs,
    Shape,
    optional_contiguous,
    optional_dtype,
)
from cunorm._dispatch.loading import launches_of
from cunorm._row_norm.cpu_launches import CPU_SHARED_ROWS
from cunorm._row_norm.jvp_plan import ROW_JVP
from cunorm._row_norm.jvp_spec import jvp_spec
from cunorm._row_norm.plan import ROW_BACKWARD, ROW_FORWARD, plan_backward, plan_forward
from cunorm._row_norm.quantized_plan import ROW_QUANTIZED
from cunorm._row_norm.quantized_spec import QUANTIZED_OPTIONS, quantized_scalars
from cunorm._row_norm.spec import (
    RowBackwardSpec,
    RowForwardSpec,
    RowOptions,
    Scalars,
    backward_scalars,
    forward_scalars,
)
from cunorm._row_norm.split_builds import backward_pieces, forward_pieces

FUNCTION = "warmup"  # the name of the function in errors
Options = dict[str, Any]


def row_builds(
    name: str, options: Options, rows: list[int] | None, width: int, device: Device
) -> list[KernelBuild]:
    """Return the builds of a function for each number of rows in `rows`; None is any number.

    A CPU has other builds for few long rows, for outputs that are larger than its caches, and for
    an x that is. Outputs are so at less than half of the rows at which x is: powers of two have all
    builds. `options` has scalars, the dtype of x, and the dtypes of other operands, None for an
    absent operand.
    """
    _, _, kind = name.rpartition("_")
    special = {"backward": backward_plans, "quantized": quantized_plans, "jvp": jvp_plans}
    plans_of = special.get(kind, forward_plans)
    counts = rows or [*range(1, CPU_SHARED_ROWS + 2), *(1 << power for power in range(5, 32))]
    has_samples = any("sample" in options[f"{one}_per"] for one in ("weight", "bias", "gate"))
    has_samples = has_samples or _is_strided(options)
    splits = [(s, n // s) for n in counts for s in (_samples(n) if has_samples else [1])]
    calls = (plans_of(name, options, (*split, width), device) for split in splits)
    plans = (plan for of_call in calls for plan in of_call)
    return [launch.build for plan in plans for launch in launches_of(plan, device)]


def _samples(rows: int) -> list[int]:
    """Return numbers of samples of equal size whose builds serve any such number.

    A single sample, samples of several rows, and those of one row have different builds. If cores
    of a CPU share rows, each number of samples counts.
    """
    divisors = [n for n in range(1, math.isqrt(rows) + 1) if rows % n == 0]
    if rows > CPU_SHARED_ROWS:
        return [*divisors[:2], rows]
    return sorted({*divisors, *(rows // n for n in divisors)})


def forward_plans(name: str, options: Options, shape: Shape, device: Device) -> list[Plan]:
    plan = forward_plan(name, options, shape, device)
    return forward_pieces(_forward_spec(name, options), plan) if options["split_rows"] else [plan]


def forward_plan(name: str, options: Options, shape: Shape, device: Device) -> Plan:
    """Plan a forward that saves its statistics, for an x of shape (samples, rows, width)."""
    inputs = _inputs(options, shape, device)
    return plan_forward(_forward_spec(name, options), (*inputs, *ROW_FORWARD.no_outputs))


def _forward_spec(name: str, options: Options) -> RowForwardSpec:
    return ROW_FORWARD.parse(*_forward_scalars(name, options, options["dtype"], saves=True))


def _forward_scalars(name: str, options: Options, dtype: object, *, saves: bool) -> Scalars:
    center = "layer_norm" in name or options["center"]
    scalars = (0.0, dtype, options["residual_dtype"])
    return forward_scalars(FUNCTION, _options(options), *scalars, center=center, saves=saves)


def _inputs(options: Options, shape: Shape, device: Device) -> list[OptionalSpec]:
    """Return a forward's inputs for an x of shape (samples, rows, width)."""
    shapes = [
        _shape_of(options.get(f"{slot.name}_per", "row"), shape) for slot in ROW_FORWARD.input_slots
    ]
    if _is_strided(options):
        shapes = [_channels_first(one) for one in shapes]
    slots = zip(ROW_FORWARD.input_slots, shapes, strict=True)
    return [optional_contiguous(one, options[slot.argument], device) for slot, one in slots]


def _is_strided(options: Options) -> bool:
    """Return whether rows lie side by side."""
    return bool(options["layout"] == "channels_first")


def _channels_first(shape: Shape) -> Shape:
    """Return a shape with the rows before the columns, if it has both."""
    return (*shape[:-2], shape[-1], shape[-2]) if len(shape) > 2 else shape


def quantized_plans(name: str, options: Options, shape: Shape, device: Device) -> list[Plan]:
    return [quantized_plan(name, options, shape, device)]


def quantized_plan(name: str, options: Options, shape: Shape, device: Device) -> Plan:
    """Plan a forward with a quantised result, for an x of shape (samples, rows, width)."""
    forward = _forward_scalars(name, options, None, saves=False)
    quantized = tuple(options[name] for name in QUANTIZED_OPTIONS)
    spec = ROW_QUANTIZED.parse(*quantized_scalars(forward, quantized))
    no_scale = None  # an array has the build of a number
    inputs = (*_inputs(options, shape, device), no_scale)
    return ROW_QUANTIZED.plan(spec, (*inputs, *ROW_QUANTIZED.no_outputs))


def jvp_plans(name: str, options: Options, shape: Shape, device: Device) -> list[Plan]:
    """Plan the jvp of a forward; the operands in `needs` have tangents of their dtypes."""
    forward, spec = forward_plan(name, options, shape, device), _forward_spec(name, options)
    inputs, results = arguments(ROW_FORWARD.input_slots, ROW_FORWARD.result_slots, forward.specs)
    tangents = {f"{one}_tangent": inputs[one] for one in options["needs"]}
    operands = inputs | results | tangents
    given = map(operands.get, ROW_JVP.inputs)
    return [ROW_JVP.plan(jvp_spec(spec, spec.dtype), (*given, *ROW_JVP.no_outputs))]


def _shape_of(per: str, shape: Shape) -> Shape:
    """Return the shape of an operand for an x of shape (samples, rows, width)."""
    samples, rows, width = shape
    sharing, _, scalar = per.partition(" ")
    lead = {"all": (), "sample": (samples, 1), "row": (samples, rows)}[sharing]
    return (*lead, 1 if scalar else width)


def backward_plans(name: str, options: Options, shape: Shape, device: Device) -> list[Plan]:
    call = _backward_call(name, options, shape, device)
    return backward_pieces(*call) if options["split_rows"] else [plan_backward(*call)]


def backward_plan(name: str, options: Options, shape: Shape, device: Device) -> Plan:
    """Plan the backward of a forward, with the forward's results and a dy like its y."""
    return plan_backward(*_backward_call(name, options, shape, device))


def _backward_call(
    name: str, options: Options, shape: Shape, device: Device
) -> tuple[RowBackwardSpec, OptionalSpecs]:
    forward = forward_plan(name, options, shape, device)
    inputs, results = arguments(ROW_FORWARD.input_slots, ROW_FORWARD.result_slots, forward.specs)
    x, stream = present(inputs["x"]), results["residual"]
    scalars = backward_scalars(
        *(FUNCTION, _options(options)),
        center="layer_norm" in name or options["center"],
        x_dtype=x.dtype.name,
        needs=options["needs"],
        accumulate=options["accumulate"],
    )
    spec = ROW_BACKWARD.parse(*scalars)
    of_stream = {None: optional_dtype(stream), True: (stream or x).dtype, False: None}
    dtype = options["d_residual"]
    d_residual = optional_contiguous(x.shape, of_stream.get(dtype, dtype), device)
    operands = inputs | results | {"dy": results["y"], "x": stream or x, "d_residual": d_residual}
    operands["branch"] = x if spec.gate_position == "branch" else None
    return spec, backward_specs(ROW_BACKWARD, spec, operands)


def _options(options: Options) -> RowOptions:
    axis = (1,) if _is_strided(options) else -1
    return RowOptions(axis, *(options[name] for name in RowOptions._fields[1:]))
