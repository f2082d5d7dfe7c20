# SPDX-License-Identifier: MIT
"""Arrays that stand for more than their memory, or lie elsewhere: whichever of them it is."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.arguments.wrong_memory import CONTIGUOUS, SIZE, UNUSABLE, UNWRITABLE
from tests.support.calls import arrays_of, assert_same, call_of, fields, names, taking, to
from tests.support.operands import at
from tests.support.refused import Case, check_error, check_refused, each

RECORDS = (
    "requires grad, which this function does not record: use cunorm.torch, torch.no_grad() or {}"
    ".detach()"
)
NO_MEMORY = (
    "has no memory behind it (freed storage, or a zero tensor of autograd's), expected a tensor "
    "with data: pass {}.clone() of one that has"
)
INSIDE = (
    "is a tensor inside a torch.func transform (vmap, grad, jvp), expected a plain one: call this "
    "outside the transform"
)
DENSE = "expected a dense tensor: pass {}.to_dense() (a nested tensor: padded)"
META = "is on device meta, expected cpu or cuda: pass a tensor with data there"


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


def subclass(tensor):
    return tensor.as_subclass(type("Logged", (type(tensor),), {}))


STATES = {
    "requires grad": (lambda tensor: tensor.detach().requires_grad_(), ValueError, RECORDS),
    "negative": (
        lambda tensor: __import__("torch")._neg_view(tensor),
        ValueError,
        "has its negative bit set, expected plain values: pass {}.resolve_neg()",
    ),
    "sparse": (lambda t: t.to_sparse(), ValueError, f"has layout torch.sparse_coo, {DENSE}"),
    "meta": (lambda tensor: tensor.to("meta"), ValueError, META),
    "freed": (freed, ValueError, NO_MEMORY),
    "subclass": (
        subclass,
        TypeError,
        "is a tests.arguments.test_wrong_tensors.Logged, a tensor subclass whose memory may not be "
        "what it stands for, expected a plain torch.Tensor: pass its local or plain tensor "
        "({}.to_local() for a DTensor)",
    ),
}


def places_of(call):
    """Yield each array of a call: what it is in, by which key, and what an error calls it."""
    for named in (call.arrays, call.out):
        for key in arrays_of(named):
            label = "out" if call.result is None else f"out.{key}"
            yield named, key, label if named is call.out else key
    if call.workspace is not None:
        yield vars(call), "workspace", "workspace"


@pytest.mark.parametrize("state", STATES)
@names
def test_a_tensor_that_is_not_its_memory_is_refused_whatever_was_met(name, state):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    make, error, text = STATES[state]
    call = call_of(name, kind="torch")
    if call.workspace is not None:
        call.workspace = call.workspace.view(call.arrays["x"].dtype)  # as bytes require no grad
    for named, key, argument in places_of(call):
        call.run()
        call.make()
        plain, named[key] = named[key], make(named[key])
        with at(argument):
            case = Case(name, error, f"{argument} {text.format(argument)}", {})
            check_error(case, call.run)
            if named is call.arrays:
                check_error(case, call.make)
        named[key] = plain


@names
def test_a_tensor_that_requires_grad_is_taken_where_none_is_recorded(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    call = call_of(name, kind="torch")
    expected = call.make()
    for argument, tensor in arrays_of(call.arrays).items():
        call.arrays[argument] = torch.nn.Parameter(tensor)
    with torch.no_grad():
        made = call.make()
    assert_same(made, expected)
    assert not any(tensor.requires_grad for tensor in fields(made).values())


@pytest.mark.parametrize("transform", ["vmap", "grad", "functionalize"])
@pytest.mark.parametrize("name", ["normalize_backward", "group_norm_backward"])
def test_a_tensor_inside_a_transform_is_refused_whatever_was_met(name, transform):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    call = call_of(name, kind="torch")
    call.workspace = call.workspace.view(torch.float32)
    for named, key, argument in places_of(call):
        call.run()
        plain, case = named[key], Case(name, TypeError, f"{argument} {INSIDE}", {})

        def inside(tensor, named=named, key=key, case=case):
            named[key] = tensor
            check_error(case, call.run)
            return tensor.sum()

        with at(argument):
            getattr(torch.func, transform)(inside)(torch.stack([plain, plain]))
        named[key] = plain


# --- memory of the frameworks ---------------------------------------------------------------------


def of_workspaces(error, text, workspace):
    check_refused(each(taking("workspace"), error, f"workspace {text}", workspace=workspace))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_tensor_that_is_no_memory_to_lend_is_refused(dtype):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    dtype = getattr(torch, dtype)
    memory = torch.zeros(64, 64, dtype=dtype)
    for view in (memory[::2], memory.T, memory[:, 1:], memory[:1].expand(64, 64)):
        of_workspaces(ValueError, f"has strides {view.stride()}, expected {CONTIGUOUS}", view)
    for offset in (4, 8):
        of_workspaces(
            ValueError, UNUSABLE, torch.zeros(SIZE, dtype=dtype)[offset // dtype.itemsize :]
        )
    text = "has dtype {}, expected float16, bfloat16, float32 or float64"
    for other in (torch.int64, torch.bool, torch.complex64):
        name = str(other).removeprefix("torch.")
        of_workspaces(TypeError, text.format(name), torch.zeros(SIZE, dtype=other))
    if dtype is torch.uint8:  # others are described as any array is
        bytes_ = torch.zeros(SIZE, dtype=dtype)
        for state in ("sparse", "meta", "freed"):
            make, error, text = STATES[state]
            of_workspaces(error, text.format("workspace"), make(bytes_))
        zero = torch._efficientzerotensor(SIZE, dtype=dtype)
        of_workspaces(ValueError, NO_MEMORY.format("workspace"), zero)


@names
def test_jax_arrays_are_no_memory_to_write_to(name):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    call = call_of(name)
    of_jax = {key: jax.numpy.asarray(array) for key, array in call.out.items()}
    for field, array in of_jax.items():
        label = "out" if call.result is None else f"out.{field}"
        out = call.out_of(call.out | {field: array})
        check_error(
            Case(name, ValueError, f"{label} {UNWRITABLE}", {}), partial(call.make, out=out)
        )
    if call.workspace is not None:
        of_workspaces(ValueError, UNUSABLE, jax.numpy.ones(SIZE, "float32"))


# --- traced arrays --------------------------------------------------------------------------------


@names
def test_a_jax_tracer_is_refused_and_pointed_to_the_jax_front_end(name):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    call = call_of(name)
    with pytest.raises(TypeError, match=rf"^{name}: \w+ is a JAX tracer.+use cunorm\.jax there"):
        jax.jit(lambda arrays: call.make(**arrays))(arrays_of(call.arrays))


def test_tracers_as_numbers_are_refused():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import cunorm.jax

    with pytest.raises(TypeError, match=r"^rms_norm: eps is .*expected a number"):
        jax.jit(lambda eps: cunorm.jax.rms_norm(np.ones((2, 8)), eps=eps))(0.1)


def test_shapes_that_are_not_known_are_refused():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import cunorm.jax

    (size,) = jax.export.symbolic_shape("b")
    x = jax.ShapeDtypeStruct((size, 8), "float32")
    with pytest.raises(TypeError, match=r"^rms_norm: x has shape \(b, 8\), expected sizes that "):
        jax.export.export(jax.jit(cunorm.jax.rms_norm))(x)


# --- other devices --------------------------------------------------------------------------------


@pytest.mark.gpu
@names
def test_an_array_on_another_device_than_x_is_refused(name):
    call = call_of(name)
    inputs = {key: array for key, array in arrays_of(call.arrays).items() if key != "x"}
    lent = {} if call.workspace is None else {"workspace": np.empty(SIZE, np.uint8)}
    for key, array in (inputs | lent).items():
        case = Case(name, ValueError, f"{key} is on cuda:0, expected cpu, the device of x", {})
        with at(case):
            check_error(case, partial(call.make, **{key: to("cupy", array)}))
