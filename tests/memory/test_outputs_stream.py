# SPDX-License-Identifier: MIT
"""y written over x where the residual stream begins: only an x that is returned must be kept."""

import numpy as np
import pytest

import cunorm
from cunorm import AddNorm, NormForward
from tests.support.calls import raises
from tests.support.operands import assert_same_bits, at, draw
from tests.support.processes import SETUP, in_process

ROWS = 5
WIDTHS = (1, 7, 64, 1003, 16384, 20000, 40001)
OWN = "expected memory of its own"


def unaligned(name, shape, dtype):
    """Draw an array whose elements are aligned, and nothing longer; between its rows is a gap."""
    rows, width = shape
    memory = np.full((rows, width + 3), np.nan, np.dtype(dtype))
    memory[:, 1:-2] = draw(name, shape, dtype)
    return memory[:, 1:-2]


@pytest.mark.parametrize("make", [draw, unaligned], ids=["aligned", "unaligned"])
@pytest.mark.parametrize("stream", ["float32", "float16", "float64"])
@pytest.mark.parametrize("position", [None, "pre", "post"])
def test_y_may_be_exactly_x_where_the_stream_is_written_to_an_array_of_its_own(
    make, stream, position
):
    for width in WIDTHS:
        shape = (ROWS, width)
        x, weight = make("x", shape, "float32"), draw("weight", width, "float32")
        gate = draw("gate", shape, "float32") if position else None
        told = {"gate": gate, "gate_position": position or "post"}
        apart = NormForward(residual=np.empty(shape, stream))
        expected = cunorm.layer_norm_forward(x, weight, out=apart, **told)
        out = NormForward(y=x, residual=make("residual", shape, stream))
        with at(width):
            result = cunorm.layer_norm_forward(x, weight, out=out, **told)
            assert result.y is x
            assert result.residual is out.residual
            for field in NormForward._fields:
                assert_same_bits(getattr(result, field), getattr(expected, field), field)


@pytest.mark.parametrize("name", ["add_normalize", "add_rms_norm", "add_layer_norm"])
def test_y_may_be_exactly_x_where_the_stream_is_of_another_dtype(name):
    for width in WIDTHS:
        x = draw("x", (ROWS, width), "bfloat16")
        told = {"residual": None, "residual_dtype": "float32"}
        expected = getattr(cunorm, name)(x, **told)
        with at(width):
            result = getattr(cunorm, name)(x, **told, out=AddNorm(y=x))
            assert result.y is x
            assert_same_bits(result.y, expected.y, "y")
            assert_same_bits(result.residual, expected.residual, "residual")


def test_the_reference_writes_y_over_x_as_the_kernels_do():
    in_process(
        """
import warnings
from cunorm import AddNorm, NormForward
warnings.simplefilter("ignore")
assert cunorm._cpu.compiler() is None
for width in (1, 7, 1003, 20000):
    for dtype in (np.float16, np.float32, np.float64):
        x = np.random.default_rng(width).standard_normal((5, width)).astype(np.float32)
        weight = x[0].copy()
        stream = NormForward(residual=np.empty_like(x, dtype))
        apart = cunorm.rms_norm_forward(x, weight, out=stream)
        given = NormForward(y=x.copy(), residual=np.empty_like(x, dtype))
        result = cunorm.rms_norm_forward(given.y, weight, out=given)
        assert result.y is given.y and result.residual is given.residual
        for field, array in apart._asdict().items():
            np.testing.assert_array_equal(getattr(result, field), array)
    row, place = x[0].copy(), weight.copy()
    apart = cunorm.add_rms_norm(row, None, weight)
    result = cunorm.add_rms_norm(row, None, place, out=AddNorm(y=place))
    assert result.residual is row
    np.testing.assert_array_equal(place, apart.y)
""",
        setup=SETUP,
        CXX="",
        PATH="/dev/null",
    )


def test_where_x_is_returned_as_the_stream_y_may_be_any_other_input():
    x, gate, weight = (draw(name, 1003, "float32") for name in ("x", "gate", "weight"))
    before, told = x.copy(), {"gate": gate, "groups": 17}
    expected = cunorm.add_rms_norm(x, None, weight, **told).y
    for place in ("weight", "gate"):
        arrays = {"weight": weight, **told}
        arrays[place] = arrays[place].copy()
        result = cunorm.add_rms_norm(x, None, **arrays, out=AddNorm(y=arrays[place]))
        assert result.y is arrays[place]
        assert result.residual is x
        assert_same_bits(result.y, expected, place)
        assert_same_bits(x, before, "x")


def test_where_x_is_returned_as_the_stream_y_may_not_be_an_array_that_is_x_too():
    x = draw("x", 1003, "float32")
    for name in ("weight", "gate"):
        with raises(ValueError, f"add_rms_norm: out.y overlaps x, {OWN}"):
            cunorm.add_rms_norm(x, None, **{name: x}, out=AddNorm(y=x))
    with raises(ValueError, f"normalize_forward: out.y overlaps x, {OWN}"):
        cunorm.normalize_forward(x, residual_dtype="float32", out=NormForward(y=x))


def test_y_may_not_be_the_x_that_the_stream_is_written_over():
    x = draw("x", (ROWS, 64), "float32")
    with raises(ValueError, f"normalize_forward: out.residual overlaps out.y, {OWN}"):
        cunorm.normalize_forward(x, out=NormForward(y=x, residual=x))
