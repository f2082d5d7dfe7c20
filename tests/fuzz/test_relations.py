# SPDX-License-Identifier: MIT
"""Each relation holds for right results, and fails for wrong results."""

from __future__ import annotations

import numpy as np
import pytest

from tests.fuzz.relations import RELATIONS
from tests.fuzz.views import contiguous
from tests.support.cases import DEFAULTS, call_of
from tests.support.gpu_arrays import OnNumpy
from tests.support.placed import Samples

ROWS = {"shape": (2, 3, 40), "layouts": (contiguous(3),), "results": (contiguous(3),)}
ROWS |= {"stream": "+ float32", "center": True, "values": "quarters"}
IMAGES = {"samples": Samples(4, (5, 3), 8, 2), "layouts": ("contiguous",)}
CASES = {
    **{f"row_norm_{way}": ROWS for way in ("forward", "backward")},
    **{f"group_norm_{way}": IMAGES | {"values": "quarters"} for way in ("forward", "backward")},
}
OF_ROWS = {"weight_own": "10", "bias_own": "1", "gate": "float32", "gate_position": "branch"}
MODULATED = {
    **{f"row_norm_{way}": OF_ROWS | {"gate_own": "01 scalar"} for way in ("forward", "backward")},
    **{
        f"group_norm_{way}": {"weight_own": "1", "bias_own": "0"} for way in ("forward", "backward")
    },
}
RELATED = [(kernel, name) for kernel, relations in RELATIONS.items() for name in relations]
ONLY_PLAIN = [("row_norm_forward", "shifted_x"), *((kernel, "split_batch") for kernel in RELATIONS)]


@pytest.mark.parametrize(("kernel", "name"), RELATED)
@pytest.mark.parametrize("is_modulated", [False, True], ids=["plain", "modulated"])
def test_a_relation_fails_only_for_wrong_results(kernel, name, is_modulated):
    case, relation = DEFAULTS | CASES[kernel], RELATIONS[kernel][name]
    case |= MODULATED[kernel] if is_modulated else {}
    result = call_of(kernel, case, OnNumpy()).check()
    applies = relation(kernel, case, call_of(kernel, case, OnNumpy()), result, 3)
    assert applies != (is_modulated and (kernel, name) in ONLY_PLAIN)
    if not applies:
        return
    arrays = (a if a is None else a + np.ones((), a.dtype) for a in result)
    wrong = type(result)(*arrays)
    with pytest.raises(AssertionError):
        relation(kernel, case, call_of(kernel, case, OnNumpy()), wrong, 3)
