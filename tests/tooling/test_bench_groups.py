# SPDX-License-Identifier: MIT
"""`python -m bench static`: counts from the SASS of group norms, and the model of their calls."""

from __future__ import annotations

from itertools import product

import pytest

from bench.plans.groups import block_elements, call_traffic
from bench.plans.model import GPUS, Traffic
from bench.plans.packs import Packs, executed
from bench.plans.plan import TWO_LAUNCHES
from bench.plans.planned import DIRECTIONS, default_features, grid, plans
from bench.timing.cases import OPERATORS
from cunorm._core.caps import NONE

# A forward. A thread copies packs of 16 bytes, four at a time and then the rest. It sums them, two
# at a time and then the rest. It sums their squares and writes results, two at a time. Divergence
# and division have slow paths.
TILE = """
        /*0000*/                   LDC.64 R2, c[0x0][0x210] ;
        /*0010*/                   LDC.64 R4, c[0x0][0x228] ;
        /*0020*/               @P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0030*/                   LDGSTS.E.BYPASS.128 [R20], desc[UR8][R2.64] ;
        /*0040*/                   LDGSTS.E.BYPASS.128 [R20+0x1000], desc[UR8][R2.64+0x100] ;
        /*0050*/                   LDGSTS.E.BYPASS.128 [R20+0x2000], desc[UR8][R2.64+0x200] ;
        /*0060*/                   LDGSTS.E.BYPASS.128 [R20+0x3000], desc[UR8][R2.64+0x300] ;
        /*0070*/                   IADD3 R2, P1, R2, 0x400, RZ ;
        /*0080*/               @P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0090*/                   LDGSTS.E.BYPASS.128 [R20], desc[UR8][R2.64] ;
        /*00a0*/               @P2 BRA `(.L_x_2) ;
.L_x_3:
        /*00b0*/                   LDS.128 R8, [R20] ;
        /*00c0*/                   LDS.128 R12, [R20+0x1000] ;
        /*00d0*/                   FADD.FTZ R16, R8, R12 ;
        /*00e0*/               @P1 BRA `(.L_x_3) ;
        /*00f0*/               @P3 BRA `(.L_x_4) ;
        /*0100*/                   LDS.128 R8, [R20] ;
        /*0110*/                   FADD.FTZ R16, R8, R16 ;
.L_x_4:
        /*0120*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
        /*0130*/                   BRA.DIV UR4, `(.L_x_9) ;
.L_x_5:
        /*0140*/                   SHFL.BFLY PT, R17, R16, 0x1, 0x1f ;
        /*0150*/              @!P4 BRA `(.L_x_6) ;
        /*0160*/                   MOV R30, 0x180 ;
        /*0170*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm3x_div_slowpath) ;
.L_x_6:
        /*0180*/                   LDS.128 R8, [R20] ;
        /*0190*/                   LDS.128 R12, [R20+0x1000] ;
        /*01a0*/                   FFMA.FTZ R16, R8, R12, R16 ;
        /*01b0*/               @P1 BRA `(.L_x_6) ;
        /*01c0*/                   BAR.SYNC.DEFER_BLOCKING 0x0 ;
.L_x_7:
        /*01d0*/                   LDS.128 R8, [R20] ;
        /*01e0*/                   MUFU.EX2 R8, R8 ;
        /*01f0*/                   STG.E.128 desc[UR8][R4.64], R8 ;
        /*0200*/                   LDS.128 R12, [R20+0x1000] ;
        /*0210*/                   MUFU.EX2 R12, R12 ;
        /*0220*/                   STG.E.128 desc[UR8][R4.64+0x100], R12 ;
        /*0230*/               @P1 BRA `(.L_x_7) ;
        /*0240*/                   EXIT ;
.L_x_9:
        /*0250*/                   WARPSYNC.COLLECTIVE R30, `(.L_x_10) ;
.L_x_10:
        /*0260*/                   BRA `(.L_x_5) ;
$__internal_0_$__cuda_sm3x_div_slowpath:
        /*0270*/                   RET.REL.NODEC R30 `(group_norm_forward) ;
"""
PACKS = Packs({0: 16, 24: 16}, 16, 8.0)
POINTERS = frozenset((0, 24, 48, 56))


def test_main_loops_count_for_all_packs_and_remainder_loops_do_not():
    once = 3 + 1 + 2 + 2 + 1 + 1
    found = executed(TILE, "90", POINTERS, PACKS)
    assert found.total == once + 6 * 8 / 4 + 4 * 8 / 2 + 4 * 8 / 2 + 7 * 8 / 2
    assert found.special == 2 * 8 / 2
    assert executed(TILE, "90", POINTERS, PACKS._replace(of_thread=0.0)).total == once


def test_a_kernel_without_loops_over_packs_is_an_error():
    with pytest.raises(ValueError, match="no loops over packs"):
        executed(TILE.replace("128", "32"), "90", frozenset((48, 56)), PACKS)


def test_a_sample_that_l2_cannot_keep_between_launches_is_read_twice():
    clusters = default_features("90")
    operator = next(one for one in OPERATORS if one.label == "group_norm+silu NHWC")
    for dtype, shape, features, expected in (
        ("bfloat16", (128, 256, 256), clusters, Traffic(2, 2)),  # one launch
        ("bfloat16", (128, 256, 256), NONE, Traffic(2, 2)),  # 16 MiB, less than half of L2
        ("bfloat16", (320, 256, 256), clusters, Traffic(4, 2)),
    ):
        last = list(plans(operator, "forward", dtype, shape, "90", features))[-1]
        assert (last.before is not None) == (last.regime == TWO_LAUNCHES)
        assert call_traffic(last) == expected


def test_the_grid_has_every_kind_of_group_plan_and_tiles_fill_most_of_their_shared_memory():
    found = [plan for plan in grid(("90",)) if plan.memory and plan.chunk and not plan.features]
    assert {"one launch", "cluster of 16", TWO_LAUNCHES} <= {plan.regime for plan in found}
    for plan in found:
        tile = plan.shared / plan.traffic().reads
        assert 0.5 * tile < block_elements(plan) <= tile


def test_two_samples_of_a_large_model_give_most_multiprocessors_a_block():
    features = default_features("90")
    operators = [one for one in OPERATORS if one.name == "group_norm+silu"]
    shapes = ((320, 64, 64), (640, 32, 32), (960, 64, 64), (1280, 32, 32), (128, 256, 256))
    for one in product(operators, DIRECTIONS, ("float32", "bfloat16"), shapes):
        few, many = (next(plans(*one, "90", features, samples)) for samples in (2, 64))
        assert few.grid >= 0.9 * GPUS["H100"].sm_count, one
        assert few.build == many.build
        assert few.grid * many.chunk == many.grid * few.chunk
