# SPDX-License-Identifier: MIT
"""Wrong formulas, by kernel and by what they need of a call: each must give wrong answers."""

from __future__ import annotations

from tests.emulation.mutants import Formula

_GATE_GRADIENT = "item.gate.derivative * (item.dy * affine<B>(rounded, factors, bias, at))"
_ROWS = (
    Formula("blockIdx.x / cluster % groups", ("0",)),
    Formula("blockIdx.x / cluster / groups", ("blockIdx.x / cluster",)),
    Formula("arguments.weight + share.group * row_width(arguments)", ("arguments.weight",)),
    Formula("arguments.bias + share.group * row_width(arguments)", ("arguments.bias",)),
    Formula("return w + offset;", ("return w;",)),
    Formula("return rounded_to<B, typename B::rounded_t>(k_r);", ("return k_r;",)),
    Formula(
        "fma(k_r, factors.item[at.index], bias.item[at.index])", ("k_r * factors.item[at.index]",)
    ),
)
CLUSTERS = (
    Formula(
        "return cluster_rank() * B::threads + threadIdx.x;", ("return B::threads + threadIdx.x;",)
    ),
    Formula(
        "cluster_load(&sums[warp % warps][i], warp / warps)",
        ("cluster_load(&sums[warp % warps][i], 0)", "cluster_load(&sums[0][i], warp / warps)"),
    ),
    Formula("blockIdx.x / cluster % groups", ("blockIdx.x % groups",)),
    Formula("blockIdx.x / cluster / groups", ("blockIdx.x / groups",)),
)
# Of clusters with more warps than a warp has lanes.
LARGE_CLUSTERS = (
    Formula(
        "first < shared_sums; first",
        ("first < (without({0}) ? shared_sums / 2 : shared_sums); first",),
    ),
)
COPIES = (
    Formula("async_commit();\n", ("{ if (!without({0})) async_commit(); }\n",)),
    Formula("stage ^= 1;", ("stage ^= without({0}) ? 0 : 1;",)),
    Formula("storage.dy.load(stage, i)", ("storage.dy.load(stage ^ int(without({0})), i)",)),
    Formula("async_wait<1>();", (";", "async_wait<2>();")),
    Formula("first + i + share.blocks * Team<B>::per_block", ("first + i + Team<B>::per_block",)),
    Formula(
        "  copy_row(arguments, team, share, share",
        ("  if (!without({0})) copy_row(arguments, team, share, share",),
    ),
)
_SAMPLES = (
    Formula(
        "fma(q, of_channel<B>(factor, at), of_channel<B>(bias, at))",
        ("q * of_channel<B>(factor, at)",),
    ),
    Formula("rstd.item[i] * weight.item[i]", ("rstd.item[i]", "weight.item[i]")),
    Formula(
        "data + sample * sample_stride + line * line_stride",
        ("data + line * line_stride", "data + sample * sample_stride + line"),
    ),
)
_CHUNKS = Formula("arguments.first_sample", ("0",))
_PARTS = (
    Formula("use(i / channels, i % channels);", ("use(0, i % channels);",)),
    Formula("rest % parts", ("0",)),
    _CHUNKS,
)
_GROUPS_TOGETHER = (
    Formula("group % extent.block_groups", ("0",)),
    Formula("use(sample, first + i);", ("use(sample, first);",)),
    Formula("blockIdx.x % shares * count", ("0",)),
)

