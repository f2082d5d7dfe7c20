# SPDX-License-Identifier: MIT
"""A call uses the memory of its `workspace`, and workspace_size bytes are exactly enough."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import cunorm
from cunorm import GroupNormGrads, NormGrads
from tests.support.calls import (
    GROUP_NORMS,
    WIDTH,
    assert_same,
    call_of,
    call_uncached,
    devices,
    fields,
    functions_taking,
    host,
    kinds,
    raises,
    to,
)
from tests.support.internals import _scratch
from tests.support.operands import DTYPES, assert_same_bits, at, draw

TAKING_WORKSPACE = functions_taking("workspace")
# Few and many rows, whole and in groups; group norms in which cores share samples, and in which
# they do not.
OF_ROWS = [((1, 1), 1), ((0, 5), 1), ((3, 37, 14), 7), ((300, 64), 2), ((3, 1000), 1)]
OF_IMAGES = [((3, 35, 12), 4, -1), ((2, 12, 35), 4, 1), ((2, 3000, 24), 3, -1)]


def calls_of(name, kind="numpy"):
    sizes = OF_IMAGES if name in GROUP_NORMS else [(*size, -1) for size in OF_ROWS]
    for shape, groups, axis in sizes[: 2 if kind == "cupy" else None]:  # CuPy is slow
        yield call_of(name, shape, kind, groups=groups, num_groups=groups, channel_axis=axis)


def size_of(call, **more):
    accepted = ("x", "weight", "bias", "groups", "num_groups", "channel_axis")
    options = {key: call.arrays[key] for key in accepted if key in call.arrays}
    return cunorm.workspace_size(call.name, **options | more)


def guarded(kind, size, fill=0xFF):
    """Return an aligned array of `size` bytes, by default NaNs, and the memory that contains it."""
    memory = np.full(size + 256, fill, np.uint8)
    start = 64 - memory.ctypes.data % 64 if kind == "numpy" else 64
    memory = to(kind, memory)
    return memory[start : start + size], memory


def check_enough(call, size, **options):
    """Check that `size` bytes are enough, no byte around them is written, and fewer bytes fail."""
    expected = {field: host(array) for field, array in fields(call.make(**options)).items()}
    for fill in (0xFF, 0x7F):
        workspace, memory = guarded(call.kind, size, fill)
        result = fields(call.make(**options, workspace=workspace))
        with at(call.shapes["x"], options, fill):
            assert result.keys() == expected.keys()
            for field, array in result.items():
                assert_same_bits(host(array), expected[field], field)
            workspace[...] = fill
            assert (host(memory) == fill).all()
    if size:
        text = f"workspace has {size - 4} bytes, expected at least {size}, as "
        with raises(ValueError, f"{call.name}: {text}cunorm.workspace_size says"):
            call.make(**options, workspace=guarded(call.kind, size - 4)[0])


# --- enough, and nothing kept ---------------------------------------------------------------------


@devices
@pytest.mark.parametrize("name", TAKING_WORKSPACE)
def test_exactly_as_many_bytes_as_documented_are_enough(name, kind):
    """One workspace can also serve all calls."""
    calls = [(call, size_of(call)) for call in calls_of(name, kind)]
    largest, _ = guarded(kind, max(size for _, size in calls))
    for call, size in calls:
        check_enough(call, size)
        assert_same(call.make(workspace=largest), call.make())


@pytest.mark.parametrize("needs", [("weight",), ("bias",), ("x",)], ids=",".join)
@pytest.mark.parametrize("name", ["layer_norm_backward", "group_norm_backward"])
def test_the_size_for_a_backward_depends_on_its_needs(name, needs):
    """A group norm's dweight needs the sums for dbias too."""
    of_both = {"needs": ("weight", "bias")}
    makes_both = name == "group_norm_backward" and needs == ("weight",)
    for call in [*calls_of(name)][-2:]:
        size = size_of(call, needs=needs)
        assert size == size_of(call, **of_both) if makes_both else size < size_of(call)
        check_enough(call, size, needs=needs)


# Samples, rows of a sample and width; leading axes of weight, of bias, and of a gate with the axes
# of its row. Rows of a sample make one or several rows of sums; a CPU's threads share the last.
LEADS = [((3, 1), ()), ((3, 1), (5,)), ((3, 5), (1, 1)), ((3, 5), (3, 5)), ((), (3, 1))]
GATES = [(), (24,), (3, 1, 24), (5, 24), (3, 5, 24), (3, 1, 1), (5, 1), (3, 5, 1)]
OF_SAMPLES = [
    *(((3, 5, 24), *leads, gate) for leads in LEADS for gate in ((), (3, 1, 24))),
    *(((3, 5, 24), (3, 1), (), gate) for gate in GATES),
    *(((2, 700, 24), (2, 1), (), gate) for gate in ((), (2, 1, 24), (2, 1, 1))),
    ((1, 3, 60_000), (1, 1), (), (1, 1, 60_000)),
    ((0, 5, 24), (0, 1), (), (0, 1, 1)),
]


