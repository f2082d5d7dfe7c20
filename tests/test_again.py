# SPDX-License-Identifier: MIT
"""Calls that are made again on the same arrays: nothing is planned, and nothing taken for granted.

Results are compared, bit for bit, with those of a call that has no `out=`, which is never
remembered.
"""

import struct

import numpy as np
import pytest
from calls import BACKWARDS, FORWARDS, WIDTH, Call, given
from operands import assert_same_bits, assert_same_fields, at, draw

import cunorm
from cunorm import AddNorm, NormForward, NormGrads, _again, _backend
from cunorm.row_norm import _backward, _forward

SHAPE = (5, WIDTH)


@pytest.fixture(autouse=True)
def known(monkeypatch):
    """Begin with no call that is remembered."""
    calls = {}
    monkeypatch.setattr(_again, "_known", calls)
    return calls


@pytest.fixture
def forbid_planning(monkeypatch):
    def forbid():
        for module in (_forward, _backward):
            monkeypatch.setattr(module, "describe_all", None)

    return forbid


def change(arrays):
    """Put other numbers into arrays."""
    for name, array in arrays.items():
        if isinstance(array, np.ndarray):
            array[...] = draw(f"another {name}", array.shape, "float32")


def assert_same(actual, expected):
    if isinstance(expected, tuple):
        assert_same_fields(actual, expected)
    else:
        assert_same_bits(actual, expected)


@pytest.mark.parametrize("name", [*FORWARDS, *BACKWARDS])
def test_a_call_made_again_is_not_planned_and_computes_with_what_its_arrays_hold(
    name, forbid_planning
):
    call = Call(name, SHAPE)
    call.run()
    change(call.arrays)
    expected = call.function(**call.arrays)
    forbid_planning()
    actual = call.run()
    assert_same(actual, expected)
    results = actual._asdict() if isinstance(actual, tuple) else {"y": actual}
    assert all(results[field] is array for field, array in call.out.items())


@pytest.mark.parametrize("name", [*FORWARDS, *BACKWARDS])
def test_any_array_elsewhere_is_another_call(name):
    """Each argument in turn gets another array, with other numbers in it."""
    call = Call(name, SHAPE)
    call.run()
    for argument, array in call.arrays.items():
        if isinstance(array, np.ndarray):
            call.arrays[argument] = draw(f"another {argument}", array.shape, "float32")
            with at(argument):
                assert_same(call.run(), call.function(**call.arrays))
    for field, array in call.out.items():
        call.out[field] = np.full_like(array, np.nan)
        with at(field):
            assert_same(call.run(), call.function(**call.arrays))


SAID = [
    {},
    {"eps": 0.5},
    {"eps": 2.0},
    {"c": 0.0},
    {"c": -0.0},
    {"c": 3},
    {"center": True},
    {"weight_offset": 1.0},
    {"weight_offset": 2.0},
    {"groups": 2},
    {"axis": 0},
    {"round_before_weight": True, "dtype": "float32"},
    {"gate_activation": "tanh"},
    {"gate_position": "pre"},
]


def test_whatever_else_is_said_is_another_call(known):
    arrays = given()
    for x in (arrays.x, arrays.x.astype(np.float16)):
        out = np.empty(SHAPE, np.float32)
        for said in [*SAID, *SAID]:
            weight = arrays.dy if said.get("axis") == 0 else arrays.weight
            told = {"weight": weight, "gate": arrays.gate, "dtype": "float32"} | said
            cunorm.normalize(x, **told, out=out)
            with at(x.dtype, said):
                assert_same_bits(out, cunorm.normalize(x, **told))
    assert len(known) == 2 * len(SAID)


def test_what_a_backward_is_told_is_another_call(known):
    call = Call("normalize_backward", SHAPE)
    call.arrays["gate"] = given().gate
    call.out["dgate"] = np.empty(SHAPE, np.float32)
    said = [told for told in SAID if not told.keys() & {"eps", "groups", "axis", "dtype"}]
    said.remove({"center": True})  # as Call says
    for told in [*said, *said]:
        expected = call.function(**call.arrays | told)
        given_to = {"out": NormGrads(**call.out), "workspace": call.workspace}
        with at(told):
            assert_same(call.function(**call.arrays | told, **given_to), expected)
    assert len(known) == len(said)


def test_a_call_that_adds_is_another_than_one_that_writes(known):
    call = Call("layer_norm_backward", SHAPE)
    lent = {"out": NormGrads(**call.out), "workspace": call.workspace}
    expected = call.function(**call.arrays)
    for accumulate, times in ((False, 1), (True, 2), (True, 3), (False, 1), (True, 2)):
        grads = call.function(**call.arrays, **lent, accumulate=accumulate)
        np.testing.assert_allclose(grads.dweight, times * expected.dweight, rtol=1e-6)
        assert_same_bits(grads.dx, expected.dx)
    assert len(known) == 2


def test_gradients_that_need_no_workspace_are_computed_again_with_one(known):
    call = Call("rms_norm_backward", SHAPE)
    expected = call.function(**call.arrays).dx
    for workspace in (None, call.workspace, None, call.workspace):
        out = NormGrads(dx=call.out["dresidual"])
        call.function(**call.arrays, needs=("x",), out=out, workspace=workspace)
        assert_same_bits(out.dx, expected)
        out.dx[...] = np.nan
    assert len(known) == 2


# --- wrong input is refused though the memory was used before -------------------------------------


