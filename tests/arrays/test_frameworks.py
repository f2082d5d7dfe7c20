# SPDX-License-Identifier: MIT
"""NumPy, PyTorch, JAX and DLPack arrays on the CPU: in without a copy, out as the caller's own."""

import ml_dtypes
import numpy as np
import pytest

import cunorm
from cunorm import NormForward, NormGrads
from cunorm._arrays import numpy_view
from tests.support.bounds import (
    assert_within,
    check_backward,
    check_forward,
    dx_bound,
    dx_terms,
    y_bound,
)
from tests.support.calls import launched
from tests.support.operands import DTYPES, NORMS, draw, optional, parameters, saved, weight_and_bias
from tests.support.processes import in_process

SHAPE = (12, 96)
KINDS = ["numpy", "torch", "jax", "dlpack"]
NARROW_AND_WIDE = ["float16", "bfloat16", "float32"]  # JAX has float64 only when it is switched on


class Foreign:
    """Speaks DLPack and nothing else."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **options):
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


def to(kind, array):
    """Return an array of a framework with those numbers; bits are bits where it has no bfloat16."""
    if array is None or kind == "numpy":
        return array
    if kind == "dlpack":  # of bfloat16 NumPy makes no capsules, torch does
        return Foreign(to("torch", array) if array.dtype == ml_dtypes.bfloat16 else array)
    if kind == "jax":
        return pytest.importorskip("jax").numpy.asarray(array)
    torch = pytest.importorskip("torch")
    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def numbers(array):
    """Return a result's numbers as a NumPy array."""
    if array is None or isinstance(array, np.ndarray):
        return array
    return numpy_view(cunorm._arrays.describe("test", "result", array))


def pointer(array):
    return cunorm._arrays.describe("test", "array", array).pointer


def is_of(kind, result, dtype):
    if kind in ("numpy", "dlpack"):
        return type(result) is np.ndarray and result.dtype == DTYPES[dtype]
    module = pytest.importorskip(kind)
    cls = {"torch": "Tensor", "jax": "Array"}[kind]
    return isinstance(result, getattr(module, cls)) and dtype in str(result.dtype)


# --- every framework ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", NARROW_AND_WIDE)
@pytest.mark.parametrize("name", NORMS)
def test_results_are_of_the_callers_framework_and_right(kind, dtype, name):
    norm = NORMS[name]
    x, dy = draw("x", SHAPE, dtype), draw("dy", SHAPE, dtype)
    given = parameters(norm, SHAPE[-1], dtype)
    theirs = {key: to(kind, array) for key, array in given.items()}
    forward = getattr(cunorm, f"{name}_forward")(to(kind, x), **theirs, **norm.asked())
    assert is_of(kind, forward.y, dtype)
    assert is_of(kind, forward.rstd, "float32")
    grads = getattr(cunorm, f"{name}_backward")(
        to(kind, dy), to(kind, x), **theirs, **norm.asked(), **saved(norm, forward)
    )
    for result in (grads.dx, grads.dweight, grads.dbias):
        assert result is None or is_of(kind, result, dtype)

    pair, meaning = weight_and_bias(given), norm.meaning(SHAPE[-1])
    check_forward(NormForward(*map(numbers, forward)), x, *pair, **meaning)
    check_backward(NormGrads(*map(numbers, grads)), dy, x, *pair, **meaning)


@pytest.mark.parametrize("kind", KINDS)
def test_streams_and_other_dtypes_are_of_the_callers_framework(kind):
    x, residual = draw("x", SHAPE, "float16"), draw("residual", SHAPE, "float32")
    result = cunorm.add_rms_norm(to(kind, x), to(kind, residual))
    assert is_of(kind, result.y, "float16")
    assert is_of(kind, result.residual, "float32")
    check_forward(NormForward(*map(numbers, result)), x, None, None, residual, eps=1e-6)
    y = cunorm.rms_norm(to(kind, residual), dtype="bfloat16")
    assert is_of(kind, y, "bfloat16")


def test_operands_of_several_frameworks_go_together_and_x_decides():
    torch = pytest.importorskip("torch")
    x, weight = draw("x", SHAPE, "float32"), optional("weight", SHAPE[-1], "float32")
    y = cunorm.rms_norm(torch.from_numpy(x), weight)
    assert isinstance(y, torch.Tensor)
    np.testing.assert_array_equal(y, cunorm.rms_norm(x, torch.from_numpy(weight)))


@pytest.mark.parametrize("kind", ["torch", "jax"])
def test_zero_rows_and_no_leading_axes_go_through_every_framework(kind):
    empty = to(kind, np.empty((0, 96), np.float32))
    assert cunorm.rms_norm(empty).shape == (0, 96)
    forward = cunorm.rms_norm_forward(to(kind, draw("x", 96, "float32")))
    assert forward.rstd.shape == ()


# --- zero-copy ------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch):
    return launched(monkeypatch)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "jax"])  # XLA makes its calls
def test_kernels_read_and_write_the_arrays_own_memory(calls, kind):
    names = ("x", "residual", "dy", "d_residual")
    arrays = {name: to(kind, draw(name, SHAPE, "float32")) for name in names}
    weight, bias = (to(kind, optional(name, SHAPE[-1], "float32")) for name in ("weight", "bias"))
    forward = cunorm.layer_norm_forward(arrays["x"], weight, bias, residual=arrays["residual"])
    grads = cunorm.layer_norm_backward(
        arrays["dy"],
        arrays["residual"],
        weight,
        bias,
        rstd=forward.rstd,
        mean=forward.mean,
        d_residual=arrays["d_residual"],
    )
    there, back = calls
    for operand, array in (
        (there.x, arrays["x"]),
        (there.residual, arrays["residual"]),
        (there.y, forward.y),
        (there.new_residual, forward.residual),
        (back.dy, arrays["dy"]),
        (back.x, arrays["residual"]),
        (back.d_residual, arrays["d_residual"]),
        (back.dx, grads.dx),
        (there.weight, weight),
        (there.bias, bias),
        (there.mean, forward.mean),
        (there.rstd, forward.rstd),
        (back.rstd, forward.rstd),
        (back.mean, forward.mean),
        (back.dweight, grads.dweight),
        (back.dbias, grads.dbias),
    ):
        assert operand.pointer == pointer(array)


