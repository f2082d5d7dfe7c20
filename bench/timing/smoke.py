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

from bench.timing import engine, gpu, providers
from bench.timing.arguments import seconds
from bench.timing.cases import TIMED, Shape
from bench.timing.gpu_timer import Gpu
from bench.timing.grid import Point

FEATURES = ("none", "async_copies", "clusters", "programmatic_launches")
PROVIDERS = ("cunorm-cupy", "cunorm,cunorm-autograd", "cunorm-jax")  # those of each process
# More rows than blocks of a backward (264 on an H200), so that blocks copy their next rows; rows
# that clusters can share; samples of a group norm.
SHAPES: dict[str, tuple[Shape, ...]] = {
    "rms_norm": ((300, 4096), (37, 1000)),
    "add_layer_norm": ((3, 20001),),
    "rms_norm+fp8": ((3, 20001),),
    "rms_norm+fp8_blocks": ((37, 1000),),
    "layer_norm+modulated": ((3, 100, 1152),),
    "group_norm+silu NHWC": ((2, 320, 16, 16),),
}


def main() -> bool:
    """Run every case, or those of --providers in this process; return whether one failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.timing.smoke", description=__doc__)
    parser.add_argument("--providers", choices=PROVIDERS)
    parser.add_argument("--seconds", type=seconds, default=30.0, help="limit of each process")
    options = parser.parse_args()
    if options.providers:
        # If a call hangs, print where.
        faulthandler.dump_traceback_later(0.9 * options.seconds, exit=True)
        return _check(options.providers) > 0
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2)) as pool:
        run = partial(_run, options.seconds)
        return not all(list(pool.map(run, product(FEATURES, PROVIDERS))))


def _run(limit: float, case: tuple[str, str]) -> bool:
    """Check providers in a process of their own, and print its output; return if they passed."""
    features, names = case
    command = [sys.executable, "-m", "bench.timing.smoke", "--providers", names]
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
    head = f"features {features}, {names}: {verdict} after {time.monotonic() - start:.1f} s"
    print("\n  ".join([head, *output.decode(errors="replace").splitlines()]), flush=True)
    return status == 0


def _check(names: str) -> int:
    """Check providers at all points; return the number of failures."""
    device, found, failed = Gpu(gpu.cupy(), None), providers.load("cuda", names.split(",")), 0
    for operator in TIMED:
        for direction, shape in product(operator.directions, SHAPES.get(operator.label, ())):
            point = Point(operator, direction, "bfloat16", shape)
            failed += engine.failures_at(device, point, found)
    return failed


if __name__ == "__main__":
    sys.exit(main())
