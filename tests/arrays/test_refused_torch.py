# SPDX-License-Identifier: MIT
"""Tensors that are not plain memory of a known dtype: errors name the fix."""

from __future__ import annotations

import pytest

import cunorm

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

# PyTorch warns about its prototypes, and about its own imports for jvp.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script"),
]


def x():
    return torch.arange(12.0).reshape(3, 4)


def imaginary():
    return x().to(torch.complex64).conj()


def d_tensor():
    distributed = pytest.importorskip(
        "torch.distributed.tensor", reason="this PyTorch has no DTensor"
    )
    return torch.Tensor._make_subclass(distributed.DTensor, x())


def fake(f):
    with FakeTensorMode():
        f(x())


TRANSFORMED = "(x|out) is a tensor inside a torch.func transform"
UNRECORDED = r"requires grad.*cunorm\.torch, torch\.no_grad\(\) or x\.detach\(\)$"
TYPE, VALUE = TypeError, ValueError
# For each case: how to create the tensor, the error, and its message.
REFUSED = {
    "a parameter": (lambda: torch.nn.Parameter(x()), VALUE, UNRECORDED),
    "int32": (lambda: x().int(), TYPE, "x has dtype int32, expected float16"),
    "float8": (lambda: x().to(torch.float8_e5m2), TYPE, "dtype float8_e5m2, expected"),
    "a conjugate": (imaginary, TYPE, "x has dtype complex64"),
    "quantized": (
        lambda: torch.quantize_per_tensor(x(), 0.1, 0, torch.qint8),
        TYPE,
        r"x has dtype qint8, .*: pass x\.dequantize\(\)$",
    ),
    "negated": (lambda: imaginary().imag, VALUE, r"negative bit set.*x\.resolve_neg\(\)$"),
    "sparse": (lambda: x().to_sparse(), VALUE, r"layout torch\.sparse_coo, .*x\.to_dense\(\)$"),
    "MKL-DNN": (lambda: x().to_mkldnn(), VALUE, "layout torch._mkldnn"),
    "nested": (
        lambda: torch.nested.nested_tensor([x()]),
        VALUE,
        r"layout nested, .*: pass torch\.nested\.to_padded_tensor\(x, 0\.0\)$",
    ),
    "meta": (
        lambda: x().to("meta"),
        VALUE,
        r"on device meta, expected cpu or cuda: use cunorm\.torch, which takes meta tensors$",
    ),
    "zeros": (lambda: torch._efficientzerotensor((3, 4)), VALUE, r"no memory.*x\.clone\(\)"),
    "unaligned": (
        lambda: torch.frombuffer(bytearray(13), dtype=torch.float32, offset=1),
        VALUE,
        r"no multiples of .*x\.clone\(\)$",
    ),
    "DTensor": (d_tensor, TYPE, r"\.DTensor, .*x\.to_local\(\)"),
}
# Contexts in which a function gets tensors that represent other tensors.
INSIDE = {
    "fake": (fake, "FakeTensor"),
    "grad": (lambda f: torch.func.grad(lambda x: f(x).sum())(x()), TRANSFORMED),
    "vmap": (lambda f: torch.vmap(f)(x()), TRANSFORMED),
    "jvp": (lambda f: torch.func.jvp(f, (x(),), (x(),)), TRANSFORMED),
    "functional": (lambda f: torch.func.functionalize(f)(x()), TRANSFORMED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tensor_that_differs_from_its_memory_is_refused_with_the_fix(name):
    make, error, message = REFUSED[name]
    cunorm.rms_norm(x())  # a cached call on a plain tensor must not accept these
    for _ in range(2):
        with pytest.raises(error, match=f"^rms_norm: .*{message}"):
            cunorm.rms_norm(make())


@pytest.mark.parametrize("name", INSIDE)
def test_a_tensor_that_represents_others_is_refused_as_operand_and_as_result(name):
    call, message = INSIDE[name]
    for function in (cunorm.rms_norm, lambda tensor: cunorm.rms_norm(x(), out=tensor)):
        cunorm.rms_norm(x(), out=x())
        with pytest.raises(TypeError, match=f"^rms_norm: .*{message}"):
            call(function)
