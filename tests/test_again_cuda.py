# SPDX-License-Identifier: MIT
"""Calls on CUDA arrays that are made again launch what they would if they were planned anew.

On arrays that say they are on a GPU: what is launched is compared, and nothing is computed. What a
call on a CPU computes again, and what makes another call, is in test_again.py.
"""

from functools import partial

import fake_cuda
import numpy as np
import pytest
from calls import (
    FUNCTIONS,
    anew,
    arrays_of,
    assert_refused,
    call_of,
    fields,
    nothing_known,
    planning_forbidden,
)
from operands import at

import cunorm
from cunorm import _again, _backend, _cuda_calls
from cunorm._arrays import Device, describe
from cunorm._builds import Build, Launch
from cunorm.group_norm import _run

torch = pytest.importorskip("torch", reason="its tensors stand in for those of a GPU")
cupy = pytest.importorskip("cupy", reason="its arrays are given memory of the host")

names = pytest.mark.parametrize("name", FUNCTIONS)
kinds = pytest.mark.parametrize("kind", ["cupy", "torch"])

OTHER_STREAM, OTHER_GPU = 0x5000, 1


@pytest.fixture
def gpu(monkeypatch):
    return fake_cuda.install(monkeypatch)


@pytest.fixture(autouse=True)
def known(monkeypatch, gpu):
    describe("test", "array", fake_cuda.on_cupy(np.empty(1, np.float32)))
    known = nothing_known(monkeypatch)
    yield known
    _backend.forget()  # what was planned for GPUs that there are not
    _run.forget()


# --- arrays, and what is launched -----------------------------------------------------------------


def moved(kind, array, gpu=0):
    """Return an array on a GPU, of a tensor."""
    if kind == "cupy":
        return fake_cuda.on_cupy(array.numpy(), gpu)
    array.gpu = gpu
    return array


def on_gpu(name, kind, gpu=0):
    """Return a call of any function with all of its arrays on a GPU."""
    call = call_of(name, kind="torch")
    for named in (call.arrays, call.out, vars(call)):
        named |= {key: moved(kind, array, gpu) for key, array in tensors_of(named).items()}
    return call


def tensors_of(named):
    return {key: value for key, value in named.items() if isinstance(value, torch.Tensor)}


def host(array):
    """Return a NumPy array over the memory of an array of either kind."""
    if isinstance(array, torch.Tensor):
        return array.numpy()
    return array.data.mem._owner


def address_of(array):
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.data.ptr


def elsewhere(array):
    """Return an array of the same form, aligned to as many bytes."""
    if isinstance(array, torch.Tensor):
        return array.clone()
    return fake_cuda.on_cupy(host(array).copy(), array.data.device_id)


def launched(gpu, run, arrays):
    """Return what a call launches, with names for addresses."""
    gpu.taken()
    gpu.allocated.clear()
    results = fields(run())
    names = {address_of(array): name for name, array in (arrays | results).items()}

    def said(word):
        for one in gpu.allocated:
            size = int(np.prod(one.shape)) * one.dtype.itemsize
            if word not in names and one.pointer <= word < one.pointer + size:
                return "memory", word - one.pointer
        return names.get(word, word)

    return [one._replace(words=tuple(map(said, one.words))) for one in gpu.taken()]


def arrays_in(call):
    lent = {} if call.workspace is None else {"workspace": call.workspace}
    return arrays_of(call.arrays) | lent


def assert_again(gpu, run, arrays):
    """Check that a call is made again, and launches what one that is planned does."""
    expected = launched(gpu, partial(anew, run), arrays)
    with planning_forbidden():
        assert launched(gpu, run, arrays) == expected
    assert expected
    return expected


def assert_planned(gpu, run, arrays):
    """Check that a call launches what one does that is planned, and then is made again."""
    expected = launched(gpu, partial(anew, run), arrays)
    assert launched(gpu, run, arrays) == expected
    assert assert_again(gpu, run, arrays) == expected
    return expected


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


def strides_of(array):
    return array.stride() if isinstance(array, torch.Tensor) else array.strides


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


@kinds
def test_a_workspace_that_became_smaller_is_refused(kind):
    call = on_gpu("rms_norm_backward", kind)
    call.run()
    call.workspace = call.workspace[:16]
    assert_refused(call.run, ValueError, "rms_norm_backward: workspace has 16 bytes")