def remembered(known):
    """Return arrays of a call that is remembered."""
    arrays = given()
    out = NormForward(y=np.empty(SHAPE, np.float32), rstd=np.empty(5, np.float32))
    cunorm.rms_norm_forward(arrays.x, arrays.weight, out=out)
    assert len(known) == 1
    return arrays.x, arrays.weight, out


def test_the_same_memory_as_another_array_is_checked_again(known):
    x, weight, out = remembered(known)
    refused = [
        (TypeError, x.view(np.int32), "x has dtype int32"),
        (TypeError, np.ma.masked_array(x, copy=False), "x is a masked array"),
        (ValueError, x.reshape(WIDTH, 5), "weight has shape (8,), expected (5,)"),
        (ValueError, x[:4], "out.y has shape (5, 8), expected (4, 8)"),
    ]
    for error, array, message in refused:
        with pytest.raises(error) as caught:
            cunorm.rms_norm_forward(array, weight, out=out)
        assert str(caught.value).startswith(f"rms_norm_forward: {message}")


def test_other_strides_are_another_call():
    memory = np.asarray(draw("x", (2 * 5, WIDTH), "float32"))
    out = np.empty(SHAPE, np.float32)
    for x in (memory[:5], memory[::2], memory[:5], memory[::2]):
        assert_same_bits(cunorm.rms_norm(x, out=out), cunorm.rms_norm(x))


def test_a_result_that_became_read_only_is_refused(known):
    x, weight, out = remembered(known)
    out.y.flags.writeable = False
    with pytest.raises(ValueError, match=r"rms_norm_forward: out\.y cannot be written to in place"):
        cunorm.rms_norm_forward(x, weight, out=out)


def test_a_result_that_moved_over_an_input_is_refused(known):
    _, weight, out = remembered(known)
    memory = np.zeros((6, WIDTH), np.float32)
    cunorm.rms_norm_forward(memory[1:], weight, out=out)
    with pytest.raises(ValueError, match=r"rms_norm_forward: out\.y overlaps x"):
        cunorm.rms_norm_forward(memory[1:], weight, out=out._replace(y=memory[:5]))


def test_a_workspace_that_became_smaller_is_refused():
    call = Call("rms_norm_backward", SHAPE)
    call.run()
    call.workspace = call.workspace[:8]
    with pytest.raises(ValueError, match="rms_norm_backward: workspace has 8 bytes"):
        call.run()


def test_values_that_are_equal_and_of_another_type_are_refused(known):
    x, weight, out = remembered(known)
    for told in ({"groups": True}, {"round_before_weight": 0}, {"eps": True}):
        cunorm.rms_norm_forward(x, weight, out=out, eps=1.0)
        (name,) = told
        with pytest.raises(TypeError, match=f"^rms_norm_forward: {name} is "):
            cunorm.rms_norm_forward(x, weight, out=out, **told)


# --- what is not remembered -----------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FORWARDS, *BACKWARDS])
def test_a_call_that_allocates_is_not_remembered(name, known):
    call = Call(name, SHAPE)
    for part in call.parts():
        call.run(without=part)
    assert not known


def test_a_call_that_copies_is_not_remembered(known):
    out = np.empty(SHAPE, np.float32)
    spread = np.asarray(draw("x", (5, 2 * WIDTH), "float32"))
    shifted = np.zeros(4 * 5 * WIDTH + 1, np.uint8)[1:].view(np.float32).reshape(SHAPE)
    for x in (spread[:, ::2], shifted):
        for number in range(3):
            x[...] = draw(f"x {number}", SHAPE, "float32")
            assert_same_bits(cunorm.rms_norm(x, out=out), cunorm.rms_norm(x))
    assert not known


def test_a_call_on_other_frameworks_arrays_is_not_remembered(known):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x, out = torch.ones(SHAPE), np.empty(SHAPE, np.float32)
    cunorm.rms_norm(x, out=out)
    cunorm.rms_norm(x, out=torch.empty(SHAPE))
    assert not known


def test_calls_are_forgotten_with_their_kernels_and_when_they_are_too_many(known, monkeypatch):
    monkeypatch.setattr(_again, "_LIMIT", 3)
    x, weight, out = remembered(known)
    for number in range(1, 8):
        cunorm.rms_norm_forward(x, weight, out=out, eps=number)
        assert 1 <= len(known) <= 3
        assert any(key.numbers.endswith(struct.pack("<d", number)) for key in known)
    _backend.forget()
    assert not known


# --- the stream -----------------------------------------------------------------------------------


def test_a_stream_that_is_x_itself_is_returned_again(known):
    x = given().x
    y = np.empty(SHAPE, np.float32)
    for _ in range(2):
        assert cunorm.add_rms_norm(x, None, out=AddNorm(y=y)).residual is x
    assert len(known) == 1
    out = NormForward(y=y, rstd=np.empty(5, np.float32))
    for _ in range(2):
        assert cunorm.rms_norm_forward(x, residual_dtype="float32", out=out).residual is x
        assert cunorm.rms_norm_forward(x, out=out).residual is None
    assert len(known) == 3


def test_dx_and_dresidual_stand_for_one_another_again(known):
    arrays = given()
    array = np.empty(SHAPE, np.float32)
    for out in (NormGrads(dx=array), NormGrads(dresidual=array)):
        for _ in range(2):
            grads = cunorm.rms_norm_backward(arrays.dy, arrays.x, rstd=arrays.rstd, out=out)
            assert grads.dx is array
            assert grads.dresidual is array
    assert len(known) == 2
