# SPDX-License-Identifier: MIT
"""Sanitizers find nothing in the CPU's builds.

A sanitizer runs in another process, which loads the sanitizer's library at its start.
AddressSanitizer and UndefinedBehaviorSanitizer check a cover of operands and layouts.
ThreadSanitizer checks kernels whose threads share rows, samples or sums. It does not know OpenMP's
barriers, so C++ threads and POSIX barriers replace OpenMP.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from itertools import product
from pathlib import Path

import pytest

from tests.support.caches import gcc
from tests.support.case_covers import FACTORS
from tests.support.internals import _compile, compiler

pytestmark = [gcc, pytest.mark.exhaustive]

PROGRAM = """
import sys
from tests.support import levels
levels.use("O1")
import os
os.environ["CUNORM_CXXFLAGS"] = sys.argv[1]
import cunorm
cunorm.set_num_threads(3)
from tests.backends.test_sanitizers import {function}
{function}(*sys.argv[2:])
print("all are run")
"""


def of_a_cover(kernel: str) -> None:
    from tests.operators.test_combinations import check
    from tests.support.case_covers import builds

    for case in builds(kernel):
        check(kernel, case)


def run(tmp_path: Path, function: str, library: str, options: str, *arguments: str) -> str:
    """Run a function with a sanitizer; return all that is printed."""
    found = [*compiler().command, f"-print-file-name={library}"]
    found = subprocess.run(found, capture_output=True, text=True, check=True).stdout.strip()
    if not Path(found).is_absolute():
        pytest.skip(f"the compiler has no {library}")
    more = {"LD_PRELOAD": found, "CUNORM_CACHE_DIR": os.fspath(tmp_path / "cache")}
    more |= {"ASAN_OPTIONS": "detect_leaks=0", "UBSAN_OPTIONS": "print_stacktrace=1"}
    program = [sys.executable, "-c", PROGRAM.format(function=function), options, *arguments]
    fixed = ["setarch", "-R"]  # ThreadSanitizer expects memory at certain addresses
    if not shutil.which("setarch") or subprocess.run([*fixed, "true"]).returncode:
        pytest.skip("needs `setarch -R`")
    started = {"capture_output": True, "text": True, "env": os.environ | more, "timeout": 3600}
    ran = subprocess.run([*fixed, *program], **started)
    assert ran.returncode == 0 and "all are run" in ran.stdout, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


@pytest.mark.parametrize("kernel", FACTORS)
def test_no_address_and_no_undefined_operation_is_reported(kernel, tmp_path):
    options = "-O1 -g -fsanitize=address,undefined -fno-sanitize-recover=all"
    assert "ERROR" not in run(tmp_path, "of_a_cover", "libasan.so", options, kernel)


# --- threads --------------------------------------------------------------------------------------

PARALLEL = """#include <pthread.h>
#include <thread>
static pthread_barrier_t barrier;
template <class F> void parallel(int threads, F f) {
  pthread_barrier_init(&barrier, nullptr, threads);
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) others.emplace_back(f, i);
  f(0);
  for (auto& other : others) other.join();
  pthread_barrier_destroy(&barrier);
}
"""
CHANGES = {
    "#ifdef _OPENMP\n  //": "#if true\n  //",
    "#pragma omp parallel num_threads(threads)\n": "parallel(threads, [&](int number) {\n",
    "omp_get_thread_num()": "number",
    "omp_get_num_threads()": "threads",
    "#pragma omp barrier": "pthread_barrier_wait(&barrier);",
    "    return 0;\n  }\n#endif": "    });\n    return 0;\n  }\n#endif",
    "  threads = threads_that_start(threads);\n": "",  # for OpenMP only
    "// Runs a thread's share": PARALLEL + "// Runs a thread's share",
}


def threaded(folder: Path) -> Path:
    """Write a launch.h with threads and barriers that ThreadSanitizer knows; return its folder."""
    text = (_compile._HOST / "launch.h").read_text("utf-8")
    for old, new in CHANGES.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "launch.h").write_text(text, "utf-8")
    return folder


def of_threads() -> None:
    """Call kernels whose threads share rows, samples or sums."""
    from tests.support.cases import call_of
    from tests.support.gpu_arrays import OnNumpy
    from tests.support.placed import Samples

    rows = [(1, 1, 1, 70_000), (1, 1, 2, 20_000), (1, 1, 500, 300)]
    samples = [(1, (64, 64), 32, 4), (1, (31, 97), 10, 2), (5, (40, 40), 16, 4)]
    cases = [("row", {"shape": shape, "center": True}) for shape in rows]
    cases += [("group", {"samples": Samples(*s, last)}) for s in samples for last in (True, False)]
    for (family, case), way, x in product(cases, ("forward", "backward"), ("float32", "bfloat16")):
        gate = {"gate": x} if family == "row" else {}
        call_of(f"{family}_norm_{way}", case | gate | {"x": x}, OnNumpy()).check()


OF_THREADS = "-O1 -g -fno-openmp -fsanitize=thread -I"


def test_no_race_of_threads_is_reported(tmp_path):
    printed = run(tmp_path, "of_threads", "libtsan.so", f"{OF_THREADS}{threaded(tmp_path)}")
    assert "WARNING: ThreadSanitizer" not in printed


def test_a_missing_barrier_is_a_race_that_is_reported(tmp_path):
    launch = threaded(tmp_path) / "launch.h"
    launch.write_text(launch.read_text().replace("pthread_barrier_wait(&barrier);", ";"))
    with pytest.raises(AssertionError, match="WARNING: ThreadSanitizer: data race"):
        run(tmp_path, "of_threads", "libtsan.so", f"{OF_THREADS}{tmp_path}")
