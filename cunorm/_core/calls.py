# SPDX-License-Identifier: MIT
"""Checks of operands for the plans of both families, and `Kernel`, which makes a call's Plan."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Protocol

from cunorm._core import validate
from cunorm._core.dtypes import DType
from cunorm._core.operands import (
    KernelTypes,
    Kind,
    Slot,
    Specs,
    dtypes_of,
    operand_of,
    present,
)
from cunorm._core.plan import OpDef, OpSpec, OutputSpec
from cunorm._core.tensor import OptionalSpec, OptionalSpecs, Shape, TensorSpec, contiguous

Outputs = tuple[OutputSpec, ...]


@dataclass(frozen=True)
class CallGeometry(ABC):
    """The division of x into rows or groups: the operands' shapes, and where lines are in memory.

    A line is a row or, in a group norm, a contiguous run of x. Parameters and statistics are
    contiguous.
    """

    float64_source: ClassVar[str]  # for errors: the arrays that decide the compute type
    absent: ClassVar[tuple[int, ...]]  # the layout of an absent operand like x
    absent_parameter: ClassVar[tuple[int, ...]]  # the layout of an absent parameter

    shape: Shape  # the shape of x
    compute: DType

    def copy_axes(self, kind: Kind, shape: Shape) -> tuple[int, ...] | None:
        """Return the order of axes in the copy of an operand; None is C order."""
        return None

    @abstractmethod
    def shape_of(self, kind: Kind) -> Shape:
        """Return the shape of an operand of a kind."""

    def fits(self, slot: Slot, shape: Shape) -> bool:
        """Return whether an operand may have a shape."""
        return shape == self.shape_of(slot.kind)

    @property
    def runs(self) -> str:
        """The number of runs of axes that kernels follow, for an error."""
        return "three runs of axes"

    @abstractmethod
    def hint(self, kind: Kind) -> str:
        """Return the end of the error for a wrong shape, which says what the shape has to match."""

    def remedies(self, argument: str, shape: Shape) -> list[str]:
        """Return what a caller may do about a wrong shape, for the error."""
        return []

    @abstractmethod
    def layout(self, spec: TensorSpec) -> tuple[int, ...] | None:
        """Return where the lines of an array like x are; None if kernels cannot follow them."""

    def parameter_layout(self, spec: TensorSpec) -> tuple[int, ...] | None:
        """Return where the rows of a parameter are; None if kernels cannot follow them."""
        return self.layout(spec)

    def can_follow(self, slot: Slot, spec: TensorSpec) -> bool:
        """Return whether kernels can follow a dense copy of an operand."""
        return True

    @abstractmethod
    def check_output(
        self, function: str, argument: str, kind: Kind, spec: TensorSpec, shape: Shape
    ) -> None:
        """Check that a given output has a shape, and strides that kernels can follow."""

    def check_compute(self, function: str, argument: str, spec: OptionalSpec) -> None:
        """Check that a statistic has the compute type."""
        if spec is not None and spec.dtype is not self.compute:
            raise TypeError(
                f"{function}: {argument} has dtype {spec.dtype}, expected {self.compute}, the "
                f"compute type: float64 if {self.float64_source} is, else float32"
            )

    def new_output(self, x: TensorSpec, kind: Kind, dtype: DType, shape: Shape) -> TensorSpec:
        return contiguous(shape, dtype, x.device)

    def layout_of_input(self, spec: OptionalSpec) -> tuple[int, ...]:
        """Return the layout of an array like x or, if it is copied, of its copy."""
        if spec is None:
            return self.absent
        axes = self.copy_axes(Kind.LIKE_X, spec.shape)
        return self.layout(spec) or present(self.layout(spec.dense(axes)))

    def layout_of_parameter(self, spec: OptionalSpec) -> tuple[int, ...]:
        """Return where a parameter's rows are or, if it is copied, those of its copy."""
        if spec is None:
            return self.absent_parameter
        axes = self.copy_axes(Kind.PARAMETER, spec.shape)
        return self.parameter_layout(spec) or present(self.parameter_layout(spec.dense(axes)))


def check_operand(
    function: str, argument: str, slot: Slot, spec: OptionalSpec, geometry: CallGeometry
) -> None:
    """Check the shape of an operand, and the dtype of a statistic."""
    shape = geometry.shape_of(slot.kind)
    if spec is not None and not geometry.fits(slot, spec.shape):
        hint = geometry.hint(slot.kind) + _remedy(function, argument, spec.shape, geometry)
        raise ValueError(f"{function}: {argument} has shape {spec.shape}, expected {shape}{hint}")
    if spec is not None and not geometry.can_follow(slot, spec):
        raise ValueError(
            f"{function}: {argument} has shape {spec.shape}, whose axes of 1 alternate too often "
            f"with others, expected at most {geometry.runs}: expand it to {geometry.shape}"
        )
    if slot.kind is Kind.STATISTIC:
        geometry.check_compute(function, argument, spec)


