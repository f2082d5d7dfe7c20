# SPDX-License-Identifier: MIT
"""The first calls on a GPU: each case in its own process, so that a crash ends no other case.

Every front end of cunorm runs without the features of `cunorm/_core/caps.py`, then with each
feature alone, so that the log shows which feature is at fault. Results are compared with the
oracle.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product

from bench.timing import engine, gpu_timer, providers
from bench.timing.arguments import seconds
from bench.timing.cases import OPERATORS, Shape
from bench.timing.grid import DIRECTIONS, Point

FEATURES = ("none", "async_copies", "clusters", "programmatic_launches")
PROVIDERS = ("cunorm-cupy", "cunorm", "cunorm-autograd", "cunorm-jax")
# More rows than blocks of a backward (264 on an H200), so that blocks copy their next rows; rows
# that clusters can share; samples of a group norm.
SHAPES: dict[str, tuple[Shape, ...]] = {
    "rms_norm": ((300, 4096), (37, 1000)),
    "add_layer_norm": ((3, 20001),),
    "group_norm+silu NHWC": ((2, 320, 16, 16),),
}


def main() -> int:
    """Run every case, or those of the provider that --provider names; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.timing.smoke", description=__doc__)
    parser.add_argument("--provider", choices=PROVIDERS)
    parser.add_argument("--seconds", type=seconds, default=30.0, help="limit of each process")
    options = parser.parse_args()
    if options.provider:
        # If a call hangs, print where.
        faulthandler.dump_traceback_later(0.9 * options.seconds, exit=True)
        return _check(options.provider)
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2)) as pool:
        run = partial(_run, options.seconds)
        return int(not all(list(pool.map(run, *zip(*product(FEATURES, PROVIDERS), strict=True)))))


def _run(limit: float, features: str, provider: str) -> bool:
    """Check a provider in a process of its own, and print its output; return whether it passed."""
    command = [sys.executable, "-m", "bench.timing.smoke", "--provider", provider]
    start = time.monotonic()
    try:
        ran = subprocess.run(
            [*command, "--seconds", str(limit)],
            env={**os.environ, "CUNORM_FEATURES": features},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit,
            check=False,
        )
        status, output = ran.returncode, ran.stdout
    except subprocess.TimeoutExpired as error:  # the process did not end itself
        status, output = 124, error.stdout or b""
    verdict = "passed" if status == 0 else f"FAILED with status {status}"
    head = f"features {features}, {provider}: {verdict} after {time.monotonic() - start:.1f} s"
    print("\n  ".join([head, *output.decode(errors="replace").splitlines()]), flush=True)
    return status == 0


def _check(name: str) -> int:
    """Check a provider at all points; return the number of failures."""
    device, found, failed = gpu_timer.find(), providers.load("cuda", [name]), 0
    for operator, direction in product(OPERATORS, DIRECTIONS):
        for shape in SHAPES.get(operator.label, ()):
            point = Point(operator, direction, "bfloat16", shape)
            failed += engine.failures_at(device, point, found)
    return failed


if __name__ == "__main__":
    sys.exit(main())
