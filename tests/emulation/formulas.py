# SPDX-License-Identifier: MIT
"""Wrong formulas, by kernel and by what they need of a call: each must give wrong answers."""

from __future__ import annotations

from tests.emulation.mutants import Formulas

_GATE_GRADIENT = "item.gate.derivative * (item.dy * affine<B>(rounded, factors, bias, at))"
_ROWS = {
    "blockIdx.x / cluster % groups": ("0",),
    "blockIdx.x / cluster / groups": ("blockIdx.x / cluster",),
    "arguments.weight + share.group * row_width(arguments)": ("arguments.weight",),
    "arguments.bias + share.group * row_width(arguments)": ("arguments.bias",),
    "return w + offset;": ("return w;",),
    "return rounded_to<B, typename B::rounded_t>(k_r);": ("return k_r;",),
    "fma(k_r, factors.item[at.index], bias.item[at.index])": ("k_r * factors.item[at.index]",),
}
CLUSTERS = {
    "return cluster_rank() * B::threads + threadIdx.x;": ("return B::threads + threadIdx.x;",),
    "cluster_load(&sums[warp % warps][i], warp / warps)": (
        "cluster_load(&sums[warp % warps][i], 0)",
        "cluster_load(&sums[0][i], warp / warps)",
    ),
    "blockIdx.x / cluster % groups": ("blockIdx.x % groups",),
    "blockIdx.x / cluster / groups": ("blockIdx.x / groups",),
}
# Of clusters with more warps than a warp has lanes.
LARGE_CLUSTERS = {
    "first < shared_sums; first": ("first < (without({0}) ? shared_sums / 2 : shared_sums); first",)
}
COPIES = {
    "async_commit();\n": ("{ if (!without({0})) async_commit(); }\n",),
    "stage ^= 1;": ("stage ^= without({0}) ? 0 : 1;",),
    "storage.dy.load(stage, i)": ("storage.dy.load(stage ^ int(without({0})), i)",),
    "async_wait<1>();": (";", "async_wait<2>();"),
    "first + i + share.blocks * Team<B>::per_block": ("first + i + Team<B>::per_block",),
    "  copy_row(arguments, team, share, share": (
        "  if (!without({0})) copy_row(arguments, team, share, share",
    ),
}
_SAMPLES = {
    "fma(q, of_channel<B>(factor, at), of_channel<B>(bias, at))": (
        "q * of_channel<B>(factor, at)",
    ),
    "rstd.item[i] * weight.item[i]": ("rstd.item[i]", "weight.item[i]"),
    "data + sample * sample_stride + line * line_stride": (
        "data + line * line_stride",
        "data + sample * sample_stride + line",
    ),
}
_CHUNKS = {"arguments.first_sample": ("0",)}
_PARTS = {
    "use(i / channels, i % channels);": ("use(0, i % channels);",),
    "rest % parts": ("0",),
    **_CHUNKS,
}
_GROUPS_TOGETHER = {
    "group % extent.block_groups": ("0",),
    "use(sample, first + i);": ("use(sample, first);",),
    "blockIdx.x % shares * count": ("0",),
}

