# SPDX-License-Identifier: MIT
"""`warmup`: compile ahead, several builds at once, what calls will need."""

from __future__ import annotations

import time
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from cunorm import _checks, _cpu, _cuda
from cunorm._arrays import CPU, Device
from cunorm._builds import Build
from cunorm._described_calls import FUNCTION, AnyLayer, described_calls, positive, several
from cunorm._planned_builds import builds as planned_builds
from cunorm.row_norm._backward_plan import NEEDS


class Warmup(NamedTuple):
    """What `warmup` did.

    Attributes
    ----------
    builds : int
        How many builds the described calls need; all of them are loaded now.
    compiled : int
        For how many of them this call made the C++ compiler run. On CUDA, how many kernels it
        loaded: CuPy compiles them or takes them from its cache on disk, and does not say which.
    seconds : float
        How long that took.
    """

    builds: int
    compiled: int
    seconds: float


def warmup(
    ops: Any,
    widths: Any,
    dtypes: Any,
    *,
    device: Any,
    rows: Any = None,
    weight: Any = "auto",
    bias: Any = None,
    residual: Any = "auto",
    gate: Any = None,
    d_residual: Any = "auto",
    dtype: Any = None,
    residual_dtype: Any = None,
    center: Any = False,
    groups: Any = 1,
    weight_offset: Any = 0.0,
    round_before_weight: Any = False,
    gate_activation: Any = "silu",
    gate_position: Any = "post",
    num_groups: Any = None,
    positions: Any = None,
    layout: Any = "channels_last",
    activation: Any = None,
    needs: Collection[str] = NEEDS,
    accumulate: Any = False,
    workers: int | None = None,
    progress: bool = True,
) -> Warmup:
    """Compile and load what calls of norms will need, several builds at once.

    Without it, each call compiles what it needs when it is first made, one build after the other.
    What is compiled is kept on disk, so that it also serves later processes.

    Where "one or several" is said, a list or tuple stands for each of its items, and every
    combination of all of them is compiled.

    Parameters
    ----------
    ops : str, one or several
        Names of public functions, each of which means that function alone: "rms_norm" is what
        inference calls, ("rms_norm_forward", "rms_norm_backward") is what training calls.
    widths : int, one or several
        Elements of a row of x: all its axes from `axis` on, all groups. Of a group norm, channels.
    dtypes : dtype, one or several
        Of x: "float16", "bfloat16", "float32" or "float64", or what a framework calls those.
    device : str
        "cpu", "cuda" (the one that is current), or "cuda:1".
    rows : int, one or several, optional
        Rows of x, or a group norm's samples. No build is for one number of rows, but few and many
        may need different ones: on a CPU a result too large for its caches has a build of its own,
        and a few long rows, or samples of a group norm, are shared among the cores; on a GPU a
        backward of many rows copies the next one ahead. By default all of these are compiled.
    weight, bias, residual, gate : dtype or bool or None, one or several
        The forward's operands: a dtype, or True for that of x; None or False where there is none.
        By default, which is "auto", there is a weight, if the function takes one, and the functions
        ``add_…`` have a residual; no bias, no gate. A backward is that of the forward described: it
        gets the residual stream as x, a dy of y's dtype, and x's dtype as `x_dtype`.
    d_residual : dtype or bool or None, one or several
        The gradient that reaches the residual stream, for a backward; True for the stream's dtype,
        which is what the default, "auto", means where the forward writes a stream.
    dtype, residual_dtype : dtype, one or several, optional
        Of y (and dy), and of the new residual stream, by default as the forward has them.
    center, groups, weight_offset, round_before_weight, gate_activation, gate_position : optional
        As the row norms take them, one or several. Of `weight_offset` it matters whether it is 0.
    num_groups : int, one or several
        As the group norms take it, which all but "instance_norm" must be told.
    positions : int, one or several
        Of a sample of a group norm: the product of its spatial axes. They must be told it.
    layout : str, one or several
        How x lies in memory for a group norm: "channels_last", as a NumPy array with channel_axis
        -1 does, or "channels_first", as a contiguous tensor with channel_axis 1.
    activation : str or None, one or several
        As the group norms take it.
    needs, accumulate : optional
        As the backward takes them; with `accumulate`, into arrays of rstd's dtype.
    workers : int, optional
        Builds that are compiled at once; by default as many as there are cores for this process.
    progress : bool, optional
        Whether to show a bar, if the package tqdm is installed.

    Returns
    -------
    Warmup
        How many builds there are, how many of them were compiled now, and the seconds that took.

    Raises
    ------
    TypeError, ValueError
        If a value is not among those above, does not go with the others, or is for an option that
        none of the functions has. Checked before anything is compiled.
    ImportError
        For CUDA, if CuPy or NVRTC is not installed.
    RuntimeError
        If there is no such device or no C++ compiler, or a build does not compile: raised when all
        the others are done, for the first of them.

    Notes
    -----
    On CUDA the builds are those for contiguous arrays that begin at multiples of 16 bytes, as new
    arrays do. A call with others, such as a slice that begins elsewhere, may need one more.

    Examples
    --------
    >>> import cunorm
    >>> cunorm.warmup("rms_norm", 256, "float32", device="cpu", rows=8, progress=False)
    Warmup(builds=1, compiled=..., seconds=...)

    What training calls for 8 images of 16 by 16 positions and 64 channels in 4 groups:

    >>> cunorm.warmup(
    ...     ("group_norm_forward", "group_norm_backward"), 64, "float32", device="cpu", rows=8,
    ...     positions=16 * 16, num_groups=4, activation="silu", bias=True, progress=False,
    ... )
    Warmup(builds=..., compiled=..., seconds=...)
    """
    options = {
        "weight": weight,
        "bias": bias,
        "residual": residual,
        "gate": gate,
        "d_residual": d_residual,
        "dtype": dtype,
        "residual_dtype": residual_dtype,
        "center": center,
        "groups": groups,
        "weight_offset": weight_offset,
        "round_before_weight": round_before_weight,
        "gate_activation": gate_activation,
        "gate_position": gate_position,
        "num_groups": num_groups,
        "positions": positions,
        "layout": layout,
        "activation": activation,
        "needs": (needs,),
        "accumulate": accumulate,
    }
    progress = _checks.flag(FUNCTION, "progress", progress)
    workers = _cpu.available_cores() if workers is None else positive("workers", workers)
    row_counts = None if rows is None else _sizes("rows", rows)
    sizes = _sizes("widths", widths)
    calls = list(described_calls(ops, dtypes, options))
    place = _device(device)
    return _prepared(_builds(calls, row_counts, sizes, place), place, workers, progress)


