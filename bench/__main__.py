# SPDX-License-Identifier: MIT
"""`python -m bench [COMMAND]`: timings and errors, tables and plots, and checks of GPU plans."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

COMMANDS = {  # a module is imported only for its command, because dependencies differ
    "time": "bench.timing.command",
    "against": "bench.compare.against",
    "accuracy": "bench.accuracy.command",
    "builds": "bench.plans.builds",
    "static": "bench.plans.command",
    "bytes": "bench.plans.traffic",
    "overview": "bench.report.overview",
    "plot": "bench.report.plot",
    "table": "bench.report.tables",
}


def main(argv: Sequence[str]) -> int:
    """Run the command that the first argument names; `time` by default."""
    command, rest = ("time", argv) if not argv or argv[0] not in COMMANDS else (argv[0], argv[1:])
    status: int = import_module(COMMANDS[command]).main(rest)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
