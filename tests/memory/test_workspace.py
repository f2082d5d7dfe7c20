# SPDX-License-Identifier: MIT
"""`workspace=`: memory that a backward uses and leaves no trace of, exactly as much as is said."""

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import cunorm
from cunorm import NormGrads
from tests.support.calls import WIDTH, given, raises
from tests.support.operands import DTYPES, assert_same_bits, assert_same_fields, at, draw

NAME = "layer_norm_backward"
ALL = ("x", "weight", "bias", "gate")
NEEDS = (ALL, ("weight",), ("bias",), ("weight", "bias"), ("x",))


def arrays_of(shape, dtype="float32", groups=1):
    """Draw the operands of a backward."""
    arrays = {name: draw(name, shape, dtype) for name in ("dy", "x")}
    arrays |= {name: draw(name, shape[-1], dtype) for name in ("weight", "bias")}
    statistics = shape[:-1] + ((groups,) if groups > 1 else ())
    compute = "float64" if dtype == "float64" else "float32"
    return arrays | {name: draw(name, statistics, compute) for name in ("rstd", "mean")}


def size_for(arrays, **told):
    operands = (arrays["x"], arrays["weight"], arrays["bias"])
    return cunorm.workspace_size(NAME, *operands, **told)


def guarded(size, fill=0xFF):
    """Return an aligned array of so many bytes, 0xff for NaN, and all the memory around it."""
    memory = np.full(size + 256, fill, np.uint8)
    start = 64 - memory.ctypes.data % 64
    return memory[start : start + size], memory


def call(arrays, **more):
    return cunorm.layer_norm_backward(**arrays, **more)


# --- enough, and nothing kept ---------------------------------------------------------------------


@pytest.mark.parametrize("needs", NEEDS, ids=",".join)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_exactly_as_many_bytes_as_are_said_are_enough_and_nothing_around_them_is_touched(
    dtype, needs
):
    rng = np.random.default_rng(len(dtype) + len(needs))
    for _ in range(25):
        leading = tuple(int(n) for n in rng.integers(0, 40, rng.integers(1, 3)))
        groups, width = int(rng.choice([1, 1, 2, 7])), int(rng.choice([1, 3, 16, 33, 200]))
        told = {"groups": groups, "needs": needs}
        arrays = arrays_of((*leading, groups * width), dtype, groups)
        size = size_for(arrays, **told)
        expected = call(arrays, **told)
        for fill in (0xFF, 0x00, 0x7F):
            workspace, memory = guarded(size, fill)
            with at(leading, width, groups, fill):
                assert_same_fields(call(arrays, **told, workspace=workspace), expected)
                workspace[...] = fill
                assert (memory == fill).all()
        assert (size == 0) == (not {"weight", "bias"} & set(needs))
        if size:
            text = f"workspace has {size - 4} bytes, expected at least {size}, as "
            with raises(ValueError, f"{NAME}: {text}cunorm.workspace_size says"):
                call(arrays, **told, workspace=guarded(size - 4)[0])


