# SPDX-License-Identifier: MIT
"""Every call: its cache, and the road of a call that is not in it.

A call follows from its scalars, and from the signature of its arrays: shape, strides, dtype, device
and alignment. The cache has an Executable for both. No address is part of its key.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from cunorm._arrays.adapter import ArrayAdapter, copied
from cunorm._arrays.cupy import joined
from cunorm._arrays.numpy import numpy_view
from cunorm._arrays.registry import adapter_of, library_types, view_all, view_workspace
from cunorm._backends import cpu, cuda
from cunorm._backends.cpu import with_scratch
from cunorm._backends.cpu.compiler import has_compiler
from cunorm._backends.cpu.threads import last_cache_bytes
from cunorm._core import overlap, validate
from cunorm._core.build import Launch
from cunorm._core.caps import Caps, CpuCaps
from cunorm._core.memo import memoize
from cunorm._core.plan import Alignments, Lowered, OpDef, Plan
from cunorm._core.tensor import ArrayView, Device, OptionalSpecs, TensorSpec, bytes_spec

Pointers = Sequence[int]  # of all arrays of a call, the workspace last; 0 for none
Run = Callable[[Pointers], object]


class CacheEntry:
    """A place in the cache; `executable` is None until the call was planned."""

    __slots__ = ("executable",)

    def __init__(self) -> None:
        self.executable: Executable | None = None


@memoize(maxsize=1024)
def cache_entry(spec: Hashable, *signature: Hashable) -> CacheEntry:
    """Return the place of a call in the cache, which drops the least recently used call.

    `spec` is an OpSpec, one object for all calls of the same scalars. Calls that fail have a place
    too, which stays empty.
    """
    return CacheEntry()


def parse(op: OpDef, params: tuple[Any, ...]) -> Any:
    """Return the OpSpec of scalars as the caller gives them."""
    try:
        return op.parse(*params)
    except TypeError:  # one of them is wrong, or cannot be hashed
        pass
    hashable = tuple([tuple(one) if isinstance(one, list | set) else one for one in params])
    try:
        return op.parse(*hashable)
    except (TypeError, ValueError):  # the error has the scalars as the caller gave them
        pass
    return op.parse.__wrapped__(*params)  # type: ignore[attr-defined]  # of functools


def dispatch(op: OpDef, params: tuple[Any, ...], arrays: tuple[Any, ...]) -> list[Any]:
    """Make a call, and return its outputs.

    Parameters
    ----------
    op : OpDef
        The operator.
    params : tuple
        Its scalars, as the caller gives them, for `op.parse`.
    arrays : tuple
        Its inputs, an array or None for each of its outputs, and a workspace or None.
    """
    return dispatch_spec(op, parse(op, params), arrays)


def dispatch_spec(op: OpDef, spec: Any, arrays: tuple[Any, ...]) -> list[Any]:
    """Make a call, as `dispatch`, of an OpSpec."""
    first = arrays[0]
    adapter = library_types.get(type(first)) or adapter_of(spec.function, op.inputs[0], first)
    if adapter.makes_calls:
        outputs = adapter.dispatch(op, spec, arrays)
        if outputs is not None:
            return outputs
    signature = adapter.signature(arrays, op.first_output)
    if signature is None:
        return _call_views(op, spec, arrays)
    facts, pointers = signature
    entry: CacheEntry = cache_entry(spec, *facts)
    executable = entry.executable
    if executable is None:
        executable = entry.executable = _executable(op, spec, _views(op, spec, arrays), arrays)
    return executable.run(arrays, pointers)


# --- a call that is not in the cache --------------------------------------------------------------


def _views(op: OpDef, spec: Any, arrays: Sequence[Any]) -> list[ArrayView | None]:
    """Return the views of all arrays, the workspace too."""
    function, workspace = spec.function, arrays[-1]
    names = (*op.inputs, *spec.output_names)
    views = view_all(function, names, arrays[:-1], op.required)
    return [*views, None if workspace is None else view_workspace(function, workspace)]


def _executable(
    op: OpDef, spec: Any, views: list[ArrayView | None], arrays: Sequence[Any]
) -> Executable:
    """Check and plan a call; load its kernels."""
    function = spec.function
    plan = op.plan(spec, tuple([None if view is None else view.spec for view in views[:-1]]))
    x, workspace = views[op.x], views[-1]
    assert x is not None
    device, adapter = x.spec.device, x.adapter
    for place in range(op.first_output, len(views) - 1):
        view = views[place]
        if view is not None and not (view.owner is arrays[place] and view.writable):
            raise ValueError(
                f"{function}: {spec.output_names[place - op.first_output]} cannot be written to in "
                "place, expected a writable, aligned array (JAX arrays are immutable)"
            )
    caps = caps_for(plan, device)
    if workspace is not None:
        _check_workspace(function, workspace.spec, plan.workspace_bound(caps), x.spec)
    # Inputs that are not aligned: the views are of copies, which nothing overlaps.
    realigned = [
        place
        for place, view in enumerate(views[: op.first_output])
        if view is not None and view.is_new
    ]
    given = _Given.of(op, spec, plan, views, realigned)
    given.check([0 if view is None else view.pointer for view in views])
    alignments = [0 if view is None else view.pointer & 15 for view in views]
    for copy in plan.copies:
        alignments[copy.place] = 0
    run = None if plan.is_empty else _loaded(op, spec, plan, caps, alignments, device, adapter)
    allocations = [
        _allocation(function, adapter, place, spec, views, realigned)
        for place, spec in plan.outputs
    ]
    return Executable(op, plan, adapter, device, run, given, realigned, allocations)


def _check_workspace(function: str, spec: TensorSpec, size: int, x: TensorSpec) -> None:
    if spec.nbytes < size:
        raise ValueError(
            f"{function}: workspace has {spec.nbytes} bytes, expected at least {size}, as "
            "cunorm.workspace_size says"
        )
    validate.same_device(function, x, [("workspace", spec)])


def device_caps(device: Device) -> Caps:
    """Return what launch plans may use of a device."""
    if device.kind == "cpu":
        return CpuCaps(last_cache_bytes())
    return cuda.gpu_caps(device)  # type: ignore[no-any-return]


def caps_for(plan: Plan, device: Device) -> Caps:
    """Return what the launches of a plan may use of a device: only clusters that fit there."""
    if device.kind == "cpu" or plan.is_empty:
        return device_caps(device)
    return cuda.caps_that_fit(device, lambda caps: plan.lower(caps, None).launches[0])


def launches_of(plan: Plan, device: Device) -> list[Launch]:
    """Return the launches of a plan, of aligned arrays."""
    if plan.is_empty:
        return []
    return [*plan.lower(caps_for(plan, device), None).launches]


def _loaded(
    op: OpDef,
    spec: Any,
    plan: Plan,
    caps: Caps,
    alignments: Alignments,
    device: Device,
    adapter: ArrayAdapter,
) -> Run:
    """Return a function that runs the kernels of a plan, given where arrays lie."""
    if device.kind == "cuda":
        lowered = plan.lower(caps, alignments)
        return cuda_run(lowered, device, adapter, adapter.stream)
    return cpu_run(op, spec, plan, caps)


def cpu_run(op: OpDef, spec: Any, plan: Plan, caps: Caps) -> Run:
    """Return a function that runs a plan's kernels on the CPU, or the reference in their place."""
    if not has_compiler():
        return partial(_run_reference, op, spec, plan.kernel_specs())
    lowered = plan.lower(caps, None)
    run = cpu.runner(lowered.calls(), op.array_count)
    return with_scratch(lowered.workspace, run) if lowered.workspace else run


