# SPDX-License-Identifier: MIT
"""Every call: its cache, and the road of a call that is not in it.

A call follows from its scalars, and from the signature of its arrays: shape, strides, dtype, device
and alignment. The cache has an Executable for both. No address is part of its key.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from cunorm._arrays.adapter import Signature, copied
from cunorm._arrays.cupy import stream_after_all
from cunorm._arrays.numpy import numpy_view
from cunorm._arrays.registry import adapter_of, library_types, view_all, view_workspace
from cunorm._backends import cpu, cuda
from cunorm._backends.cpu import with_scratch
from cunorm._backends.cpu.compiler import has_compiler
from cunorm._backends.cpu.threads import last_cache_bytes
from cunorm._core import validate
from cunorm._core.build import Launch
from cunorm._core.caps import Caps, CpuCaps
from cunorm._core.memo import memoize
from cunorm._core.overlap import OverlapCheck
from cunorm._core.plan import Alignments, OpDef, Plan
from cunorm._core.tensor import ArrayView, Device, OptionalSpecs, TensorSpec, bytes_spec

Views = list[Any]  # an ArrayView or None for each array of a call, the workspace last
Pointers = Sequence[int]  # the same; 0 for None
Run = Callable[[Pointers], object]


@dataclass(slots=True, eq=False)
class CacheEntry:
    """An entry of the cache: a loaded call, or None until it was planned."""

    executable: Any = None


@memoize(maxsize=1024)
def cache_entry(spec: Hashable, *signature: Hashable) -> CacheEntry:
    """Return the cache's entry of a call; the least recently used call is dropped.

    `spec` is an OpSpec, one object for all calls of the same scalars. Calls that fail have an entry
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
    with suppress(TypeError, ValueError):  # an error names the scalars as the caller gives them
        return op.parse(*hashable)
    return op.parse.__wrapped__(*params)  # type: ignore[attr-defined]  # of functools


def dispatch(op: OpDef, params: tuple[Any, ...], arrays: tuple[Any, ...]) -> list[Any]:
    """Make a call, and return its outputs.

    `params` are its scalars, as the caller gives them, for `op.parse`; `arrays` are its inputs, an
    array or None for each output, and a workspace or None.
    """
    return dispatch_spec(op, parse(op, params), arrays)


def dispatch_spec(op: OpDef, spec: Any, arrays: tuple[Any, ...]) -> list[Any]:
    """Make a call, as `dispatch`, of an OpSpec."""
    first = arrays[0]
    adapter = library_types.get(type(first)) or adapter_of(spec.function, op.inputs[0], first)
    if adapter.dispatches_itself:
        outputs = adapter.dispatch(op, spec, arrays)
        if outputs is not None:
            return outputs
    views = None
    signature = adapter.signature(arrays, op.first_output)
    if signature is None:  # arrays of several libraries, JAX's, DLPack's, or wrong ones
        views = _views(op, spec, arrays)
        signature = _signature(op, arrays, views)
    key_parts, pointers = signature
    entry: CacheEntry = cache_entry(spec, *key_parts)
    executable: Executable | None = entry.executable
    if executable is None:
        executable = entry.executable = _executable(op, spec, arrays, views)
    if views is None:
        return executable.run(arrays, pointers)
    return executable.run_views(arrays, views)


# --- a call that is not in the cache --------------------------------------------------------------


def _views(op: OpDef, spec: Any, arrays: Sequence[Any]) -> Views:
    """Return the views of all arrays, the workspace too."""
    function, workspace = spec.function, arrays[-1]
    names = (*op.inputs, *spec.output_names)
    views = view_all(function, names, arrays[:-1], op.required)
    return [*views, None if workspace is None else view_workspace(function, workspace)]


def _signature(op: OpDef, arrays: Sequence[Any], views: Views) -> Signature:
    """Return what the cache's key has of the views of a call, and their addresses."""
    key_parts = [
        view and (view.spec, view.pointer & 15, view.writable, view.owner is array)
        for view, array in zip(views, arrays, strict=True)
    ]
    return [views[op.x].adapter, *key_parts], _pointers(views)


