# SPDX-License-Identifier: MIT
"""What a row norm's call launches, for its number of rows and for others."""

from cunorm._core.caps import MAX_SMS, Caps, CpuCaps
from cunorm._core.dtypes import DType
from cunorm._core.param_grad import ParamGradTypes, param_grad_call
from cunorm._core.plan import Alignments, CallSize, KernelCall, Lowered, Sizes
from cunorm._row_norm import launches
from cunorm._row_norm.geometry import Geometry
from cunorm._row_norm.kernels import ForwardTypes, RowKernel


def workspace_bound(compute: DType, geometry: Geometry, parameters: int, caps: Caps | None) -> int:
    """Return the most bytes of the partial sums for a number of parameters."""
    rows = geometry.rows.not_empty()
    if isinstance(caps, CpuCaps):
        parts = launches.cpu_sums(rows)
    else:
        sm_count = MAX_SMS if caps is None else caps.sm_count
        parts = min(rows.rows, launches.cuda_parts(rows, sm_count))
    return parameters * parts * rows.sums_pitch(twice=True) * compute.itemsize


def lower(kernel: RowKernel, params: ParamGradTypes, caps: Caps, alignments: Alignments) -> Lowered:
    types, shape, outputs = kernel.types, kernel.geometry.rows, params.outputs
    if isinstance(caps, CpuCaps):
        planned = launches.cpu_launch(types, shape, caps)
    elif isinstance(types, ForwardTypes):
        access = kernel.access(alignments)
        planned = launches.cuda_forward(types, shape, access, caps, kernel.axes)
    else:
        access, axes = kernel.access(alignments), kernel.axes
        planned = launches.cuda_backward(types, shape.not_empty(), access, caps, axes)
    launch, pitch = planned.launch, planned.launch.sums_pitch
    sums, calls = kernel.sums(launch.sums_size), []
    if shape.rows:
        args = kernel.args(sums)
        calls.append(KernelCall(launch, args, shape.elements, planned.row_parts))
    if outputs:
        parts = launch.parts if shape.rows else 0
        sizes = (parts, pitch, shape.row_width)
        calls.append(param_grad_call(params, kernel.slots, sums, *sizes, caps))

    def sizes_of(rows: int) -> Sizes | None:
        parts, macros = planned.cut(rows)
        if macros != own_macros:
            return None
        elements, sums_size = rows * row_width, parts * pitch
        offsets = [offset for offset in kernel.sums(sums_size) if offset is not None]
        grid = parts * planned.blocks_per_part
        found = [CallSize(grid, elements, (*offsets, rows))]
        if outputs:
            own_grid = calls[1].launch.grid
            found.append(CallSize(own_grid, parts * row_width, (*offsets, parts)))
        return Sizes(outputs * sums_size * itemsize, found)

    row_width, itemsize = shape.row_width, types.compute.itemsize
    _, own_macros = planned.cut(shape.not_empty().rows)
    size = outputs * launch.sums_size * itemsize
    return Lowered(tuple(call.launch for call in calls), lambda: calls, size, sizes_of)
