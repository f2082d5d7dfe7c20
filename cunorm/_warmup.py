# SPDX-License-Identifier: MIT
"""`warmup`: compile ahead what calls will need, several builds at once."""

from __future__ import annotations  # keeps the names of type aliases in help()

import time
from collections.abc import Iterator, Mapping, Set, ValuesView
from contextlib import nullcontext
from inspect import signature
from itertools import product
from numbers import Number
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from cunorm import _group_norm, _row_norm
from cunorm._backends import cuda
from cunorm._backends.cpu.compiler import compiler, search
from cunorm._backends.cpu.threads import available_cores
from cunorm._backends.pool import compile_concurrently, progress_bar
from cunorm._core import validate
from cunorm._core.build import KernelBuild
from cunorm._core.dtypes import DTYPES, QUANTIZED, DType, parse_dtype, parse_one_of
from cunorm._core.tensor import CPU, Device
from cunorm._core.types import (
    Activation,
    DTypeLike,
    GatePer,
    GatePosition,
    Layout,
    Needs,
    Per,
    QuantizedDType,
    ScaleDType,
    Several,
)
from cunorm._group_norm.builds import LAYOUTS, group_builds
from cunorm._row_norm.builds import FUNCTION, Options, row_builds
from cunorm._row_norm.spec import NEEDS, WITHOUT_BRANCH

AUTO = "auto"
PIECES = ("row_moments", "combine_moments", "normalize_backward_sums")  # see split_rows
FUNCTIONS = (*(one for one in _row_norm.__all__ if one not in PIECES), *_group_norm.__all__)
PERS = {"weight": get_args(Per), "bias": get_args(Per), "gate": get_args(GatePer)}
Operand: TypeAlias = Several[DTypeLike | bool | None]
Meaning: TypeAlias = dict[bool | str, object]  # what True, False and AUTO mean for an operand


