# SPDX-License-Identifier: MIT
"""Tensors that stand for something else than their memory: refused, with the fix named."""

from __future__ import annotations

import numpy as np
import pytest

import cunorm

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

# torch's own: prototypes, and what it imports for jvp
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning"),
]


def x():
    return torch.arange(12.0).reshape(3, 4)


def imaginary():
    return x().to(torch.complex64).conj()


def freed_storage():
    tensor = x()
    tensor.untyped_storage().resize_(0)
    return tensor


def unaligned():
    return torch.frombuffer(bytearray(13), dtype=torch.float32, offset=1)


class Logged(torch.Tensor):
    pass


def d_tensor():
    distributed = pytest.importorskip("torch.distributed.tensor")
    return torch.Tensor._make_subclass(distributed.DTensor, x())


def inside(transform):
    """Return what calls a function inside a transform."""
    return lambda f: transform(lambda x: f(x).sum())


def fake(f):
    with FakeTensorMode():
        f(x())


TRANSFORMED = "x is a tensor inside a torch.func transform"
# Of each: a call of a function, the error, and what it says.
REFUSED = {
    "requires grad": (
        lambda f: f(x().requires_grad_()),
        ValueError,
        r"requires grad.*cunorm\.torch, torch\.no_grad\(\) or x\.detach\(\)$",
    ),
    "a parameter": (lambda f: f(torch.nn.Parameter(x())), ValueError, "requires grad"),
    "int32": (lambda f: f(x().int()), TypeError, "x has dtype int32, expected float16"),
    "float8": (lambda f: f(x().to(torch.float8_e5m2)), TypeError, "dtype float8_e5m2, expected"),
    "a conjugate": (lambda f: f(imaginary()), TypeError, "x has dtype complex64"),
    "quantized": (
        lambda f: f(torch.quantize_per_tensor(x(), 0.1, 0, torch.qint8)),
        TypeError,
        r"x has dtype qint8, .*: pass x\.dequantize\(\)$",
    ),
    "negated": (
        lambda f: f(imaginary().imag),
        ValueError,
        r"x has its negative bit set.*: pass x\.resolve_neg\(\)$",
    ),
    "sparse": (
        lambda f: f(x().to_sparse()),
        ValueError,
        r"layout torch\.sparse_coo, .*x\.to_dense\(\)",
    ),
    "sparse rows": (lambda f: f(x().to_sparse_csr()), ValueError, "layout torch.sparse_csr"),
    "MKL-DNN": (lambda f: f(x().to_mkldnn()), ValueError, "layout torch._mkldnn"),
    "nested": (lambda f: f(torch.nested.nested_tensor([x()])), ValueError, "layout nested"),
    "meta": (lambda f: f(x().to("meta")), ValueError, "on device meta, expected cpu or cuda"),
    "freed": (lambda f: f(freed_storage()), ValueError, "no memory behind it"),
    "zeros of autograd's": (
        lambda f: f(torch._efficientzerotensor((3, 4))),
        ValueError,
        r"no memory.*x\.clone\(\)",
    ),
    "unaligned": (lambda f: f(unaligned()), ValueError, r"no multiples of .*x\.clone\(\)$"),
    "a subclass": (lambda f: f(x().as_subclass(Logged)), TypeError, r"x is a .*Logged, a tensor s"),
    "DTensor": (lambda f: f(d_tensor()), TypeError, r"\.DTensor, .*x\.to_local\(\)"),
    "fake": (fake, TypeError, r"FakeTensor"),
    "in grad": (lambda f: torch.func.grad(lambda x: f(x).sum())(x()), TypeError, TRANSFORMED),
    "in vmap": (lambda f: torch.vmap(f)(x()), TypeError, TRANSFORMED),
    "in jvp": (lambda f: torch.func.jvp(f, (x(),), (x(),)), TypeError, TRANSFORMED),
    "functional": (lambda f: torch.func.functionalize(f)(x()), TypeError, TRANSFORMED),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_tensor_that_is_not_its_memory_is_refused_with_the_fix(name):
    call, error, message = REFUSED[name]
    cunorm.rms_norm(x())  # what is known of a plain tensor helps none of these
    for _ in range(2):
        with pytest.raises(error, match=f"^rms_norm: .*{message}"):
            call(cunorm.rms_norm)


def test_where_no_gradient_is_recorded_parameters_are_tensors():
    parameter = torch.nn.Parameter(x())
    expected = cunorm.rms_norm(parameter.detach())
    for without in (torch.no_grad, torch.inference_mode):
        with without():
            np.testing.assert_array_equal(cunorm.rms_norm(parameter), expected)


def test_a_tensor_given_as_out_is_marked_as_changed_for_autograd():
    leaf, saved = torch.ones(3, 4, requires_grad=True), x()
    product = (leaf * saved).sum()
    cunorm.rms_norm(x(), out=saved)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.backward()