def _run_reference(op: OpDef, spec: Any, specs: OptionalSpecs, pointers: Pointers) -> None:
    views = [
        None if one is None else numpy_view(ArrayView(pointer, one, None, None, writable=True))
        for one, pointer in zip(specs, pointers, strict=False)
    ]
    op.reference(spec, views)


def cuda_run(
    lowered: Lowered, device: Device, adapter: ArrayAdapter, stream_of: Callable[[Device], int]
) -> Run:
    """Return a function that starts kernels on a GPU, on the stream that is current then."""
    start = cuda.launcher(lowered.calls(), device)
    memory = bytes_spec(lowered.workspace, device) if lowered.workspace else None

    def on_stream(pointers: Pointers) -> None:
        if memory is not None and not pointers[-1]:
            # The allocator may give it away again at once: to what the same stream does later.
            workspace = adapter.allocate(memory)
            start([*pointers[:-1], workspace.pointer], stream_of(device))
        else:
            start(pointers, stream_of(device))

    def run(pointers: Pointers) -> None:
        if cuda.current_device() == device.index:
            on_stream(pointers)
        else:
            with adapter.device_scope(device):
                on_stream(pointers)

    return run


def _call_views(op: OpDef, spec: Any, arrays: tuple[Any, ...]) -> list[Any]:
    """Make a call on arrays that have no signature: of several libraries, JAX's, DLPack's."""
    views = _views(op, spec, arrays)
    x = views[op.x]
    assert x is not None
    facts = [
        None if view is None else (view.spec, view.pointer & 15, view.writable, view.owner is array)
        for view, array in zip(views, arrays, strict=True)
    ]
    entry: CacheEntry = cache_entry(spec, x.adapter, *facts)
    executable = entry.executable
    if executable is None:
        executable = entry.executable = _executable(op, spec, views, arrays)
    return executable.run_views(arrays, views)