def _remedy(function: str, argument: str, shape: Shape, geometry: CallGeometry) -> str:
    """Return the end of the error for a wrong shape, if the shape suggests what is wrong."""
    x, row = geometry.shape_of(Kind.LIKE_X), geometry.shape_of(Kind.PARAMETER)
    remedies = geometry.remedies(argument, shape)
    if function.startswith("add_") and argument == "residual" and shape == row:
        remedies.append(f"the order is {function}(x, residual, weight, ...)")
    if argument == "dy" and (shape == row or x == row == shape[-len(x) :]):
        remedies.append(f"the order is {function}(dy, x, ...)")
    of_rows = hasattr(geometry, "leading_axes")
    takes_int = of_rows and getattr(geometry, "order", None) is None  # the axis is an int
    if argument in ("weight", "bias") and takes_int and len(x) > 2 and shape == x[1:2]:
        remedies.append("pass axis=(1,) for rows of the channels, axis 1")
    if argument in ("weight", "bias") and takes_int and shape == x[-len(shape) :]:
        remedies.append(f"pass axis=-{len(shape)} for rows of this shape, of one statistic each")
    if argument in ("weight", "bias") and len(shape) > len(row) == 1 and prod(shape) == row[0]:
        heads = f", with groups={shape[0]} for a statistic of each head" if of_rows else ""
        remedies.append(f"pass {argument}.reshape(-1){heads if shape[0] > 1 else ''}")
    if argument in ("gate", "residual") and _is_narrower(shape, x):
        remedies.append("expand it, as by broadcast_to of numpy or jax.numpy, or Tensor.expand")
        has_branch = function not in ("normalize", "rms_norm", "layer_norm")
        if argument == "gate" and has_branch and not getattr(geometry, "branch_gate", False):
            remedies.append("pass gate_position='branch' if it is a gate of the branch")
    return ": " + ", or ".join(remedies) if remedies else ""


def _is_narrower(shape: Shape, full: Shape) -> bool:
    """Return whether broadcasting would expand an array of `shape` to the shape `full`."""
    sizes = zip(shape[::-1], full[::-1], strict=False)
    return len(shape) <= len(full) and all(size in (1, full_size) for size, full_size in sizes)


def by_name(types: type[KernelTypes], specs: OptionalSpecs) -> tuple[Specs, Specs]:
    """Return a call's inputs and its given results, both by the names that kernels use."""
    count = len(types.inputs)
    return (
        {slot.name: spec for slot, spec in zip(types.inputs, specs[:count], strict=True)},
        {slot.name: spec for slot, spec in zip(types.results, specs[count:], strict=True)},
    )


def check_inputs(
    function: str, types: type[KernelTypes], inputs: Specs, geometry: CallGeometry
) -> None:
    for slot in types.inputs:
        check_operand(function, slot.argument, slot, inputs[slot.name], geometry)


def check_results(
    spec: OpSpec, types: type[KernelTypes], inputs: Specs, given: Specs, geometry: CallGeometry
) -> tuple[Specs, Outputs]:
    """Check given results and all devices; return all results, and the results to allocate."""
    function, x, results = spec.function, present(inputs["x"]), {**given}
    shapes = {slot.name: _result_shape(slot, inputs, geometry) for slot in types.results}
    for argument, slot in zip(spec.output_names, types.results, strict=True):
        output = given[slot.name]
        if output is not None:
            geometry.check_output(function, argument, slot.kind, output, shapes[slot.name])
    names = (*(slot.argument for slot in types.inputs), *spec.output_names)
    validate.same_device(function, x, zip(names, (inputs | given).values(), strict=True))
    dtypes, outputs = spec.result_dtypes(dtypes_of(inputs | given)), []
    for number, slot in enumerate(types.results, len(inputs)):
        if slot.name in dtypes and given[slot.name] is None:
            new = geometry.new_output(x, slot.kind, dtypes[slot.name], shapes[slot.name])
            outputs.append(OutputSpec(number, new))
            results[slot.name] = new
    return results, tuple(outputs)


def _result_shape(slot: Slot, inputs: Specs, geometry: CallGeometry) -> Shape:
    """Return the shape of a result; the gradient of an operand has the operand's shape."""
    operand = inputs.get(slot.name.removeprefix("d"))
    return geometry.shape_of(slot.kind) if operand is None else operand.shape


class BackwardSpec(OpSpec, Protocol):
    @property
    def needs(self) -> tuple[str, ...]: ...

    @property
    def accumulate(self) -> bool: ...


def check_gradients(
    spec: BackwardSpec, types: type[KernelTypes], inputs: Specs, given: Specs
) -> None:
    """Check that the call computes each given gradient, and has the arrays for `accumulate`."""
    for slot in types.results:
        operand = operand_of(slot)
        if operand not in spec.needs or inputs[operand] is None:
            reason = "its operand is absent or not in needs"
            validate.absent(spec.function, f"out.{slot.argument}", given[slot.name], reason)
    if spec.accumulate:
        wanted = spec.result_dtypes(dtypes_of(inputs | given))
        validate.accumulators(spec.function, wanted, given)


def backward_specs(op: OpDef[Any], spec: BackwardSpec, operands: Specs) -> OptionalSpecs:
    """Return the specs of a backward's arrays; the keys of `operands` are the caller's names.

    An output is given only if the backward adds to it. It then has the compute type.
    """
    compute = present(operands["rstd"]).dtype
    added = {name for name in op.summed if spec.accumulate and name in spec.needs}
    likes = [operands[name] if name in added else None for name in map(operand_of, op.result_slots)]
    reads = [operands[slot.argument] for slot in op.input_slots]
    return (*reads, *(like and like._replace(dtype=compute) for like in likes))
