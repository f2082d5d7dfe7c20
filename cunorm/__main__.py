# SPDX-License-Identifier: MIT
"""The command line: ``python -m cunorm`` with ``info``, ``demo`` or ``warmup``."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

_INTERRUPTED = 128 + signal.SIGINT  # the exit status that shells give
try:
    from cunorm import __version__, _cache, _info
    from cunorm._core.dtypes import DTYPES, QUANTIZED, SCALES
    from cunorm._core.types import GatePosition
    from cunorm._core.validate import ACTIVATIONS
    from cunorm._group_norm.builds import LAYOUTS
    from cunorm._row_norm.spec import NEEDS
    from cunorm._warmup import AUTO, FUNCTIONS, PERS, warmup
except KeyboardInterrupt:
    sys.exit(_INTERRUPTED)

_ABOUT = "Normalization kernels, forward and backward, for every array framework."
_EXAMPLES = """\
examples:
  python -m cunorm demo --quick
  python -m cunorm info
  python -m cunorm warmup --op rms_norm rms_norm_backward --width 1024 --dtype float32"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    try:
        status = _run(arguments)
        print(end="", flush=True)
        return status
    except KeyboardInterrupt:  # the compilers that ran have ended
        if sys.stderr is not None and sys.stderr.isatty():
            print(file=sys.stderr)  # after the terminal's ^C
        return _INTERRUPTED
    except OSError as error:  # most likely, standard output fails: write nothing more to it
        with suppress(OSError, ValueError, AttributeError):  # a stream may lack a descriptor
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # else the reader, such as `head`, has ended
            _complain(f"python -m cunorm: {error}")
        return 1


def _complain(text: str) -> None:
    if sys.stderr is not None:
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cunorm",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"cunorm {__version__}")
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("info", help="show versions, devices, compilers and caches")
    demo_parser, warmup_parser = _demo_parser(commands), _warmup_parser(commands)
    chosen = parser.parse_args(arguments)
    if chosen.command == "warmup":
        return _run_warmup(warmup_parser, chosen)
    if chosen.command != "demo":
        print(_info.report() if chosen.command else parser.format_help())
        return 0
    try:
        from cunorm._demo import run
        from cunorm._demo.operators import DemoError

        try:
            return run(chosen.input, chosen.device, chosen.quick, chosen.plot)
        except DemoError as error:
            demo_parser.error(str(error))
    except ModuleNotFoundError as error:
        package = str(error.name).partition(".")[0]
        _complain(f"the demo needs {package}: python -m pip install {package}")
    except RuntimeError as error:  # a build does not compile
        _complain(str(error))
    return 1


def _demo_parser(commands: Any) -> argparse.ArgumentParser:
    what = "run every norm, forward and backward, on real input, and check its errors"
    about = f"{what}. The exit status is 1 if a result is further off than its bound."
    parser: argparse.ArgumentParser = commands.add_parser("demo", help=what, description=about)
    add = parser.add_argument
    rows = (
        "an array of floats whose last axis is a row or, for group norms, the channels of a "
        "position; by default a text of this Python installation, each byte replaced by its row of "
        "the text's 256x256 matrix of log bigram counts"
    )
    devices = "where to run; by default on CUDA if there is a device, else on the CPU"
    plot = (
        "also draw the speed of some norms, of plain NumPy (or CuPy) formulas and, if PyTorch is "
        "installed, of its functions over the size of x; needs matplotlib"
    )
    add("--input", type=Path, metavar="FILE.npy", help=rows)
    add("--device", choices=("cpu", "cuda"), help=devices)
    add("--quick", action="store_true", help="only a few telling norms")
    add("--plot", type=Path, metavar="FILE.png", help=plot)
    return parser


# --- warmup ---------------------------------------------------------------------------------------

_WARMUP = (
    "Compile ahead what calls of cunorm will need, several builds at once, and keep it on disk. "
    "Options that take several values are crossed: every combination is compiled. The options "
    "mean what the arguments of cunorm.warmup mean."
)
_OPERAND_VALUES = {AUTO: AUTO, "yes": True, "no": False} | {name: name for name in DTYPES}
_OPERANDS = {  # their defaults, in words
    "weight": "x's, and no for l2_norm",
    "bias": "no",
    "residual": "x's for the functions add_..., else no",
    "gate": "no",
    "d_residual": "the residual stream's if there is one, else no; yes means the stream's, too",
}
_Settings = dict[str, Any]
_REQUIRED: _Settings = {"nargs": "+", "required": True}
_SEVERAL: _Settings = {"nargs": "+", "default": argparse.SUPPRESS}
_FLAG: _Settings = {"action": "store_true"}
_DTYPE: _Settings = {"choices": DTYPES, "metavar": "DTYPE"}
_OPERAND: _Settings = _SEVERAL | _DTYPE | {"choices": _OPERAND_VALUES, "nargs": "*"}