# --- a call that is in the cache ------------------------------------------------------------------


class _Given(NamedTuple):
    """Arrays that the caller gives for outputs, and for a workspace; none may overlap another."""

    function: str
    names: tuple[str, ...]
    specs: OptionalSpecs
    pairs: list[overlap.Pair]
    aliases: dict[int, tuple[int, ...]]

    @classmethod
    def of(
        cls,
        op: OpDef,
        spec: Any,
        plan: Plan,
        views: Sequence[ArrayView | None],
        realigned: Collection[int],
    ) -> _Given:
        """Return those of a call; `realigned` are the places of inputs that were copied."""
        specs = tuple([None if view is None else view.spec for view in views])
        given = [place for place in range(op.first_output, len(specs)) if specs[place] is not None]
        names = (*op.inputs, *spec.output_names, "workspace")
        pairs = [
            pair
            for pair in overlap.pairs(specs, op.first_output, given)
            if pair.other not in realigned
        ]
        return cls(spec.function, names, specs, pairs, plan.aliases)

    def check(self, pointers: Pointers) -> None:
        """Check that no output shares memory with another array, but for exact aliases."""
        for pair in self.pairs:
            output, other, least, most = pair
            difference = pointers[output] - pointers[other]
            if least < difference < most:
                self._check_pair(output, other, difference)

    def _check_pair(self, output: int, other: int, difference: int) -> None:
        spec, other_spec = self.specs[output], self.specs[other]
        assert spec is not None
        assert other_spec is not None
        may_be_same = other in self.aliases.get(output, ())
        if may_be_same and difference == 0 and spec == other_spec:
            return
        if not overlap.share_memory(spec, other_spec, difference):
            return
        also = " (or exactly the memory, shape, strides and dtype of an input)"
        raise ValueError(
            f"{self.function}: {self.names[output]} overlaps {self.names[other]}, expected memory "
            f"of its own{also if may_be_same else ''}"
        )


class _Allocation(NamedTuple):
    """An output to allocate: its place, its allocator, and the place of the array to give it."""

    place: int
    allocate: Callable[[Any], Any]
    model: int