def test_only_tensors_that_are_given_for_results_are_marked_as_changed():
    call = on_gpu("layer_norm_backward", "torch")
    call.run()
    read = arrays_in(call)
    before = {name: tensor._version for name, tensor in (read | call.out).items()}
    with planning_forbidden():
        call.run()
    after = {name: tensor._version for name, tensor in (read | call.out).items()}
    assert after == before | {name: before[name] + 1 for name in call.out}


# --- what makes another call ----------------------------------------------------------------------


@kinds
def test_an_alignment_stride_dtype_or_device_that_is_another_is_planned_anew(kind, gpu, known):
    memory = torch.zeros(8 * 64 + 64)
    start = -memory.data_ptr() % 64 // 4

    def rows(first, *strides, dtype=torch.float32):
        return memory.view(dtype)[start:].as_strided((4, 64), strides or (64, 1), start + first)

    tensors = {
        "as it was": rows(0),
        "aligned to 4 bytes": rows(1),
        "aligned to 8 bytes": rows(2),
        "wider rows": rows(0, 68, 1),
        "the same row": rows(0, 0, 1),
        "halves": rows(0, dtype=torch.float16),
    }
    arrays = {what: moved(kind, tensor) for what, tensor in tensors.items()}
    arrays["another GPU"] = moved(kind, rows(0).detach(), OTHER_GPU)
    found = {}
    for turn in range(2):
        for what, x in arrays.items():
            run = partial(cunorm.rms_norm, x)
            with at(what):
                check = assert_again if turn else assert_planned
                found[what] = check(gpu, run, {"x": x})
        assert len(known) == len(arrays)
    assert len({launches[0] for launches in found.values()}) == len(found)


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


@kinds
def test_arrays_on_another_gpu_are_refused_though_their_forms_were_met(kind):
    x, weight = moved(kind, torch.zeros(4, 64)), moved(kind, torch.zeros(64))
    far = moved(kind, torch.zeros(64), OTHER_GPU)
    y, far_y = (moved(kind, torch.zeros(4, 64), index) for index in (0, OTHER_GPU))
    cunorm.rms_norm(x, weight)
    cunorm.rms_norm(x, weight, out=y)
    for arrays, out in (((x, far), None), ((x, far), y), ((x, weight), far_y)):
        call = partial(cunorm.rms_norm, *arrays, out=out)
        assert_refused(call, ValueError, "rms_norm: ")


@pytest.mark.parametrize("turned", [False, True])
def test_a_call_on_arrays_of_two_frameworks_is_planned_each_time(turned, gpu, known, monkeypatch):
    kinds = ("torch", "cupy") if turned else ("cupy", "torch")
    x, weight = (
        moved(kind, torch.zeros(shape)) for kind, shape in zip(kinds, ((4, 64), (64,)), strict=True)
    )
    run = partial(cunorm.rms_norm, x, weight)
    arrays = {"x": x, "weight": weight}
    for _ in range(2):
        assert launched(gpu, run, arrays) == launched(gpu, partial(anew, run), arrays)
    assert not known


@pytest.mark.parametrize("module", [np, torch])
def test_an_array_on_the_cpu_among_them_is_refused(module):
    x, weight = (moved("cupy", torch.zeros(s)) for s in ((4, 64), (64,)))
    cunorm.rms_norm(x, weight)
    call = partial(cunorm.rms_norm, x, np.zeros(64, np.float32))
    assert_refused(call, ValueError, "rms_norm: ")


# --- what is refused ------------------------------------------------------------------------------


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


class Logged(torch.Tensor):
    pass


STATES = {
    "requires grad": lambda tensor: tensor.detach().requires_grad_(),
    "negative": torch._neg_view,
    "freed": freed,
    "subclass": lambda tensor: tensor.as_subclass(Logged),
}


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("name", ["normalize_forward", "normalize_backward", "group_norm_backward"])
def test_a_tensor_that_is_not_its_memory_is_refused_as_when_planned_anew(name, state):
    call = on_gpu(name, "torch")
    call.make()
    call.run()
    for run in (call.make, call.run):
        for argument, plain in arrays_of(call.arrays).items():
            call.arrays[argument] = STATES[state](plain)
            with at(argument):
                assert_refused(run, (TypeError, ValueError), f"{name}: {argument} ")
            call.arrays[argument] = plain
            with planning_forbidden():
                run()


def test_a_call_in_fake_mode_is_refused():
    call = on_gpu("rms_norm", "torch")
    call.run()
    with torch._subclasses.FakeTensorMode():
        assert_refused(call.run, TypeError, "rms_norm: x is used where torch makes tensors without")


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
