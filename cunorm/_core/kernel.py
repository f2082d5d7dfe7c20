# SPDX-License-Identifier: MIT
"""`Kernel`: a kernel with its operands, which makes a call's Plan."""

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Any, Generic, TypeVar

from cunorm._core.build import ArgsWriter
from cunorm._core.calls import CallGeometry, Outputs
from cunorm._core.caps import Caps
from cunorm._core.operands import Kind, Slot, Specs, TypesT, names_of, present
from cunorm._core.param_grad import Offsets, ParamGradTypes
from cunorm._core.plan import Aliases, Alignments, InputCopy, Plan, SharedOutputs
from cunorm._core.tensor import WHOLE, WIDEST_ACCESS, TensorSpec, optional_dtype

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
            name: geometry.layout_of_input(operands.get(name)) for name in types.lines()
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
        for name in types.parameters():
            writer.pointer(name)
            writer.integers(*self.parameter_layouts.get(name, ()))
        for name in names_of(types.inputs + types.results, Kind.STATISTIC):
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
            spec = self._operands[slot.name]
            if spec and self._is_copied(slot, spec):
                copies.append(InputCopy(number, geometry.copy_axes(slot.kind, spec.shape)))
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
