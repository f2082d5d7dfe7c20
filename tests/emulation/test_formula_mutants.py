# SPDX-License-Identifier: MIT
"""A kernel in which any one term of its formulas is missing, or another, fails.

What is exchanged stands once in the kernel's text. The call has every operand, groups that begin at
odd addresses, and numbers that show each rounding.
"""

from __future__ import annotations

import pytest

from cunorm.results import NormForward, NormGrads
from tests.support.bounds import check_backward, check_forward

from .arrays import EPS, Operands, saved
from .covered import ACTIVATIONS, check_backward_case, check_forward_case
from .emulator import EmulationError, unavailable
from .kernels import emulate_backward, emulate_forward
from .plans import emulated_source

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

CASE = {
    **dict.fromkeys(("gate", "weight", "bias"), "float32"),
    **{"width": 33, "groups": 3, "rows": "several", "far": False, "layouts": None},
    **{"center": True, "c": 1.0, "weight_offset": 1.0},
    **{"gate_activation": "silu", "place": ("end", None), "grid": 2, "order": "forward"},
    "features": "",
}
FORWARD = {**CASE, "x": "bfloat16", "stream": "+ float32", "y": "float32"}
BACKWARD = {
    **CASE,
    **dict.fromkeys(("dy", "x", "d_residual", "dgate", "accumulate"), "float32"),
    **{"dx": "bfloat16", "outputs": "dx dresidual", "needs": ("weight", "bias", "gate")},
}
CHECKS = {
    "row_norm_forward": (check_forward_case, FORWARD),
    "row_norm_backward": (check_backward_case, BACKWARD),
    "param_grad": (check_backward_case, BACKWARD),
}

WHERE = {  # the gate is
    "pre": {"gate_position": "pre", "round_before_weight": False},
    "post": {"gate_position": "post", "round_before_weight": True},
}

# What stands in a kernel, and what in its place.
IN_BOTH = (
    ("group(blockIdx.x / cluster % groups)", "group(0)"),
    ("block(blockIdx.x / cluster / groups)", "block(blockIdx.x / cluster)"),
    ("weight(arguments.weight + share.group * row_width(arguments))", "weight(arguments.weight)"),
    ("bias(arguments.bias + share.group * row_width(arguments))", "bias(arguments.bias)"),
    ("return w + offset;", "return w;"),
    ("return rounded_to<B, typename B::rounded_t>(k_r);", "return k_r;"),
    (
        "return fma(k_r, factors.item[at.index], bias.item[at.index]);",
        "return k_r * factors.item[at.index];",
    ),
)
MUTANTS = {
    ("row_norm_forward", "post"): (
        *IN_BOTH,
        ("n *= B::activation::at(read<B>(gate, at)).value;", ";"),
        ("s += read<B>(residual_pack, at);", ";"),
        ("return stream.store(column);", "return stream.store(column), LoadedPack<B, stream_t>{};"),
        ("return (p - shift) - correction;", "return p;"),
        ("C(arguments.k) * row.rstd", "row.rstd"),
        ("row.moments.variance + C(arguments.eps)", "row.moments.variance"),
        ("arguments.rstd + index, row.rstd", "arguments.rstd + index, row.k_rstd"),
    ),
    ("row_norm_forward", "pre"): (
        ("* B::activation::at(read<B>(gate_pack, at)).value;", ";"),
        ("math::over_root(arguments.k, square)", "row.rstd"),
    ),
    ("row_norm_backward", "post"): (
        *IN_BOTH,
        ("row.k_rstd = C(arguments.k) * row.rstd;", "row.k_rstd = row.rstd;"),
        ("dn *= gate.value;", ";"),
        ("item.gate.derivative * (item.dy * affine", "item.gate.value * (item.dy * affine"),
        ("item.gate.derivative * (item.dy * affine", "(item.dy * affine"),
        ("(item.dy * affine<B>", "(item.dn * affine<B>"),
        ("affine<B>(rounded, factors", "affine<B>(k_r, factors"),
        ("dweight.add_product(at, item.dn, rounded);", "dweight.add_product(at, item.dn, k_r);"),
        ("dweight.add_product(at, item.dn,", "dweight.add_product(at, item.dy,"),
        ("dbias.add(at, item.dn);", "dbias.add(at, item.dy);"),
        ("ds += read<B>(d_residual, at);", ";"),
        ("dr *= parameters.factor(weight, at);", ";"),
        ("dr *= parameters.factor(weight, at);", "dr *= read<B>(weight, at);"),
        ("dp *= factors.item[at.index];", ";"),
        ("row.offset = -rstd * mean_dr;", ";"),
        ("mean_dr = C(arguments.k) * sums", "mean_dr = sums"),
        ("fma(k_r, r_factor, offset)", "offset"),
        ("fma(k_r, r_factor, offset)", "fma(rounded, r_factor, offset)"),
        ("share.group * width)", "0)"),
        ("sum_pitch(width * share.groups) +", "sum_pitch(width) +"),
    ),
    ("row_norm_backward", "pre"): (
        ("p *= gate.value;", ";"),
        ("ds *= item.gate.value;", ";"),
        ("ds += read<B>(d_residual, at);", "ds += read<B>(d_residual, at) * item.gate.value;"),
        ("item.gate.derivative * (dp * item.x)", "item.gate.value * (dp * item.x)"),
        ("item.gate.derivative * (dp * item.x)", "(dp * item.x)"),
        ("(dp * item.x)", "(dp * item.p)"),
        ("(dp * item.x)", "(ds * item.x)"),
    ),
    ("param_grad", "post"): (
        ("if constexpr (B::accumulate) {", "if constexpr (false) {"),
        ("sum.item[at.index] += read<B>(before, at);", "sum.item[at.index] = read<B>(before, at);"),
        ("part_sums + part * arguments.stride", "part_sums"),
        ("part = part_thread; part", "part = part_thread + 1; part"),
    ),
}


@pytest.mark.parametrize("position", WHERE)
@pytest.mark.parametrize("kernel", CHECKS)
def test_the_kernel_itself_passes_where_its_mutants_must_fail(kernel, position):
    check, case = CHECKS[kernel]
    check(case | WHERE[position])


@pytest.mark.parametrize(
    ("kernel", "position", "before", "after"),
    [(*where, *change) for where, changes in MUTANTS.items() for change in changes],
)
def test_another_formula_fails(kernel, position, before, after):
    text = emulated_source(kernel)
    assert text.count(before) == 1
    check, case = CHECKS[kernel]
    with pytest.raises((AssertionError, EmulationError)):
        check(case | WHERE[position], sources={kernel: text.replace(before, after)})


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_another_activation_fails(activation):
    make = Operands((1, 1, 9, 100))
    dy, x, gate = (make.rows("float32") for _ in range(3))
    options = {"gate": gate, "gate_activation": activation}
    y = emulate_forward(x, eps=EPS, **options).result.y
    grads = emulate_backward(dy, x, **options, **saved(x, **options)).result
    check_forward(NormForward(y), x, None, None, eps=EPS, **options)
    check_backward(grads, dy, x, None, None, eps=EPS, **options)
    for other in set(ACTIVATIONS) - {activation}:
        options["gate_activation"] = other
        with pytest.raises(AssertionError):
            check_forward(NormForward(y), x, None, None, eps=EPS, **options)
        for field in ("dx", "dgate"):
            alone = NormGrads(**{field: getattr(grads, field)})
            with pytest.raises(AssertionError):
                check_backward(alone, dy, x, None, None, eps=EPS, **options)
