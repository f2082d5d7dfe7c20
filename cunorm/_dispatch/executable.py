# SPDX-License-Identifier: MIT
"""A planned and loaded call, which runs on any arrays of the same signature."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any, NamedTuple

from cunorm._arrays.adapter import copied
from cunorm._arrays.cupy import stream_after_all
from cunorm._arrays.registry import view_workspace
from cunorm._core.operands import Kind
from cunorm._core.overlap import OverlapCheck
from cunorm._core.plan import OpDef, Plan
from cunorm._core.tensor import (
    Arrays,
    ArrayView,
    Shape,
    TensorSpec,
    contiguous,
)

Views = list[Any]  # an ArrayView or None for each array of a call; the workspace is last
Pointers = Sequence[int]  # addresses in the same order, 0 for None
Run = Callable[[Pointers], object]


def pointers_of(views: Views) -> list[int]:
    return [0 if view is None else view.pointer for view in views]


class Loaded(NamedTuple):
    """The loaded kernels of a plan."""

    run: Run
    # Takes another number of rows; returns a Run, or None if this number needs other builds.
    resized: Callable[[int], Run | None] | None = None


# An output's slot, its allocator, and the slot of the array that the allocator gets.
_Allocation = tuple[int, Callable[[Any], Any], int]


class Executable:
    """A loaded plan, which runs on any arrays of the same signature."""

    def __init__(
        self,
        op: OpDef[Any],
        plan: Plan,
        views: Views,
        overlaps: OverlapCheck,
        loaded: Loaded | None,
    ) -> None:
        self._adapter, self._device = views[op.x].adapter, views[op.x].spec.device
        self._overlaps, self._kinds = overlaps, op.kinds
        self._run = loaded and loaded.run  # None if no kernel runs
        self._outputs, self._shared, self._axes = plan.outputs, plan.shared, dict(plan.copies)
        self._results = slice(op.first_output, op.array_count - 1)
        self._has_given = any(views[op.first_output :])  # the caller gives outputs or a workspace
        self._last_checked: list[int] = []  # the addresses that the last check accepted
        realigned = [slot for slot, view in enumerate(views) if view and view.is_new]
        self._copied = sorted({*realigned, *self._axes})
        self._resize = loaded.resized if loaded and not self._copied else None
        self._pointer = self._adapter.pointer
        self._have_models: set[int] = set()  # the slots of outputs allocated like another array
        self._allocations = [self._allocation(views[:-1], *output) for output in plan.outputs]
        # Whether `_change_rows` has anything to change.
        self._depends_on_rows = self._has_given or any(
            self._allocates_by_rows(one.slot) for one in plan.outputs
        )

    def run(self, arrays: Arrays, pointers: list[int]) -> list[Any]:
        """Run on arrays of one library at these addresses, and return the outputs."""
        if self._has_given and pointers != self._last_checked:
            if pointers[-1] & 15:
                view_workspace(self._overlaps.function, arrays[-1])  # this raises an error
            self._overlaps.check(pointers)
            self._last_checked = pointers[:]
        copies = self._copies(arrays, pointers) if self._copied else None
        slots = [*arrays]
        for slot, allocate, model in self._allocations:
            array = slots[slot] = allocate(arrays[model])
            pointers[slot] = self._pointer(array)
        if self._run is not None:
            self._run(pointers)
        del copies  # a GPU may still read them, but only later work of the stream gets their memory
        if self._has_given:
            self._adapter.bump_version(arrays[self._results])
        for slot, source in self._shared:
            slots[slot] = slots[source]
        return slots[self._results]

    def _copies(self, arrays: Arrays, pointers: list[int]) -> list[ArrayView]:
        """Copy inputs that kernels cannot read in place, and return the copies."""
        copies = []
        for slot in self._copied:
            view = self._adapter.view(
                self._overlaps.function, self._overlaps.names[slot], arrays[slot]
            )
            if slot in self._axes:
                view = copied(view, self._axes[slot])
            pointers[slot] = view.pointer
            copies.append(view)
        return copies

    def run_views(self, arrays: Arrays, views: Views) -> list[Any]:
        """Run on arrays of any libraries, and return the outputs."""
        self._overlaps.check(pointers_of(views))
        for slot, axes in self._axes.items():
            views[slot] = copied(views[slot], axes)
        for slot, spec in self._outputs:
            with _naming(self._overlaps.function, spec):
                views[slot] = self._adapter.allocate(spec)
        pointers, adapter, device = pointers_of(views), self._adapter, self._device
        if self._run is not None and device.kind == "cpu":
            self._run(pointers)
        elif self._run is not None:
            present = [view for view in views if view is not None]
            with adapter.device_scope(device), stream_after_all(adapter, present, device):
                self._run(pointers)
        slots = [*arrays]
        slots[self._results] = [view and view.adapter.export(view) for view in views[self._results]]
        for slot, source in self._shared:
            slots[slot] = slots[source]
        return slots[self._results]

    @property
    def has_other_rows(self) -> bool:
        """Return whether `resized` may return an Executable."""
        return self._resize is not None

    def resized(self, x_shape: Shape, leading_axes: int) -> "Executable | None":
        """Return an Executable like this one for contiguous arrays with another number of rows.

        x has `leading_axes` axes before those of a row. Return None if other builds are needed.
        """
        run = self._resize and self._resize(prod(x_shape[:leading_axes]))
        if run is None:
            return None
        another = object.__new__(Executable)
        another.__dict__.update(self.__dict__)
        another._run = run
        if self._depends_on_rows:
            another._change_rows(x_shape, leading_axes)
        return another

    def _change_rows(self, x_shape: Shape, leading_axes: int) -> None:
        """Adapt the allocators and the check of overlaps to another number of rows."""

        def of_rows(spec: TensorSpec, kind: Kind) -> TensorSpec:
            if kind is Kind.PARAMETER or (kind is Kind.SCALE and prod(spec.shape) == 1):
                return spec
            shape = x_shape
            if kind in (Kind.STATISTIC, Kind.SCALE):
                shape = (*x_shape[:leading_axes], *spec.shape[leading_axes:])
            return contiguous(shape, spec.dtype, spec.device)

        earlier, self._allocations, self._last_checked = self._allocations, [], []
        for (slot, allocate, model), (_, spec) in zip(earlier, self._outputs, strict=True):
            if self._allocates_by_rows(slot):
                own_spec, has_model = of_rows(spec, self._kinds[slot]), slot in self._have_models
                allocate = self._adapter.allocator(own_spec, has_model=has_model)
            self._allocations.append((slot, allocate, model))
        if self._has_given:
            specs = zip(self._overlaps.specs[:-1], self._kinds, strict=True)
            given = [None if spec is None else of_rows(spec, kind) for spec, kind in specs]
            self._overlaps = self._overlaps.of_specs((*given, None))

    def _allocates_by_rows(self, slot: int) -> bool:
        """Return whether an output's allocator depends on the number of rows."""
        takes_shape = slot in self._have_models and self._adapter.allocates_like
        return self._kinds[slot] is not Kind.PARAMETER and not takes_shape

    def _allocation(self, views: Views, slot: int, spec: TensorSpec) -> _Allocation:
        """Return how to allocate an output: if possible like another array, which is quicker.

        The two have the same spec and, because the number of rows may change, the same kind.
        """
        kind, adapter = self._kinds[slot], self._adapter
        models = (
            model
            for model, (view, kind_of_model) in enumerate(zip(views, self._kinds, strict=True))
            if view and view.spec == spec and kind_of_model is kind
            if view.adapter is adapter and not view.is_new
        )
        model = next(models, None)
        with _naming(self._overlaps.function, spec):
            allocate = adapter.allocator(spec, has_model=model is not None)
        if model is not None:
            self._have_models.add(slot)
        return slot, allocate, model or 0


@contextmanager
def _naming(function: str, spec: TensorSpec) -> Iterator[None]:
    """Add the function's name to the error for a dtype that a library does not have."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{function}: a result of dtype {spec.dtype}: {error}") from None
