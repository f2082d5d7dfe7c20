# SPDX-License-Identifier: MIT
"""How a call is planned: an OpDef makes a Plan, which for a device is lowered to launches.

A plan depends on shapes, dtypes and the device, never on the number of CPU threads; how a row is
cut into packs depends on its width and the operands' dtypes alone, so that a row's result does not
depend on the rows around it, nor on alignment.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from cunorm._core.build import KernelArgs, Launch
from cunorm._core.caps import Caps
from cunorm._core.dtypes import DTYPES
from cunorm._core.tensor import WIDEST_ACCESS, OptionalSpecs, Shape, TensorSpec

GRID_LIMIT = 2**31 - 1

Alignments = Sequence[int] | None  # of each array's address, modulo 16; None: all are aligned


class OutputSpec(NamedTuple):
    """An output to allocate: its place among all arrays, and its spec."""

    place: int
    spec: TensorSpec


class InputCopy(NamedTuple):
    """An input to copy: its place, and the order of its axes in the copy, None for C order."""

    place: int
    axes: tuple[int, ...] | None = None


class KernelCall(NamedTuple):
    launch: Launch
    args: KernelArgs
    work: int = 0  # elements that it goes through, by which a CPU takes threads
    parts: int = 0  # that a CPU's threads share of each block; 0: they share blocks


class Lowered(NamedTuple):
    """What a call launches on a device."""

    launches: tuple[Launch, ...]  # one of each build
    calls: Callable[[], list[KernelCall]]  # returns all launches in order: there may be thousands
    workspace: int  # the bytes that they need


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a call does, with checked operands, and no pointers."""

    specs: OptionalSpecs  # of all inputs, then of all outputs, those to allocate too
    outputs: tuple[OutputSpec, ...]  # to allocate
    copies: tuple[InputCopy, ...]  # of inputs whose strides the kernels cannot follow
    # For the place of an output, those of the inputs that it may be exactly: nobody reads an
    # element of such an input after the thread that writes it.
    aliases: dict[int, tuple[int, ...]]
    shared: tuple[tuple[int, int], ...]  # outputs that are other arrays too: the places of both
    lower: Callable[[Caps, Alignments], Lowered]
    workspace_bound: Callable[[Caps | None], int]  # bytes for any alignments; None: on any GPU
    is_empty: bool = False  # no kernel runs: there are no rows, or no output is wanted

    def kernel_specs(self) -> OptionalSpecs:
        """Return the specs with those of copies in place of the inputs that are copied."""
        specs = [*self.specs]
        for place, axes in self.copies:
            spec = specs[place]
            assert spec is not None
            specs[place] = spec.dense(axes)
        return tuple(specs)


@dataclass(frozen=True, slots=True, eq=False)
class OpDef:
    """One operator in one direction.

    Its OpSpec has the checked scalars of a call; `function`, the public function that errors name;
    and `output_names`, the caller's name of the array for each output.
    """

    name: str  # in texts that executables keep
    inputs: tuple[str, ...]  # the names of all arrays, in order; a workspace follows the outputs
    outputs: tuple[str, ...]
    required: int  # how many of the first inputs must be there
    x: int  # the place of x, whose library and device are those of the outputs
    spec_type: type  # the class of its OpSpec, a dataclass
    parse: Callable[..., Any]  # returns the OpSpec of scalars as callers give them; memoized
    plan: Callable[[Any, OptionalSpecs], Plan]  # from an OpSpec and the specs of given arrays
    # Does the kernels' work, for an OpSpec and a NumPy array or None for each input and output.
    reference: Callable[[Any, Sequence[Any]], None]
    parameters: tuple[str, ...] = ("weight", "bias")  # inputs that all rows share
    sums: tuple[str, ...] = ()  # outputs that are sums over all rows
    first_output: int = field(init=False)  # its place

    def __post_init__(self) -> None:
        object.__setattr__(self, "first_output", len(self.inputs))  # read in every call

    @property
    def array_count(self) -> int:
        return len(self.inputs) + len(self.outputs) + 1  # the workspace


# Of the texts in XLA's executables and in graphs of torch.compile, which both keep on disk. Other
# fields of an OpSpec, or other inputs and outputs of an OpDef, need a higher one.
TEXT_VERSION = 3


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

    An operand is its alignment, itemsize, and strides between rows in elements. One access takes
    fewer of larger elements, so alignment counts up to 16 bytes.
    """
    access = min(WIDEST_ACCESS, width & -width)
    for alignment, itemsize, strides in operands:
        offsets = [alignment, *(stride * itemsize for stride in strides)]
        while access > 1 and any(at % min(access * itemsize, WIDEST_ACCESS) for at in offsets):
            access //= 2
    return access