class Warmup(NamedTuple):
    """What `warmup` did: the builds that calls need, all of them loaded, and the seconds it took.

    `compiled` counts the builds that the C++ compiler made now. On CUDA it counts the kernels that
    were loaded, because CuPy does not say which of them it compiled and which it had on disk.
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
    weight_per: Several[Per] = "all",
    bias_per: Several[Per] = "all",
    gate_per: Several[GatePer] = "row",
    dtype: Several[DTypeLike | QuantizedDType | None] = None,
    residual_dtype: Several[DTypeLike | None] = None,
    scale: Several[float | None] = None,
    block: Several[int | None] = None,
    scale_dtype: Several[ScaleDType] = "float32",
    absmax_bound: Several[float | None] = None,
    return_y: Several[bool] = False,
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
    split_rows: Several[bool] = False,
    workers: int | None = None,
    progress: bool = True,
) -> Warmup:
    """Compile and load what calls of norms will need, several builds at once.

    Without `warmup`, the first call compiles what it needs. The builds are kept on disk for later
    processes. On CUDA they are for contiguous arrays that begin at multiples of 16 bytes, as
    new arrays do; a call with other arrays, such as slices, may need one more build. Most arguments
    are a value, or a list or tuple of values; every combination of the values is compiled.

    Parameters
    ----------
    ops : str
        Public functions, such as "rms_norm_forward" and "rms_norm_backward" for training.
    widths : int
        Elements of a whole row of x, whatever its axes and groups; for a group norm, channels.
    dtypes : dtype
        The dtype of x: "float16", "bfloat16", "float32", "float64" or a framework's dtype.
    device : str
        "cpu", "cuda" (the current one), or "cuda:1".
    rows : int, optional
        Rows of x, or a group norm's samples; by default builds for any number are compiled.
    weight, bias, residual, gate : dtype or bool or None
        The forward's operands: a dtype, True for that of x, None or False if absent. By default
        there is a weight if the function takes one, a residual for the functions ``add_…``, no bias
        and no gate. A backward is that of such a forward: its x is the residual stream, if there
        is one, its dy has y's dtype, and its `x_dtype` is the dtype of the forward's x.
    d_residual : dtype or bool or None
        The gradient of the residual stream that a backward gets; True means the stream's dtype. By
        default True if the forward writes a stream.
    weight_per, bias_per : str
        "all" rows share a row of the parameter; each "sample" has a row, as in a weight of shape
        (B, 1, D) or (S, D) for an x of (B, S, D), or (N, C) in a group norm: some rows share one;
        or each "row" of x, as in (B, S, D), which a group norm does not take.
    gate_per : str
        The same for a gate; of a gate on the branch, "sample scalar" and "row scalar" are a number
        for each sample or row.
    dtype, residual_dtype : dtype, optional
        The dtype of y and dy, or of q, and that of the new residual stream; by default the
        function's choice.
    scale, block, scale_dtype, absmax_bound, return_y : optional
        As quantised norms take them. Of `scale` and `absmax_bound` it only matters whether they are
        given; an array as scale has the build of a number.
    center, groups, weight_offset, round_before_weight, gate_activation, gate_position : optional
        As the row norms take them. Of `weight_offset` it only matters whether it is 0.
    num_groups, activation : int, and str or None
        As the group norms take them; all but "instance_norm" need `num_groups`.
    positions : int
        The product of the spatial axes of a group norm's sample. Group norms need it.
    layout : str
        The memory layout of x: "channels_last", as of a NumPy array with channel_axis or axis -1,
        or "channels_first", as of a contiguous tensor with channel_axis 1 or axis (1,). Norms with
        groups, quantised results or split rows are for "channels_last".
    needs, accumulate : optional
        As the backward takes them; for a jvp, `needs` names the operands that have tangents. With
        `accumulate`, dweight and dbias have rstd's dtype.
    split_rows : bool, optional
        Whether rows are split over devices, so that `widths` are those of parts: the builds of
        `row_moments`, `combine_moments` and norms that are given statistics, or for a backward of
        `normalize_backward_sums` and of what is given sums.
    workers : int, optional
        Builds that are compiled at once; by default as many as this process has cores.
    progress : bool, optional
        Whether to show a bar, if the package tqdm is installed.

    Raises
    ------
    TypeError, ValueError
        If a value is not among those above, does not go with the others, or is for an option that
        none of the functions has; raised before anything is compiled.
    ImportError
        If CuPy or NVRTC, which CUDA needs, is not installed.
    RuntimeError
        If there is no such device or no C++ compiler, or if a build does not compile. This last
        error is raised after all other builds are done.

    Examples
    --------
    >>> import cunorm
    >>> cunorm.warmup("rms_norm", 256, "float32", device="cpu", rows=8, progress=False)
    Warmup(builds=1, compiled=..., seconds=...)
    """
    options = {name: value for name, value in locals().items() if name in _ABSENT}
    progress = validate.flag(FUNCTION, "progress", progress)
    workers = available_cores() if workers is None else _positive("workers", workers)
    target = _device(device)
    builds = planned(ops, widths, dtypes, target, rows, options)
    start = time.perf_counter()
    bar = progress_bar(len(builds), desc="cunorm compiles") if progress else None
    with nullcontext() if bar is None else bar:
        step = (lambda ended: None) if bar is None else bar.update
        try:
            compiled = compile_concurrently(builds, target, workers, step)
        except RuntimeError as error:
            raise RuntimeError(f"{FUNCTION}: {error}") from error.__cause__
    return Warmup(len(builds), compiled, time.perf_counter() - start)


def planned(
    ops: object, widths: object, dtypes: object, device: Device, rows: object, options: Options
) -> list[KernelBuild]:
    counts = None if rows is None else [_positive("rows", one) for one in _several("rows", rows)]
    sizes = [_positive("widths", one) for one in _several("widths", widths)]
    options = _ABSENT | options
    calls = list(_calls(ops, dtypes, options | {"needs": (options["needs"],)}))
    builds: dict[KernelBuild, None] = {}  # a dict keeps their order
    for (name, options_of_call), width in product(calls, sizes):
        builds_of = group_builds if name in _group_norm.__all__ else row_builds
        builds |= dict.fromkeys(builds_of(name, options_of_call, counts, width, device))
    return list(builds)


def _device(name: object) -> Device:
    """Return the device of a name; raise an error if it or its compiler is not there."""
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
    except RuntimeError as error:  # any error of the driver
        raise RuntimeError(f"{FUNCTION}: device is {name!r}: {error}") from error
    cuda.nvrtc_version()  # raises an error without NVRTC
    return device


# --- the calls that options describe --------------------------------------------------------------

_NOT_OPTIONS = ("ops", "widths", "dtypes", "device", "rows", "workers", "progress")
# The value of each option for a function that does not take it.
_ABSENT: Options = {
    name: None if one.default == AUTO else one.default
    for name, one in signature(warmup).parameters.items()
    if name not in _NOT_OPTIONS
}


def _calls(ops: object, dtypes: object, options: Options) -> Iterator[tuple[str, Options]]:
    """Yield the function and the parsed options of every call that the options describe."""
    names = [validate.choice(FUNCTION, "ops", name, FUNCTIONS) for name in _several("ops", ops)]
    xs = [parse_dtype(FUNCTION, "dtypes", spec) for spec in _several("dtypes", dtypes)]
    choices = {option: _several(option, value) for option, value in options.items()}
    taken = {name: _options_of(name) for name in names}
    who = f"{names[0]} does not take" if len(names) == 1 else f"none of {names} takes"
    for option, values in choices.items():
        if not any(option in of_name for of_name in taken.values()):
            for value in values:
                if not _is_default(option, value):
                    raise ValueError(f"{FUNCTION}: {option} is {value!r}, which {who}")
    for name in names:
        choices_of_name = (
            values if option in taken[name] else (_ABSENT[option],)
            for option, values in choices.items()
        )
        for x, *chosen in product(xs, *choices_of_name):
            yield name, _parsed(name, x, dict(zip(choices, chosen, strict=True)))


def _several(argument: str, value: object) -> tuple[Any, ...]:
    """Return a collection's items; a value that is no collection, such as a name, is one item."""
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
    family = _group_norm if name in _group_norm.__all__ else _row_norm
    options = set(signature(getattr(family, name)).parameters)
    if family is _group_norm:
        options |= {"positions", "layout"}
    if name.endswith("_backward"):  # options of its forward
        options.add("dtype")
    if name.endswith("_jvp"):
        options.add("needs")
    if "d_residual" in options:
        options |= {"residual", "residual_dtype"}
    options |= {f"{one}_per" for one in PERS if one in options}
    if family is _row_norm and not name.endswith("_quantized"):
        options |= {"layout"} if name.endswith("_jvp") else {"layout", "split_rows"}
    return options


