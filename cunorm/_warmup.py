# SPDX-License-Identifier: MIT
"""`warmup`: compile ahead, several builds at once, what calls will need."""

from __future__ import annotations  # help() has the names of the aliases

import time
from collections.abc import Iterator, Set, ValuesView
from contextlib import nullcontext
from inspect import signature
from itertools import product
from numbers import Number
from typing import Any, Literal, NamedTuple, TypeAlias

from cunorm import _group_norm, _row_norm
from cunorm._backends import cuda
from cunorm._backends.cpu.compiler import compiler, search
from cunorm._backends.cpu.threads import available_cores
from cunorm._backends.pool import compile_concurrently, progress_bar
from cunorm._core import validate
from cunorm._core.build import KernelBuild
from cunorm._core.dtypes import DType, parse_dtype, parse_optional_dtype
from cunorm._core.tensor import CPU, Device
from cunorm._core.types import Activation, DTypeLike, GatePosition, Layout, Needs, Several
from cunorm._group_norm.builds import LAYOUTS, group_builds
from cunorm._row_norm.builds import FUNCTION, Options, row_builds
from cunorm._row_norm.spec import NEEDS

AUTO = "auto"
FUNCTIONS = (*_row_norm.__all__, *_group_norm.__all__)
Operand: TypeAlias = Several[DTypeLike | bool | None]


class Warmup(NamedTuple):
    """What `warmup` did: the builds that calls need, all loaded now, and the seconds that took.

    `compiled` counts the builds for which it ran the C++ compiler. On CUDA it counts the kernels
    that it loaded: CuPy does not say which of them it compiled and which it had on disk.
    """

    builds: int
    compiled: int
    seconds: float


