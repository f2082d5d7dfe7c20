# SPDX-License-Identifier: MIT
"""Weights and biases with several rows, and gates on the branch, on a CPU."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

import cunorm
from tests.support.cases import call_of
from tests.support.gpu_arrays import OnNumpy
from tests.support.operands import assert_same_bits

KERNELS = ("row_norm_forward", "row_norm_backward")
OWN = (None, "000", "100", "001", "111")
# Along two axes that another axis separates, along the middle axis alone, and along the first two.
APART = ("101", "010", "110")
GATES = (None, "000", "100", "111", "101", "000 scalar", "100 scalar", "111 scalar")
BOTH = {"center": True, "stream": "+ float32", "d_residual": "float32", "shape": (3, 2, 5, 40)}
BRANCH = {"gate": "float32", "gate_position": "branch", "gate_activation": "tanh"}


def checked(kernel, **case):
    return call_of(kernel, BOTH | case, OnNumpy()).check()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(("weight", "bias"), [*product(OWN, OWN), *product(APART, APART)])
def test_weight_and_bias_may_each_have_rows_along_any_axes(kernel, weight, bias):
    checked(kernel, weight_own=weight, bias_own=bias)


OPTIONS = {
    "groups": {"groups": 3},
    "an offset": {"weight_offset": 1.0, "round_before_weight": True, "x": "bfloat16"},
    "a post-gate": {"gate": "bfloat16", "weight": "float16"},
    "a pre-gate": {"gate": "float16", "gate_position": "pre"},
    "no center": {"center": False, "c": 1.0, "x": "float16", "dx": "float32"},
    "float64": {"x": "float64", "weight": "float64", "stream": "+ float64"},
    "a bias alone": {"weight": None},
    "a weight alone": {"bias": None, "needs": ("weight",)},
    "strides": {"layouts": 1},
    "added sums": {"accumulate": "float64"},
    "a row that is cut": {"shape": (3, 2, 5, 83)},
    "long rows": {"shape": (2, 1, 3, 20_011)},
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("own", ["100", "001", "111"])
@pytest.mark.parametrize("option", OPTIONS)
def test_modulation_goes_with_every_option(kernel, own, option):
    checked(kernel, **{"weight_own": own, "bias_own": own} | OPTIONS[option])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("weight", [None, "100", "111"])
def test_a_gate_on_the_branch_may_be_shared_or_one_number_for_a_row(kernel, gate, weight):
    checked(kernel, **BRANCH, gate_own=gate, weight_own=weight)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("gate", [None, "100", "100 scalar"])
@pytest.mark.parametrize("option", ["groups", "no center", "float64", "strides", "long rows"])
def test_a_gate_on_the_branch_goes_with_every_option(kernel, gate, option):
    checked(kernel, **BRANCH | {"gate_own": gate} | OPTIONS[option])


@pytest.mark.parametrize("gate", [None, "100", "010 scalar"])
@pytest.mark.parametrize("own", [None, "100", "111"])
def test_a_workspace_of_the_given_size_suffices(own, gate):
    case = BRANCH | {"gate_own": gate, "workspace": True, "given": ("dweight", "dgate")}
    checked("row_norm_backward", weight_own=own, bias_own=own, **case)


def test_axes_that_alternate_too_often_are_refused():
    x, weight = np.zeros((2, 3, 2, 3, 8), np.float32), np.ones((2, 1, 2, 1, 8), np.float32)
    text = r"layer_norm: weight has shape \(2, 1, 2, 1, 8\), whose axes of 1 alternate too often"
    with pytest.raises(ValueError, match=text):
        cunorm.layer_norm(x, weight)
    with pytest.raises(ValueError, match="expected at most two runs of axes before the groups"):
        cunorm.layer_norm(x, weight[0], groups=2)
    x = np.zeros((2, 2, 2, 2, 2, 8), np.float32)
    saved = cunorm.layer_norm_forward(x)
    shapes = ((2, 1, 1, 1, 1, 8), (1, 1, 2, 1, 1, 8), (1, 1, 1, 1, 2, 8))
    weight, bias, gate = (np.ones(shape, np.float32) for shape in shapes)
    given = {"gate": gate, "gate_position": "branch", "branch": x}
    with pytest.raises(ValueError, match=r"and gate .* are shared along different axes of x"):
        cunorm.layer_norm_backward(x, x, weight, bias, mean=saved.mean, rstd=saved.rstd, **given)


@pytest.mark.parametrize("case", [{}, {"gate_activation": "silu", "x": "bfloat16"}])
def test_without_a_residual_the_gated_branch_is_the_stream(case):
    result = checked("row_norm_forward", **BRANCH | {"stream": None} | case)
    assert str(result.residual.dtype) == case.get("x", "float32")


def modulated(samples, rows, width=70):
    rng = np.random.default_rng(3)

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32)

    x, dy, stream = (draw(samples, rows, width) for _ in range(3))
    weight, bias, gate = (draw(samples, 1, width) for _ in range(3))
    return x, dy, stream, weight, bias, gate


def differentiated(x, dy, stream, weight, bias, gate):
    options = {"gate": gate, "gate_activation": "tanh", "gate_position": "branch"}
    saved = cunorm.layer_norm_forward(x, weight, bias, residual=stream, **options)
    statistics = {"mean": saved.mean, "rstd": saved.rstd, "branch": x, "d_residual": dy}
    grads = cunorm.layer_norm_backward(dy, saved.residual, weight, bias, **statistics, **options)
    return (*saved, *grads)


@pytest.mark.parametrize("rows", [1, 9, 33, 400])
def test_no_bit_of_a_sample_or_its_gradients_depends_on_other_samples(rows):
    operands = modulated(5, rows)
    together = differentiated(*operands)
    for sample in range(5):
        alone = differentiated(*(operand[sample : sample + 1] for operand in operands))
        for one, all_samples in zip(alone, together, strict=True):
            assert_same_bits(one, all_samples[sample : sample + 1])


def test_chunks_of_an_array_are_read_where_they_lie():
    x, dy, stream, *_ = modulated(4, 6, 64)
    rng = np.random.default_rng(0)
    vectors = rng.standard_normal((4, 1, 6 * 64)).astype(np.float32)
    chunks = np.split(vectors, 6, axis=-1)[1:4]
    copies = [chunk.copy() for chunk in chunks]
    read_in_place = differentiated(x, dy, stream, *chunks)
    for one, other in zip(read_in_place, differentiated(x, dy, stream, *copies), strict=True):
        assert_same_bits(one, other)


def test_a_parameter_whose_rows_are_not_contiguous_is_copied():
    x, dy, stream, weight, bias, gate = modulated(4, 6, 64)
    apart = [np.repeat(one, 2, axis=-1)[..., ::2] for one in (weight, bias, gate)]
    for one, other in zip(
        differentiated(x, dy, stream, weight, bias, gate),
        differentiated(x, dy, stream, *apart),
        strict=True,
    ):
        assert_same_bits(one, other)


EMPTY = [((0, 3, 8), (0, 1, 8)), ((2, 0, 8), (2, 1, 8)), ((2, 2, 3, 0, 8), (2, 1, 1, 8))]


@pytest.mark.parametrize(("shape", "own"), EMPTY)
def test_gradients_of_samples_without_rows_are_zeros(shape, own):
    x, own = np.zeros(shape, np.float32), np.ones(own, np.float32)
    saved = cunorm.layer_norm_forward(x, own, own)
    grads = cunorm.layer_norm_backward(x, x, own, own, mean=saved.mean, rstd=saved.rstd)
    assert grads.dweight.shape == grads.dbias.shape == own.shape
    assert not grads.dweight.any() and not grads.dbias.any()
