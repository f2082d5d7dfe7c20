# SPDX-License-Identifier: MIT
"""The planning of a call: an OpDef makes a Plan, and the Plan is lowered to launches on a device.

A plan depends on scalars, shapes, strides, dtypes and the device; its launches also depend on
alignment. Neither depends on the number of CPU threads. On a device, only the width of a row and
the operands' dtypes decide how the row is cut into packs, so the row's result depends neither on
other rows nor on alignment.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from cunorm._core.build import KernelArgs, Launch
from cunorm._core.caps import Caps
from cunorm._core.dtypes import ALL_DTYPES, DType
from cunorm._core.memo import memoize
from cunorm._core.operands import DTypes, Kind, Slot, present
from cunorm._core.tensor import OptionalSpecs, Shape, TensorSpec

GRID_LIMIT = 2**31 - 1

Aliases = dict[int, tuple[int, ...]]
SharedOutputs = tuple[tuple[int, int], ...]  # slots: of an output, of the array returned for it
Alignments = Sequence[int] | None  # the address of each array modulo 16; None if all are aligned


class OutputSpec(NamedTuple):
    """An output to allocate: its slot among all arrays of the call, and its spec."""

    slot: int
    spec: TensorSpec


class InputCopy(NamedTuple):
    """An input to copy: its slot, and the order of axes in the copy; None is C order."""

    slot: int
    axes: tuple[int, ...] | None = None


class KernelCall(NamedTuple):
    launch: Launch
    args: KernelArgs
    work: int = 0  # a number of elements that decides how many CPU threads run
    parts: int = 0  # the parts into which CPU threads may split a block; 0: they take whole blocks


# The part of a KernelCall that depends on the number of rows: its grid, its work, and the values of
# the words that `KernelArgs.sized` lists.
CallSize = tuple[int, int, tuple[int, ...]]
Sizes = tuple[int, list[CallSize]]  # the bytes of workspace; for each call its CallSize


class Lowered(NamedTuple):
    """The launches of a call on a device."""

    launches: tuple[Launch, ...]  # one launch of each build
    # A function, because there may be thousands of calls, and some callers need only `launches`.
    calls: Callable[[], list[KernelCall]]
    workspace: int  # the bytes of workspace that the calls need
    # Returns the Sizes for another number of rows, two or more; None if it needs other builds.
    # There is no such function if each number needs a plan of its own.
    sizes: Callable[[int], Sizes | None] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The work of a call, with checked operands and without pointers."""

    specs: OptionalSpecs  # all inputs, then all outputs, given or allocated
    outputs: tuple[OutputSpec, ...]  # the outputs to allocate
    copies: tuple[InputCopy, ...]  # the inputs with strides that kernels cannot follow
    # For an output's slot: the slots of inputs whose memory the output may share exactly. No thread
    # reads an element of these inputs after the element was overwritten.
    aliases: Aliases
    shared: SharedOutputs
    lower: Callable[[Caps, Alignments], Lowered]
    workspace_bound: Callable[[Caps | None], int]  # in bytes, for any alignments; None: any GPU
    is_empty: bool = False  # no kernel runs, because there is nothing to write

    def kernel_specs(self) -> OptionalSpecs:
        """Return the specs; an input that is copied has the spec of its copy."""
        specs = [*self.specs]
        for slot, axes in self.copies:
            specs[slot] = present(specs[slot]).dense(axes)
        return tuple(specs)


class OpSpec(Protocol):
    """The checked scalars of a call, a dataclass. Calls with equal scalars share one object."""

    @property
    def function(self) -> str:
        """The name of the public function in errors."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """The caller's names of the outputs."""

    def result_dtypes(self, dtypes: DTypes) -> dict[str, DType]:
        """Return the dtypes of the results that are written, from the dtypes of all operands."""

    def statistics_shape(self, x_shape: Shape) -> Shape:
        """Return the shape of mean and rstd."""

    def leading_axes(self, ndim: int) -> int:
        """Return how many axes of x come before a row's; 0 if a plan serves only one shape of x."""


