# SPDX-License-Identifier: MIT
"""Libraries of one version share their threads' variables; other libraries share nothing."""

from __future__ import annotations

import re
import shutil
import subprocess

import numpy as np
import pytest

import cunorm
from tests.support.caches import fresh_process, gcc, libraries
from tests.support.internals import FLOAT32, ForwardTypes, RowShape, _compile, cpu_forward
from tests.support.processes import in_process

pytestmark = gcc  # libraries of other compilers share nothing

EXPORTED = re.compile(r"cunorm_blocks|cunorm_run|_Z\w*\d+cunorm_([0-9a-f]{32})\w+")


@pytest.mark.compiled("O3")
def test_libraries_export_entry_points_and_shared_variables_named_by_their_version(tmp_path):
    if shutil.which("nm") is None:
        pytest.skip("needs nm, of binutils, to list symbols")
    x = np.ones((2, 8), np.float16)
    with fresh_process(CUNORM_CACHE_DIR=tmp_path):
        y = cunorm.rms_norm_forward(x, gate=x, gate_position="pre")
        cunorm.rms_norm_backward(x, x, x[0], gate=x, gate_position="pre", rstd=y.rstd)
        found = libraries(tmp_path)
    assert len(found) == 3
    versions = set()
    for library in found:
        listed = ["nm", "-D", "--defined-only", "--format=posix", library]
        printed = subprocess.run(listed, capture_output=True, text=True, check=True).stdout
        names = [line.split()[0] for line in printed.splitlines()]
        matches = list(map(EXPORTED.fullmatch, names))
        assert all(matches), names
        versions |= {match[1] for match in matches if match[1]}
        assert ("kept_lines" in printed) == ("norm" in library.name), "only norms share kept_lines"
    assert len(versions) == 1


@pytest.mark.parametrize("what", ["_stand_ins", "compiler"])
def test_the_name_of_shared_variables_depends_on_headers_and_compiler(monkeypatch, what):
    names = []

    def compile_build(build, cxx, options, text, target):
        names.append(re.search("#define LIBRARIES (.*)", text)[1])

    monkeypatch.setattr(_compile, "_compile", compile_build)
    monkeypatch.setattr(_compile, "checksum_matches", lambda target: False)
    build = cpu_forward(ForwardTypes(FLOAT32, x=FLOAT32, y=FLOAT32), RowShape(8, 8)).build
    _compile._compiled(build)
    changed = {
        "_stand_ins": lambda: "another",
        "compiler": lambda: _compile.Compiler(("another",), "another", True),
    }
    monkeypatch.setattr(_compile, what, changed[what])
    _compile._compiled(build)
    assert len({*names}) == 2


TWO = """
from tests.support.cases import call_of
from tests.support.gpu_arrays import OnNumpy
from tests.support.machines import compiled_for, edited
import pathlib
cunorm.set_num_threads(2)
other = edited(pathlib.Path({folder!r}), {{"gang.h": ("int next_ring = 0;", {gang!r})}})
gated = {{"shape": (1, 1, 40, 300), "gate": "float16"}}
calls = [call_of("row_norm_forward", {{"shape": (1, 1, 2, 40_000)}}, OnNumpy())]
calls += [call_of("row_norm_backward", gated, OnNumpy())]
for headers in (None, other, None, other):
    with compiled_for("native", headers):
        for call in calls:
            call.check()
"""


def test_two_versions_of_the_headers_in_a_process_give_right_results(tmp_path):
    """The second version has a larger thread-local variable."""
    more = "long long more[16] = {}; int next_ring = 0;"
    in_process(TWO.format(folder=str(tmp_path), gang=more))