def _builds(
    calls: list[tuple[str, AnyLayer]], rows: list[int] | None, widths: list[int], device: Device
) -> list[Build]:
    """Return the builds of all calls with all shapes, each once, in their order."""
    builds: dict[Build, None] = {}
    for (name, layer), width in product(calls, widths):
        builds |= dict.fromkeys(planned_builds(name, layer, rows, width, device))
    return list(builds)


def _sizes(argument: str, given: Any) -> list[int]:
    return [positive(argument, size) for size in several(argument, given)]


def _device(name: Any) -> Device:
    """Return the device of a name; it is there, and there is a compiler for it."""
    kind, _, number = str(name).partition(":")
    if kind == "cpu" and number in ("", "0"):
        if _cpu.compiler() is None:
            raise RuntimeError(
                f"{FUNCTION}: no C++ compiler is found: install g++ or clang++, or point CXX at one"
            )
        return CPU
    if kind != "cuda" or not (number.isdecimal() or number == ""):
        raise ValueError(f'{FUNCTION}: device is {name!r}, expected "cpu", "cuda" or "cuda:1"')
    try:
        device = Device("cuda", int(number) if number else _cuda.current_device())
        _cuda.device_limits(device)
    except RuntimeError as error:  # CuPy's for all that the driver says
        raise RuntimeError(f"{FUNCTION}: device is {name!r}: {error}") from error
    _cuda.nvrtc_version()  # raises where there is none
    return device


def _prepared(builds: list[Build], device: Device, workers: int, progress: bool) -> Warmup:
    """Compile and load builds at once, as many as there are workers."""
    start = time.perf_counter()
    on_gpu = device.kind == "cuda"
    prepare = partial(_cuda.prepare, device=device) if on_gpu else _cpu.prepare
    with ThreadPoolExecutor(workers) as pool, _bar(len(builds), progress) as bar:
        tasks = {pool.submit(prepare, build): build for build in builds}
        try:
            for _ in as_completed(tasks):
                bar.update()
        except BaseException:  # the user does not want to wait
            for task in tasks:
                task.cancel()
            raise
    _raise_first_error(tasks)
    compiled = sum(task.result() for task in tasks)
    return Warmup(len(builds), compiled, time.perf_counter() - start)


def _raise_first_error(tasks: dict[Future[Any], Build]) -> None:
    failed = [(build, error) for task, build in tasks.items() if (error := task.exception())]
    if failed:
        build, error = failed[0]
        text = str(error) if str(build) in str(error) else f"{build}: {error}"
        counts = f"{len(failed)} of {len(tasks)} builds failed, the first of them"
        raise RuntimeError(f"{FUNCTION}: {counts}: {text}") from error


class _NoBar:
    """Stands for a bar that is not shown."""

    def update(self) -> None:
        """Do nothing."""


def _bar(total: int, shown: bool) -> Any:
    try:
        if not shown:
            return nullcontext(_NoBar())
        from tqdm.auto import tqdm
    except ImportError:
        return nullcontext(_NoBar())
    # tqdm's thread that watches bars would stay for as long as the process lives.
    unwatched = type("Bar", (tqdm,), {"monitor_interval": 0})
    return unwatched(total=total, desc="cunorm compiles", unit="build", miniters=1)
