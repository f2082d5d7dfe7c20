# SPDX-License-Identifier: MIT
"""A group norm's kernel in which any one term of its formulas is missing, or another, fails.

What is exchanged stands once in the kernel's text. Groups have mean 0 or 10000, deviation 1 and
every operand; where a formula is of parts of a sample, or of many groups, there are some.
"""

from __future__ import annotations

import pytest

from cunorm.results import GroupNormForward, GroupNormGrads
from tests.support.group_bounds import check_group_backward, check_group_forward

from .covered import ACTIVATIONS
from .emulator import EmulationError, unavailable
from .group_arrays import EPS, FAMILIES, Grid, Operands, saved
from .group_kernels import GroupPlan, emulate_group_backward, emulate_group_forward
from .plans import emulated_source

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

SAMPLES = 3


def run_forward(family, far, **plan):
    """Run a forward with every operand, and hold it to the oracle."""
    grid = family.of(SAMPLES)
    make = Operands(grid, far=far)
    operands = (make.x("float32"), family.groups, make.param("float32"), make.param("float32"))
    told = {"activation": "silu", "channel_axis": grid.channel_axis, "eps": 0.5}
    ran = emulate_group_forward(*operands, **told, plan=GroupPlan(**plan))
    check_group_forward(ran.result, *operands, **told)


def run_backward(family, far, **plan):
    """Run a backward with every operand, and hold it to the oracle."""
    grid = family.of(SAMPLES)
    make = Operands(grid, far=far)
    dy, x, *parameters = make.dy("float32"), make.x("float32"), *map(make.param, ["float32"] * 2)
    operands = (dy, x, family.groups, *parameters)
    statistics = saved(x, family.groups, grid.channel_axis)
    for activation in (None, "silu"):  # with silu, a mean that is off a little may change phi'
        told = {"activation": activation, "channel_axis": grid.channel_axis}
        ran = emulate_group_backward(*operands, **told, **statistics, plan=GroupPlan(**plan))
        check_group_backward(ran.result, *operands, **told, eps=EPS)


RUNS = {"group_norm_forward": run_forward, "group_norm_backward": run_backward}

