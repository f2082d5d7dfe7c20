# SPDX-License-Identifier: MIT
"""Split an attention of OLMo 2 over processes of PyTorch, and compare it with the whole layer.

Each process has some of the heads. OLMo 2 normalises the queries of all heads as one row, and the
keys, so a process has only a part of each row: ``cunorm.torch.rms_norm(…, process_group=group)``
exchanges one number for each row and process. The script compares the output and all gradients
with those of one process that has all heads, and shows what norms of the parts alone would give. It
prints and draws the differences, and exits with 1 if those of the split layer are too large.

Usage: ``python examples/torch_split_rows.py --ranks 2 --output torch_split_rows.png``
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from devices import torch_device
from options import parse, size
from split_rows.report import QUICK, check_sizes, command_line, drawn, report
from split_rows.torch_attention import Arrays, differentiated, joined, run_as, run_next


def run_split(arrays: Arrays, options: Any) -> list[Arrays]:
    """Return the results of all processes together: with norms of rows, and with norms of parts."""
    ranks, head = options.ranks, options.width // options.heads
    with tempfile.TemporaryDirectory() as folder:
        torch.save(arrays, Path(folder, "arrays"))
        given = (ranks, folder, head, options.device)
        others = torch.multiprocessing.spawn(run_next, given, nprocs=ranks - 1, join=False)
        run_as(0, *given)
        while not others.join():  # it returns whenever one of them ends
            pass
        files = [Path(folder, f"of_{rank}") for rank in range(ranks)]
        of_ranks = [torch.load(file, map_location="cpu") for file in files]
    return [joined([*parts]) for parts in zip(*of_ranks, strict=True)]


def main(argv: list[str] | None = None) -> int:
    """Run the layer whole and split, compare, and draw; return the exit status."""
    parser = command_line(__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=size, default=2, help="processes; on CUDA each has a GPU")
    options = parse(parser, argv, picture="torch_split_rows.png", quick=QUICK)
    check_sizes(parser, options, options.ranks)
    options.device = torch_device(parser, options.device)
    if options.device == "cuda" and torch.cuda.device_count() < options.ranks:
        if "--device" in (sys.argv if argv is None else argv):
            parser.error(f"--ranks is {options.ranks}, expected at most one for each GPU")
        options.device = "cpu"
    arrays = {name: torch.from_numpy(one) for name, one in drawn(options).items()}
    split, own = run_split(arrays, options)
    right = differentiated(arrays, options.width // options.heads)
    return report(f"{options.ranks} processes", right, split, own, options)


if __name__ == "__main__":
    sys.exit(main())
