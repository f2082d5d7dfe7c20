# SPDX-License-Identifier: MIT
"""What is no memory to lend as `workspace=`, and what `workspace_size` is not the size of."""

from dataclasses import replace

import numpy as np
import pytest

import cunorm
from cunorm import NormGrads
from cunorm._arrays import Device, describe_memory
from cunorm.row_norm import _backward, _workspace
from tests.support.calls import WIDTH, given, raises
from tests.support.operands import assert_same_bits, bits, draw

NAME = "layer_norm_backward"
SIZE = 1 << 14  # bytes, of which no call here needs a quarter


def bytes_of(size):
    """Return so many bytes of 0xff, at a multiple of 64."""
    memory = np.full(size + 64, 0xFF, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size]


def square():
    """Draw the operands of a backward of 16 rows of 16."""
    arrays = {name: draw(name, (16, 16), "float32") for name in ("dy", "x")}
    names = ("weight", "bias", "rstd", "mean")
    return arrays | {name: draw(name, 16, "float32") for name in names}


# --- what is no such memory -----------------------------------------------------------------------

UNUSABLE = (
    "cannot be used in place, expected a writable array whose address is a multiple of 16 "
    "(JAX arrays are immutable)"
)


def refused(error, text, workspace, **told):
    """Expect that a call names what is wrong, whatever needs the workspace, and writes nothing."""
    arrays = given()
    names = ("dy", "x", "weight", "bias", "rstd", "mean")
    operands = {name: getattr(arrays, name) for name in names} | told
    out = NormGrads(dx=np.full_like(arrays.x, 7))
    for needs in (("x", "weight", "bias"), ("x",)):
        with raises(error, f"{NAME}: workspace {text}"):
            cunorm.layer_norm_backward(**operands, workspace=workspace, needs=needs, out=out)
    assert (out.dx == 7).all()


STRIDED = "has strides {}, expected a contiguous array"


def strides_of(array):
    return array.strides if isinstance(array, np.ndarray) else array.stride()


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_strided_workspace_is_refused(dtype):
    memory = np.empty((64, 64), dtype)
    for view in (memory[:, :32], memory[::-1], memory.T, memory[::2], memory[0, ::-1]):
        refused(ValueError, STRIDED.format(strides_of(view)), view)
    expanded = np.broadcast_to(memory[:1], (64, 64))
    refused(ValueError, STRIDED.format(expanded.strides), expanded)


@pytest.mark.parametrize("offset", [1, 4, 8])
@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_an_unaligned_workspace_is_refused(dtype, offset):
    workspace = bytes_of(SIZE)
    refused(ValueError, UNUSABLE, workspace[offset : offset - 16].view(dtype))


def test_a_read_only_workspace_is_refused():
    for dtype in (np.uint8, np.float32):
        workspace = bytes_of(SIZE).view(dtype)
        workspace.flags.writeable = False
        refused(ValueError, UNUSABLE, workspace)


@pytest.mark.parametrize("dtype", [object, [("number", "f8"), ("thing", "O")]], ids=str)
def test_a_workspace_of_references_is_refused(monkeypatch, dtype):
    """Python would follow what a kernel leaves there, and fall."""
    monkeypatch.setattr(_backward, "run_backward", None)
    arrays, workspace = square(), np.zeros(SIZE, dtype)
    with pytest.raises((TypeError, ValueError), match=rf"^{NAME}: workspace has dtype .*expected"):
        cunorm.layer_norm_backward(**arrays, workspace=workspace)


@pytest.mark.parametrize("thing", [[0.0], 4096, b"bytes", bytearray(4096)], ids=lambda t: type(t))
def test_a_workspace_that_is_no_array_is_refused(thing):
    with pytest.raises(TypeError, match=rf"^{NAME}: workspace is of type {type(thing).__name__}, "):
        cunorm.layer_norm_backward(**square(), workspace=thing)


def test_a_jax_array_as_workspace_is_refused():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    refused(ValueError, UNUSABLE, jax.numpy.ones(SIZE, "float32"))
    with pytest.raises((TypeError, ValueError), match=f"^{NAME}: workspace "):
        cunorm.layer_norm_backward(**square(), workspace=jax.numpy.ones(SIZE, "uint8"))


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_torch_tensor_with_strides_is_refused(dtype):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    memory = torch.zeros(64, 64, dtype=getattr(torch, dtype))
    for view in (memory[::2], memory.T, memory[:, 1:], memory[:1].expand(64, 64)):
        refused(ValueError, STRIDED.format(strides_of(view)), view)