# What stands in a kernel, and what in its place.
IN_BOTH = (
    ("fma(q, of_channel<B>(factor, at), of_channel<B>(bias, at))", "q * of_channel<B>(factor, at)"),
    ("rstd.item[i] * weight.item[i]", "rstd.item[i]"),
    ("rstd.item[i] * weight.item[i]", "weight.item[i]"),
    ("data + sample * sample_stride + line", "data + line"),
    ("line * line_stride", "line"),
)
OF_PARTS = (
    ("return left < tile_positions ? left : tile_positions;", "return tile_positions;"),
    ("use(i / channels, i % channels);", "use(0, i % channels);"),
    ("rest % parts, block", "0, block"),
)
OF_CHUNKS = (("first_sample(arguments.first_sample)", "first_sample(0)"),)
OF_GROUPS = (
    ("group % extent.block_groups", "0"),
    ("use(sample, first + i);", "use(sample, first);"),
    ("blockIdx.x % shares * count", "0"),
)
MUTANTS = {
    ("group_norm_forward", "last, one launch"): (
        *IN_BOTH,
        ("sums.item[i] / count", "sums.item[i]"),
        ("sums.item[i] / count", "C(0)"),
        ("of_channel<B>(shift, at)) - of_channel<B>(correction, at)", "of_channel<B>(shift, at))"),
        ("(rest - first_rest)", "0"),
        ("rest = first_rest + distance", "rest = distance"),
        ("(shift - first_shift) + (rest", "(rest"),
        ("m.squares + m.count * rest * rest", "m.squares"),
        ("m.squares + m.count * rest * rest", "m.count * rest * rest"),
        ("m.distance - distance", "m.distance"),
        ("team.all_reduce(distances) / elements", "team.all_reduce(distances)"),
        (" / elements + arguments.eps", " / elements"),
        (" / elements + arguments.eps", " / (elements - 1) + arguments.eps"),
        ("C((first_shift - double(shift)) + rest)", "C(rest)"),
        ("arguments.mean + index, shift", "arguments.mean + index, C(first_shift)"),
        ("B::activation::value(n)", "n"),
    ),
    ("group_norm_forward", "last, three launches"): (
        *OF_PARTS,
        ("m.count * m.distance", "m.distance"),
        ("m.count * m.distance", "double(extent.part_positions(0)) * m.distance"),
        ("m.squares + m.count * rest * rest", "m.squares + rest * rest"),
        ("sum * counts.inverse(part)", "sum * counts.inverse(0)"),
        ("{counts.count(part)", "{counts.count(0)"),
    ),
    ("group_norm_forward", "first, three launches, in warps"): (
        ("C(extent.part_positions(tile.part))", "C(extent.tile_positions)"),
        ("block % parts, rest % tiles", "0, rest % tiles"),
    ),
    ("group_norm_forward", "last, one launch, groups together"): OF_GROUPS,
    ("group_norm_forward", "chunks"): OF_CHUNKS,
    ("group_norm_backward", "last, one launch"): (
        *IN_BOTH,
        ("read<B>(inputs.x, at) - of_channel<B>(mean, at)", "read<B>(inputs.x, at)"),
        ("dy * B::activation::at(affine<B>(p, factor, bias, at)).derivative", "dy"),
        ("bias, at)).derivative", "bias, at)).value"),
        (
            "a = weighted.item[0] / elements, b = weighted",
            "b = weighted.item[0] / elements, a = weighted",
        ),
        ("a = weighted.item[0] / elements", "a = weighted.item[0]"),
        ("double(extent.group_size())", "double(extent.positions)"),
        ("C(-rstd * a - correction", "C(-correction"),
        ("C(-rstd * a - correction", "C(-a - correction"),
        ("factor_of_p = -rstd * rstd * b", "factor_of_p = 0"),
        ("factor_of_p = -rstd * rstd * b", "factor_of_p = -rstd * b"),
        ("(sums.item[1] - correction * sum_h)", "sums.item[1]"),
        (
            "const double sum_h = sums.item[0], sum_h_r = rstd *",
            "const double sum_h = sums.item[0], sum_h_r =",
        ),
        ("C(-rstd * a - correction * factor_of_p)", "C(-rstd * a)"),
        ("weighted.item[0] += weight * sum_h;", "weighted.item[0] += sum_h;"),
        ("weighted.item[1] += weight * sum_h_r;", "weighted.item[1] += sum_h_r;"),
        ("dweight_sums + place, C(sum_h_r)", "dweight_sums + place, C(sum_h)"),
        ("dbias_sums + place, C(sum_h)", "dbias_sums + place, C(sum_h_r)"),
        ("fma(h, of_channel<B>(channels.factor, at), rest)", "h + rest"),
        ("handed_on.store(SumHP, strip, sums_h_p);", "handed_on.store(SumHP, strip, sums_h);"),
    ),
    ("group_norm_backward", "last, three launches"): (
        *OF_PARTS[1:],
        ("part < parts; part += lanes", "part < 1; part += lanes"),
    ),
    ("group_norm_backward", "first, three launches, in warps"): (
        ("block % parts, rest % tiles", "0, rest % tiles"),
    ),
    ("group_norm_backward", "last, one launch, groups together"): OF_GROUPS,
    ("group_norm_backward", "chunks"): (
        *OF_CHUNKS,
        ("place = whole_sample * sum_pitch", "place = sample * sum_pitch"),
    ),
}


def run(kernel, name, **plan):
    """Run near 0 and far from it."""
    chunks = {"chunk": 1} if name == "chunks" else {}
    family = FAMILIES["last, three launches" if chunks else name]
    for far in (False, True):
        RUNS[kernel](family, far, **family.plan, **chunks, **plan)


@pytest.mark.parametrize(("kernel", "name"), MUTANTS)
def test_the_kernel_itself_passes_where_its_mutants_must_fail(kernel, name):
    run(kernel, name)


@pytest.mark.parametrize(
    ("kernel", "name", "before", "after"),
    [(*where, *change) for where, changes in MUTANTS.items() for change in changes],
)
def test_another_formula_fails(kernel, name, before, after):
    text = emulated_source(kernel)
    assert text.count(before) == 1
    with pytest.raises((AssertionError, EmulationError)):
        run(kernel, name, sources={kernel: text.replace(before, after)})


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_another_activation_fails(activation):
    make = Operands(Grid(3, (9,), 40))
    dy, x = make.dy("float32"), make.x("float32")
    f = emulate_group_forward(x, 5, activation=activation, eps=EPS).result
    dx = emulate_group_backward(dy, x, 5, **saved(x, 5), activation=activation).result.dx
    y, dx = GroupNormForward(f.y), GroupNormGrads(dx)
    absent = (5, None, None)
    check_group_forward(y, x, *absent, activation=activation, eps=EPS)
    check_group_backward(dx, dy, x, *absent, activation=activation, eps=EPS)
    for other in set(ACTIVATIONS) - {activation}:
        with pytest.raises(AssertionError):
            check_group_forward(y, x, *absent, activation=other, eps=EPS)
        with pytest.raises(AssertionError):
            check_group_backward(dx, dy, x, *absent, activation=other, eps=EPS)