class Executable:
    """A loaded plan: it runs on any arrays of the same signature."""

    def __init__(
        self,
        op: OpDef,
        plan: Plan,
        adapter: ArrayAdapter,
        device: Device,
        run: Run | None,
        given: _Given,
        realigned: Sequence[int],
        allocations: Sequence[_Allocation],
    ) -> None:
        self._adapter, self._device, self._run = adapter, device, run
        self._outputs, self._copies, self._shared = plan.outputs, plan.copies, plan.shared
        self._given, self._realigned, self._allocations = given, realigned, allocations
        self._first, self._last = op.first_output, op.array_count - 1
        self._checked: list[int] = []  # addresses of the last call with given outputs
        self._has_given = any(spec is not None for spec in given.specs[self._first :])
        self._has_copies = bool(realigned or plan.copies)
        self._pointer = adapter.pointer

    def run(self, arrays: tuple[Any, ...], pointers: list[int]) -> list[Any]:
        """Run on arrays of one library, which lie at these addresses, and return the outputs."""
        if self._has_given and pointers != self._checked:
            if pointers[-1] & 15:
                view_workspace(self._given.function, arrays[-1])  # raises
            self._given.check(pointers)
            self._checked = pointers[:]
        copies = self._copied(arrays, pointers) if self._has_copies else None
        found = [*arrays]
        for place, allocate, model in self._allocations:
            array = found[place] = allocate(arrays[model])
            pointers[place] = self._pointer(array)
        if self._run is not None:
            self._run(pointers)
        del copies  # not before the kernels have read them
        if self._has_given:
            self._adapter.bump_version(arrays[self._first : self._last])
        for place, source in self._shared:
            found[place] = found[source]
        return found[self._first : self._last]

    def _copied(self, arrays: Sequence[Any], pointers: list[int]) -> list[ArrayView]:
        """Copy inputs that kernels cannot read where they lie, and return the copies."""
        function, names = self._given.function, self._given.names
        copies = []
        for place in self._realigned:
            view = self._adapter.view(function, names[place], arrays[place])
            pointers[place] = view.pointer
            copies.append(view)
        for place, axes in self._copies:
            view = copied(self._adapter.view(function, names[place], arrays[place]), axes)
            pointers[place] = view.pointer
            copies.append(view)
        return copies

    def run_views(self, arrays: tuple[Any, ...], views: list[ArrayView | None]) -> list[Any]:
        """Run on arrays of any libraries, and return the outputs."""
        self._given.check([0 if view is None else view.pointer for view in views])
        for place, axes in self._copies:
            view = views[place]
            assert view is not None
            views[place] = copied(view, axes)
        for place, spec in self._outputs:
            with _naming(self._given.function, spec):
                views[place] = self._adapter.allocate(spec)
        pointers = [0 if view is None else view.pointer for view in views]
        if self._run is not None and self._device.kind == "cpu":
            self._run(pointers)
        elif self._run is not None:
            present = [view for view in views if view is not None]
            device = self._device
            with self._adapter.device_scope(device), joined(self._adapter, present, device):
                self._run(pointers)
        found = [*arrays]
        for place in range(self._first, self._last):
            view = views[place]
            found[place] = None if view is None else view.adapter.export(view)
        for place, source in self._shared:
            found[place] = found[source]
        return found[self._first : self._last]


def _allocation(
    function: str,
    adapter: ArrayAdapter,
    place: int,
    spec: TensorSpec,
    views: Sequence[ArrayView | None],
    realigned: Sequence[int],
) -> _Allocation:
    """Return how to make an output: like another array, which is quicker, where one is like it."""
    models = (
        model
        for model, view in enumerate(views[:-1])  # not the workspace, whose spec is of its bytes
        if view is not None and view.spec == spec and view.adapter is adapter
    )
    model = next((model for model in models if model not in realigned), None)
    with _naming(function, spec):
        allocate = adapter.allocator(spec, has_model=model is not None)
    return _Allocation(place, allocate, model or 0)


@contextmanager
def _naming(function: str, spec: TensorSpec) -> Iterator[None]:
    """Name a function in the error for an output that a library cannot have."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{function}: a result of dtype {spec.dtype}: {error}") from None
