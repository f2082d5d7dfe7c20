# SPDX-License-Identifier: MIT
"""Any subset of the gradients is right, on every instruction set of this machine.

Memory in which builds keep values between passes is poisoned first: see `machines.py`. The fuzzer
also draws subsets of the gradients.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.case_covers import ACTIVATIONS, NEEDS
from tests.support.cases import call_of
from tests.support.covers import everything, label
from tests.support.gpu_arrays import OnNumpy
from tests.support.host_code import needs_a_compiler
from tests.support.machines import compiled_for, machines
from tests.support.operands import DTYPES, at
from tests.support.placed import Samples

pytestmark = needs_a_compiler

# The last pack of each row is cut. In a group norm of the first of SIZES, a thread keeps h, the
# gradient before the activation, from one pass to the next. In the second, the workspace keeps h.
# Where h is quick to compute again, it is not kept.
WIDTHS = (3, 300)
SIZES = ((2, (30,), 40, 8), (3, (97,), 400, 4))


def check(kernel, case):
    with compiled_for(case["machine"]):
        for size in SIZES if "group" in kernel else WIDTHS:
            size_case = {"shape": (1, 1, 5, size)}
            if "group" in kernel:
                size_case = {"samples": Samples(*size, case["channels_last"])}
            with at(size_case):
                call_of(kernel, case | size_case | {"workspace": True}, OnNumpy()).check()


@pytest.mark.parametrize("machine", machines())
def test_gradients_of_a_gate_or_of_weight_and_gate_are_not_old_memory(machine):
    """Without dx and center, a post-gate's backward reduces over no row.

    So no first pass stores values, and the kernel must not read the memory for such values.
    """
    dtypes = dict.fromkeys(("x", "dy", "gate"), "float16")
    size_case = {"shape": (1, 1, 3, 300), **dtypes, "bias": None}
    for needs in [("gate",), ("weight", "gate")]:
        check("row_norm_backward", size_case | {"needs": needs, "machine": machine})


# --- all subsets ----------------------------------------------------------------------------------

_ALL = {"x": tuple(DTYPES), "machine": machines()}
OF_ROWS = {"gate_position": ("post", "pre"), "gate_activation": ACTIVATIONS, **_ALL}
OF_GROUPS = {"channels_last": (True, False), "activation": (None, *ACTIVATIONS[:-1]), **_ALL}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("kernel", "needs"),
    [pytest.param(k, n, id=f"{k}-{'-'.join(n)}") for k in NEEDS for n in NEEDS[k]],
)
def test_all_gradients_with_all_activations_positions_and_dtypes_are_within_their_bounds(
    kernel, needs
):
    for case in everything(OF_GROUPS if "group" in kernel else OF_ROWS):
        dtypes = dict.fromkeys(("dy", "gate"), case["x"])
        with at(label(case)), np.errstate(all="ignore"):
            check(kernel, case | dtypes | {"needs": needs})
