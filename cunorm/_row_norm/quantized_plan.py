# SPDX-License-Identifier: MIT
"""The OpDef of row norms with a quantised result."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from cunorm._core.plan import OpDef
from cunorm._row_norm.plan import plan_forward
from cunorm._row_norm.quantized_kernel import TABLE, QuantizedKernel
from cunorm._row_norm.quantized_spec import QUANTIZED_CHECKS, RowQuantizedSpec


def _by_reference(spec: RowQuantizedSpec, arrays: Sequence[Any]) -> None:
    raise NotImplementedError


ROW_QUANTIZED = OpDef(
    name="row_quantized",
    input_slots=TABLE.forward_inputs,
    result_slots=TABLE.forward_results,
    spec_type=RowQuantizedSpec,
    checks=QUANTIZED_CHECKS,
    plan=partial(plan_forward, kernel_type=QuantizedKernel),
    reference=_by_reference,
)
