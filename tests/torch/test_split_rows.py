# SPDX-License-Identifier: MIT
"""Row norms of rows that processes share: as one process normalises the whole rows."""

import os
import pickle
from copy import deepcopy
from datetime import timedelta
from functools import partial

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
dist = torch.distributed

if not (dist.is_available() and dist.is_gloo_available()):
    pytest.skip("this PyTorch has no gloo", allow_module_level=True)

from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import fully_shard  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402

import cunorm  # noqa: E402
import cunorm.torch as ct  # noqa: E402
from cunorm.torch import _split  # noqa: E402
from cunorm.torch._groups import summed  # noqa: E402
from tests.support.operands import draw  # noqa: E402
from tests.support.torch_split import (  # noqa: E402
    CASES,
    WIDTH,
    Joined,
    Part,
    check_case,
    leaf,
    operands,
    part,
    to_torch,
    widths,
)

LIMIT = timedelta(seconds=60)


def check_bits():
    """The y of each process has the bits that the plain functions give, in the order of ranks."""
    shapes = {"x": (40, WIDTH), "weight": (WIDTH,), "bias": (WIDTH,)}
    x, weight, bias = (draw(name, shape, "float64") for name, shape in shapes.items())
    parts = [cunorm.row_moments(part(x, rank), center=True) for rank in range(len(widths()))]
    mean, m2, correction = (
        np.stack([getattr(one, name) for one in parts]) for name in ("mean", "m2", "correction")
    )
    stacked = cunorm.Moments(mean, m2, np.float64(widths()), correction)
    statistics = cunorm.combine_moments(stacked, eps=1e-5)
    own = part(x), part(weight), part(bias)
    expected = cunorm.layer_norm(*own, **statistics._asdict())
    y = ct.layer_norm(*map(to_torch, own), process_group=dist.group.WORLD)
    assert expected.tobytes() == y.numpy().tobytes()


def check_messages():
    """A message has one number for the part of a row and, for each row, one to three numbers."""
    sent, gather, rows = [], _split._gather, 64

    def counted(gathered, message, group):
        sent.append(message.numel())
        gather(gathered, message, group=group)

    _split._gather = counted
    x, weight, bias = (
        leaf(part(draw(name, shape, "float64")))
        for name, shape in (("x", (rows, WIDTH)), ("weight", WIDTH), ("bias", WIDTH))
    )
    options = {"process_group": dist.group.WORLD}
    ct.rms_norm(x, weight, **options).sum().backward()
    ct.layer_norm(x, weight, bias, **options).sum().backward()
    ct.rms_norm(x.detach(), weight, **options).sum().backward()
    _split._gather = gather
    check = 2  # of the numbers of rows and of their bytes, on a CPU
    forward, backward = [check, rows + 1, check, 3 * rows + 1], [rows, 2 * rows]
    assert sent == [*forward[:2], backward[0], *forward[2:], backward[1], *forward[:2]]


def check_gradients():
    """All processes differentiate the norm of whole rows numerically, in step."""
    shapes = {"x": (1, WIDTH), "weight": (WIDTH,), "bias": (WIDTH,)}
    leaves = [leaf(draw(name, shape, "float64")) for name, shape in shapes.items()]

    def norm(*leaves):
        own = map(Part.apply, leaves)
        return Joined.apply(ct.layer_norm(*own, process_group=dist.group.WORLD))

    assert torch.autograd.gradcheck(norm, leaves)


def model(kind, own, **groups):
    """Return the same float64 model for each kind of norms, for a part of the row."""
    layers = [getattr(kind, name)(own, eps=1e-5, **groups) for name in ("RMSNorm", "LayerNorm")]
    for index, layer in enumerate(layers):
        weight = torch.from_numpy(draw(f"weight {index}", WIDTH, "float64"))
        layer.weight = torch.nn.Parameter((part(weight) if own < WIDTH else weight).clone())
    return torch.nn.Sequential(*layers).double()


def trained(network, x):
    network(x).sin().sum().backward()
    return [one.grad for one in network.parameters()]


def check_modules():
    """Modules of parts of rows, and modules of whole rows of some of the tokens."""
    x = torch.from_numpy(draw("x", (8, WIDTH), "float64"))
    group, rank = dist.group.WORLD, dist.get_rank()
    whole = trained(model(torch.nn, WIDTH), x)
    close = partial(torch.testing.assert_close, rtol=0, atol=8 * WIDTH * 2.0**-50)
    split = model(ct, widths()[rank], process_group=group)
    for found, expected in zip(trained(deepcopy(split), part(x)), whole, strict=True):
        close(found, part(expected))
    tokens = model(ct, WIDTH, parameter_group=group)
    for found, expected in zip(trained(tokens, x.chunk(len(widths()))[rank]), whole, strict=True):
        close(found, expected)
    with pytest.raises(TypeError, match="process_group cannot be pickled: save its state_dict"):
        pickle.dumps(split[0])


