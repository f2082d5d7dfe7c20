# SPDX-License-Identifier: MIT
"""Each relation holds for right results, and does not for wrong ones."""

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
OF_BACKWARDS, OF_FORWARDS = {"twice_dy", "split_batch"}, {"shifted_x", "add_then_norm"}


def applies(relation, kernel):
    if relation == "other_function":
        return kernel != "group_norm_backward"
    others = OF_FORWARDS if "backward" in kernel else OF_BACKWARDS
    return relation not in others and (relation, kernel[:5]) != ("add_then_norm", "group")


@pytest.mark.parametrize("kernel", CASES)
@pytest.mark.parametrize("relation", RELATIONS)
def test_a_relation_fails_for_wrong_results_alone(relation, kernel):
    case = DEFAULTS | CASES[kernel]
    call = call_of(kernel, case, OnNumpy())
    result = call.check()
    RELATIONS[relation](kernel, case, call, result, 3)
    if applies(relation, kernel):
        call = call_of(kernel, case, OnNumpy())
        arrays = (a if a is None else a + np.ones((), a.dtype) for a in result)
        with pytest.raises(AssertionError):
            RELATIONS[relation](kernel, case, call, type(result)(*arrays), 3)
