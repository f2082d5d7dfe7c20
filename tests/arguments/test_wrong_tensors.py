# SPDX-License-Identifier: MIT
"""Arrays that stand for more than their memory, or lie elsewhere: whichever of them it is."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from tests.arguments.wrong_memory import CONTIGUOUS, SIZE, UNUSABLE, UNWRITABLE
from tests.support.calls import arrays_of, call_of, names, taking, to
from tests.support.operands import at
from tests.support.refused import Case, check_error, check_refused, each

RECORDS = (
    "requires grad, which this function does not record: use cunorm.torch, torch.no_grad() or {}"
    ".detach()"
)


@names
def test_a_tensor_that_requires_grad_is_refused_outside_no_grad(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    call = call_of(name, kind="torch")
    if call.workspace is not None:
        call.workspace = call.workspace.view(torch.float32)  # as bytes cannot require grad
    places = [(named, key) for named in (call.arrays, call.out) for key in arrays_of(named)]
    places += [(vars(call), "workspace")] if call.workspace is not None else []
    call.run()
    for named, key in places:
        argument = f"out.{key}" if named is call.out else key
        argument = "out" if call.result is None and named is call.out else argument
        plain, named[key] = named[key], named[key].detach().requires_grad_()
        case = Case(name, ValueError, f"{argument} {RECORDS.format(argument)}", {})
        with at(case):
            check_error(case, call.run)
            if named is call.arrays:
                check_error(case, call.make)
        with torch.no_grad():
            call.run()
        named[key] = plain
        call.run()


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
    text = "is on device meta, expected cpu or cuda: pass a tensor with data there"
    of_workspaces(ValueError, text, torch.empty(SIZE, dtype=dtype, device="meta"))
    freed = torch.empty(SIZE, dtype=dtype)
    freed.untyped_storage().resize_(0)
    text = (
        "has no memory behind it (freed storage, or a zero tensor of autograd's), expected a "
        "tensor with data: pass workspace.clone() of one that has"
    )
    of_workspaces(ValueError, text, freed)
    of_workspaces(ValueError, text, torch._efficientzerotensor(SIZE, dtype=dtype))
    text = "expected a dense tensor: pass workspace.to_dense() (a nested tensor: padded)"
    sparse = torch.ones(SIZE, dtype=dtype).to_sparse()
    of_workspaces(ValueError, f"has layout torch.sparse_coo, {text}", sparse)


@pytest.mark.parametrize("transform", ["vmap", "functionalize"])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_workspace_inside_a_functional_transform_is_refused(dtype, transform):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    text = (
        "is a tensor inside a torch.func transform (vmap, grad, jvp), expected a plain one: call "
        "this outside the transform"
    )

    def function(workspace):
        of_workspaces(TypeError, text, workspace)
        return workspace.clone()

    getattr(torch.func, transform)(function)(torch.zeros(2, SIZE, dtype=getattr(torch, dtype)))


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64"])
def test_a_workspace_of_a_tensor_of_another_dtype_is_refused(dtype):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    text = f"has dtype {dtype}, expected float16, bfloat16, float32 or float64"
    of_workspaces(TypeError, text, torch.zeros(SIZE, dtype=getattr(torch, dtype)))


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
