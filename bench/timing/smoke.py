# SPDX-License-Identifier: MIT
"""The first calls on a GPU: each case in its own process, so that a crash ends no other case.

The cases run without the features of `cunorm/_core/caps.py`, then with each feature alone (`room`
only with clusters), so that the log shows which feature is at fault. The results are compared with
the oracle.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

import cunorm
from bench.timing import gpu
from bench.timing.arguments import seconds
from bench.timing.arrays import as_host, as_torch, upload
from bench.timing.cases import (
    OPERATORS,
    TOLERANCE,
    Operands,
    check,
    host_operands,
    oracle,
    worst_error,
)
from bench.timing.peers import torch_backward, torch_forward
from bench.timing.providers.base import require_gpu
from cunorm._backends import cuda, driver
from cunorm._core.build import KernelBuild, Launch
from cunorm._core.tensor import Device

FEATURES = ("none", "async_copies", "clusters", "programmatic_launches")
OPERATOR, *_ = OPERATORS  # rms_norm, whose leaves are x and weight
# A backward's blocks copy their next rows only if there are more rows than blocks: 264 on an H200.
DTYPE, SHAPE = "bfloat16", (300, 4096)
WIDE, FEW_ROWS, ROWS = 20001, 3, 9  # width of rows for clusters; rows in calls; rows in a warmup
# Rows that fill a GPU, and fewer; rows that clusters can share; samples of a group norm.
OF_CUPY = {
    "rms_norm": (SHAPE, (37, 1000)),
    "add_layer_norm": ((FEW_ROWS, WIDE),),
    "group_norm+silu NHWC": ((2, 320, 16, 16),),
}


def main() -> int:
    """Run every case, or the case that --case names; return 1 if a case failed."""
    parser = argparse.ArgumentParser(prog="python -m bench.timing.smoke", description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--seconds", type=seconds, default=30.0, help="limit of each case")
    options = parser.parse_args()
    if options.case is None:
        pairs = [
            (features, name, options.seconds)
            for features in FEATURES
            for name in CASES
            if name != "room" or features == "clusters"
        ]
        with ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2)) as pool:
            return int(not all(list(pool.map(lambda case: _run(*case), pairs))))
    # If a call hangs, print where.
    faulthandler.dump_traceback_later(0.9 * options.seconds, exit=True)
    try:
        CASES[options.case]()
    except ImportError as error:
        print(f"skipped: {error}")
    return 0


def _run(features: str, name: str, limit: float) -> bool:
    """Run a case in a process of its own, and print its output; return whether it succeeded."""
    command = [sys.executable, "-m", "bench.timing.smoke", "--case", name, "--seconds", str(limit)]
    environment = {**os.environ, "CUNORM_FEATURES": features}
    start = time.monotonic()
    try:
        ran = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit,
            check=False,
        )
        status, output = ran.returncode, ran.stdout
    except subprocess.TimeoutExpired as error:  # the case did not end itself
        status, output = 124, error.stdout or b""
    verdict = "passed" if status == 0 else f"FAILED with status {status}"
    head = f"features {features}, {name}: {verdict} after {time.monotonic() - start:.1f} s"
    print("\n  ".join([head, *output.decode(errors="replace").splitlines()]), flush=True)
    return status == 0


def on_cupy() -> None:
    """Forward and backward of some norms, on CuPy's arrays."""
    cupy = gpu.cupy()
    for operator in OPERATORS:
        for shape in OF_CUPY.get(operator.label, ()):
            error = check(operator, DTYPE, shape, partial(upload, cupy), cupy.asnumpy)
            _judge(f"{operator.label} {shape}", error)


def on_torch() -> None:
    """cunorm.torch's forward, and its backward, which autograd runs on another thread."""
    require_gpu("torch")
    host, cupy = host_operands(OPERATOR, DTYPE, SHAPE), gpu.cupy()
    tensors = {name: as_torch(upload(cupy, array)) for name, array in host.items()}
    import cunorm.torch

    norm = partial(cunorm.torch.rms_norm, eps=OPERATOR.eps)
    _judge_all("forward", host, (torch_forward(norm, OPERATOR, tensors)(),))
    _judge_all("backward", host, _torch_gradients(tensors))