SpecT = TypeVar("SpecT", bound=OpSpec)
# Functions that check and convert a scalar. They get the names of cunorm's function and of the
# argument, for errors.
Checks = dict[str, Callable[[str, str, Any], Any]]


def _parsed(spec_type: type[SpecT], checks: Checks, *scalars: Any) -> SpecT:
    """Return the OpSpec of scalars, which are in the order of its fields, `function` first."""
    names = [one.name for one in fields(spec_type)]  # type: ignore[arg-type]  # a dataclass
    values = [
        checks[name](scalars[0], name, value) if name in checks else value
        for name, value in zip(names, scalars, strict=True)
    ]
    return spec_type(*values)


class OpDef(Generic[SpecT]):
    """One operator in one direction."""

    def __init__(
        self,
        name: str,  # the name in texts that XLA's executables keep
        input_slots: tuple[Slot, ...],  # in the order of the arrays
        result_slots: tuple[Slot, ...],  # in the order of the arrays; a workspace follows them
        spec_type: type[SpecT],
        checks: Checks,
        plan: Callable[[SpecT, OptionalSpecs], Plan],  # takes the specs of inputs and given outputs
        # Does the work of the kernels on a NumPy array or None for each input and output.
        reference: Callable[[SpecT, Sequence[Any]], None],
    ) -> None:
        self.name, self.input_slots, self.result_slots = name, input_slots, result_slots
        self.spec_type, self.plan, self.reference = spec_type, plan, reference
        self.parse: Callable[..., SpecT] = memoize(typed=True)(partial(_parsed, spec_type, checks))
        # Calls read these attributes. `x` is the slot of x or, without x, of the first input: its
        # library and device the outputs have. `no_outputs` stands for the outputs in a call that
        # gives none.
        self.inputs = tuple(slot.argument for slot in input_slots)
        self.outputs = tuple(slot.argument for slot in result_slots)
        self.kinds = tuple(slot.kind for slot in input_slots + result_slots)
        needed = [slot.is_required for slot in input_slots]
        self.required = (*needed, *[False] * len(result_slots))
        self.x = self.inputs.index("x") if "x" in self.inputs else 0
        self.first_output = len(input_slots)
        self.no_outputs = (None,) * len(result_slots)
        self.array_count = len(self.kinds) + 1  # 1 for the workspace
        # The operands whose gradients are sums over all rows.
        self.summed = [slot.name[1:] for slot in result_slots if slot.kind is Kind.PARAMETER]


@memoize()
def backward_spec(op: OpDef[Any], forward: OpSpec, x_dtype: DType, needs: tuple[str, ...]) -> Any:
    """Return the OpSpec of a forward's backward; errors name the function of the forward."""
    own = {"x_dtype": x_dtype, "needs": needs, "accumulate": False}
    names = [one.name for one in fields(op.spec_type)]
    return op.spec_type(*(own[name] if name in own else getattr(forward, name) for name in names))


# The version of texts that are kept on disk: in XLA's executables and torch.compile's graphs. Raise
# it if the fields of an OpSpec or the outputs of an OpDef change, but not for an optional input:
# XLA's texts name the inputs that are present, and torch refuses a call with other inputs.
TEXT_VERSION = 4


def spec_to_json(spec: Any) -> str:
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return json.dumps({"version": TEXT_VERSION} | values, default=lambda one: {"dtype": one.name})


def spec_from_json(spec_type: type, text: str) -> Any:
    """Return the OpSpec of a text that has the current version."""
    values = json.loads(text)
    version = values.pop("version", None)
    if version != TEXT_VERSION:
        raise ValueError(
            f"cunorm: a compiled call of text version {version}, expected {TEXT_VERSION}: compile "
            "it again with this version of cunorm"
        )
    return spec_type(**{name: _decode(value) for name, value in values.items()})


def _decode(value: Any) -> Any:
    if isinstance(value, dict):
        return ALL_DTYPES[value["dtype"]]
    return tuple(value) if isinstance(value, list) else value
