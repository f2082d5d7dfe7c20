# SPDX-License-Identifier: MIT
"""Calls on CUDA arrays that are made again launch what they would if they were planned anew.

On arrays that say they are on a GPU: what is launched is compared, and nothing is computed. What a
call on a CPU computes again is in test_again.py, and what makes another call on CUDA arrays in
test_again_cuda_others.py.
"""

from functools import partial

import numpy as np
import pytest

import cunorm
from cunorm import _again, _backend, _cuda_calls
from cunorm._arrays import Device
from cunorm._builds import Build, Launch
from cunorm.group_norm import _run
from tests.support import again_cuda
from tests.support.again_cuda import (
    OTHER_GPU,
    OTHER_STREAM,
    address_of,
    arrays_in,
    assert_again,
    assert_planned,
    elsewhere,
    kinds,
    launched,
    moved,
    names,
    on_gpu,
    strides_of,
)
from tests.support.calls import anew, arrays_of, fields, planning_forbidden
from tests.support.operands import at

torch = pytest.importorskip("torch", reason="its tensors stand in for those of a GPU")
cupy = pytest.importorskip("cupy", reason="its arrays are given memory of the host")

gpu, known = again_cuda.gpu, again_cuda.known


# --- what is launched again -----------------------------------------------------------------------


@kinds
@names
def test_a_call_made_again_launches_what_a_planned_one_does(name, kind, gpu):
    """With memory given for all that it makes, and for all but each part of that."""
    call = on_gpu(name, kind)
    for part in (None, *call.parts()):
        run = partial(call.run, without=part)
        run()
        with at(part):
            expected = assert_again(gpu, run, arrays_in(call) | call.out)
        words = {word for one in expected for word in one.words}
        assert "x" in words
        assert words & {"y", "dx"}
        lent = any(isinstance(word, tuple) for word in words)
        assert lent == (part == "workspace" and call.workspace.shape != (0,))


@kinds
@names
def test_results_are_made_for_arrays_that_lie_elsewhere_without_planning(name, kind, gpu, known):
    call = on_gpu(name, kind)
    made = [call.make()]
    kept = []  # so that nothing is made where they lie
    for argument in arrays_of(call.arrays):
        kept.append(call.arrays[argument])
        call.arrays[argument] = elsewhere(call.arrays[argument])
        with at(argument):
            assert_again(gpu, call.make, arrays_of(call.arrays))
        made.append(call.make())
    assert len(known) == 1
    right = fields(anew(call.make))
    for result in made:
        assert [*fields(result)] == [*right]
        for field, array in fields(result).items():
            forms = [(type(a), a.shape, a.dtype, strides_of(a)) for a in (array, right[field])]
            assert forms[0] == forms[1]
    distinct = [{id(array): array for array in fields(one).values()}.values() for one in made]
    addresses = [address_of(array) for arrays in distinct for array in arrays]
    assert len(addresses) == len(set(addresses))


@kinds
def test_a_result_in_the_order_of_a_channels_last_x_is_made_again(kind, gpu):
    x = moved(kind, torch.zeros(2, 5, 4, 8).permute(0, 3, 1, 2))
    run = partial(cunorm.group_norm, x, 4, channel_axis=1)
    strides = [strides_of(run()), strides_of(run())]
    assert strides == 2 * [strides_of(x)]
    assert_again(gpu, run, {"x": x})


@kinds
@names
def test_a_call_made_again_is_on_the_stream_that_is_current_then(name, kind, gpu):
    call = on_gpu(name, kind)
    for run in (call.make, call.run):
        run()
        gpu.taken()
        for streams in ({0: OTHER_STREAM}, {OTHER_GPU: OTHER_STREAM}):
            gpu.streams = streams
            with planning_forbidden():
                run()
            assert {one.stream for one in gpu.taken()} == {streams.get(0, 0)}