def warmup(
    ops: Several[str],
    widths: Several[int],
    dtypes: Several[DTypeLike],
    *,
    device: str,
    rows: Several[int] | None = None,
    weight: Operand | Literal["auto"] = "auto",
    bias: Operand = None,
    residual: Operand | Literal["auto"] = "auto",
    gate: Operand = None,
    d_residual: Operand | Literal["auto"] = "auto",
    dtype: Several[DTypeLike | None] = None,
    residual_dtype: Several[DTypeLike | None] = None,
    center: Several[bool] = False,
    groups: Several[int] = 1,
    weight_offset: Several[float] = 0.0,
    round_before_weight: Several[bool] = False,
    gate_activation: Several[Activation] = "silu",
    gate_position: Several[GatePosition] = "post",
    num_groups: Several[int] | None = None,
    positions: Several[int] | None = None,
    layout: Several[Layout] = "channels_last",
    activation: Several[Activation | None] = None,
    needs: Needs = NEEDS,
    accumulate: Several[bool] = False,
    workers: int | None = None,
    progress: bool = True,
) -> Warmup:
    """Compile and load what calls of norms will need, several builds at once.

    Without it, a call compiles what it needs when it is first made, and says so on standard error
    if that takes long. The builds are kept on disk for later processes, too. On CUDA they are for
    contiguous arrays that begin at multiples of 16 bytes, as new arrays do; a call with others,
    such as a slice, may need one more. "One or several" is a value or a list or tuple of values;
    every combination of all of them is compiled.

    Parameters
    ----------
    ops : str, one or several
        Names of public functions, each for that function alone: inference calls "rms_norm",
        training ("rms_norm_forward", "rms_norm_backward").
    widths : int, one or several
        Elements of a row of x: all its axes from `axis` on, all groups. Of a group norm, channels.
    dtypes : dtype, one or several
        Of x: "float16", "bfloat16", "float32" or "float64", or a framework's dtype.
    device : str
        "cpu", "cuda" (the current one), or "cuda:1".
    rows : int, one or several, optional
        Rows of x, or a group norm's samples; by default any number, as few and many rows, and large
        results, may need different builds.
    weight, bias, residual, gate : dtype or bool or None, one or several
        The forward's operands: a dtype, or True for that of x; None or False where there is none.
        By default, "auto", there is a weight, if the function takes one, and a residual for the
        functions ``add_…``; no bias, no gate. A backward is that of the forward described: it gets
        the residual stream as x, a dy of y's dtype, and x's dtype as `x_dtype`.
    d_residual : dtype or bool or None, one or several
        A backward's gradient of the residual stream; True for the stream's dtype, which is also the
        default, "auto", where the forward writes a stream.
    dtype, residual_dtype : dtype, one or several, optional
        Of y (and dy), and of the new residual stream, by default as the forward has them.
    center, groups, weight_offset, round_before_weight, gate_activation, gate_position : optional
        As the row norms take them, one or several. Of `weight_offset` it matters whether it is 0.
    num_groups, activation : int, and str or None, one or several
        As the group norms take them; all but "instance_norm" need `num_groups`.
    positions : int, one or several
        Of a sample of a group norm, which needs it: the product of its spatial axes.
    layout : str, one or several
        A group norm's memory layout of x: "channels_last", as of a NumPy array with channel_axis
        -1, or "channels_first", as of a contiguous tensor with channel_axis 1.
    needs, accumulate : optional
        As the backward takes them; with `accumulate`, into arrays of rstd's dtype.
    workers : int, optional
        Builds that are compiled at once; by default as many as this process has cores.
    progress : bool, optional
        Whether to show a bar, if the package tqdm is installed.

    Raises
    ------
    TypeError, ValueError
        Before anything is compiled, if a value is not among those above, does not go with the
        others, or is for an option that none of the functions has.
    ImportError
        For CUDA, if CuPy or NVRTC is not installed.
    RuntimeError
        If there is no such device or no C++ compiler, or a build does not compile: raised when all
        the others are done, for the first of them.

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
    options = {name: value for name, value in locals().items() if name in _ABSENT}
    progress = validate.flag(FUNCTION, "progress", progress)
    workers = available_cores() if workers is None else _positive("workers", workers)
    target = _device(device)
    builds = planned(ops, widths, dtypes, target, rows, options)
    start = time.perf_counter()
    bar = progress_bar(len(builds), desc="cunorm compiles") if progress else None
    with nullcontext() if bar is None else bar:
        step = (lambda: None) if bar is None else bar.update
        try:
            compiled = compile_concurrently(builds, target, workers, step)
        except RuntimeError as error:
            raise RuntimeError(f"{FUNCTION}: {error}") from error.__cause__
    return Warmup(len(builds), compiled, time.perf_counter() - start)


def planned(
    ops: object, widths: object, dtypes: object, device: Device, rows: object, options: Options
) -> list[KernelBuild]:
    """Return the builds that calls need, which are described as `warmup` takes them."""
    counts = None if rows is None else [_positive("rows", one) for one in _several("rows", rows)]
    sizes = [_positive("widths", one) for one in _several("widths", widths)]
    options = _ABSENT | options
    calls = list(_calls(ops, dtypes, options | {"needs": (options["needs"],)}))
    builds: dict[KernelBuild, None] = {}  # each once, in their order
    for (name, options_of_call), width in product(calls, sizes):
        builds_of = group_builds if name in _group_norm.__all__ else row_builds
        builds |= dict.fromkeys(builds_of(name, options_of_call, counts, width, device))
    return list(builds)


def _device(name: object) -> Device:
    """Return the device of a name; it is there, and there is a compiler for it."""
    kind, _, number = str(name).partition(":")
    if kind == "cpu" and number in ("", "0"):
        if compiler() is None:
            problem = f" ({search().cxx_problem})" if search().cxx_problem else ""
            raise RuntimeError(
                f"{FUNCTION}: no C++ compiler is found{problem}: install g++ or clang++, or point "
                "CXX at one"
            )
        return CPU
    if kind != "cuda" or not (number.isdecimal() or number == ""):
        raise ValueError(f'{FUNCTION}: device is {name!r}, expected "cpu", "cuda" or "cuda:1"')
    try:
        device = Device("cuda", int(number) if number else cuda.current_device())
        cuda.gpu_caps(device)
    except RuntimeError as error:  # CuPy's for all that the driver says
        raise RuntimeError(f"{FUNCTION}: device is {name!r}: {error}") from error
    cuda.nvrtc_version()  # raises where there is none
    return device


# --- the calls that options describe --------------------------------------------------------------

_NOT_OPTIONS = ("ops", "widths", "dtypes", "device", "rows", "workers", "progress")
# The value of each option that a function does not take.
_ABSENT: Options = {
    name: None if one.default == AUTO else one.default
    for name, one in signature(warmup).parameters.items()
    if name not in _NOT_OPTIONS
}


def _calls(ops: object, dtypes: object, options: Options) -> Iterator[tuple[str, Options]]:
    """Yield the function and the options, those of _ABSENT, of every call that is described."""
    names = [validate.choice(FUNCTION, "ops", name, FUNCTIONS) for name in _several("ops", ops)]
    xs = [parse_dtype(FUNCTION, "dtypes", spec) for spec in _several("dtypes", dtypes)]
    choices = {option: _several(option, value) for option, value in options.items()}
    taken = {name: _options_of(name) for name in names}
    for option, values in choices.items():
        if any(option in of_name for of_name in taken.values()):
            continue
        wrong = [value for value in values if not _is_default(option, value)]
        if wrong:
            who = f"{names[0]} does not take" if len(names) == 1 else f"none of {names} takes"
            raise ValueError(f"{FUNCTION}: {option} is {wrong[0]!r}, which {who}")
    for name in names:
        values_of_name = (
            values if option in taken[name] else (_ABSENT[option],)
            for option, values in choices.items()
        )
        for x, *chosen in product(xs, *values_of_name):
            yield name, _parsed(name, x, dict(zip(choices, chosen, strict=True)))


def _several(argument: str, value: object) -> tuple[Any, ...]:
    """Return the items of a collection; all else, names and arrays too, is the one item."""
    if not isinstance(value, list | tuple | range | Set | ValuesView):
        return (value,)
    if len(value) == 0:
        raise ValueError(f"{FUNCTION}: {argument} is {value!r}, expected at least one")
    return tuple(value)


def _positive(argument: str, value: object) -> int:
    number = validate.integer(FUNCTION, argument, value)
    if number < 1:
        raise ValueError(f"{FUNCTION}: {argument} is {value!r}, expected at least 1")
    return number


def _options_of(name: str) -> set[str]:
    """Return the options that describe a function's calls."""
    family = _group_norm if name in _group_norm.__all__ else _row_norm
    options = set(signature(getattr(family, name)).parameters)
    if family is _group_norm:
        options |= {"positions", "layout"}
    if name.endswith("_backward"):  # which its forward describes, too
        options.add("dtype")
    if "d_residual" in options:
        options |= {"residual", "residual_dtype"}
    return options


