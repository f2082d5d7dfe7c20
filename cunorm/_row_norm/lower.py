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
    types, shape = kernel.types, kernel.geometry.rows
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
    if params.outputs:
        parts = launch.parts if shape.rows else 0
        sizes = (parts, pitch, shape.row_width)
        calls.append(param_grad_call(params, kernel.slots, sums, *sizes, caps))

    def build_of(rows: int) -> object:
        takes_one_part = params.outputs and planned.parts_of(rows) == 1
        return planned.build_of(rows), takes_one_part

    def sizes_of(rows: int) -> Sizes | None:
        if build_of(rows) != own_build:
            return None
        parts = planned.parts_of(rows)
        offsets = [one for one in kernel.sums(parts * pitch) if one is not None]
        grid, elements = parts * planned.blocks_per_part, rows * shape.row_width
        found = [CallSize(grid, elements, (*offsets, rows))]
        if params.outputs:
            of_params = (*offsets, parts)
            found.append(CallSize(calls[1].launch.grid, parts * shape.row_width, of_params))
        return Sizes(params.outputs * parts * pitch * types.compute.itemsize, found)

    own_build = build_of(shape.rows) if shape.rows else None
    size = params.outputs * launch.sums_size * types.compute.itemsize
    return Lowered(tuple(call.launch for call in calls), lambda: calls, size, sizes_of)
