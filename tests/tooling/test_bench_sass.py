# SPDX-License-Identifier: MIT
"""The counts of `python -m bench static` from SASS, and the predictions of its model."""

from __future__ import annotations

import pytest

from bench.model import Gpu, ParamGrad, Shares, Traffic, call_prediction, shares
from bench.static_reads import Operands, loads_at_once, read

# A forward of bfloat16 rows, 16 elements a thread, in a loop over rows: all of x is loaded first, a
# root has a slow path, and weight is loaded for each pack. The arguments begin at 0x210.
KEPT = """
	.text.row_norm_forward:
row_norm_forward:
        /*0000*/                   LDC.64 R6, c[0x0][0x300] ;
        /*0010*/                   ULDC.64 UR4, c[0x0][0x210] ;
        /*0020*/                   ULDC.64 UR6, c[0x0][0x2a0] ;
        /*0030*/                   S2R R4, SR_TID.X ;
.L_x_1:
        /*0040*/                   LEA R2, P0, R4, UR4, 0x1 ;
        /*0050*/                   LEA.HI.X R3, R4, UR5, R5, 0x1, P0 ;
        /*0060*/                   LDG.E.128 R8, desc[UR8][R2.64] ;
        /*0070*/                   LDG.E.128 R12, desc[UR8][R2.64+0x400] ;
        /*0080*/                   FFMA.FTZ R20, R8, R12, R9 ;
        /*0090*/              @!P1 BRA `(.L_x_2) ;
        /*00a0*/                   MOV R30, 0xc0 ;
        /*00b0*/                   CALL.REL.NOINC `($__internal_0_$__cuda_sm20_sqrt_slowpath) ;
        /*00c0*/                   BRA `(.L_x_3) ;
.L_x_2:
        /*00d0*/                   MUFU.RSQ R20, R20 ;
        /*00e0*/                   FMUL.FTZ R21, R20, R20 ;
        /*00f0*/                   FMUL.FTZ R22, R20, R20 ;
        /*0100*/                   FMUL.FTZ R23, R20, R20 ;
.L_x_3:
        /*0110*/                   IMAD.WIDE.U32 R16, R4, 0x2, R6 ;
        /*0120*/                   LEA R18, P0, R4, UR6, 0x1 ;
        /*0130*/                   LDG.E.128 R24, desc[UR8][R16.64] ;
        /*0140*/                   FMUL.FTZ R8, R8, R24 ;
        /*0150*/                   STG.E.128 desc[UR8][R18.64], R8 ;
        /*0160*/                   LDG.E.128 R24, desc[UR8][R16.64+0x400] ;
        /*0170*/                   FMUL.FTZ R12, R12, R24 ;
        /*0180*/                   STG.E.128 desc[UR8][R18.64+0x400], R12 ;
        /*0190*/               @P2 BRA `(.L_x_1) ;
        /*01a0*/                   EXIT ;
.L_x_4:
        /*01b0*/                   BRA `(.L_x_4);
        /*01c0*/                   NOP;
$__internal_0_$__cuda_sm20_sqrt_slowpath:
        /*01d0*/                   LDG.E.128 R40, desc[UR8][R2.64] ;
        /*01e0*/                   RET.REL.NODEC R30 `(row_norm_forward) ;
"""
OPERANDS = Operands({0: 2, 144: 2}, frozenset((240, 248)), frozenset((256, 264)), 16.0)

# A pass that keeps nothing: a loop, which may be skipped, takes 8 elements at a time.
STREAMED = """
        /*0000*/                   LDC.64 R2, c[0x0][0x210] ;
        /*0010*/                   LDC.64 R4, c[0x0][0x2a0] ;
        /*0020*/               @P0 BRA `(.L_x_2) ;
.L_x_1:
        /*0030*/                   LDG.E.128 R8, desc[UR8][R2.64] ;
        /*0040*/                   FADD.FTZ R8, R8, R9 ;
        /*0050*/                   STG.E.128 desc[UR8][R4.64], R8 ;
        /*0060*/                   IADD3 R2, P1, R2, 0x80, RZ ;
        /*0070*/               @P2 BRA `(.L_x_1) ;
.L_x_2:
        /*0080*/                   EXIT ;
"""


def test_of_a_kept_row_late_loads_waits_and_the_usual_path_are_counted():
    found = read(KEPT, "90", OPERANDS)
    assert found.late_loads == 1  # the second load of weight; the slow path does not count
    assert found.instructions == 6 + 4 + 9  # before the branch, on the fast path, after it
    assert found.instructions_once == 4 + 1
    assert (found.loaded, found.waits) == (32, 1)


def test_loads_before_the_first_store_are_not_late():
    early = KEPT.replace("LDG.E.128 R24, desc[UR8][R16.64+0x400]", "NOP")
    assert read(early, "90", OPERANDS).late_loads == 0
    statistic = KEPT.replace("R16.64+0x400", "R28.64").replace(
        "LDC.64 R6", "LDC.64 R28, c[0x0][0x310] ;\n /*0008*/ LDC.64 R6"
    )
    assert read(statistic, "90", OPERANDS).late_loads == 0


def test_a_loop_of_a_streamed_row_is_taken_for_the_threads_share_of_it():
    found = read(STREAMED, "90", OPERANDS._replace(share=64.0))
    assert (found.loaded, found.waits) == (8 * 16, 8)
    assert found.instructions == 3 + 8 * 5 + 1


def test_loads_in_flight_together_are_those_before_a_value_is_needed():
    assert loads_at_once(KEPT, "90", 0, frozenset((0, 144, 240))) == 2
    assert loads_at_once(KEPT, "90", 240, frozenset((0, 144, 240))) == 1


def test_a_prediction_is_the_formula_by_hand():
    gpu = Gpu(sm_count=100, clock=1e9, copy=2e12, latency=1e-6)
    # Copy speed: 20 bytes a ns for each multiprocessor, so 5 elements of 2 bytes in and 2 out. 4
    # slots issue 128 thread instructions a ns, so 4 elements of 32 instructions. 6000 bytes in
    # flight for a µs are 6 bytes a ns, so 3 elements.
    found = shares(gpu, Traffic(2, 2), 32.0, 6000.0, 2.0)
    assert found == pytest.approx((0.8, 0.6, 1.0))
    assert (found.prediction, found.limit) == (pytest.approx(0.6), "latency")
    # A row read twice: half as many elements for the bytes in flight, and 6 bytes for every 4.
    assert shares(gpu, Traffic(2, 2), 32.0, 6000.0, 4.0) == pytest.approx((0.8, 0.3, 4 / 6))
    assert Shares(2.0, 3.0, 1.0).prediction == 1.0
    assert Shares(2.0, 3.0, 1.0).limit == "copy"


def test_param_grad_counts_in_the_prediction_of_a_backward():
    gpu = Gpu(sm_count=100, clock=1e9, copy=2**41, l2_latency=1e-6)
    # 2**26 elements of 8 bytes take 2**-12 s at copy speed, about 244 µs.
    ideal = 2.0**-12
    assert call_prediction(gpu, Traffic(4, 4), 0.5, None) == pytest.approx(0.5)
    found = call_prediction(gpu, Traffic(4, 4), 0.5, ParamGrad(1 << 20, 30.0))
    written = 2.0**20 / 2**41
    assert found == pytest.approx(ideal / (ideal / 0.5 + written + 3e-6 + 30e-6))