REVERSED = ("torch", "reversed")
VIEWS = {
    "every other row": lambda array: array[::2],
    "reversed": lambda array: array[::-1],
    "columns": lambda array: array[:, 5:90],
    "transposed": lambda array: array.reshape(3, 4, 96).swapaxes(0, 1),
    "qkv": lambda array: array.reshape(3, 4, 3, 32)[:, :, 1],
}


@pytest.mark.parametrize(
    ("kind", "view"),  # torch has no negative strides
    [(kind, view) for kind in ("numpy", "torch") for view in VIEWS if (kind, view) != REVERSED],
)
def test_views_of_up_to_three_strides_are_not_copied(calls, kind, view):
    x = VIEWS[view](to(kind, draw("x", SHAPE, "float32")))
    y = cunorm.rms_norm(x)
    assert calls[0].x.pointer == pointer(x)
    dense = np.ascontiguousarray(numbers(x))
    np.testing.assert_array_equal(numbers(y), cunorm.rms_norm(dense))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_a_last_axis_that_is_not_contiguous_is_copied_and_the_caller_not_changed(kind):
    x = draw("x", SHAPE, "float32")
    strided = to(kind, x)[:, ::2]
    y = cunorm.rms_norm(strided)
    np.testing.assert_array_equal(numbers(y), cunorm.rms_norm(x[:, ::2].copy()))
    np.testing.assert_array_equal(x, draw("x", SHAPE, "float32"))


def test_torch_inference_mode_changes_nothing():
    torch = pytest.importorskip("torch", reason="PyTorch, whose mode it is, is not installed")
    x = torch.from_numpy(draw("x", SHAPE, "float32"))
    with torch.inference_mode():
        y, again = cunorm.rms_norm(x), cunorm.rms_norm(x.clone(), out=torch.empty(SHAPE))
    np.testing.assert_array_equal(y, cunorm.rms_norm(x))
    np.testing.assert_array_equal(again, y)


# --- against torch's own autograd -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_forward_and_backward_are_those_of_torchs_own_autograd(name, dtype):
    torch = pytest.importorskip("torch")
    width = 257
    x, dy = (draw(o, (33, width), dtype) for o in ("x", "dy"))
    given = parameters(NORMS[name], width, dtype)
    leaves = [torch.from_numpy(a.astype(np.float64)).requires_grad_() for a in (x, *given.values())]
    exact = getattr(torch.nn.functional, name)(leaves[0], (width,), *leaves[1:], eps=1e-5)
    exact.backward(torch.from_numpy(dy.astype(np.float64)))
    dx, *d_parameters = (leaf.grad.numpy() for leaf in leaves)

    theirs = [to("torch", array) for array in (x, *given.values())]
    forward = getattr(cunorm, f"{name}_forward")(*theirs, eps=1e-5)
    grads = getattr(cunorm, f"{name}_backward")(
        to("torch", dy), *theirs, **saved(NORMS[name], forward)
    )
    y = exact.detach().numpy()
    bias = given.get("bias", np.zeros(width)).astype(np.float64)
    assert_within(numbers(forward.y), y, y_bound(y, dtype, terms=y - bias), "y")
    r = (y - bias) / given["weight"].astype(np.float64)
    dr, rstd = dy.astype(np.float64) * given["weight"], numbers(forward.rstd)[:, None]
    terms = dx_terms(dr, r, rstd, center=name == "layer_norm")
    assert_within(numbers(grads.dx), dx, dx_bound(dx, terms, dtype), "dx")
    for name_, exact_gradient in zip(("dweight", "dbias"), d_parameters, strict=False):
        np.testing.assert_allclose(
            numbers(getattr(grads, name_)).astype(np.float64),
            exact_gradient,
            rtol=2.0**-8 if dtype == "bfloat16" else 1e-5,
            atol=1e-5,
        )


# --- nothing that the caller has not --------------------------------------------------------------

FRAMEWORKS = "torch", "jax", "jaxlib", "cupy", "ml_dtypes"


def test_importing_cunorm_imports_no_framework():
    printed = in_process(
        f"import sys, cunorm\nprint([name for name in {FRAMEWORKS} if name in sys.modules])",
        setup="",
    )
    assert printed.strip() == "[]"


def test_normalising_numpy_arrays_imports_no_framework():
    printed = in_process(f"check(0)\nprint([name for name in {FRAMEWORKS} if name in sys.modules])")
    assert printed.strip() == "[]"


def test_torch_bfloat16_needs_no_ml_dtypes():
    pytest.importorskip("torch")
    in_process(
        "sys.modules['ml_dtypes'] = None\n"
        "import torch\n"
        "x = torch.ones(600, 257, dtype=torch.bfloat16)\n"
        "assert (cunorm.rms_norm(x) == 1).all()\n"
    )


def test_bfloat16_numpy_results_say_what_they_need():
    in_process(
        "sys.modules['ml_dtypes'] = None\n"
        "try:\n"
        "    cunorm.rms_norm(np.ones((2, 8), np.float32), dtype='bfloat16')\n"
        "except TypeError as error:\n"
        "    assert 'pip install ml_dtypes' in str(error), error\n"
        "else:\n"
        "    raise AssertionError('no error')\n"
    )
