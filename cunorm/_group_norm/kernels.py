# SPDX-License-Identifier: MIT
"""The kernels of group norms: the macros of their builds, and their argument structs."""

import struct
from dataclasses import dataclass, replace
from typing import ClassVar

from cunorm._core.build import ArgsWriter, KernelArgs, Macros
from cunorm._core.dtypes import DType
from cunorm._core.kernel import Kernel
from cunorm._core.operands import KernelTypes, Kind, Operand, OperandTable, Slot, Specs, names_of
from cunorm._core.param_grad import Offsets, Parts
from cunorm._core.plan import Alignments
from cunorm._core.tensor import Arrays
from cunorm._group_norm.layout import GroupGeometry

TABLE = OperandTable(
    inputs=(
        Operand("x", Kind.LIKE_X, is_required=True, is_saved=True, has_gradient=True),
        Operand("weight", Kind.PARAMETER, is_saved=True, has_gradient=True),
        Operand("bias", Kind.PARAMETER, is_saved=True, has_gradient=True),
    ),
    results=(
        Operand("y", Kind.LIKE_X, is_required=True, has_gradient=True),
        Operand("mean", Kind.STATISTIC, is_required=True, is_saved=True),
        Operand("rstd", Kind.STATISTIC, is_required=True, is_saved=True),
    ),
)


def forward_inputs(x: object, *, weight: object = None, bias: object = None) -> Arrays:
    """Return the inputs of a forward in the order of the table."""
    return (x, weight, bias)


def backward_inputs(
    dy: object, x: object, *, weight: object = None, bias: object = None, mean: object, rstd: object
) -> Arrays:
    """Return the inputs of a backward in the order of the table."""
    return (dy, x, weight, bias, mean, rstd)


@dataclass(frozen=True, kw_only=True)
class GroupTypes(KernelTypes):
    kernel: ClassVar[str]  # the name of its source file and of its entry point

    x: DType
    activation: str = "identity"
    sample_parameters: bool = False  # weight or bias may differ from sample to sample

    @property
    def loaded(self) -> list[DType]:
        return [getattr(self, name) for name in names_of(self.inputs, Kind.LIKE_X)]

    @property
    def written(self) -> DType | None:
        (name,) = names_of(self.results, Kind.LIKE_X)
        return getattr(self, name)  # type: ignore[no-any-return]

    def macros(self) -> Macros:
        macros = (*super().macros(), ("ACTIVATION", self.activation))
        return (*macros, ("SAMPLE_PARAMETERS", "true")) if self.sample_parameters else macros


@dataclass(frozen=True)
class GroupForwardTypes(GroupTypes):
    kernel = "group_norm_forward"
    inputs, results = TABLE.forward_inputs, TABLE.forward_results

    y: DType


@dataclass(frozen=True)
class GroupBackwardTypes(GroupTypes):
    kernel = "group_norm_backward"
    inputs, results = TABLE.backward_inputs, TABLE.backward_results

    dy: DType
    dx: DType | None = None
    dweight: bool = False
    dbias: bool = False


def _tangent(name: str, kind: Kind, *, is_required: bool = False) -> Slot:
    return Slot(f"{name}_tangent", f"{name}_tangent", kind, is_required)


@dataclass(frozen=True)
class GroupJvpTypes(GroupTypes):
    kernel = "group_norm_jvp"
    inputs = (
        *(slot for slot in TABLE.backward_inputs if slot.name != "dy"),
        _tangent("x", Kind.LIKE_X, is_required=True),
        *(_tangent(name, Kind.PARAMETER) for name in ("weight", "bias")),
    )
    results = (_tangent("y", Kind.LIKE_X, is_required=True),)

    x_tangent: DType
    y_tangent: DType
    weight_tangent: DType | None = None
    bias_tangent: DType | None = None


class GroupKernel(Kernel[GroupTypes, GroupGeometry]):
    """A group norm's kernel with its operands; `numbers` has the eps of a forward."""

    def __init__(
        self,
        types: GroupTypes,
        geometry: GroupGeometry,
        operands: Specs,
        numbers: tuple[float, ...] = (),
        *,
        accumulate: bool = False,
    ) -> None:
        parameters = {name: operands[name] for name in names_of(types.inputs, Kind.PARAMETER)}
        has_rows = any(spec and len(spec.shape) == 2 for spec in parameters.values())
        types = replace(types, sample_parameters=has_rows)
        super().__init__(types, geometry, operands, numbers, accumulate=accumulate)
        if has_rows:
            layout = geometry.layout_of_parameter
            self.parameter_layouts = {name: layout(spec) for name, spec in parameters.items()}

    def parts(self, parts: int) -> tuple[Parts | None, ...]:
        """Return, for param_grad, which rows of sums each gradient adds up; empty: all rows.

        A sample has `parts` rows of sums.
        """
        gradients = [self._operands.get(name) for name in ("dweight", "dbias")]
        if all(spec is None or len(spec.shape) == 1 for spec in gradients):
            return ()
        return (*(spec and self.geometry.parts_of(spec.shape, parts) for spec in gradients), None)

    def args(
        self, count: int, first: int, part_positions: int, parts: int, sums: Offsets
    ) -> KernelArgs:
        """Return the bytes of `struct Arguments` for `count` samples from sample `first` on."""
        writer, sizes = ArgsWriter(self.slots), self.geometry.sizes
        self.write_args(writer, sums)
        writer.pointer("workspace")
        writer.integers(count, first, sizes.positions, sizes.channels, sizes.groups)
        writer.integers(part_positions, parts)
        return writer.finish(struct.pack(f"<{len(self.numbers)}d", *self.numbers))

    def access(self, alignments: Alignments) -> int:
        sizes, strides = self.geometry.sizes, dict[str, tuple[int, ...]](self.layouts)
        if not sizes.channels_last:
            return self.access_to(sizes.positions, strides, alignments)
        strides |= dict.fromkeys(names_of(self.types.inputs, Kind.PARAMETER), ())
        strides |= self.parameter_layouts
        return self.access_to(sizes.channels, strides, alignments)
