# SPDX-License-Identifier: MIT
"""The OpDef of row norms with a quantised result."""

from collections.abc import Sequence
from functools import partial
from math import prod
from typing import Any

import numpy as np

from cunorm._core.dtypes import dtype_of, numpy_dtype
from cunorm._core.operands import arguments, present
from cunorm._core.plan import OpDef
from cunorm._row_norm.plan import plan_forward
from cunorm._row_norm.quantized_kernel import TABLE, QuantizedKernel
from cunorm._row_norm.quantized_spec import QUANTIZED_CHECKS, RowQuantizedSpec
from cunorm.reference import normalize_forward, quantize, round_to
from cunorm.reference.rows import store
from cunorm.results import QuantizedNorm


def _by_reference(spec: RowQuantizedSpec, arrays: Sequence[Any]) -> None:
    inputs, results = arguments(TABLE.forward_inputs, TABLE.forward_results, arrays)
    scale, stream = inputs.pop("scale"), results["residual"]
    exact = normalize_forward(
        **inputs,
        residual_dtype=None if stream is None else stream.dtype,
        eps=spec.mean_eps(prod(inputs["x"].shape[spec.axis :]) // spec.groups),
        **spec.options(),
    )
    x, weight = (
        None if one is None else dtype_of(spec.function, "x", one.dtype)
        for one in (inputs["x"], inputs["weight"])
    )
    y_dtype = spec.own_dtype(present(x), weight)
    y = round_to(exact.y, numpy_dtype(y_dtype))
    is_wide = np.float64 in (inputs["x"].dtype, None if stream is None else stream.dtype)
    assert isinstance(spec.axis, int)  # by QUANTIZED_CHECKS
    q, found = quantize(
        y.astype(np.float64 if is_wide else np.float32),
        dtype=spec.q_dtype.name,
        scale=spec.scale if scale is None else scale,
        block=spec.block,
        scale_dtype=spec.scale_dtype.name,
        absmax_bound=spec.absmax_bound,
        axis=spec.axis,
        groups=spec.groups,
    )
    store(results, QuantizedNorm(q, found, exact.y, exact.residual))


ROW_QUANTIZED = OpDef(
    name="row_quantized",
    input_slots=TABLE.forward_inputs,
    result_slots=TABLE.forward_results,
    spec_type=RowQuantizedSpec,
    checks=QUANTIZED_CHECKS,
    plan=partial(plan_forward, kernel_type=QuantizedKernel),
    reference=_by_reference,
)