def check_sums_of_16_bits():
    """Gradients of bfloat16 are added in float32 and rounded once."""
    weight = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    used, none = summed(dist.group.WORLD, weight, None)
    sent, reduce = [], dist.all_reduce
    dist.all_reduce = lambda message, **options: [sent.append(message), reduce(message, **options)]
    (used * (1.0 if dist.get_rank() else 256.0)).sum().backward()
    dist.all_reduce = reduce
    total = {2: 256.0, 4: 260.0}[dist.get_world_size()]  # 257 is no bfloat16, 259 neither
    assert weight.grad.tolist() == [total, total]
    assert [one.dtype for one in sent] == [torch.float32]
    assert none is None


def check_mesh():
    """DTensors on a mesh; FSDP2 over one of its dimensions, rows split over the other."""
    mesh = init_device_mesh("cpu", (len(widths()) // 2, 2), mesh_dim_names=("data", "row"))
    x, dy = (torch.from_numpy(draw(name, (6, WIDTH), "float64")) for name in ("x", "dy"))
    weight = torch.from_numpy(draw("weight", WIDTH, "float64"))
    close = partial(torch.testing.assert_close, rtol=0, atol=6 * WIDTH * 2.0**-50)
    whole = [one.clone().requires_grad_() for one in (x, weight)]
    y = torch.nn.functional.rms_norm(whole[0], (WIDTH,), whole[1], eps=1e-6)
    y.backward(dy)
    for of_x, of_weight in (
        ([Shard(0), Shard(1)], [Replicate(), Shard(0)]),
        ([Shard(0), Shard(1)], [Shard(0), Replicate()]),
        ([Replicate(), Shard(0)], [Replicate(), Replicate()]),
    ):
        mine = [distribute_tensor(one, mesh, p) for one, p in ((x, of_x), (weight, of_weight))]
        mine = [one.requires_grad_() for one in mine]
        found = ct.rms_norm(*mine)
        assert found.placements == tuple(of_x)
        found.backward(distribute_tensor(dy, mesh, of_x))
        close(found.full_tensor(), y)
        for one, other in zip(mine, whole, strict=True):
            close(one.grad.full_tensor(), other.grad)
    split = distribute_tensor(x, mesh, [Shard(0), Shard(1)])
    with pytest.raises(ValueError, match="at most one dimension of the mesh splits"):
        ct.rms_norm(distribute_tensor(x, mesh, [Shard(1), Shard(1)]))
    with pytest.raises(ValueError, match="rms_norm: groups is 2 and x has placements"):
        ct.rms_norm(split, groups=2)
    with pytest.raises(ValueError, match="expected a part of each row on all 2 processes"):
        ct.rms_norm(distribute_tensor(x[:, :1], mesh, [Shard(0), Shard(1)]))
    with pytest.raises(TypeError, match=r"rms_norm: weight is .*, expected a DTensor on the mesh"):
        ct.rms_norm(split, weight)
    with pytest.raises(ValueError, match="rms_norm: process_group is given and x is a DTensor"):
        ct.rms_norm(split, process_group=dist.group.WORLD)
    if hasattr(torch.cpu.Stream, "record_event"):  # else FSDP2 cannot run on a CPU
        check_fsdp(mesh, x, close)


def check_fsdp(mesh, x, close):
    """A step of FSDP2 and split rows gives the parameters of one process."""
    row, data = mesh.get_local_rank("row"), mesh.get_local_rank("data")
    alone = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH)).double()
    own = ct.LayerNorm(WIDTH // 2, process_group=mesh.get_group("row"))
    split = torch.nn.Sequential(own).double()
    fully_shard(split, mesh=mesh["data"])
    for network, given in ((alone, x), (split, x.chunk(mesh.size(0))[data].chunk(2, 1)[row])):
        optimizer = torch.optim.SGD(network.parameters(), lr=0.5)
        (network(given).sin().sum() / len(given)).backward()
        optimizer.step()
    for one, other in zip(split.parameters(), alone.parameters(), strict=True):
        close(one.full_tensor(), other.chunk(2)[row])


def check_refusals():
    """Errors come before anything is sent, or on all processes."""
    group, rank = dist.group.WORLD, dist.get_rank()
    x, weight = (leaf(part(draw("x", shape, "float64"))) for shape in ((2, WIDTH), WIDTH))
    with pytest.raises(RuntimeError, match="rms_norm: a second derivative is asked for"):
        y = ct.rms_norm(x, weight, process_group=group).square().sum()
        torch.autograd.grad(y, x, create_graph=True)
    with pytest.raises(RuntimeError, match="rms_norm: derivatives are batched, expected first"):
        y = ct.rms_norm(x, weight, process_group=group).square().sum()
        torch.autograd.grad(y, x, torch.ones(2), is_grads_batched=True)
    with pytest.raises(RuntimeError, match="rms_norm: process_group or parameter_group is given"):
        torch.func.grad(lambda x: ct.rms_norm(x, process_group=group).sum())(x)
    with pytest.raises(TypeError, match="RMSNorm: process_group is of type str, expected a torch"):
        ct.RMSNorm(2, process_group="world")
    with pytest.raises(TypeError, match=r"rms_norm: axis is \(0,\), expected an int"):
        ct.rms_norm(x, axis=(0,), process_group=group)
    if rank == 0:
        with pytest.raises(ValueError, match="rms_norm: weight has shape"):
            ct.rms_norm(x, x.T, process_group=group)
    with pytest.raises(ValueError, match="rows of 0 elements"):
        ct.rms_norm(x[:, :0], process_group=group)
    with pytest.raises(ValueError, match=r"rms_norm: x has \d rows, and \d on rank \d of process_"):
        ct.rms_norm(x[: 2 - (rank == 1)], process_group=group)
    with pytest.raises(ValueError, match=r"process_group exchanges \d bytes a row, and \d on r"):
        ct.rms_norm(x.float() if rank == 1 else x, process_group=group)
    only = dist.new_group([1])
    if rank == 1:  # a group of one has the bits of no group
        assert torch.equal(ct.rms_norm(x, process_group=only), ct.rms_norm(x))
        with pytest.raises(ValueError, match="rms_norm: groups is 2, expected 1 with proc"):
            ct.rms_norm(x, groups=2, process_group=only)
    else:
        with pytest.raises(ValueError, match="rms_norm: process_group does not have this process"):
            ct.rms_norm(x, process_group=only)


def check_the_stream_alone():
    """If only the stream is used, infinite rows and other processes change no gradient."""
    whole = operands({"residual": "float32", "gate": "float32"})
    whole["x"][0, 0] = np.inf
    names, options = ("x", "residual", "gate"), {"gate_position": "branch"}

    def gradients(own, **group):
        x, residual, gate = leaves = [leaf(own(whole[name])) for name in names]
        weight, bias = (to_torch(own(whole[name])) for name in ("weight", "bias"))
        found = ct.add_layer_norm(x, residual, weight, bias, gate=gate, **options, **group)
        found.residual.backward(to_torch(own(whole["d_residual"])))
        return [one.grad for one in leaves]

    found = gradients(part, process_group=dist.group.WORLD)
    for one, expected in zip(found, gradients(np.asarray), strict=True):
        torch.testing.assert_close(one, part(expected), rtol=0, atol=0, equal_nan=True)


def check_that_a_death_is_an_error():
    """The others get an error within the group's timeout; this ends the first process."""
    pair = dist.new_group([0, 1], timeout=timedelta(seconds=10))
    if dist.get_rank() == 0:
        os._exit(0)
    if dist.get_rank() == 1:
        with pytest.raises(RuntimeError):
            ct.rms_norm(torch.ones(2, 1), process_group=pair)


def check_as_one_of(rank, ranks, folder, cases):
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=LIMIT)
    for name in cases:
        check_case(name)
    for check in (*CHECKS_OF_FOUR, *CHECKS) if ranks == 4 else CHECKS:
        check()


CHECKS_OF_FOUR = (check_the_stream_alone,)
CHECKS = (
    check_bits,
    check_messages,
    check_gradients,
    check_modules,
    check_sums_of_16_bits,
    check_mesh,
    check_refusals,
    check_that_a_death_is_an_error,
)


def check_and_leave(*arguments):
    """Check in a process that ends without finalizing Python (see test_distributed)."""
    check_as_one_of(*arguments)
    os._exit(0)


@pytest.mark.filterwarnings("ignore:DTensor random operators")  # of early versions of PyTorch
@pytest.mark.parametrize(
    ("ranks", "cases"),
    [(2, [*CASES][:1]), pytest.param(4, CASES, marks=pytest.mark.exhaustive)],
    ids=("two", "four"),
)
def test_processes_that_share_rows_compute_what_one_computes(ranks, cases, tmp_path):
    arguments = (ranks, str(tmp_path), tuple(cases))
    others = torch.multiprocessing.spawn(
        check_and_leave, arguments, nprocs=ranks - 1, join=False, daemon=True
    )
    check_as_one_of(ranks - 1, *arguments)
    dist.destroy_process_group()
    while not others.join(2 * LIMIT.seconds):  # raises another process's error
        pass