def test_dx_of_float64_makes_the_sums_float64():
    """So does `out.dx`, which says the same."""
    arrays = arrays_of((9, 40))
    for name in ("rstd", "mean"):
        arrays[name] = arrays[name].astype(np.float64)
    size = size_for(arrays, x_dtype="float64")
    assert size == 2 * size_for(arrays)
    expected = call(arrays, x_dtype="float64")
    workspace, memory = guarded(size)
    assert_same_fields(call(arrays, x_dtype="float64", workspace=workspace), expected)
    out = NormGrads(dx=np.empty((9, 40)))
    assert_same_fields(call(arrays, out=out, workspace=workspace), expected)
    workspace[...] = 0xFF
    assert (memory == 0xFF).all()
    text = f"workspace has {size // 2} bytes, expected at least {size}"
    with raises(ValueError, f"{NAME}: {text}, as cunorm.workspace_size says"):
        call(arrays, out=out, workspace=workspace[: size // 2])


def test_one_workspace_serves_calls_of_different_shapes_and_dtypes():
    shapes = [((300, 64), "float32"), ((2, 3), "bfloat16"), ((40, 7, 33), "float64")]
    shapes += [((1, 1), "float32"), ((0, 5), "float32"), ((3, 1000), "float32")]
    cases = [arrays_of(*case) for case in shapes]
    workspace, _ = guarded(max(map(size_for, cases)))
    expected = [call(arrays) for arrays in cases]
    for turn in (1, -1):
        for arrays, right in list(zip(cases, expected, strict=True))[::turn]:
            assert_same_fields(call(arrays, workspace=workspace), right)


def test_with_enough_rows_the_size_no_longer_grows_as_they_do():
    """It is what keeps the device busy, not an array of x's size."""
    x, weight = np.empty((100_000, WIDTH), np.float32), given().weight
    sizes = [cunorm.workspace_size("rms_norm_backward", x[:n], weight) for n in (1, 1000, 100_000)]
    assert 0 < sizes[0] <= sizes[1] < sizes[2] < x.nbytes


# --- arrays of any kind ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [*DTYPES, "uint8", "int64", "complex64", "i4,f4"])
def test_the_workspace_may_be_of_any_dtype_and_shape(dtype):
    arrays = arrays_of((50, 24))
    size, expected = size_for(arrays), call(arrays)
    workspace, memory = guarded(size)
    typed = workspace.view(DTYPES.get(dtype, dtype))
    for array in (typed, typed.reshape(2, 2, -1)):
        assert_same_fields(call(arrays, workspace=array), expected)
        workspace[...] = 0xFF
        assert (memory == 0xFF).all()


@pytest.mark.parametrize("extra", range(4))
def test_a_number_of_bytes_that_no_float_divides_is_taken(extra):
    arrays = arrays_of((50, 24))
    workspace, memory = guarded(size_for(arrays) + extra)
    assert_same_fields(call(arrays, workspace=workspace), call(arrays))
    workspace[...] = 0xFF
    assert (memory == 0xFF).all()


def test_axes_of_one_element_do_not_make_an_array_any_less_contiguous():
    arrays = arrays_of((50, 24))
    size = size_for(arrays)
    one_of_two = guarded(2 * size)[0].view(np.float32).reshape(2, -1)[::2]
    assert one_of_two.flags.c_contiguous
    assert_same_fields(call(arrays, workspace=one_of_two), call(arrays))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["uint8", "float32", "float64", "bfloat16"])
def test_the_workspace_may_be_a_torch_tensor(kind, dtype):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    arrays = arrays_of((50, 24))
    dtype = getattr(torch, dtype)
    size = size_for(arrays)
    workspace = torch.full((size,), 0xFF, dtype=torch.uint8).view(dtype)
    expected = call(arrays)
    if kind == "torch":
        theirs = {name: torch.from_numpy(array) for name, array in arrays.items()}
        assert size_for(theirs) == size
        grads = NormGrads(
            *[g if g is None else g.numpy() for g in call(theirs, workspace=workspace)]
        )
    else:
        grads = call(arrays, workspace=workspace)
    assert_same_fields(grads, expected)


def test_an_empty_workspace_is_enough_where_nothing_is_added_up():
    arrays = arrays_of((5, 8))
    told = {"needs": ("x",), "workspace": np.empty(0, np.uint8)}
    assert_same_fields(call(arrays, **told), call(arrays, needs=("x",)))


def test_a_workspace_between_the_rows_of_an_array_is_taken():
    """It lies within the array's extent, and shares no byte with it."""
    arrays = arrays_of((2, 8))
    size = size_for(arrays)
    memory, _ = guarded(size + 64)
    x = as_strided(memory[:32].view(np.float32), (2, 8), (size + 32, 4))
    x[...] = arrays["x"]
    workspace, expected = memory[32:-32], call(arrays)
    assert_same_fields(call(arrays | {"x": x}, workspace=workspace), expected)
    assert_same_bits(np.ascontiguousarray(x), arrays["x"], "x")


def test_what_the_l2_norm_does_not_take_has_no_size():
    x, name = given().x, "l2_norm_backward"
    with raises(ValueError, f"workspace_size: x_dtype is given, expected None: {name} has none"):
        cunorm.workspace_size(name, x, x_dtype="float16")
    text = f"needs is ('bias',), expected the default: {name} has none"
    with raises(ValueError, f"workspace_size: {text}"):
        cunorm.workspace_size(name, x, needs=("bias",))
    assert cunorm.workspace_size(name, x, groups=2) == 0
