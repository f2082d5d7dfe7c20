# SPDX-License-Identifier: MIT
"""How a call is planned: an OpDef makes a Plan, which for a device is lowered to launches.

A plan depends on scalars, shapes, strides, dtypes and the device, its launches also on alignment;
neither depends on the number of CPU threads. How a row is cut into packs depends on its width and
the operands' dtypes alone, so a row's result depends neither on other rows nor on alignment.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from cunorm._core.build import KernelArgs, Launch
from cunorm._core.caps import Caps
from cunorm._core.dtypes import DTYPES, DType
from cunorm._core.memo import memoize
from cunorm._core.operands import DTypes, Kind, Slot
from cunorm._core.tensor import WIDEST_ACCESS, OptionalSpecs, Shape, TensorSpec

GRID_LIMIT = 2**31 - 1

Aliases = dict[int, tuple[int, ...]]
SharedOutputs = tuple[tuple[int, int], ...]  # an output, and the array that is returned for it
Alignments = Sequence[int] | None  # of each array's address, modulo 16; None: all are aligned


class OutputSpec(NamedTuple):
    """An output to allocate: its slot among all arrays, and its spec."""

    slot: int
    spec: TensorSpec


class InputCopy(NamedTuple):
    """An input to copy: its slot, and the order of its axes in the copy, None for C order."""

    slot: int
    axes: tuple[int, ...] | None = None


class KernelCall(NamedTuple):
    launch: Launch
    args: KernelArgs
    work: int = 0  # elements, whose number decides how many CPU threads run
    parts: int = 0  # into which CPU threads split each block; 0: a thread takes whole blocks


class CallSize(NamedTuple):
    """The part of a KernelCall that follows from the number of rows."""

    grid: int
    work: int
    words: tuple[int, ...]  # of the arguments, as `KernelArgs.sized` lists them


class Sizes(NamedTuple):
    """The part of a Lowered that follows from the number of rows."""

    workspace: int
    calls: list[CallSize]


class Lowered(NamedTuple):
    """What a call launches on a device."""

    launches: tuple[Launch, ...]  # one of each build
    calls: Callable[[], list[KernelCall]]  # in order; a function, as there may be thousands
    workspace: int  # the bytes that they need
    # Returns what changes for another number of rows, two or more; None if the builds change.
    sizes: Callable[[int], Sizes | None] = lambda rows: None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a call does, with checked operands, and no pointers."""

    specs: OptionalSpecs  # of all inputs, then of all outputs, those to allocate too
    outputs: tuple[OutputSpec, ...]  # to allocate
    copies: tuple[InputCopy, ...]  # of inputs whose strides the kernels cannot follow
    # By the slot of an output, the slots of inputs whose memory it may share exactly: no thread
    # reads an element of these inputs after it was overwritten.
    aliases: Aliases
    shared: SharedOutputs
    lower: Callable[[Caps, Alignments], Lowered]
    workspace_bound: Callable[[Caps | None], int]  # bytes for any alignments; None: on any GPU
    is_empty: bool = False  # no kernel runs: there are no rows, or no output is wanted

    def kernel_specs(self) -> OptionalSpecs:
        """Return the specs with those of copies in place of the inputs that are copied."""
        specs = [*self.specs]
        for slot, axes in self.copies:
            spec = specs[slot]
            assert spec is not None
            specs[slot] = spec.dense(axes)
        return tuple(specs)


class OpSpec(Protocol):
    """The checked scalars of a call, a dataclass. Calls with equal scalars have one object."""

    @property
    def function(self) -> str:
        """The public function that errors name."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """The caller's name of the array for each output."""

    def result_dtypes(self, dtypes: DTypes) -> dict[str, DType]:
        """Return the dtypes of the results that are written, from the operands', all by name."""

    def statistics_shape(self, x_shape: Shape) -> Shape:
        """Return the shape of mean and rstd."""

    def leading_axes(self, ndim: int) -> int:
        """Return how many axes of x are rows; 0: a plan is for one shape of x."""


SpecT = TypeVar("SpecT", bound=OpSpec)
# By a scalar's name: checks and converts its value, of a function and an argument that errors name.
Checks = dict[str, Callable[[str, str, Any], Any]]


