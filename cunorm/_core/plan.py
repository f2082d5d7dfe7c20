# SPDX-License-Identifier: MIT
"""How a call is planned: an OpDef makes a Plan, which for a device is lowered to launches.

A plan depends on shapes, dtypes and the device, never on the number of CPU threads; how a row is
cut into packs depends on its width and the operands' dtypes alone, so that a row's result does not
depend on the rows around it, nor on alignment.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from cunorm._core.build import KernelArgs, Launch
from cunorm._core.caps import Caps, GpuCaps
from cunorm._core.tensor import (
    WIDEST_ACCESS,
    OptionalSpecs,
    TensorSpec,
    contiguous,
    inverse_permutation,
)

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
    """A launch with its arguments."""

    launch: Launch
    args: KernelArgs
    work: int = 0  # elements that it goes through, by which a CPU takes threads
    parts: int = 0  # that a CPU's threads share of each block; 0: they share blocks


class Lowered(NamedTuple):
    """What a call launches on a device.

    Attributes
    ----------
    launches : tuple of Launch
        One of each build.
    calls : function
        Returns all launches in order, with their arguments: there may be thousands.
    workspace : int
        The bytes that they need.
    """

    launches: tuple[Launch, ...]
    calls: Callable[[], list[KernelCall]]
    workspace: int


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a call does, with checked operands, and no pointers.

    Attributes
    ----------
    specs : tuple
        Of every array, inputs, then outputs, those to allocate too. None is absent.
    outputs : tuple of OutputSpec
        To allocate.
    copies : tuple of InputCopy
        Inputs whose strides the kernels cannot follow.
    aliases : dict
        For the place of an output, those of the inputs that it may be exactly: nobody reads an
        element of such an input after the thread that writes it.
    shared : tuple of (int, int)
        An output that is another array of the call: the places of both.
    lower : function
        Returns the launches, for the caps of a device and the alignments of arrays.
    workspace_bound : function
        Returns the bytes that any alignment needs on a device, or on any GPU, for caps of None.
    """

    specs: OptionalSpecs
    outputs: tuple[OutputSpec, ...]
    copies: tuple[InputCopy, ...]
    aliases: dict[int, tuple[int, ...]]
    shared: tuple[tuple[int, int], ...]
    lower: Callable[[Caps, Alignments], Lowered]
    workspace_bound: Callable[[Caps | None], int]
    is_empty: bool = False  # no kernel runs: there are no rows, or no output is wanted

    def kernel_specs(self) -> OptionalSpecs:
        """Return the specs with those of copies in place of the inputs that are copied."""
        specs = [*self.specs]
        for place, axes in self.copies:
            spec = specs[place]
            assert spec is not None
            axes = tuple(range(len(spec.shape))) if axes is None else axes
            shape = spec.permuted(axes).shape
            copy = contiguous(shape, spec.dtype, spec.device)
            specs[place] = copy.permuted(inverse_permutation(axes))
        return tuple(specs)


class OpSpec(Protocol):
    """The checked scalars of a call; each OpDef has its own class."""

    @property
    def function(self) -> str:
        """Return the public function, which errors name."""

    @property
    def output_names(self) -> tuple[str, ...]:
        """Return what the caller names the array for each output."""


@dataclass(frozen=True, slots=True, eq=False)
class OpDef:
    """One operator in one direction.

    Attributes
    ----------
    name : str
        In texts that executables keep.
    inputs, outputs : tuple of str
        The names of all arrays, in order; a workspace follows them.
    required : int
        How many of the first inputs must be there.
    x : int
        The place of x, whose library and device are those of the outputs.
    spec_type : type
        The class of its OpSpec, a dataclass.
    parse : function
        Returns the OpSpec of scalars as callers give them; memoized.
    plan : function
        Returns the Plan of an OpSpec and the specs of inputs and given outputs.
    reference : function
        Does the kernels' work on NumPy arrays: of an OpSpec, and an array or None for each input
        and output.
    parameters : tuple of str
        The inputs that all rows share.
    sums : tuple of str
        The outputs that are sums over all rows.
    first_output : int
        The place of the first output.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    required: int
    x: int
    spec_type: type
    parse: Callable[..., Any]
    plan: Callable[[Any, OptionalSpecs], Plan]
    reference: Callable[[Any, Sequence[Any]], None]
    parameters: tuple[str, ...] = ("weight", "bias")
    sums: tuple[str, ...] = ()
    first_output: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "first_output", len(self.inputs))  # read in every call

    @property
    def array_count(self) -> int:
        """Return how many arrays a call has, absent ones and the workspace too."""
        return len(self.inputs) + len(self.outputs) + 1


Operand = tuple[int, int, tuple[int, ...]]  # alignment, itemsize, strides between rows in elements


def vector_width(width: int, operands: Sequence[Operand] = ()) -> int:
    """Return how many elements every operand lets a thread move in one access, a power of two.

    One access takes fewer of larger elements, so alignment counts up to 16 bytes.
    """
    access = min(WIDEST_ACCESS, width & -width)
    for alignment, itemsize, strides in operands:
        while access > 1:
            bytes_at_once = min(access * itemsize, WIDEST_ACCESS)
            if alignment % bytes_at_once == 0 and not any(
                stride * itemsize % bytes_at_once for stride in strides
            ):
                break
            access //= 2
    return access


def fitting_caps(
    caps: GpuCaps, first_launch: Callable[[GpuCaps], Launch], fits: Callable[[Launch], bool]
) -> GpuCaps:
    """Return a GPU's caps, with smaller clusters, or none, where it has no room for them."""
    while (launch := first_launch(caps)).build.cluster > 1 and not fits(launch):
        fewer = min(launch.build.cluster, caps.features.largest_cluster) // 2
        features = caps.features._replace(clusters=fewer > 1, largest_cluster=fewer)
        caps = caps._replace(features=features)
    return caps
