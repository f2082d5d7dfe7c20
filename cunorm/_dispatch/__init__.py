# SPDX-License-Identifier: MIT
"""The path of every call: its cache, and the planning of a call that the cache does not have.

A call is determined by its scalars and by the signature of its arrays: shape, strides, dtype,
device and alignment. Together they are the key of an Executable in the cache. Calls of row norms
on contiguous arrays that differ only in the number of rows share one plan, if their builds agree.
"""

from collections.abc import Hashable
from contextlib import suppress
from math import prod
from typing import Any

from cunorm._arrays.adapter import ArrayAdapter
from cunorm._arrays.registry import adapter_of, library_types, view_all, view_workspace
from cunorm._core import validate
from cunorm._core.memo import memoize
from cunorm._core.operands import Kind
from cunorm._core.overlap import OverlapCheck
from cunorm._core.plan import OpDef, SpecT
from cunorm._core.tensor import Arrays, Shape, contiguous_strides
from cunorm._dispatch.executable import Executable, Views, pointers_of
from cunorm._dispatch.loading import caps_for, load


class CacheEntry:
    """An entry of the cache, whose executable is None until the call is planned."""

    executable: Executable | None = None


@memoize(maxsize=1024)
def cache_entry(spec: Hashable, *signature: Hashable) -> CacheEntry:
    """Return the cache's entry of a call; a new entry may drop the least recently used call.

    `spec` is an OpSpec, the same object for all calls with the same scalars. A call that fails
    also has an entry, which stays empty.
    """
    return CacheEntry()


@memoize(maxsize=1024)
def rows_entry(spec: Hashable, *key: Hashable) -> list[Executable]:
    """Return the planned calls that differ only in the number of rows, one per set of builds."""
    return []


def clear_calls() -> None:
    """Empty the caches of calls, which keep kernels loaded."""
    cache_entry.cache_clear()
    rows_entry.cache_clear()


def parse(op: OpDef[SpecT], scalars: tuple[Any, ...]) -> SpecT:
    """Return the OpSpec of scalars that are as the caller gave them."""
    try:
        return op.parse(*scalars)
    except TypeError:
        return _parse_unhashable(op, scalars)


def _parse_unhashable(op: OpDef[SpecT], scalars: tuple[Any, ...]) -> SpecT:
    """Return the OpSpec of scalars that cannot be hashed, or raise the error for a wrong scalar."""
    hashable = tuple([tuple(one) if isinstance(one, list | set) else one for one in scalars])
    with suppress(TypeError, ValueError):  # the error of the call below has the caller's scalars
        return op.parse(*hashable)
    spec: SpecT = op.parse.__wrapped__(*scalars)  # type: ignore[attr-defined]  # set by functools
    return spec


def dispatch(op: OpDef[SpecT], scalars: tuple[Any, ...], arrays: Arrays) -> list[Any]:
    """Make a call, and return its outputs.

    `scalars` are the caller's, for `op.parse`. `arrays` are the inputs, then an array or None for
    each output, then a workspace or None.
    """
    try:
        spec = op.parse(*scalars)
    except TypeError:
        spec = _parse_unhashable(op, scalars)
    return dispatch_spec(op, spec, arrays)


def dispatch_spec(op: OpDef[SpecT], spec: SpecT, arrays: Arrays) -> list[Any]:
    """Make a call with an OpSpec; `arrays` are those of `dispatch`."""
    first = arrays[0]
    adapter = library_types.get(type(first)) or adapter_of(spec.function, op.inputs[0], first)
    if adapter.dispatches_itself:
        outputs = adapter.dispatch(op, spec, arrays)
        if outputs is not None:
            return outputs
    signature = adapter.signature(arrays, op.first_output)
    if signature is None:  # several libraries, or one without signatures, or an array to refuse
        return _dispatch_views(op, spec, arrays)
    key_parts, pointers = signature
    entry: CacheEntry = cache_entry(spec, *key_parts)
    executable = entry.executable
    if executable is None:
        executable = entry.executable = _executable(op, spec, adapter, arrays, pointers)
    return executable.run(arrays, pointers)


def _dispatch_views(op: OpDef[SpecT], spec: SpecT, arrays: Arrays) -> list[Any]:
    views = _views(op, spec, arrays)
    key_parts = [
        view and (view.spec, view.pointer & 15, view.writable, view.owner is array)
        for view, array in zip(views, arrays, strict=True)
    ]
    entry: CacheEntry = cache_entry(spec, views[op.x].adapter, *key_parts)
    if entry.executable is None:
        entry.executable = _planned(op, spec, arrays, views)
    executable: Executable = entry.executable
    return executable.run_views(arrays, views)