@kinds
@names
def test_a_call_enters_its_device_where_that_is_not_current_and_leaves_it(name, kind, gpu):
    """By the library whose arrays they are: CuPy would leave a context on the one before."""
    call = on_gpu(name, kind, OTHER_GPU)
    for run in (call.run, call.make):
        for current in (0, OTHER_GPU, 0):
            gpu.current = current
            assert {one.device for one in launched(gpu, partial(anew, run), {})} == {OTHER_GPU}
            run()
            gpu.entered.clear()
            with planning_forbidden():
                assert {one.device for one in launched(gpu, run, {})} == {OTHER_GPU}
            assert set(gpu.entered) == ({(kind, OTHER_GPU)} if current == 0 else set())
            assert gpu.current == current


def nowhere(kind, shape):
    """Return an empty array as the libraries make it on a GPU: it has no address."""
    if kind == "torch":
        return torch.empty(shape)
    memory = cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(0, 0, None, 0), 0)
    return cupy.ndarray(shape, "float32", memory)


@kinds
def test_empty_arrays_that_have_no_address_are_recognised(kind, gpu, known):
    x, weight = nowhere(kind, (0, 64)), moved(kind, torch.zeros(64))
    run = partial(cunorm.rms_norm_backward, x, x, weight, rstd=nowhere(kind, (0,)))
    (launch,) = assert_planned(gpu, run, {})
    assert launch.kernel == "param_grad"
    given = {"workspace": nowhere(kind, (0,))}
    images = {"x": moved(kind, torch.zeros(2, 5, 4, 8))}
    assert_planned(gpu, partial(cunorm.group_norm, *images.values(), 4, **given), images)
    assert len(known) == 2


# --- memory ---------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("name", ["rms_norm_backward", "group_norm_backward"])
def test_memory_that_is_not_given_is_the_frameworks_own_in_each_call(name, kind, gpu, monkeypatch):
    call = on_gpu(name, kind)
    run = partial(call.run, without="workspace")
    run()
    if kind == "torch":
        monkeypatch.setattr(cupy, "empty", None)
    gpu.allocated.clear()
    with planning_forbidden():
        run()
        run()
    first, second = gpu.allocated
    assert first.form == second.form
    assert isinstance(first.owner, torch.Tensor if kind == "torch" else cupy.ndarray)
    assert first.pointer != second.pointer
    call.run()
    gpu.allocated.clear()
    with planning_forbidden():
        call.run()
    assert not gpu.allocated


def test_only_tensors_that_are_given_for_results_are_marked_as_changed():
    call = on_gpu("layer_norm_backward", "torch")
    call.run()
    read = arrays_in(call)
    before = {name: tensor._version for name, tensor in (read | call.out).items()}
    with planning_forbidden():
        call.run()
    after = {name: tensor._version for name, tensor in (read | call.out).items()}
    assert after == before | {name: before[name] + 1 for name in call.out}


# --- kernels --------------------------------------------------------------------------------------


@names
def test_what_is_forgotten_is_planned_and_loaded_anew(name, gpu, known, monkeypatch):
    asked = []
    raw_kernel = cupy.RawKernel
    monkeypatch.setattr(
        cupy, "RawKernel", lambda *build: (asked.append(build), raw_kernel(*build))[1]
    )
    call = on_gpu(name, "cupy")
    call.make()
    before = {entry[1] for entry in asked}
    asked.clear()
    call.make()
    assert not asked
    _backend.forget()
    _run.forget()
    assert not _again._known
    call.make()
    assert {entry[1] for entry in asked} == before


def test_calls_in_the_midst_of_another_leave_its_arguments_alone(gpu):
    """As when a thread is interrupted between two addresses."""
    build = Build("row_norm_forward", ())
    launch = Launch(build, 3, 32)
    made = []

    def launches(at):
        made.append(at)
        return [(launch, np.array([at[0], 7, at[1] + 8, at[0]], np.uint64).tobytes())] * 2

    start = _cuda_calls.starter(launches, 2, Device("cuda", 0))
    count = len(made)

    class Interrupted(list):
        def __getitem__(self, place):
            start([1000, 2000], 6)
            return super().__getitem__(place)

    start(Interrupted([100, 200]), 5)
    assert len(made) == count
    own = [one for one in gpu.taken() if one.stream == 5]
    assert [one.words for one in own] == 2 * [(100, 7, 208, 100)]