def modulated(kind, shape, weight, bias, gate):
    """Return a backward with parameters of samples or rows, and what the size depends on."""
    call, width = call_of("layer_norm_backward", shape, kind), shape[-1]
    shapes = {"weight": (*weight, width), "bias": (*bias, width)}
    shapes |= {"gate": gate, "branch": shape} if gate else {}
    drawn = {name: to(kind, draw(name, one, "float32")) for name, one in shapes.items()}
    call.arrays |= {"gate": None} | drawn
    if not gate:
        return call, {}
    call.arrays |= {"gate_position": "branch", "gate_activation": "tanh"}
    return call, {"gate": call.arrays["gate"], "gate_position": "branch"}


@devices
@pytest.mark.parametrize(("shape", "weight", "bias", "gate"), OF_SAMPLES)
def test_the_size_for_modulated_norms_and_gates_of_the_branch_is_enough(
    shape, weight, bias, gate, kind
):
    if kind == "cupy":
        shape = (*shape[:2], min(shape[2], 24))  # wide rows take long on the software GPU
        gate = gate and (*gate[:-1], min(gate[-1], 24))
    call, options = modulated(kind, shape, weight, bias, gate)
    check_enough(call, size_of(call, **options))
    for needs in [("gate",)] * bool(gate) + [("x", "bias")]:
        check_enough(call, size_of(call, **options, needs=needs), needs=needs)


@pytest.mark.parametrize(("shape", "weight", "bias", "gate"), OF_SAMPLES[:-1])
def test_a_modulated_backward_on_a_cpu_takes_as_many_bytes_as_the_size(
    shape, weight, bias, gate, monkeypatch
):
    call, options = modulated("numpy", shape, weight, bias, gate)
    taken, take = [0], _scratch.take
    monkeypatch.setattr(_scratch, "take", lambda size: taken.append(size) or take(size))
    call_uncached(call.make)
    assert taken[-1] == size_of(call, **options)


def test_rows_with_parameters_or_gates_of_their_own_need_no_sums():
    shape = (3, 5, 24)
    for gate in ((), shape):
        call, options = modulated("numpy", shape, (3, 5), (3, 5), gate)
        assert size_of(call, **options) == 0
    call, options = modulated("numpy", shape, (), (3, 5), (3, 5, 1))
    assert size_of(call, **options, needs=("weight", "bias")) < size_of(call, **options)


@devices
@pytest.mark.parametrize("leads", [((3,), (3,)), ((3,), ()), ((1,), (3,)), ((), (1,))])
def test_the_size_for_group_norms_with_parameters_of_samples_is_enough(leads, kind):
    for axis, sizes in ((-1, (35, 12)), (1, (12, 35))):
        for name in ("group_norm_forward", "group_norm_backward"):
            call = call_of(name, (3, *sizes), kind, num_groups=4, channel_axis=axis)
            for parameter, lead in zip(("weight", "bias"), leads, strict=True):
                drawn = draw(parameter, (*lead, 12), "float32")
                call.arrays[parameter] = to(kind, drawn)
            check_enough(call, size_of(call))


@pytest.mark.parametrize("position", ["pre", "branch"])
def test_a_position_without_a_gate_is_refused(position):
    text = f"workspace_size: gate_position is '{position}', expected 'post' as gate is None"
    with raises(ValueError, text):
        size_of(call_of("layer_norm_backward"), gate_position=position)


def test_dx_of_float64_makes_the_sums_float64():
    """A float64 `out.dx` or x has the same effect."""
    call = call_of("layer_norm_backward", (9, 40))
    size = size_of(call, x_dtype="float64")
    for dtype, times in (("float16", 1), ("bfloat16", 1), ("float32", 1), ("float64", 2)):
        assert size * times == 2 * size_of(call, x=draw("x", (9, 40), dtype))
    for key in ("rstd", "mean"):
        call.arrays[key] = call.arrays[key].astype(np.float64)
    check_enough(call, size, x_dtype="float64")
    check_enough(call, size, out=NormGrads(dx=np.empty((9, 40))))


