# SPDX-License-Identifier: MIT
"""Operands of PyTorch tensors."""

from __future__ import annotations

import pytest

from cunorm._arrays import CPU, contiguous_form, describe, numpy_view
from cunorm._arrays._torch import TORCH
from cunorm._dtypes import DTYPES

torch = pytest.importorskip("torch")

DTYPE_NAMES = ["float16", "bfloat16", "float32", "float64"]


def some_tensor(dtype="float32"):
    return torch.arange(12).reshape(3, 4).to(getattr(torch, dtype))


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_a_tensor_is_described_without_a_copy(dtype):
    tensor = some_tensor(dtype)
    operand = describe("f", "x", tensor)
    assert (operand.pointer, operand.owner is tensor) == (tensor.data_ptr(), True)
    assert (operand.shape, operand.strides) == ((3, 4), (4, 1))
    assert type(operand.shape) is tuple
    assert operand.dtype is DTYPES[dtype]
    assert (operand.device, operand.framework.name, operand.writable) == (CPU, "torch", True)


@pytest.mark.parametrize(
    ("view", "strides"),
    [
        (lambda t: t.T, (1, 4)),
        (lambda t: t[1:, ::2], (4, 2)),
        (lambda t: t[:1].expand(3, 4), (0, 1)),
        (lambda t: t[1, 2], ()),
        (lambda t: t[:0], (4, 1)),
    ],
    ids=["transposed", "stepped", "expanded", "0-d", "empty"],
)
def test_views_keep_their_first_element_and_their_strides(view, strides):
    tensor = view(some_tensor())
    operand = describe("f", "x", tensor)
    assert (operand.pointer, operand.shape) == (tensor.data_ptr(), tuple(tensor.shape))
    if tensor.numel():
        assert operand.strides == strides


def test_a_parameter_is_a_tensor_where_no_gradient_is_recorded():
    parameter = torch.nn.Parameter(some_tensor())
    with torch.no_grad():
        assert describe("f", "weight", parameter).pointer == parameter.data_ptr()
    with pytest.raises(ValueError, match="requires grad"):
        describe("f", "weight", parameter)


def test_a_tensor_that_requires_grad_is_pointed_to_the_ways_out():
    tensor = some_tensor().requires_grad_()
    fixes = r"^rms_norm: x requires grad.*cunorm\.torch, torch\.no_grad\(\) or x\.detach\(\)$"
    with pytest.raises(ValueError, match=fixes):
        describe("rms_norm", "x", tensor)
    assert describe("rms_norm", "x", tensor.detach()).pointer == tensor.data_ptr()
    with torch.inference_mode():
        assert describe("rms_norm", "x", tensor).pointer == tensor.data_ptr()


def freed_storage():
    tensor = some_tensor()
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.filterwarnings("ignore::UserWarning")  # prototypes: nested, quantized
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: some_tensor().to(torch.int32), TypeError, "x has dtype int32, expected float16"),
        (lambda: some_tensor().to(torch.float8_e5m2), TypeError, "dtype float8_e5m2, expected"),
        (lambda: some_tensor().to(torch.complex64).conj(), TypeError, "x has dtype complex64"),
        (
            lambda: torch.quantize_per_tensor(some_tensor(), 0.1, 0, torch.qint8),
            TypeError,
            r"x has dtype qint8, .*: pass x\.dequantize\(\)$",
        ),
        (
            lambda: some_tensor().to(torch.complex64).conj().imag,
            ValueError,
            r"x has its negative bit set.*: pass x\.resolve_neg\(\)$",
        ),
        (
            lambda: some_tensor().to_sparse(),
            ValueError,
            r"layout torch\.sparse_coo, .*x\.to_dense\(\)",
        ),
        (lambda: some_tensor().to_sparse_csr(), ValueError, "layout torch.sparse_csr"),
        (lambda: some_tensor().to_mkldnn(), ValueError, "layout torch._mkldnn"),
        (lambda: torch.nested.nested_tensor([some_tensor()]), ValueError, "layout nested"),
        (lambda: some_tensor().to("meta"), ValueError, "on device meta, expected cpu or cuda"),
        (freed_storage, ValueError, "no memory behind it"),
        (lambda: torch._efficientzerotensor((3,)), ValueError, r"no memory.*x\.clone\(\)"),
        (
            lambda: torch.frombuffer(bytearray(9), dtype=torch.float32, offset=1),
            ValueError,
            r"no multiples of their size.*x\.clone\(\)$",
        ),
    ],
    ids=lambda value: None if callable(value) else "",
)
def test_a_tensor_that_is_not_its_memory_is_refused_with_the_fix(make, error, message):
    with pytest.raises(error, match=f"^rms_norm: .*{message}"):
        describe("rms_norm", "x", make())


@pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")  # torch's own, in jvp
@pytest.mark.parametrize(
    "transform",
    [
        lambda f, x: torch.func.grad(f)(x),
        lambda f, x: torch.vmap(f)(x),
        lambda f, x: torch.func.jvp(f, (x,), (x,)),
        lambda f, x: torch.func.functionalize(f)(x),
    ],
    ids=["grad", "vmap", "jvp", "functionalize"],
)
def test_a_tensor_inside_a_functional_transform_is_refused(transform):
    def function(x):
        describe("rms_norm", "x", x)
        return x.sum()

    with pytest.raises(TypeError, match=r"^rms_norm: x is a tensor inside a torch\.func transform"):
        transform(function, some_tensor())


class Logged(torch.Tensor):
    pass


def test_a_tensor_subclass_is_refused_by_name_every_time():
    for _ in range(2):
        with pytest.raises(TypeError, match=r"x is a .*\.Logged, a tensor subclass"):
            describe("f", "x", some_tensor().as_subclass(Logged))


def test_a_fake_tensor_is_refused():
    fake_tensor = pytest.importorskip("torch._subclasses.fake_tensor")
    with fake_tensor.FakeTensorMode(), pytest.raises(TypeError, match=r"\.FakeTensor, a tensor su"):
        describe("f", "x", some_tensor())


def test_a_dtensor_is_refused_and_pointed_to_its_local_tensor():
    distributed = pytest.importorskip("torch.distributed.tensor")
    with pytest.raises(TypeError, match=r"\.DTensor, .*x\.to_local\(\)"):
        TORCH.accepts("f", "x", distributed.DTensor)


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_outputs_are_the_tensors_that_were_written_to(dtype):
    operand = TORCH.allocate(contiguous_form((2, 3, 5), DTYPES[dtype], CPU))
    tensor = operand.framework.export(operand)
    assert (tensor.dtype, tensor.device.type) == (getattr(torch, dtype), "cpu")
    assert (operand.pointer, operand.shape) == (tensor.data_ptr(), tuple(tensor.shape))
    assert operand.strides == tensor.stride() == (15, 5, 1)


def test_a_tensor_given_as_out_is_marked_as_changed_for_autograd():
    leaf = torch.ones(3, requires_grad=True)
    saved = torch.ones(3)
    product = (leaf * saved).sum()
    operand = describe("f", "out", saved)
    assert TORCH.export(operand) is saved
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()


@pytest.mark.parametrize("dtype", DTYPE_NAMES)
def test_contiguous_copies_a_transposed_tensor_into_c_order(dtype):
    tensor = some_tensor(dtype).T
    copy = TORCH.contiguous(describe("f", "x", tensor))
    assert copy.pointer == copy.owner.data_ptr() != tensor.data_ptr()
    assert (copy.strides, copy.dtype) == ((3, 1), DTYPES[dtype])
    assert torch.equal(copy.owner, tensor)


def test_numpy_view_reads_bfloat16_tensors():
    view = numpy_view(describe("f", "x", some_tensor("bfloat16").T))
    assert view.dtype.name == "bfloat16"
    assert view.tolist() == some_tensor().T.tolist()


@pytest.mark.gpu
def test_a_cuda_tensor_is_described_and_allocated_on_its_device_and_stream():
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device")
    tensor = some_tensor().cuda()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        operand = describe("f", "x", tensor)
        output = TORCH.allocate(contiguous_form((2, 3), DTYPES["bfloat16"], operand.device))
        assert TORCH.stream(operand.device) == stream.cuda_stream
    assert operand.pointer == tensor.data_ptr()
    assert operand.device == ("cuda", tensor.device.index)
    assert TORCH.export(output).device == tensor.device
