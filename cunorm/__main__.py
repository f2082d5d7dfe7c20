# SPDX-License-Identifier: MIT
"""The command line: ``python -m cunorm`` with ``info``, ``demo`` or ``warmup``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cunorm import _demo, _info, _warmup_command


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m cunorm",
        description="Normalization kernels, forward and backward, for every array framework.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="show versions, devices, compilers and caches")
    demo = _demo_parser(commands)
    warmup = commands.add_parser(
        "warmup",
        help="compile ahead what calls will need",
        description=_warmup_command.DESCRIPTION,
    )
    _warmup_command.add_options(warmup)
    chosen = parser.parse_args(arguments)
    if chosen.command == "info":
        print(_info.report())
        return 0
    if chosen.command == "warmup":
        return _warmup_command.run(warmup, chosen)
    try:
        return _demo.run(chosen.input, chosen.device)
    except _demo.DemoError as error:
        demo.error(str(error))


def _demo_parser(commands: Any) -> argparse.ArgumentParser:
    """Add the command ``demo`` with its options."""
    demo: argparse.ArgumentParser = commands.add_parser(
        "demo",
        help="run every operator on real input and check it against the float64 reference",
        description="Run every operator, forward and backward, on real input, check each against "
        "the float64 reference and print a table. The exit status is 1 if a result is further "
        "off than its tolerance.",
    )
    demo.add_argument(
        "--input",
        type=Path,
        metavar="FILE.npy",
        help="an array of floats whose last axis is a row or, for group norms, the channels of a "
        "position; by default a text of this Python installation, each byte as its row of the "
        "text's 256x256 log-bigram-count matrix",
    )
    demo.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="where to run; by default on CUDA if there is a device, else on the CPU",
    )
    return demo


if __name__ == "__main__":
    sys.exit(main())