@devices
@pytest.mark.parametrize("shape", [(2, 8, 8, 64), (2, 2, 1, 6), (3, 32, 32, 320)])
def test_a_group_norms_size_is_enough_for_any_activation_and_other_dtypes(shape, kind):
    """On a CPU, fewer bytes are refused. Nothing is launched: a result overlaps an input."""
    choices = [*product(("bfloat16", "float64"), (-1, 1))]
    # On a GPU each dtype once, because kernels are compiled before the overlap is found.
    for dtype, axis in choices if kind == "numpy" else choices[::3]:
        x = draw("x", shape if axis == -1 else (*shape[:1], shape[-1], *shape[1:-1]), dtype)
        parameter, given = to(kind, draw("weight", shape[-1], "float64")), to(kind, x)
        options = {"weight": parameter, "bias": parameter, "num_groups": 2, "channel_axis": axis}
        statistic = type(given)((len(x), 2), "float64" if dtype == "float64" else "float32")
        back = {"dy": given, "mean": statistic, "rstd": statistic}
        back["out"] = GroupNormGrads(dx=given[::-1])
        rest = {"group_norm": {"out": given[::-1]}, "group_norm_backward": back}
        for op, activation in product(rest, ("identity", "gelu")):
            enough = cunorm.workspace_size(op, given, **options)
            sizes = [enough, enough - 4] if kind == "numpy" and enough else [enough]
            for size in sizes:
                says = "overlaps" if size == enough else f"has {size} bytes, expected at least"
                more = options | {"activation": activation, "workspace": guarded(kind, size)[0]}
                with at(dtype, axis, op, activation), pytest.raises(ValueError, match=says):
                    getattr(cunorm, op)(x=given, **rest[op], **more)


def test_with_many_rows_the_size_grows_less_than_x():
    x, weight = np.empty((1_000_000, WIDTH), np.float32), np.ones(WIDTH, np.float32)
    sizes = [cunorm.workspace_size("rms_norm_backward", x[:n], weight) for n in (1, 1000, 100_000)]
    assert 0 < sizes[0] <= sizes[1] < sizes[2] < x.nbytes / 10
    assert cunorm.workspace_size("group_norm_forward", x[:, :4], num_groups=2) < x.nbytes / 2


# --- arrays of any kind ---------------------------------------------------------------------------


def test_the_workspace_may_be_of_any_dtype_shape_and_number_of_bytes():
    call = call_of("layer_norm_backward", (50, 24))
    expected, size = call.make(), size_of(call)
    for dtype in (*DTYPES.values(), "uint8", "int64", "complex64", "i4,f4"):
        workspace, memory = guarded("numpy", size)
        for array in (typed := workspace.view(dtype), typed.reshape(2, 2, -1)):
            assert_same(call.make(workspace=array), expected)
            workspace[...] = 0xFF
            assert (memory == 0xFF).all()
    for extra in (1, 2, 3):
        assert_same(call.make(workspace=guarded("numpy", size + extra)[0]), expected)
    one_of_two = guarded("numpy", 2 * size)[0].reshape(2, -1)[::2]
    assert_same(call.make(workspace=one_of_two), expected)  # an axis of one element has any stride


@kinds
def test_the_workspace_may_be_a_torch_tensor(kind):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    call = call_of("layer_norm_backward", (50, 24), kind)
    for dtype in (torch.uint8, torch.float64, torch.bfloat16):
        workspace = torch.full((size_of(call),), 0xFF, dtype=torch.uint8).view(dtype)
        assert_same(call.make(workspace=workspace), call.make())


def test_where_nothing_is_added_up_an_empty_workspace_is_enough():
    call = call_of("layer_norm_backward")
    options = {"needs": ("x",), "workspace": np.empty(0, np.uint8)}
    assert_same(call.make(**options), call.make(needs=("x",)))
    assert cunorm.workspace_size("l2_norm_backward", call.arrays["x"], groups=2) == 0
    for name in GROUP_NORMS:
        one, none = call_of(name, (1, 35, 12)), call_of(name, (0, 35, 12))
        assert size_of(none) <= size_of(one)
        assert none.make(workspace=none.workspace) is not None


@kinds
def test_a_result_is_not_allocated_like_a_workspace_of_equal_size(kind):
    """A row of 64 in float16 has 128 bytes, like a workspace of 128 uint8 or 16 float64."""
    row = draw("x", 64, "float32")
    rstd = cunorm.rms_norm_forward(row).rstd
    dy, x, saved = (to(kind, one) for one in (row, row, rstd))
    options = {"rstd": saved, "x_dtype": "float16", "needs": ("x",)}
    expected = cunorm.rms_norm_backward(dy, x, **options).dx
    for dtype in ("uint8", "float64"):
        workspace = to(kind, np.zeros(128, np.uint8).view(dtype))
        dx = cunorm.rms_norm_backward(dy, x, **options, workspace=workspace).dx
        assert (dx.shape, dx.dtype) == (expected.shape, expected.dtype)
        assert_same_bits(host(dx), host(expected))