FORMULAS: dict[tuple[str, str], tuple[Formula, ...]] = {
    ("row_norm_forward", "post"): (
        *_ROWS,
        Formula("n *= B::activation::at(read<B>(gate, at)).value;", (";",)),
        Formula("s += read<B>(residual_pack, at);", (";",)),
        Formula(
            "return stream.store(column);",
            ("return stream.store(column), LoadedPack<B, stream_t>{};",),
        ),
        Formula("(p - shift) - correction", ("p",)),
        Formula("C(arguments.k) * row.rstd", ("row.rstd",)),
        Formula("row.moments.variance + C(arguments.eps)", ("row.moments.variance",)),
        Formula(
            "global_store(arguments.rstd + index, row.rstd);",
            ("global_store(arguments.rstd + index, row.k_rstd);",),
        ),
    ),
    ("row_norm_forward", "pre"): (
        Formula(
            "read<B>(s, at) * B::activation::at(read<B>(gate_pack, at)).value", ("read<B>(s, at)",)
        ),
        Formula("math::over_root(arguments.k, square)", ("row.rstd",)),
    ),
    ("row_norm_backward", "post"): (
        *_ROWS,
        Formula("row.k_rstd = C(arguments.k) * row.rstd;", ("row.k_rstd = row.rstd;",)),
        Formula("dn *= gate.value;", (";",)),
        Formula(
            _GATE_GRADIENT,
            (
                _GATE_GRADIENT.replace("derivative", "value"),
                _GATE_GRADIENT.replace("item.gate.derivative * ", ""),
                _GATE_GRADIENT.replace("item.dy", "item.dn"),
                _GATE_GRADIENT.replace("rounded", "k_r"),
            ),
        ),
        Formula(
            "dweight.add_product(at, item.dn, rounded);",
            (
                "dweight.add_product(at, item.dn, k_r);",
                "dweight.add_product(at, item.dy, rounded);",
            ),
        ),
        Formula("dbias.add(at, item.dn);", ("dbias.add(at, item.dy);",)),
        Formula("ds += read<B>(d_residual, at);", (";",)),
        Formula("dr *= parameters.factor(weight, at);", (";", "dr *= read<B>(weight, at);")),
        Formula("dp *= factors.item[at.index];", (";",)),
        Formula("row.offset = -rstd * mean_dr;", (";",)),
        Formula("C(arguments.k) * sums.item[1] / width", ("sums.item[1] / width",)),
        Formula("fma(k_r, r_factor, offset)", ("offset", "fma(rounded, r_factor, offset)")),
        Formula("share.group * width", ("0",)),
        Formula(
            "(in_registers ? 1 : 2) * sum_pitch(width * share.groups)",
            ("(in_registers ? 1 : 2) * sum_pitch(width)",),
        ),
    ),
    ("row_norm_backward", "pre"): (
        Formula("p *= gate.value;", (";",)),
        Formula("ds *= item.gate.value;", (";",)),
        Formula(
            "ds += read<B>(d_residual, at);",
            ("ds += read<B>(d_residual, at) * item.gate.value;",),
        ),
        Formula(
            "item.gate.derivative * (dp * item.x)",
            (
                *("item.gate.value * (dp * item.x)", "(dp * item.x)"),
                *("item.gate.derivative * (dp * item.p)", "item.gate.derivative * (ds * item.x)"),
            ),
        ),
    ),
    ("param_grad", "accumulated"): (
        Formula(
            "sum.item[at.index] += read<B>(before, at);",
            (";", "sum.item[at.index] = read<B>(before, at);"),
        ),
        Formula("part_sums + part * arguments.stride", ("part_sums",)),
        Formula("index_t part = part_thread;", ("index_t part = part_thread + without({0});",)),
    ),
    ("group_norm_forward", "last, one launch"): (
        *_SAMPLES,
        Formula("sums.item[i] / count", ("sums.item[i]", "C(0)")),
        Formula(
            "(read<B>(x, at) - of_channel<B>(shift, at)) - of_channel<B>(correction, at)",
            ("read<B>(x, at) - of_channel<B>(shift, at)",),
        ),
        Formula(
            "(shift - first_shift) + (rest - first_rest)",
            ("shift - first_shift", "rest - first_rest"),
        ),
        Formula("first_rest + distance", ("distance",)),
        Formula("m.squares + m.count * rest * rest", ("m.squares", "m.count * rest * rest")),
        Formula("m.distance - distance", ("m.distance",)),
        Formula("team.all_reduce(distances) / elements", ("team.all_reduce(distances)",)),
        Formula(
            "(squares < 0 ? 0 : squares) / elements + arguments.eps",
            (
                "(squares < 0 ? 0 : squares) / elements",
                "(squares < 0 ? 0 : squares) / (elements - 1) + arguments.eps",
            ),
        ),
        Formula("C((first_shift - double(shift)) + rest)", ("C(rest)",)),
        Formula(
            "global_store(arguments.mean + index, shift);",
            ("global_store(arguments.mean + index, C(first_shift));",),
        ),
        Formula("B::activation::value(n)", ("n",)),
    ),
    ("group_norm_forward", "last, three launches"): (
        *_PARTS,
        Formula(
            "return left < tile_positions ? left : tile_positions;", ("return tile_positions;",)
        ),
        Formula(
            "m.count * m.distance",
            ("m.distance", "double(extent.part_positions(0)) * m.distance"),
        ),
        Formula("m.squares + m.count * rest * rest", ("m.squares + rest * rest",)),
        Formula("sum * counts.inverse(part)", ("sum * counts.inverse(0)",)),
        Formula("counts.count(part)", ("counts.count(0)",)),
    ),
    ("group_norm_forward", "first, three launches, in warps"): (
        Formula("C(extent.part_positions(tile.part))", ("C(extent.tile_positions)",)),
        Formula("block % parts", ("0",)),
    ),
    ("group_norm_forward", "last, one launch, groups together"): _GROUPS_TOGETHER,
    ("group_norm_backward", "last, one launch"): (
        *_SAMPLES,
        Formula("read<B>(inputs.x, at) - of_channel<B>(mean, at)", ("read<B>(inputs.x, at)",)),
        Formula(
            "dy * B::activation::at(affine<B>(p, factor, bias, at)).derivative",
            ("dy", "dy * B::activation::at(affine<B>(p, factor, bias, at)).value"),
        ),
        Formula("weighted.item[0] / elements", ("weighted.item[1] / elements", "weighted.item[0]")),
        Formula("weighted.item[1] / elements", ("weighted.item[0] / elements",)),
        Formula("double(extent.group_size())", ("double(extent.positions)",)),
        Formula(
            "C(-rstd * a - correction * factor_of_p)",
            ("C(-correction * factor_of_p)", "C(-a - correction * factor_of_p)"),
        ),
        Formula("-rstd * rstd * b", ("0.0", "-rstd * b")),
        Formula(
            "rstd * (sums.item[1] - correction * sum_h)",
            ("rstd * sums.item[1]", "sums.item[1] - correction * sum_h"),
        ),
        Formula("weighted.item[0] += weight * sum_h;", ("weighted.item[0] += sum_h;",)),
        Formula("weighted.item[1] += weight * sum_h_r;", ("weighted.item[1] += sum_h_r;",)),
        Formula("C(sum_h_r)", ("C(sum_h)",)),
        Formula("C(sum_h)", ("C(sum_h_r)",)),
        Formula("fma(h, of_channel<B>(channels.factor, at), rest)", ("h + rest",)),
        Formula(
            "handed_on.store(SumHP, strip, sums_h_p);", ("handed_on.store(SumHP, strip, sums_h);",)
        ),
    ),
    # With an activation, a mean that is off a little may change its derivative.
    ("group_norm_backward", "last, one launch, linear"): (
        Formula("C(-rstd * a - correction * factor_of_p)", ("C(-rstd * a)",)),
    ),
    ("group_norm_backward", "last, three launches"): (
        *_PARTS,
        Formula(
            "part < parts; part += lanes", ("part < (without({0}) ? 1 : parts); part += lanes",)
        ),
        Formula(
            "whole_sample * sum_pitch(extent.channels)", ("sample * sum_pitch(extent.channels)",)
        ),
    ),
    ("group_norm_backward", "first, three launches, in warps"): (Formula("block % parts", ("0",)),),
    ("group_norm_backward", "last, one launch, groups together"): _GROUPS_TOGETHER,
}