FORMULAS: dict[tuple[str, str], Formulas] = {
    ("row_norm_forward", "post"): {
        **_ROWS,
        "n *= B::activation::at(read<B>(gate, at)).value;": (";",),
        "s += read<B>(residual_pack, at);": (";",),
        "return stream.store(column);": (
            "return stream.store(column), LoadedPack<B, stream_t>{};",
        ),
        "(p - shift) - correction": ("p",),
        "C(arguments.k) * row.rstd": ("row.rstd",),
        "row.moments.variance + C(arguments.eps)": ("row.moments.variance",),
        "global_store(arguments.rstd + index, row.rstd);": (
            "global_store(arguments.rstd + index, row.k_rstd);",
        ),
    },
    ("row_norm_forward", "pre"): {
        "read<B>(s, at) * B::activation::at(read<B>(gate_pack, at)).value": ("read<B>(s, at)",),
        "math::over_root(arguments.k, square)": ("row.rstd",),
    },
    ("row_norm_backward", "post"): {
        **_ROWS,
        "row.k_rstd = C(arguments.k) * row.rstd;": ("row.k_rstd = row.rstd;",),
        "dn *= gate.value;": (";",),
        _GATE_GRADIENT: (
            _GATE_GRADIENT.replace("derivative", "value"),
            _GATE_GRADIENT.replace("item.gate.derivative * ", ""),
            _GATE_GRADIENT.replace("item.dy", "item.dn"),
            _GATE_GRADIENT.replace("rounded", "k_r"),
        ),
        "dweight.add_product(at, item.dn, rounded);": (
            "dweight.add_product(at, item.dn, k_r);",
            "dweight.add_product(at, item.dy, rounded);",
        ),
        "dbias.add(at, item.dn);": ("dbias.add(at, item.dy);",),
        "ds += read<B>(d_residual, at);": (";",),
        "dr *= parameters.factor(weight, at);": (";", "dr *= read<B>(weight, at);"),
        "dp *= factors.item[at.index];": (";",),
        "row.offset = -rstd * mean_dr;": (";",),
        "C(arguments.k) * sums.item[1] / width": ("sums.item[1] / width",),
        "fma(k_r, r_factor, offset)": ("offset", "fma(rounded, r_factor, offset)"),
        "share.group * width": ("0",),
        "(in_registers ? 1 : 2) * sum_pitch(width * share.groups)": (
            "(in_registers ? 1 : 2) * sum_pitch(width)",
        ),
    },
    ("row_norm_backward", "pre"): {
        "p *= gate.value;": (";",),
        "ds *= item.gate.value;": (";",),
        "ds += read<B>(d_residual, at);": ("ds += read<B>(d_residual, at) * item.gate.value;",),
        "item.gate.derivative * (dp * item.x)": (
            *("item.gate.value * (dp * item.x)", "(dp * item.x)"),
            *("item.gate.derivative * (dp * item.p)", "item.gate.derivative * (ds * item.x)"),
        ),
    },
    ("param_grad", "accumulated"): {
        "sum.item[at.index] += read<B>(before, at);": (
            ";",
            "sum.item[at.index] = read<B>(before, at);",
        ),
        "part_sums + part * arguments.stride": ("part_sums",),
        "index_t part = part_thread;": ("index_t part = part_thread + without({0});",),
    },
    ("group_norm_forward", "last, one launch"): {
        **_SAMPLES,
        "sums.item[i] / count": ("sums.item[i]", "C(0)"),
        "(read<B>(x, at) - of_channel<B>(shift, at)) - of_channel<B>(correction, at)": (
            "read<B>(x, at) - of_channel<B>(shift, at)",
        ),
        "(shift - first_shift) + (rest - first_rest)": ("shift - first_shift", "rest - first_rest"),
        "first_rest + distance": ("distance",),
        "m.squares + m.count * rest * rest": ("m.squares", "m.count * rest * rest"),
        "m.distance - distance": ("m.distance",),
        "team.all_reduce(distances) / elements": ("team.all_reduce(distances)",),
        "(squares < 0 ? 0 : squares) / elements + arguments.eps": (
            "(squares < 0 ? 0 : squares) / elements",
            "(squares < 0 ? 0 : squares) / (elements - 1) + arguments.eps",
        ),
        "C((first_shift - double(shift)) + rest)": ("C(rest)",),
        "global_store(arguments.mean + index, shift);": (
            "global_store(arguments.mean + index, C(first_shift));",
        ),
        "B::activation::value(n)": ("n",),
    },
    ("group_norm_forward", "last, three launches"): {
        **_PARTS,
        "return left < tile_positions ? left : tile_positions;": ("return tile_positions;",),
        "m.count * m.distance": ("m.distance", "double(extent.part_positions(0)) * m.distance"),
        "m.squares + m.count * rest * rest": ("m.squares + rest * rest",),
        "sum * counts.inverse(part)": ("sum * counts.inverse(0)",),
        "counts.count(part)": ("counts.count(0)",),
    },
    ("group_norm_forward", "first, three launches, in warps"): {
        "C(extent.part_positions(tile.part))": ("C(extent.tile_positions)",),
        "block % parts": ("0",),
    },
    ("group_norm_forward", "last, one launch, groups together"): _GROUPS_TOGETHER,
    ("group_norm_backward", "last, one launch"): {
        **_SAMPLES,
        "read<B>(inputs.x, at) - of_channel<B>(mean, at)": ("read<B>(inputs.x, at)",),
        "dy * B::activation::at(affine<B>(p, factor, bias, at)).derivative": (
            "dy",
            "dy * B::activation::at(affine<B>(p, factor, bias, at)).value",
        ),
        "weighted.item[0] / elements": ("weighted.item[1] / elements", "weighted.item[0]"),
        "weighted.item[1] / elements": ("weighted.item[0] / elements",),
        "double(extent.group_size())": ("double(extent.positions)",),
        "C(-rstd * a - correction * factor_of_p)": (
            "C(-correction * factor_of_p)",
            "C(-a - correction * factor_of_p)",
        ),
        "-rstd * rstd * b": ("0.0", "-rstd * b"),
        "rstd * (sums.item[1] - correction * sum_h)": (
            "rstd * sums.item[1]",
            "sums.item[1] - correction * sum_h",
        ),
        "weighted.item[0] += weight * sum_h;": ("weighted.item[0] += sum_h;",),
        "weighted.item[1] += weight * sum_h_r;": ("weighted.item[1] += sum_h_r;",),
        "C(sum_h_r)": ("C(sum_h)",),
        "C(sum_h)": ("C(sum_h_r)",),
        "fma(h, of_channel<B>(channels.factor, at), rest)": ("h + rest",),
        "handed_on.store(SumHP, strip, sums_h_p);": ("handed_on.store(SumHP, strip, sums_h);",),
    },
    # With an activation, a mean that is off a little may change its derivative.
    ("group_norm_backward", "last, one launch, linear"): {
        "C(-rstd * a - correction * factor_of_p)": ("C(-rstd * a)",)
    },
    ("group_norm_backward", "last, three launches"): {
        **_PARTS,
        "part < parts; part += lanes": ("part < (without({0}) ? 1 : parts); part += lanes",),
        "whole_sample * sum_pitch(extent.channels)": ("sample * sum_pitch(extent.channels)",),
    },
    ("group_norm_backward", "first, three launches, in warps"): {"block % parts": ("0",)},
    ("group_norm_backward", "last, one launch, groups together"): _GROUPS_TOGETHER,
}