@pytest.mark.parametrize("offset", [1, 2, 8])
def test_a_torch_tensor_that_is_not_aligned_is_refused(offset):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    refused(ValueError, UNUSABLE, torch.zeros(SIZE, dtype=torch.uint8)[offset:])


@pytest.mark.parametrize("dtype", ["int64", "bool", "complex64"])
def test_a_torch_tensor_of_another_dtype_is_refused(dtype):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    text = f"has dtype {dtype}, expected float16, bfloat16, float32 or float64"
    refused(TypeError, text, torch.zeros(SIZE, dtype=getattr(torch, dtype)))


NO_MEMORY = (
    "has no memory behind it (freed storage, or a zero tensor of autograd's), expected a tensor "
    "with data: pass workspace.clone() of one that has"
)
TORCH_DTYPES = pytest.mark.parametrize("dtype", ["uint8", "float32"])


@TORCH_DTYPES
@pytest.mark.parametrize("kind", ["freed", "zero"])
def test_a_torch_tensor_without_memory_is_refused(dtype, kind):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    workspace = torch.empty(SIZE, dtype=getattr(torch, dtype))
    if kind == "freed":
        workspace.untyped_storage().resize_(0)
    else:
        workspace = torch._efficientzerotensor(SIZE, dtype=workspace.dtype)
    refused(ValueError, NO_MEMORY, workspace)


@TORCH_DTYPES
def test_a_torch_tensor_of_no_elements_is_refused_for_its_size(dtype):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    workspace = torch.empty(0, dtype=getattr(torch, dtype))
    with pytest.raises(ValueError, match=rf"^{NAME}: workspace has 0 bytes, expected at least"):
        cunorm.layer_norm_backward(**square(), workspace=workspace)


@pytest.mark.parametrize("dtype", ["uint8", "int64", "float32"])
def test_a_torch_tensor_on_another_kind_of_device_is_refused_for_that(dtype):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    text = "is on device meta, expected cpu or cuda: pass a tensor with data there"
    refused(ValueError, text, torch.empty(SIZE, dtype=getattr(torch, dtype), device="meta"))


@TORCH_DTYPES
@pytest.mark.parametrize("transform", ["vmap", "functionalize"])
def test_a_torch_tensor_inside_a_functional_transform_is_refused(dtype, transform):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    text = (
        "is a tensor inside a torch.func transform (vmap, grad, jvp), expected a plain one: call "
        "this outside the transform"
    )

    def function(workspace):
        refused(TypeError, text, workspace)
        return workspace.clone()

    getattr(torch.func, transform)(function)(torch.zeros(2, SIZE, dtype=getattr(torch, dtype)))


@TORCH_DTYPES
@pytest.mark.filterwarnings("ignore::UserWarning")  # a prototype: nested
@pytest.mark.parametrize("layout", ["nested", "torch.sparse_coo"])
def test_a_torch_tensor_that_is_not_dense_is_refused(dtype, layout):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    dense = torch.ones(SIZE, dtype=getattr(torch, dtype))
    workspace = torch.nested.nested_tensor([dense]) if layout == "nested" else dense.to_sparse()
    text = "expected a dense tensor: pass workspace.to_dense() (a nested tensor: padded)"
    refused(ValueError, f"has layout {layout}, {text}", workspace)


def test_a_workspace_on_another_device_is_refused(monkeypatch):
    def elsewhere(*asked):
        operand = describe_memory(*asked)
        return replace(operand, form=operand.form._replace(device=Device("cuda", 1)))

    monkeypatch.setattr(_workspace, "describe_memory", elsewhere)
    refused(ValueError, "is on cuda:1, expected cpu, the device of x", bytes_of(SIZE))


def test_only_what_adds_up_takes_a_workspace():
    arrays = given()
    with pytest.raises(TypeError, match="unexpected keyword argument 'workspace'"):
        cunorm.l2_norm_backward(
            arrays.dy, arrays.x, rstd=arrays.rstd, workspace=np.empty(64, np.uint8)
        )


# --- overlaps -------------------------------------------------------------------------------------

OWN = "expected memory of its own"


@pytest.mark.parametrize("name", ["dy", "x", "weight", "bias", "rstd", "mean"])
def test_a_workspace_that_overlaps_an_input_is_refused(name):
    arrays = square()
    workspace = bytes_of(SIZE)
    for start in (0, 64, len(workspace) - arrays[name].nbytes):
        place = workspace[start : start + arrays[name].nbytes].view(np.float32)
        place = place.reshape(arrays[name].shape)
        before = bits(workspace).copy()
        for typed in (workspace, workspace.view(np.float64)):
            with raises(ValueError, f"{NAME}: workspace overlaps {name}, {OWN}"):
                cunorm.layer_norm_backward(**arrays | {name: place}, workspace=typed)
        np.testing.assert_array_equal(bits(workspace), before)


