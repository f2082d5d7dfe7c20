# SPDX-License-Identifier: MIT
"""Run scripts in separate interpreters, for tests of what happens once in a process."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).parents[2]
SETUP = textwrap.dedent("""
    import multiprocessing, os, sys, threading
    import numpy as np
    import cunorm

    def tasks():
        return len(os.listdir("/proc/self/task"))

    def check(seed, backward=True):
        # These tolerances show wrong numbers, but not wrong roundings.
        rng = np.random.default_rng(seed)
        x, dy = (rng.standard_normal((600, 257)).astype(np.float32) for _ in range(2))
        weight = rng.standard_normal(257).astype(np.float32)
        forward = cunorm.rms_norm_forward(x, weight)
        exact = cunorm.reference.rms_norm_forward(x, weight)
        np.testing.assert_allclose(forward.y, exact.y, rtol=0, atol=1e-4)
        if not backward:
            return
        grads = cunorm.rms_norm_backward(dy, x, weight, rstd=forward.rstd)
        exact_grads = cunorm.reference.rms_norm_backward(dy, x, weight, rstd=exact.rstd)
        np.testing.assert_allclose(grads.dx, exact_grads.dx, rtol=0, atol=1e-4)
        np.testing.assert_allclose(grads.dweight, exact_grads.dweight, rtol=0, atol=1e-3)
""")


def in_process(script: str, *, setup: str = SETUP, timeout: int = 120, **environment: str) -> str:
    """Run a script, and return its output; the test fails if the script raises or hangs."""
    # Python 3.12 warns about forks of processes with threads.
    command = [sys.executable, "-W", "ignore:This process:DeprecationWarning", "-c", setup + script]
    finished = subprocess.run(
        command,
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def python(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run the interpreter in a separate process; any exit status is accepted."""
    options = {"capture_output": True, "text": True, "cwd": ROOT}
    command, env = [sys.executable, *arguments], {**os.environ, **environment}
    return subprocess.run(command, **options, env=env, check=False)


def is_running(process: int) -> bool:
    """Return whether a process runs, on Linux; a zombie does not run."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def resident() -> int:
    """Return the bytes of this process that are in memory, on Linux."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
