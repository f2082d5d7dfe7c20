# SPDX-License-Identifier: MIT
"""A row norm's kernel with its operands: its argument struct, and the macros of their layouts."""

from dataclasses import replace

from cunorm._core.build import ArgsWriter, KernelArgs, Macros, cuda_bool, numbers_of
from cunorm._core.dtypes import FLOAT32
from cunorm._core.kernel import Kernel
from cunorm._core.operands import Kind, Specs, present, type_macros
from cunorm._core.param_grad import Offsets, Parts
from cunorm._core.plan import Alignments
from cunorm._core.tensor import SINGLE_ROW, UNBOUNDED, RowLayout, StridedLayout, optional_dtype
from cunorm._row_norm.geometry import Geometry
from cunorm._row_norm.kernels import BackwardTypes, ForwardTypes, RowTypes
from cunorm._row_norm.modulation import Segments
from cunorm._row_norm.shape import RowShape

_GATES = ("gate", "dgate", "branch")  # `row_layouts` chooses among these


class RowKernel(Kernel[RowTypes, Geometry]):
    """A row norm's kernel with its operands."""

    forward_types: type[ForwardTypes] = ForwardTypes

    def __init__(
        self,
        types: RowTypes,
        geometry: Geometry,
        operands: Specs,
        numbers: tuple[float, ...],
        *,
        function: str,  # for errors
        given: Specs,  # all parameters, even those that the kernel does not read
        accumulate: bool = False,
    ) -> None:
        self.segments: Segments | None = None  # of a backward with several rows of a parameter
        self.own: tuple[str, ...] = ()  # the gradients of parameters that the row's kernel writes
        row = geometry.shape_of(Kind.PARAMETER)
        self.has_rows = any(spec.shape != row for spec in given.values() if spec)
        known = dict.fromkeys((*types.lines(), *types.parameters())) | operands  # None for others
        if isinstance(types, BackwardTypes):
            types = self._with_segments(function, types, geometry, known, given)
        types = replace(types, strided=geometry.strided)
        super().__init__(types, geometry, operands, numbers, accumulate=accumulate)
        self._gate = known["gate"]
        # The layouts of operands in the base of `struct Arguments`.
        absent = geometry.layout_of_input(None)
        self.base_layouts = {"branch": self.layouts.pop("branch", absent)}
        self.params = self.params._replace(**dict.fromkeys(self.own))  # type: ignore[arg-type]  # fields by name
        if isinstance(types, BackwardTypes) and types.dgate_sums:
            scalar = geometry.is_scalar(known["gate"])
            dgate = optional_dtype(known["dgate"])
            self.params = self.params._replace(dgate=dgate, scalar_gate=scalar)
        if self.has_rows:
            self.parameter_layouts = {
                name: geometry.layout_of_parameter(known[name]) for name in types.parameters()
            }

    def _with_segments(
        self,
        function: str,
        types: BackwardTypes,
        geometry: Geometry,
        operands: Specs,
        given: Specs,
    ) -> BackwardTypes:
        """Find the segments, and return the types with the gradients that rows write or add up."""
        branch, gate, dgate = (operands[name] for name in ("branch", "gate", "dgate"))
        is_wanted = branch is not None  # whether the gradient of a gate on the branch is
        self.segments = geometry.segments_with(function, given, gate if is_wanted else None)
        if self.segments is None:
            return types
        if is_wanted and not geometry.is_of_row(gate):
            types = replace(types, dgate=None, dgate_sums=dgate is not None)
        of_row = [f"d{name}" for name in self.segments.of_row]
        self.own = tuple(name for name in of_row if operands.get(name) is not None)
        own = {f"own_{name}": optional_dtype(operands[name]) for name in self.own}
        own |= {"branch": optional_dtype(branch)}
        return replace(types, **dict.fromkeys(self.own, False), **own)  # type: ignore[arg-type]  # fields by name

    def macros(self, *, is_cpu: bool) -> Macros:
        """Return the macros of a build whose weight, bias or gate lies otherwise than usual."""
        types, segments, found = self.types, self.segments, []
        if types.formula.branch_gate:
            axes = self.layouts["gate"].axes
            found = [
                ("BRANCH_GATE", "true"),
                ("SCALAR_GATE", cuda_bool(self.geometry.is_scalar(self._gate))),
                ("GATE_AXES", "3" if is_cpu else str(axes)),
            ]
        if self.has_rows:
            axes = max(RowLayout(*one).axes for one in self.parameter_layouts.values())
            found.append(("PARAMETER_AXES", "3" if is_cpu else str(axes)))
        if segments is None or not isinstance(types, BackwardTypes):
            return tuple(found)
        reads_own = any(getattr(types, name) for name in segments.of_row)
        return (
            *found,
            ("SEGMENT_AXES", "2" if is_cpu else str(segments.axes)),
            ("OWN_PARAMETERS", cuda_bool(reads_own)),
            *type_macros(types, "own_dweight", "own_dbias"),
            ("ACCUMULATE", cuda_bool(bool(self.own) and self.params.accumulate)),
            *type_macros(types, "branch"),
            ("DGATE_SUMS", cuda_bool(types.dgate_sums)),
        )

    def row_layouts(self) -> list[RowLayout | StridedLayout]:
        """Return the layouts of operands that the kernel finds by `ROW_AXES`."""
        types = self.types
        found = [*self.base_layouts.values()]
        found += [self.layouts[name] for name in types.lines() if name not in _GATES]
        if not types.formula.branch_gate:  # else GATE_AXES is of the gate
            found.append(self.layouts["gate"])
        if isinstance(types, BackwardTypes) and types.dgate:  # else a sum, or absent
            found.append(self.layouts["dgate"])
        return found

    @property
    def shape(self) -> RowShape:
        """Return the shape of the rows of a segment, or of all rows."""
        rows = self.geometry.rows
        return rows if self.segments is None else rows._replace(rows=self.segments.rows)

    def parts(self, parts: int) -> tuple[Parts | None, ...]:
        """Return, for param_grad, which rows of sums each gradient adds up, if there are segments.

        A segment has `parts` rows of sums.
        """
        segments, params = self.segments, self.params
        if segments is None:
            return ()
        wanted = {"weight": params.dweight, "bias": params.dbias, "gate": params.dgate}
        return tuple(
            None if dtype is None else segments.parts_of(name, parts)
            for name, dtype in wanted.items()
        )

    def args(self, sums: Offsets) -> KernelArgs:
        """Return the bytes of `struct Arguments`."""
        writer = ArgsWriter(self.slots)
        self.write_base(writer, sums)
        self.write_args(writer, sums)
        rows, width, groups = self.shape
        writer.sized(rows)
        writer.integers(groups, width)
        return writer.finish(numbers_of(self.types.compute, self.numbers))

    def write_base(self, writer: ArgsWriter, sums: Offsets) -> None:
        """Write the base of `struct Arguments`: with segments, `struct SegmentArguments`."""
        segments = self.segments
        if segments is None:
            return
        writer.integers(segments.number, *segments.first, *segments.inside)
        for name in ("dweight", "dbias"):
            writer.pointer(name if name in self.own else "")
            writer.integers(*SINGLE_ROW._replace(inner_stride=self.geometry.rows.width))
        writer.pointer("branch")
        writer.integers(*self.base_layouts["branch"])
        writer.pointers_into_workspace(sums[2:])

    def sums(self, sums_size: int) -> Offsets:
        """Return the offsets of the sums for dweight, dbias and dgate, of `sums_size` elements."""
        types = self.types
        if isinstance(types, ForwardTypes):
            return None, None, None
        size = sums_size * types.compute.itemsize
        wanted = (types.dweight, types.dbias, types.dgate_sums)
        return [size * sum(wanted[:i]) if want else None for i, want in enumerate(wanted)]

    def _pack_rows(self, alignments: Alignments) -> int:
        """Return how many strided rows a GPU's thread may take at once, two or one."""
        types, layouts = self.types, self.layouts | self.base_layouts
        if types.gate or types.compute is not FLOAT32 or self.has_rows:
            return 1
        for name in layouts.keys() & self.slots:
            inner, _, *strides, inner_stride, step = layouts[name]
            counts = [inner if inner < UNBOUNDED else self.geometry.rows.rows, *strides, step]
            itemsize = present(self._operands[name]).dtype.itemsize
            is_aligned = alignments is None or alignments[self.slots[name]] % (2 * itemsize) == 0
            if inner_stride != 1 or any(one % 2 for one in counts) or not is_aligned:
                return 1
        return 2

    def access(self, alignments: Alignments) -> int:
        if self.types.strided:
            return self._pack_rows(alignments)
        parameters = (*self.types.parameters(), *self.own)
        strides: dict[str, tuple[int, ...]] = dict.fromkeys(parameters, ())
        layouts = self.layouts | self.parameter_layouts | self.base_layouts
        if self.geometry.is_scalar(self._gate):
            layouts = {n: one for n, one in layouts.items() if n not in ("gate", "dgate")}
        strides |= {name: RowLayout(*layout).strides for name, layout in layouts.items()}
        return self.access_to(self.geometry.rows.width, strides, alignments)