def on_another_thread() -> None:
    """Check that, after a warmup, a backward on another thread finds room for clusters."""
    cupy, asked, ask = gpu.cupy(), [], driver.clusters_that_fit

    def noted(*launch: Any) -> int:
        asked.append((threading.current_thread() is threading.main_thread(), ask(*launch)))
        return asked[-1][1]

    driver.clusters_that_fit = noted
    both = ("rms_norm_forward", "rms_norm_backward")
    cunorm.warmup(both, WIDE, "float32", device="cuda", rows=ROWS, progress=False)
    host = host_operands(OPERATOR, "float32", (FEW_ROWS, WIDE))
    arrays = {name: upload(cupy, array) for name, array in host.items()}
    results: list[Any] = []
    try:
        require_gpu("torch")
    except ImportError as error:
        print(f"without autograd: {error}")
        thread = threading.Thread(target=lambda: results.extend(_with_cupy(arrays)))
        thread.start()
        thread.join()
    else:
        results.extend(_torch_gradients({name: as_torch(a) for name, a in arrays.items()}))
    _judge_all("backward", host, results, "float32")
    print("asked on the main thread, and how many clusters fit:", *asked)
    if cuda.gpu_caps(Device("cuda", 0)).features.clusters:
        assert not all(is_main for is_main, _ in asked), "another thread never asked the driver"
        assert all(fit for _, fit in asked), "the driver found no room for a cluster"


def _with_cupy(arrays: Operands) -> Any:
    x, weight = arrays["x"], arrays["weight"]
    rstd = cunorm.rms_norm_forward(x, weight, eps=OPERATOR.eps).rstd
    grads = cunorm.rms_norm_backward(arrays["dy"], x, weight, rstd=rstd)
    return grads.dx, grads.dweight


def _torch_gradients(tensors: Operands) -> Any:
    import torch

    import cunorm.torch

    norm = partial(cunorm.torch.rms_norm, eps=OPERATOR.eps)
    return torch_backward(torch, norm, OPERATOR, tensors)()


def on_jax() -> None:
    """cunorm.jax without jit, under jit, and its gradients under jit."""
    host, arrays = _of_jax()
    import jax

    import cunorm.jax

    norm = partial(cunorm.jax.rms_norm, eps=OPERATOR.eps)
    pull_back = jax.jit(lambda x, weight, dy: jax.vjp(norm, x, weight)[1](dy))
    x, weight, dy = arrays["x"], arrays["weight"], arrays["dy"]
    _judge_all("forward", host, (norm(x, weight),))
    _judge_all("forward", host, (jax.jit(norm)(x, weight),))
    _judge_all("backward", host, pull_back(x, weight, dy))


def mixed() -> None:
    """Call cunorm with arrays of JAX and of CuPy."""
    host, arrays = _of_jax()
    weight = upload(gpu.cupy(), host["weight"])
    _judge_all("forward", host, (cunorm.rms_norm(arrays["x"], weight, eps=OPERATOR.eps),))


def room() -> None:
    """Print how many clusters of each size the driver has room for."""
    cupy = gpu.cupy()
    if int(cupy.cuda.Device().compute_capability) < 90:
        raise ImportError("clusters need compute capability 9.0")
    for blocks in (2, 4, 8, 16):
        source = f'extern "C" __global__ void __cluster_dims__({blocks}, 1, 1) probe(int* x) {{}}'
        kernel = cupy.RawKernel(source, "probe", ("-std=c++17",))
        driver.allow_large_clusters(cupy, kernel.kernel)
        fit = {}
        for shared in (0, 64 << 10, 128 << 10, 224 << 10):
            kernel.max_dynamic_shared_size_bytes = shared
            build = KernelBuild("probe", (("CLUSTER", str(blocks)),))
            launch = Launch(build, blocks, 1024, shared=shared)
            fit[f"{shared >> 10} KiB"] = driver.clusters_that_fit(cupy, kernel.kernel, launch)
        print(f"clusters of {blocks} blocks of 1024 threads, by shared memory of a block: {fit}")


CASES = {
    "cupy": on_cupy,
    "torch": on_torch,
    "thread": on_another_thread,
    "jax": on_jax,
    "mixed": mixed,
    "room": room,
}


def _of_jax() -> tuple[Operands, Operands]:
    """Return operands on the host, and as JAX arrays on the GPU; ImportError without JAX's CUDA."""
    import jax

    try:
        device = jax.devices("cuda")[0]
    except RuntimeError as error:
        raise ImportError(f"JAX has no CUDA: {error}") from error
    host = host_operands(OPERATOR, DTYPE, SHAPE)
    return host, {name: jax.device_put(array, device) for name, array in host.items()}


def _judge_all(direction: str, host: Operands, results: Any, dtype: str = DTYPE) -> None:
    """Compare the results of a direction with the oracle."""
    names = OPERATOR.outputs(direction)
    found = {name: np.asarray(as_host(one)) for name, one in zip(names, results, strict=True)}
    _judge(direction, worst_error(found, oracle(OPERATOR, direction, host)), dtype)


def _judge(what: str, error: float, dtype: str = DTYPE) -> None:
    print(f"{what}: error {error:.1e}", flush=True)
    if not error <= TOLERANCE[dtype]:
        raise ArithmeticError(f"{what} is wrong by {error:.1e} of the largest value")


if __name__ == "__main__":
    sys.exit(main())