def _is_default(option: str, value: object) -> bool:
    """Whether a value of an option that no function takes means the same as leaving it out."""
    if value is None or value is False:
        return True
    # Only strings and numbers are compared: dtype float64 equals None; == of arrays is an array.
    items = value if isinstance(value, tuple) else (value,)  # a tuple of names is one value
    is_plain = all(isinstance(item, str | Number) for item in items)
    return is_plain and value in (_ABSENT[option], AUTO)


def _parsed(name: str, x: DType, options: Options) -> Options:
    """Check the options of a call, and return them with operands as dtypes."""
    if_given: Meaning = {True: x, False: None, AUTO: None}
    by_default = if_given | {AUTO: x}
    meanings: dict[str, Meaning] = {
        "weight": by_default,
        "bias": if_given,
        "residual": by_default if name.startswith("add_") else if_given,
        "gate": if_given,
        "d_residual": {True: True, False: False, AUTO: None},  # as `row_builds` takes it
    }
    parsed = {one: _operand(one, options[one], meaning) for one, meaning in meanings.items()}
    _check_sharing(name, options, {one for one in PERS if parsed[one] is not None})
    parsed["needs"] = validate.names(FUNCTION, "needs", options["needs"], NEEDS)
    validate.flag(FUNCTION, "split_rows", options["split_rows"])
    for one in ("dtype", "residual_dtype"):
        is_q = one == "dtype" and name.endswith("_quantized")
        parsed[one] = _dtype_name(one, options[one], QUANTIZED if is_q else DTYPES)
    if name in _group_norm.__all__:
        if name != "instance_norm":
            validate.integer(FUNCTION, "num_groups", options["num_groups"])
        parsed["positions"] = _positive("positions", options["positions"])
    layout = validate.choice(FUNCTION, "layout", options["layout"], LAYOUTS)
    is_of_rows = name not in _group_norm.__all__
    for one, default in (("split_rows", False), ("groups", 1)) if is_of_rows else ():
        if options[one] != default and layout != "channels_last":
            got = f"layout is {layout!r} and {one} is {options[one]!r}"
            raise ValueError(f"{FUNCTION}: {got}, expected 'channels_last'")
    return {**options, **parsed, "x": x}


def _dtype_name(option: str, value: object, allowed: Mapping[str, DType]) -> str | None:
    """Return the name of a result's dtype; without a value, None or the default of q."""
    if value is None:
        return next(iter(QUANTIZED)) if allowed is QUANTIZED else None
    return parse_one_of(FUNCTION, option, value, allowed=allowed).name


def _check_sharing(name: str, options: Options, given: set[str]) -> None:
    """Check which rows share weight, bias and gate, and that only given operands say so."""
    is_branch = options["gate_position"] == "branch"
    if is_branch and (name in WITHOUT_BRANCH or name.endswith("_jvp")):
        raise ValueError(f"{FUNCTION}: gate_position is 'branch', which {name} does not take")
    for one, values in PERS.items():
        option, reason = f"{one}_per", ""
        if name in _group_norm.__all__ and one != "gate":
            values = values[:2]  # not for each position
        value = validate.choice(FUNCTION, option, options[option], values)
        if one not in given:
            reason = f"{one} is absent"
        elif one == "gate" and not is_branch:
            reason = "the gate is not on the branch"
        if reason and value != _ABSENT[option]:
            default = f"expected {_ABSENT[option]!r} as {reason}"
            raise ValueError(f"{FUNCTION}: {option} is {value!r}, {default}")


def _operand(argument: str, value: object, meaning: Meaning) -> object:
    """Return the dtype of an operand, or what a value that is no dtype means for it."""
    value = False if value is None else value
    if isinstance(value, bool) or (isinstance(value, str) and value == AUTO):
        return meaning[value]
    try:
        return parse_dtype(FUNCTION, argument, value)
    except TypeError as error:
        raise TypeError(f"{error}, or True, False or None") from None