# --- a call that is not in the cache --------------------------------------------------------------


def _executable(
    op: OpDef[SpecT],
    spec: SpecT,
    adapter: ArrayAdapter,
    arrays: Arrays,
    pointers: list[int],
) -> "Executable":
    """Return an Executable for a call on arrays of one library."""
    found = _rows_key(op, spec, adapter, arrays, pointers)
    if found is None:
        return _planned(op, spec, arrays, _views(op, spec, arrays))
    shape, leading_axes, key = found
    planned: list[Executable] = rows_entry(spec, adapter, leading_axes, *key)
    for executable in planned:
        resized = executable.resized(shape, leading_axes)
        if resized is not None:
            return resized
    executable = _planned(op, spec, arrays, _views(op, spec, arrays))
    if executable.has_other_rows:
        planned.append(executable)
    return executable


def _rows_key(
    op: OpDef[SpecT],
    spec: SpecT,
    adapter: ArrayAdapter,
    arrays: Arrays,
    pointers: list[int],
) -> tuple[Shape, int, list[Any]] | None:
    """Return x's shape, the number of its axes that come before a row's, and a key.

    Calls that differ only in their number of rows have equal keys. The result is None if arrays are
    not in C order or do not fit together, if there is a workspace, or if there are fewer than two
    rows, because a single row has no stride to the next row.
    """
    x = arrays[op.x]
    shape = () if x is None else tuple(x.shape)
    if not shape or arrays[-1] is not None:
        return None
    leading_axes = spec.leading_axes(len(shape))
    rows, row = shape[:leading_axes], shape[leading_axes:]
    if not rows or prod(rows) < 2:
        return None
    has_single = 1 in shape  # the stride along an axis of one element may be any number
    key: list[Any] = [row]
    for slot, array in enumerate(arrays):
        if array is None:
            continue
        kind, expected = op.kinds[slot], shape
        if kind is Kind.PARAMETER:
            expected = row
        elif kind is Kind.STATISTIC:
            groups = tuple(array.shape[leading_axes:])
            expected = (*rows, *groups)
            key.append(groups)
        elif kind is Kind.SCALE:
            own = tuple(array.shape)
            is_single = prod(own) == 1  # for all rows
            expected = own if is_single else (*rows, *own[leading_axes:])
            key += (is_single, own if is_single else own[leading_axes:])
        contiguous_type = adapter.contiguous_type(array)
        if contiguous_type is None or (slot != op.x and array.shape != expected):
            return None
        if has_single and adapter.strides(array) != contiguous_strides(expected):
            return None
        key += (slot, contiguous_type, pointers[slot] & 15)
    return shape, leading_axes, key


def _views(op: OpDef[SpecT], spec: SpecT, arrays: Arrays) -> Views:
    function, workspace = spec.function, arrays[-1]
    names = (*op.inputs, *spec.output_names)
    views = view_all(function, names, arrays[:-1], op.required)
    return [*views, None if workspace is None else view_workspace(function, workspace)]


def _planned(op: OpDef[SpecT], spec: SpecT, arrays: Arrays, views: Views) -> "Executable":
    """Check and plan a call, and load its kernels."""
    function, x, workspace = spec.function, views[op.x], views[-1]
    plan = op.plan(spec, tuple([view and view.spec for view in views[:-1]]))
    names = (*op.inputs, *spec.output_names, "workspace")
    for slot in range(op.first_output, len(views) - 1):
        view = views[slot]
        if view is not None and not (view.owner is arrays[slot] and view.writable):
            raise ValueError(
                f"{function}: {names[slot]} cannot be written to in place, expected a writable, "
                "aligned NumPy, CuPy or PyTorch array (JAX arrays are immutable)"
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
    # An input that is not aligned is copied, and no array overlaps the copy.
    specs = tuple([None if view is None or view.is_new else view.spec for view in views])
    overlaps = OverlapCheck(function, names, specs, op.first_output, plan.aliases)
    pointers = pointers_of(views)
    overlaps.check(pointers)
    alignments = [pointer & 15 for pointer in pointers]
    for input_copy in plan.copies:
        alignments[input_copy.slot] = 0
    loaded = None if plan.is_empty else load(op, spec, plan, caps, alignments, x)
    return Executable(op, plan, views, overlaps, loaded)
