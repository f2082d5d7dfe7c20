# SPDX-License-Identifier: MIT
"""What makes another call on CUDA arrays than one that was made: it is planned anew, or refused."""

from functools import partial

import numpy as np
import pytest

import cunorm
from tests.support import again_cuda
from tests.support.again_cuda import (
    OTHER_GPU,
    assert_again,
    assert_planned,
    kinds,
    launched,
    moved,
    on_gpu,
)
from tests.support.calls import anew, arrays_of, assert_refused, planning_forbidden
from tests.support.operands import at

torch = pytest.importorskip("torch", reason="its tensors stand in for those of a GPU")

gpu, known = again_cuda.gpu, again_cuda.known


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


# --- what is refused ------------------------------------------------------------------------------


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


@pytest.mark.parametrize("module", [np, torch])
def test_an_array_on_the_cpu_among_them_is_refused(module):
    x, weight = (moved("cupy", torch.zeros(s)) for s in ((4, 64), (64,)))
    cunorm.rms_norm(x, weight)
    call = partial(cunorm.rms_norm, x, np.zeros(64, np.float32))
    assert_refused(call, ValueError, "rms_norm: ")


@kinds
def test_a_workspace_that_became_smaller_is_refused(kind):
    call = on_gpu("rms_norm_backward", kind)
    call.run()
    call.workspace = call.workspace[:16]
    assert_refused(call.run, ValueError, "rms_norm_backward: workspace has 16 bytes")


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