def _pointers(views: Views) -> list[int]:
    return [0 if view is None else view.pointer for view in views]


def _executable(op: OpDef, spec: Any, arrays: Sequence[Any], views: Views | None) -> "Executable":
    """Check and plan a call; load its kernels."""
    views = views or _views(op, spec, arrays)
    function, x, workspace = spec.function, views[op.x], views[-1]
    plan = op.plan(spec, tuple([view and view.spec for view in views[:-1]]))
    names = (*op.inputs, *spec.output_names, "workspace")
    for place in range(op.first_output, len(views) - 1):
        view = views[place]
        if view is not None and not (view.owner is arrays[place] and view.writable):
            raise ValueError(
                f"{function}: {names[place]} cannot be written to in place, expected a writable, "
                "aligned array (JAX arrays are immutable)"
            )
    caps = caps_for(plan, x.spec.device)
    if workspace is not None:
        nbytes, least = workspace.spec.nbytes, plan.workspace_bound(caps)
        if nbytes < least:
            raise ValueError(
                f"{function}: workspace has {nbytes} bytes, expected at least {least}, as "
                "cunorm.workspace_size says"
            )
        validate.same_device(function, x.spec, [("workspace", workspace.spec)])
    # Nothing overlaps an input that is not aligned, as its view is of a copy.
    specs = tuple([None if view is None or view.is_new else view.spec for view in views])
    overlaps = OverlapCheck(function, names, specs, op.first_output, plan.aliases)
    pointers = _pointers(views)
    overlaps.check(pointers)
    alignments = [pointer & 15 for pointer in pointers]
    for copy in plan.copies:
        alignments[copy.place] = 0
    run = None if plan.is_empty else _loaded(op, spec, plan, caps, alignments, x)
    return Executable(op, plan, views, overlaps, run)


def caps_for(plan: Plan | None, device: Device) -> Caps:
    """Return what launches may use of a device; those of a plan, only clusters that fit there."""
    if device.kind == "cpu":
        return CpuCaps(last_cache_bytes())
    if plan is None or plan.is_empty:
        return cuda.gpu_caps(device)  # type: ignore[no-any-return]
    return cuda.caps_that_fit(device, lambda caps: plan.lower(caps, None).launches[0])


def launches_of(plan: Plan, device: Device) -> list[Launch]:
    """Return the launches of a plan, of aligned arrays."""
    if plan.is_empty:
        return []
    return [*plan.lower(caps_for(plan, device), None).launches]


def _loaded(
    op: OpDef, spec: Any, plan: Plan, caps: Caps, alignments: Alignments, x: ArrayView
) -> Run:
    """Return a function that runs a plan's kernels, on a GPU on the stream that is current then.

    It may be called with another device current: adapters allocate on a device, a launch is of one.
    """
    device, adapter = x.spec.device, x.adapter
    if device.kind == "cpu":
        return cpu_run(op, spec, plan, caps)
    lowered = plan.lower(caps, alignments)
    start = cuda.launcher(lowered.calls(), device)
    memory = bytes_spec(lowered.workspace, device) if lowered.workspace else None

    def run(pointers: Pointers) -> None:
        if memory is None or pointers[-1]:
            start(pointers, adapter.stream(device))
        else:
            # The allocator may give it away again at once: to what the same stream does later.
            workspace = adapter.allocate(memory)
            start([*pointers[:-1], workspace.pointer], adapter.stream(device))

    return run


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
        for one, pointer in zip(specs, pointers[:-1], strict=True)  # the workspace is the last
    ]
    op.reference(spec, views)


# --- a call that is in the cache ------------------------------------------------------------------