def _parsed(spec_type: type[SpecT], checks: Checks, *scalars: Any) -> SpecT:
    """Return the OpSpec of scalars, which are in the order of its fields, the function first."""
    names = [one.name for one in fields(spec_type)]  # type: ignore[arg-type]  # a dataclass
    values = [
        checks[name](scalars[0], name, value) if name in checks else value
        for name, value in zip(names, scalars, strict=True)
    ]
    return spec_type(*values)


@dataclass(frozen=True, slots=True, eq=False)
class OpDef(Generic[SpecT]):
    """One operator in one direction."""

    name: str  # in texts that executables keep
    input_slots: tuple[Slot, ...]  # of the arrays, in order
    result_slots: tuple[Slot, ...]  # likewise; a workspace follows them
    spec_type: type[SpecT]
    checks: Checks
    plan: Callable[[SpecT, OptionalSpecs], Plan]  # from the specs of given arrays
    # Does the kernels' work, for a NumPy array or None for each input and output.
    reference: Callable[[SpecT, Sequence[Any]], None]
    # Read in every call: the callers' names of inputs and outputs; the slots of x, whose library
    # and device are those of the outputs, and of the first output; results where none is given.
    parse: Callable[..., SpecT] = field(init=False)  # of scalars as callers give them; memoized
    inputs: tuple[str, ...] = field(init=False)
    outputs: tuple[str, ...] = field(init=False)
    kinds: tuple[Kind, ...] = field(init=False)  # of inputs and outputs
    slots_like_x: tuple[int, ...] = field(init=False)  # the numbers of these slots, by kind
    parameter_slots: tuple[int, ...] = field(init=False)
    statistic_slots: tuple[int, ...] = field(init=False)
    required: tuple[bool, ...] = field(init=False)  # whether inputs and outputs are
    x: int = field(init=False)
    first_output: int = field(init=False)
    no_outputs: tuple[None, ...] = field(init=False)

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        put("parse", memoize(typed=True)(partial(_parsed, self.spec_type, self.checks)))
        put("inputs", tuple(slot.argument for slot in self.input_slots))
        put("outputs", tuple(slot.argument for slot in self.result_slots))
        kinds = tuple(slot.kind for slot in self.input_slots + self.result_slots)
        put("kinds", kinds)
        for name, kind in (
            ("slots_like_x", Kind.LIKE_X),
            ("parameter_slots", Kind.PARAMETER),
            ("statistic_slots", Kind.STATISTIC),
        ):
            put(name, tuple(slot for slot, found in enumerate(kinds) if found is kind))
        needed = [slot.is_required for slot in self.input_slots]
        put("required", (*needed, *[False] * len(self.outputs)))
        put("x", self.inputs.index("x"))
        put("first_output", len(self.inputs))
        put("no_outputs", (None,) * len(self.outputs))

    @property
    def array_count(self) -> int:
        return len(self.inputs) + len(self.outputs) + 1  # the workspace

    @property
    def summed(self) -> list[str]:
        """Return the operands whose gradients are sums over all rows."""
        return [slot.name[1:] for slot in self.result_slots if slot.kind is Kind.PARAMETER]


# The version of texts that are kept on disk, in XLA's executables and torch.compile's graphs. Raise
# it for other fields of an OpSpec or other outputs of an OpDef. Another optional input needs no new
# version: XLA's texts name the inputs that are present, and torch refuses graphs with other inputs.
TEXT_VERSION = 4


def spec_to_json(spec: Any) -> str:
    """Return the fields of an OpSpec as JSON."""
    values = {field.name: getattr(spec, field.name) for field in fields(spec)}
    return json.dumps({"version": TEXT_VERSION} | values, default=lambda one: {"dtype": one.name})


def spec_from_json(spec_type: type, text: str) -> Any:
    """Return the OpSpec of a text of this version."""
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
        return DTYPES[value["dtype"]]
    return tuple(value) if isinstance(value, list) else value


def vector_width(width: int, operands: Sequence[tuple[int, int, Shape]] = ()) -> int:
    """Return how many elements every operand lets a thread move in one access, a power of two.

    An operand is its alignment, itemsize, and strides between rows in elements. An access takes at
    most 16 bytes, so more alignment than that is not needed.
    """
    access = min(WIDEST_ACCESS, width & -width)
    for alignment, itemsize, strides in operands:
        offsets = [alignment, *(stride * itemsize for stride in strides)]
        while access > 1 and any(at % min(access * itemsize, WIDEST_ACCESS) for at in offsets):
            access //= 2
    return access
