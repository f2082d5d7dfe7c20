# SPDX-License-Identifier: MIT
"""Checks of operands for the plans of both families, and `Kernel`, which makes a call's Plan."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from cunorm._core import validate
from cunorm._core.build import ArgsWriter
from cunorm._core.caps import Caps
from cunorm._core.dtypes import DType
from cunorm._core.operands import (
    KernelTypes,
    Kind,
    Slot,
    Specs,
    TypesT,
    dtypes_of,
    names_of,
    operand_of,
    present,
)
from cunorm._core.param_grad import Offsets, ParamGradTypes
from cunorm._core.plan import (
    Aliases,
    Alignments,
    InputCopy,
    OpDef,
    OpSpec,
    OutputSpec,
    Plan,
    SharedOutputs,
)
from cunorm._core.tensor import (
    WHOLE,
    WIDEST_ACCESS,
    OptionalSpec,
    OptionalSpecs,
    Shape,
    TensorSpec,
    contiguous,
    optional_dtype,
)

Outputs = tuple[OutputSpec, ...]


@dataclass(frozen=True)
class CallGeometry(ABC):
    """The division of x into rows or groups: the operands' shapes, and where lines are in memory.

    A line is a row or, in a group norm, a contiguous run of x. Parameters and statistics are
    contiguous.
    """

    float64_source: ClassVar[str]  # for errors: the arrays that decide the compute type
    absent: ClassVar[tuple[int, ...]]  # the layout of an absent operand

    shape: Shape  # the shape of x
    compute: DType

    @property
    def copy_axes(self) -> tuple[int, ...] | None:
        """Return the order of axes in the copy of an operand like x; None is C order."""
        return None

    @abstractmethod
    def shape_of(self, kind: Kind) -> Shape:
        """Return the shape of an operand of a kind."""

    def fits(self, slot: Slot, shape: Shape) -> bool:
        """Return whether an operand may have a shape."""
        return shape == self.shape_of(slot.kind)

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
        """Return the layout of an operand or, if the operand is copied, of its copy."""
        if spec is None:
            return self.absent
        return self.layout(spec) or present(self.layout(spec.dense(self.copy_axes)))


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
            f"with others, expected at most three runs of axes: expand it to {geometry.shape}"
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
    if argument in ("weight", "bias") and of_rows and shape == x[-len(shape) :]:
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


GeometryT = TypeVar("GeometryT", bound=CallGeometry)


class Kernel(Generic[TypesT, GeometryT]):
    """A kernel with its operands, without the addresses of arrays."""

    def __init__(
        self,
        types: TypesT,
        geometry: GeometryT,
        operands: Specs,  # None for an operand that the kernel neither reads nor writes
        numbers: tuple[float, ...] = (),
        *,
        accumulate: bool = False,
    ) -> None:
        self.types, self.geometry, self.numbers = types, geometry, numbers
        self._operands = operands
        found = enumerate(operands.items())
        self.slots = {name: slot for slot, (name, spec) in found if spec is not None}
        self.slots["workspace"] = len(operands)
        # Each value is a RowLayout or, in a group norm, Lines.
        self.layouts: dict[str, Any] = {
            name: geometry.layout_of_input(operands[name]) for name in types.lines()
        }
        # The layouts of parameters that have several rows or, in a group norm, several samples.
        self.parameter_layouts: dict[str, tuple[int, ...]] = {}
        dweight, dbias = (optional_dtype(operands.get(name)) for name in ("dweight", "dbias"))
        self.params = ParamGradTypes(types.compute, dweight, dbias, accumulate)

    def access_to(
        self, line: int, strides: dict[str, tuple[int, ...]], alignments: Alignments
    ) -> int:
        """Return the largest `ACCESS` of a GPU's build that alignment allows, a power of two.

        `strides` has the strides between the lines of each operand, none if an operand is one line.
        One instruction moves at most 16 bytes, so an alignment above 16 has no effect.
        """
        access = min(WIDEST_ACCESS, line & -line)
        if alignments is None:
            return access
        for name in strides.keys() & self.slots:
            itemsize = present(self._operands[name]).dtype.itemsize
            alignment = alignments[self.slots[name]]
            offsets = [alignment, *(stride * itemsize for stride in strides[name])]
            while access > 1 and any(at % min(access * itemsize, WIDEST_ACCESS) for at in offsets):
                access //= 2
        return access

    def write_args(self, writer: ArgsWriter, sums: Offsets) -> None:
        """Write the arrays and sums of `struct Arguments`.

        The pointer to a group norm's workspace is not written. `sums` are the byte offsets in the
        workspace of the partial sums for dweight and dbias.
        """
        types = self.types
        for name, layout in self.layouts.items():
            writer.pointer(name)
            writer.integers(*layout)
        for kind in (Kind.PARAMETER, Kind.STATISTIC):
            for name in names_of(types.inputs, kind):
                writer.pointer(name)
                writer.integers(*self.parameter_layouts.get(name, ()))
        for name in names_of(types.results, Kind.STATISTIC):
            writer.pointer(name)
        if types.sums():
            writer.pointers_into_workspace(sums[:2])

    def plan(
        self,
        inputs: Specs,
        outputs: Outputs,
        lower: Callable[..., Any],  # takes this kernel, caps and alignments
        workspace_bound: Callable[[Caps | None], int],
        aliases: Aliases,
        shared: SharedOutputs = (),
    ) -> Plan:
        """Return the Plan of a call; `inputs` also has the inputs that the kernel does not read."""
        geometry, copies = self.geometry, []
        for number, slot in enumerate(self.types.inputs):
            spec, is_like_x = self._operands[slot.name], slot.kind is Kind.LIKE_X
            if spec and self._is_copied(slot, spec):
                copies.append(InputCopy(number, geometry.copy_axes if is_like_x else None))
        specs = tuple((self._operands | inputs).values())
        return Plan(
            specs=specs,
            outputs=outputs,
            copies=tuple(copies),
            aliases=aliases,
            shared=shared,
            lower=partial(lower, self),
            workspace_bound=workspace_bound,
            is_empty=not any(spec and prod(spec.shape) for spec in specs[len(inputs) :]),
        )

    def _is_copied(self, slot: Slot, spec: TensorSpec) -> bool:
        """Return whether kernels cannot follow an input's strides."""
        if slot.name in self.parameter_layouts:
            return self.geometry.parameter_layout(spec) is None
        layout_of = self.geometry.layout if slot.kind is Kind.LIKE_X else WHOLE.layout
        return layout_of(spec) is None
