# SPDX-License-Identifier: MIT
"""On a CPU, nothing outside of arrays and variables is read.

Arrays lie beside pages where a read ends the process; and GCC's sanitizers check each access.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cases import call_of
from tests.support.gpu_arrays import OnNumpy
from tests.support.guarded import OnGuarded
from tests.support.host_code import needs_a_compiler
from tests.support.internals import compiler
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


def check_some() -> None:
    """Run some calls of each kernel, in usual memory."""
    for kernel, cases in CASES.items():
        for case in cases[3::2]:
            call_of(kernel, case, OnNumpy()).check()


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


def sanitizers() -> str:
    """Return the libraries that a process must load first; skip without them."""
    if not (compiler().is_gcc and sys.platform == "linux"):
        pytest.skip("needs GCC on Linux")
    found = []
    for name in ("libasan.so", "libubsan.so", "libstdc++.so.6"):
        command = [*compiler().command, f"-print-file-name={name}"]
        path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_file():
            pytest.skip(f"needs GCC's {name}")
        found.append(path)
    return " ".join(found)


@pytest.mark.exhaustive
def test_no_access_is_outside_a_variable(tmp_path):
    options = "-O0 -fsanitize=address,bounds -fno-sanitize-recover=all"
    environment = {"LD_PRELOAD": sanitizers(), "ASAN_OPTIONS": "detect_leaks=0"}
    environment |= {"CUNORM_CXXFLAGS": options, "CUNORM_CACHE_DIR": str(tmp_path)}
    script = "from tests.memory.test_reads import check_some\ncheck_some()"
    in_process(script, setup="", timeout=300, **environment)