def _warmup_parser(commands: Any) -> argparse.ArgumentParser:
    what = "compile ahead what calls will need"
    parser: argparse.ArgumentParser = commands.add_parser("warmup", help=what, description=_WARMUP)

    def add(name: str, what: str | None, settings: _Settings, **more: Any) -> None:
        parser.add_argument(f"--{name}", help=what, **settings, **more)

    function = "public functions, such as rms_norm or rms_norm_backward"
    add("op", function, _REQUIRED, choices=FUNCTIONS, metavar="FUNCTION", dest="ops")
    width = "elements of a row of x; of group norms, channels"
    add("width", width, _REQUIRED, type=int, metavar="WIDTH", dest="widths")
    add("dtype", f"of x: {', '.join(DTYPES)}", _REQUIRED | _DTYPE, dest="dtypes")
    add("device", "cpu, cuda or cuda:1; by default CUDA if there is a device, else the CPU", {})
    rows = "rows or samples of x; by default builds for any number of them"
    add("rows", rows, _SEVERAL, type=int)
    for name, default in _OPERANDS.items():
        what = f"its dtype, yes (or nothing) for x's, or no; by default auto: {default}"
        add(name.replace("_", "-"), what, _OPERAND)
    for name, allowed in PERS.items():
        default = "row" if name == "gate" else "all"
        what = f"what has its own row of it: {', '.join(allowed)}; by default {default}"
        add(f"{name}-per", what, _SEVERAL, choices=allowed, metavar="PER")
    of_y = {"choices": DTYPES | QUANTIZED, "metavar": "DTYPE"}
    add("y-dtype", "of y and dy, or of q", _SEVERAL | of_y, dest="dtype")
    add("scale", "of quantised norms: calls give it; any number", _SEVERAL, type=float)
    add("block", "of quantised norms: columns with one scale", _SEVERAL, type=int)
    add("scale-dtype", "of quantised norms", _SEVERAL, choices=SCALES)
    add("absmax-bound", "of quantised norms: calls give it; any number", _SEVERAL, type=float)
    add("return-y", "of quantised norms: y is a result, too", _FLAG)
    add("residual-dtype", "of the new residual stream", _SEVERAL | _DTYPE)
    add("center", "of normalize: the mean is subtracted", _FLAG)
    add("groups", "of each row", _SEVERAL, type=int)
    add("weight-offset", "what is added to weight", _SEVERAL, type=float)
    rounds = "rows are rounded to x's dtype before the product with weight"
    add("round-before-weight", rounds, _FLAG)
    names = ", ".join(ACTIVATIONS)
    add("gate-activation", names, _SEVERAL, choices=ACTIVATIONS, metavar="NAME")
    add("gate-position", "where the gate is applied", _SEVERAL, choices=get_args(GatePosition))
    add("num-groups", "of group norms' channels", _SEVERAL, type=int)
    add("positions", "of a sample of group norms", _SEVERAL, type=int)
    add("layout", "in memory, of x: " + ", ".join(LAYOUTS), _SEVERAL, choices=LAYOUTS)
    add("activation", f"of group norms: {names}", _SEVERAL, choices=ACTIVATIONS, metavar="NAME")
    add("needs", "whose gradients are wanted", _SEVERAL, choices=NEEDS)
    add("accumulate", "dweight and dbias are added to", _FLAG)
    add("split-rows", "rows are split over devices; widths are those of parts", _FLAG)
    add("workers", "builds compiled at once; by default as many as cores", {}, type=int)
    add("quiet", "no progress bar", {"action": "store_false", "dest": "progress"})
    return parser


def _run_warmup(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> int:
    arguments = {name: value for name, value in vars(chosen).items() if name != "command"}
    for name in _OPERANDS.keys() & arguments.keys():
        arguments[name] = [_OPERAND_VALUES[value] for value in arguments[name]] or True
    device = chosen.device or ("cuda" if _info.cuda_devices()[0] else "cpu")
    try:
        done = warmup(**arguments | {"device": device})
    except (TypeError, ValueError) as error:
        parser.error(str(error))
    except (ImportError, RuntimeError) as error:
        _complain(str(error))
        return 1
    on_gpu = device.startswith("cuda")
    folder = _cache.cupy_cache_folder() if on_gpu else _cache.cache_info().folder
    print(
        f"{device}: {done.builds} builds, {done.compiled} of them "
        f"{'loaded' if on_gpu else 'compiled'} now, in {done.seconds:.1f} s, kept in {folder}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