def _is_default(option: str, value: object) -> bool:
    """Whether a value says no more than to leave the option out."""
    if value is None or value is False:
        return True
    # For other types, == may return an array, or True: to NumPy float64 equals None.
    items = value if isinstance(value, tuple) else (value,)  # a tuple of names is one value
    is_plain = all(isinstance(item, str | Number) for item in items)
    return is_plain and value in (_ABSENT[option], AUTO)


def _parsed(name: str, x: DType, options: Options) -> Options:
    """Return a call's options with operands as dtypes, checked."""
    meanings = {  # of True, of False, and of "auto"
        "weight": (x, None, x),
        "bias": (x, None, None),
        "residual": (x, None, x if name.startswith("add_") else None),
        "gate": (x, None, None),
        "d_residual": (True, False, None),  # as `cunorm._row_norm.builds` takes it
    }
    parsed = {one: _operand(one, options[one], *meaning) for one, meaning in meanings.items()}
    parsed["needs"] = validate.names(FUNCTION, "needs", options["needs"], NEEDS)
    for one in ("dtype", "residual_dtype"):
        dtype = parse_optional_dtype(FUNCTION, one, options[one])
        parsed[one] = dtype and dtype.name
    if name in _group_norm.__all__:
        if name != "instance_norm":
            validate.integer(FUNCTION, "num_groups", options["num_groups"])
        parsed["positions"] = _positive("positions", options["positions"])
        validate.choice(FUNCTION, "layout", options["layout"], LAYOUTS)
    return {**options, **parsed, "x": x}


def _operand(argument: str, value: object, present: object, absent: object, auto: object) -> object:
    """Return the dtype that an operand has, or what a value that is no dtype means for it."""
    if value is None or isinstance(value, bool):
        return present if value else absent
    if isinstance(value, str) and value == AUTO:
        return auto
    try:
        return parse_dtype(FUNCTION, argument, value)
    except TypeError as error:
        raise TypeError(f"{error}, or True, False or None") from None
