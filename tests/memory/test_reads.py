# SPDX-License-Identifier: MIT
"""On a CPU, nothing outside of arrays is read: beside them lie pages that end the process if read.

backends/test_sanitizers.py checks accesses of variables.
"""

from __future__ import annotations

import sys

import pytest

from tests.support.cases import call_of
from tests.support.guarded import OnGuarded
from tests.support.host_code import needs_a_compiler
from tests.support.operands import at
from tests.support.placed import Samples
from tests.support.processes import in_process

pytestmark = [
    needs_a_compiler,
    pytest.mark.skipif(sys.platform == "win32", reason="Windows has no mprotect"),
]


ROWS = {"center": True, "stream": "+ float32", "d_residual": "float32", "gate": "float32"}
LAST = Samples(2, (5, 3), 70, 7)
FIRST = Samples(2, (7, 11), 6, 3, channels_last=False, channel_axis=1)
OF_ROWS = [
    *(ROWS | {"shape": (1, 1, 3, 5), "x": x} for x in ("float32", "bfloat16")),
    *(ROWS | {"shape": (1, 1, 3, 150), "x": x} for x in ("float32", "bfloat16")),
    ROWS | {"shape": (1, 1, 3, 48), "x": "bfloat16"},
    ROWS | {"shape": (1, 1, 2, 128), "groups": 2},
]
OF_GROUPS = [
    {"samples": samples, "x": x, "activation": "silu"}
    for samples in (LAST, LAST._replace(channels=67, groups=67), FIRST)
    for x in ("float32", "bfloat16")
]
CASES = {
    **dict.fromkeys(("row_norm_forward", "row_norm_backward"), OF_ROWS),
    **dict.fromkeys(("group_norm_forward", "group_norm_backward"), OF_GROUPS),
}


def check(side: str) -> None:
    """Run all calls on guarded memory; tests do so in a child process."""
    for kernel, cases in CASES.items():
        for case in cases:
            with at(kernel, case):
                call_of(kernel, case, OnGuarded(side == "behind")).check()


@pytest.mark.parametrize("side", ["before", "behind"])
def test_memory_beside_an_array_is_not_read(side):
    in_process(f"from tests.memory.test_reads import check\ncheck({side!r})", setup="")


SCRIPT = """
import ctypes
import numpy as np
from tests.support.guarded import OnGuarded
array = OnGuarded({}).allocate(np.zeros(10, np.uint8))
ctypes.string_at(array.ctypes.data + {}, 1)
"""


@pytest.mark.parametrize(("side", "end", "beside"), [("before", 0, -1), ("behind", 9, 10)])
def test_a_read_beside_an_array_ends_the_process(side, end, beside):
    in_process(SCRIPT.format(side == "behind", end), setup="")
    with pytest.raises(AssertionError):
        in_process(SCRIPT.format(side == "behind", beside), setup="")