@pytest.mark.parametrize("field", ["dx", "dresidual", "dweight", "dbias"])
def test_a_workspace_that_overlaps_an_output_is_refused(field):
    arrays = square()
    like = arrays["weight" if field in ("dweight", "dbias") else "x"]
    workspace = bytes_of(SIZE)
    for start in (0, 64, len(workspace) - like.nbytes):
        place = workspace[start : start + like.nbytes].view(np.float32).reshape(like.shape)
        with raises(ValueError, f"{NAME}: workspace overlaps out.{field}, {OWN}"):
            cunorm.layer_norm_backward(
                **arrays, workspace=workspace, out=NormGrads(**{field: place})
            )
    assert (workspace == 0xFF).all()


def test_an_overlap_is_found_at_a_place_that_was_fine_for_other_arrays():
    """Where arrays lie is remembered, with what they are: neither alone says that all is well."""
    arrays, memory = square(), bytes_of(SIZE)
    half, x = memory[: SIZE // 2], memory[SIZE // 2 :][:1024].view(np.float32).reshape(16, 16)
    x[...] = arrays["x"]
    expected = cunorm.layer_norm_backward(**arrays)
    arrays["x"] = x
    for _ in range(2):
        grads = cunorm.layer_norm_backward(**arrays, workspace=half)
        assert_same_bits(grads.dx, expected.dx)
        assert_same_bits(grads.dweight, expected.dweight)
        with raises(ValueError, f"{NAME}: workspace overlaps x, {OWN}"):
            cunorm.layer_norm_backward(**arrays, workspace=memory)


# --- what has no size -----------------------------------------------------------------------------

OPS = (
    "'normalize_backward', 'rms_norm_backward', 'layer_norm_backward', 'l2_norm_backward', "
    "'group_norm', 'instance_norm', 'group_norm_forward' or 'group_norm_backward'"
)


@pytest.mark.parametrize("op", ["rms_norm", "rms_norm_forward", "backward", ""])
def test_only_what_takes_a_workspace_has_a_size(op):
    with raises(ValueError, f"workspace_size: op is {op!r}, expected {OPS}"):
        cunorm.workspace_size(op, given().x)


@pytest.mark.parametrize(
    "op", [None, cunorm.rms_norm_backward, ["rms_norm_backward"]], ids=["None", "function", "list"]
)
def test_the_op_of_a_workspace_size_is_a_name(op):
    with raises(TypeError, f"workspace_size: op is {op!r}, expected {OPS}"):
        cunorm.workspace_size(op, given().x)


@pytest.mark.parametrize(
    ("op", "parameter"),
    [("rms_norm_backward", "bias"), ("l2_norm_backward", "bias"), ("l2_norm_backward", "weight")],
)
def test_a_parameter_that_a_norm_does_not_have_has_no_size(op, parameter):
    with raises(ValueError, f"workspace_size: {parameter} is given, expected None: {op} has none"):
        cunorm.workspace_size(op, given().x, **{parameter: given().weight})


def test_a_workspace_size_is_for_arrays_that_fit_and_needs_that_there_are():
    x, weight = given().x, given().weight
    wrong = np.ones(WIDTH + 1, np.float32)
    text = "weight has shape (9,), expected (8,) to match x.shape[-1]"
    with raises(ValueError, f"workspace_size: {text}"):
        cunorm.workspace_size("rms_norm_backward", x, wrong)
    text = "needs is ('y',), expected a tuple of 'x', 'weight', 'bias', 'gate'"
    with raises(ValueError, f"workspace_size: {text}"):
        cunorm.workspace_size("rms_norm_backward", x, weight, needs=("y",))
    text = "x_dtype is 'int8', expected float16, bfloat16, float32 or float64"
    with raises(TypeError, f"workspace_size: {text}"):
        cunorm.workspace_size("rms_norm_backward", x, weight, x_dtype="int8")
    with raises(TypeError, "workspace_size: axis is True, expected an int"):
        cunorm.workspace_size("rms_norm_backward", x, weight, axis=True)
    with pytest.raises(TypeError, match=r"^workspace_size: x is None, expected a NumPy"):
        cunorm.workspace_size("rms_norm_backward", None)