class Executable:
    """A loaded plan: it runs on any arrays of the same signature."""

    def __init__(
        self, op: OpDef, plan: Plan, views: Views, overlaps: OverlapCheck, run: Run | None
    ) -> None:
        self._adapter, self._device = views[op.x].adapter, views[op.x].spec.device
        self._function, self._names, self._overlaps = overlaps.function, overlaps.names, overlaps
        self._run = run  # None: no kernel runs
        self._outputs, self._shared, self._axes = plan.outputs, plan.shared, dict(plan.copies)
        self._results = slice(op.first_output, op.array_count - 1)
        self._has_given = any(views[op.first_output :])  # outputs, or a workspace, of the caller
        self._checked: list[int] = []  # addresses of the last call with such
        realigned = [place for place, view in enumerate(views) if view and view.is_new]
        self._copied = sorted({*realigned, *self._axes})
        self._pointer = self._adapter.pointer
        self._allocations = [self._allocation(views, *output) for output in plan.outputs]

    def run(self, arrays: tuple[Any, ...], pointers: list[int]) -> list[Any]:
        """Run on arrays of one library, which lie at these addresses, and return the outputs."""
        if self._has_given and pointers != self._checked:
            if pointers[-1] & 15:
                view_workspace(self._function, arrays[-1])  # raises
            self._overlaps.check(pointers)
            self._checked = pointers[:]
        copies = self._copies(arrays, pointers) if self._copied else None
        every = [*arrays]
        for place, allocate, model in self._allocations:
            array = every[place] = allocate(arrays[model])
            pointers[place] = self._pointer(array)
        if self._run is not None:
            self._run(pointers)
        del copies  # not before the kernels have read them
        if self._has_given:
            self._adapter.bump_version(arrays[self._results])
        for place, source in self._shared:
            every[place] = every[source]
        return every[self._results]

    def _copies(self, arrays: Sequence[Any], pointers: list[int]) -> list[ArrayView]:
        """Copy inputs that kernels cannot read where they lie, and return the copies."""
        copies = []
        for place in self._copied:
            view = self._adapter.view(self._function, self._names[place], arrays[place])
            if place in self._axes:
                view = copied(view, self._axes[place])
            pointers[place] = view.pointer
            copies.append(view)
        return copies

    def run_views(self, arrays: tuple[Any, ...], views: Views) -> list[Any]:
        """Run on arrays of any libraries, and return the outputs."""
        self._overlaps.check(_pointers(views))
        for place, axes in self._axes.items():
            views[place] = copied(views[place], axes)
        for place, spec in self._outputs:
            with _naming(self._function, spec):
                views[place] = self._adapter.allocate(spec)
        pointers, adapter, device = _pointers(views), self._adapter, self._device
        if self._run is not None and device.kind == "cpu":
            self._run(pointers)
        elif self._run is not None:
            present = [view for view in views if view is not None]
            with adapter.device_scope(device), stream_after_all(adapter, present, device):
                self._run(pointers)
        every = [*arrays]
        every[self._results] = [view and view.adapter.export(view) for view in views[self._results]]
        for place, source in self._shared:
            every[place] = every[source]
        return every[self._results]

    def _allocation(
        self, views: Views, place: int, spec: TensorSpec
    ) -> tuple[int, Callable[[Any], Any], int]:
        """Return the place of an output, its allocator, and the place of the array to give that.

        It is quicker to allocate like another array, where one has the same spec.
        """
        models = (
            model
            for model, view in enumerate(views[:-1])  # the workspace's spec is that of bytes
            if view and view.spec == spec and view.adapter is self._adapter and not view.is_new
        )
        model = next(models, None)
        with _naming(self._function, spec):
            allocate = self._adapter.allocator(spec, has_model=model is not None)
        return place, allocate, model or 0


@contextmanager
def _naming(function: str, spec: TensorSpec) -> Iterator[None]:
    """Name a function in the error for an output that a library cannot have."""
    try:
        yield
    except TypeError as error:
        raise TypeError(f"{function}: a result of dtype {spec.dtype}: {error}") from None
