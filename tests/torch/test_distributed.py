# SPDX-License-Identifier: MIT
"""Two processes train a model with norms of cunorm.torch as one does on the whole batch."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.operands import at

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

from tests.support import torch_ranks  # noqa: E402

SECONDS = 120  # until processes that wait for each other have failed


def run(rank, folder):
    """Run one of the processes, which fails by an error or by hanging."""
    return subprocess.run(
        [sys.executable, "-m", torch_ranks.__name__, str(rank), folder],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def test_two_processes_train_as_one_on_the_whole_batch(tmp_path):
    with ThreadPoolExecutor() as threads:
        done = list(threads.map(lambda rank: run(rank, tmp_path), range(torch_ranks.RANKS)))
    assert [one.returncode for one in done] == [0, 0], "\n".join(one.stderr for one in done)
    trained = [torch.load(tmp_path / f"{rank}.pt") for rank in range(torch_ranks.RANKS)]
    model, start = torch_ranks.model(), torch_ranks.model()
    torch_ranks.train(model)
    for way in ("DistributedDataParallel", "fully_shard"):
        every = (model.parameters(), start.parameters(), *(ranks[way] for ranks in trained))
        with at(way):
            for one, before, there, other in zip(*every, strict=True):
                assert torch.equal(there, other)
                # Sums of some 250 terms, in another order, through eight layers and two steps;
                # numbers about 1.
                torch.testing.assert_close(there, one, rtol=0, atol=8 * 2 * 250 * 2.0**-53)
                assert (one - before).abs().max() > 1e-3
