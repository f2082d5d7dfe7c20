# SPDX-License-Identifier: MIT
"""Two processes train models with cunorm.torch's norms to the same result as one process."""

import os
from datetime import timedelta
from functools import partial
from itertools import chain

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
dist = torch.distributed

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Shard  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import cunorm.torch as ct  # noqa: E402

WIDTH, LAYERS, ROWS, STEPS, RATE, RANKS = 24, 3, 10, 2, 0.5, 2
LIMIT = timedelta(seconds=60)


def model():
    """Return the same float64 model each time."""
    torch.manual_seed(0)
    layers = ((ct.RMSNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)) for _ in range(LAYERS))
    return torch.nn.Sequential(*chain(*layers), ct.LayerNorm(WIDTH)).double()


def train(network, rank=0, ranks=1):
    """Train on every batch; each of several processes uses its own rows of a batch."""
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(STEPS, 2, ROWS, WIDTH, generator=generator, dtype=torch.float64)
    optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
    for given, wanted in batches[..., rank::ranks, :]:
        optimizer.zero_grad()
        (network(given) - wanted).square().mean().backward()
        optimizer.step()
    return network


def check_as_one_of_two(rank, folder):
    """Train under DistributedDataParallel and FSDP2; compare parameters with those of one process.

    In early versions of PyTorch, CPU streams have no events, and FSDP2 cannot run without these.
    """
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=LIMIT)
    copied = train(DistributedDataParallel(model()), rank, RANKS)
    trained = [list(copied.module.parameters())]
    if hasattr(torch.cpu.Stream, "record_event"):
        sharded = model()
        for part in (*sharded, sharded):
            fully_shard(part)
        train(sharded, rank, RANKS)
        trained.append([one.full_tensor() for one in sharded.parameters()])
    check_tensor_parallel(rank)
    dist.destroy_process_group()
    whole, start = list(train(model()).parameters()), list(model().parameters())
    for parameters in trained:
        for there, one, before in zip(parameters, whole, start, strict=True):
            # The bound allows for another order of sums of some 250 terms about 1, through seven
            # layers and two steps.
            torch.testing.assert_close(there, one, rtol=0, atol=7 * 2 * 250 * 2.0**-53)
            assert (one - before).abs().max() > 1e-3


def check_tensor_parallel(rank):
    """Split linear layers and the norms' tokens between the processes; compare with one process.

    The inputs of the first norm's backward, and of the second norm's forward, are results of
    collectives that are still running.
    """
    whole, split = (two_layers() for _ in range(2))
    styles = {"1": ColwiseParallel(input_layouts=Shard(1))}
    styles |= {"2": RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(split, init_device_mesh("cpu", (RANKS,)), styles)
    x = torch.randn(3, 4, WIDTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = whole(x)
    y.sin().sum().backward()
    mine = split(x.chunk(RANKS, 1)[rank])
    mine.sin().sum().backward()
    # The bound allows for another order of sums of some 100 terms about 10, through four layers.
    close = partial(torch.testing.assert_close, rtol=0, atol=4 * 10 * 100 * 2.0**-53)
    close(mine, y.chunk(RANKS, 1)[rank])
    for index in (0, 3):
        for found, expected in zip(
            split[index].parameters(), whole[index].parameters(), strict=True
        ):
            dist.all_reduce(found.grad)
            close(found.grad, expected.grad)


def two_layers():
    torch.manual_seed(3)
    linear = (torch.nn.Linear(*sizes) for sizes in ((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH)))
    return torch.nn.Sequential(ct.RMSNorm(WIDTH), *linear, ct.LayerNorm(WIDTH)).double()


def check_and_leave(rank, folder):
    """Check in a process of its own, which ends without finalizing Python.

    A thread of gloo that releases a tensor's Python object in that moment would abort the process:
    https://github.com/pytorch/pytorch/issues/190489.
    """
    check_as_one_of_two(rank, folder)
    os._exit(0)


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # of early versions of PyTorch
def test_two_processes_train_as_one_on_the_whole_batch(tmp_path):
    other = torch.multiprocessing.spawn(check_and_leave, (str(tmp_path),), join=False, daemon=True)
    check_as_one_of_two(1, tmp_path)
    assert other.join(2 * LIMIT.seconds)  # raises the other process's error
