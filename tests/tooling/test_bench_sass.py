# SPDX-License-Identifier: MIT
"""`python -m bench static`: counts from SASS, and the predictions of the model."""

from __future__ import annotations

import pytest

from bench.plans.model import EXCHANGE, Gpu, ParamGrad, Traffic, Work, between, param_grad_time
from bench.plans.paths import Step
from bench.plans.reads import Operands, loads_at_once, read
from bench.plans.rounds import Grid, Round, Times, rate, round_of, seconds, shares, times_of
from bench.plans.sass import blocks
from bench.plans.work import work_of

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


def test_late_loads_waits_and_the_usual_path_of_a_kept_row_are_counted():
    found = read(KEPT, "90", OPERANDS)
    assert found.late_loads == 1  # the second load of weight; the slow path does not count
    assert found.work.total == 6 + 4 + 9  # before, on and after the fast path
    assert found.work_once.total == 4 + 1
    assert (found.parameter_waits, found.waits_once) == (2, 0)
    assert (found.loaded, found.waits) == (32, 1)


def test_loads_before_the_first_store_are_not_late():
    early = KEPT.replace("LDG.E.128 R24, desc[UR8][R16.64+0x400]", "NOP")
    assert read(early, "90", OPERANDS).late_loads == 0
    statistic = KEPT.replace("R16.64+0x400", "R28.64").replace(
        "LDC.64 R6", "LDC.64 R28, c[0x0][0x310] ;\n /*0008*/ LDC.64 R6"
    )
    assert read(statistic, "90", OPERANDS).late_loads == 0


def test_a_loop_of_a_streamed_row_counts_for_the_threads_share_of_the_row():
    found = read(STREAMED, "90", OPERANDS._replace(share=64.0))
    assert (found.loaded, found.waits) == (8 * 16, 8)
    assert found.work.total == 3 + 8 * 5 + 1


def test_loads_in_flight_together_are_those_before_a_value_is_needed():
    assert loads_at_once(KEPT, "90", 0, frozenset((0, 144, 240))) == 2
    assert loads_at_once(KEPT, "90", 240, frozenset((0, 144, 240))) == 1


GPU = Gpu("90", sm_count=100, clock=1e9, copy=2e12, latency=1e-6, l2_latency=1e-6)
# Each of 8 warps has 500 instructions, half of them of integers, and waits only for loads.
WORK = Work(total=500.0, alone=1000.0, integer=250.0)


def test_the_work_of_a_path_is_counted_by_pipe_and_in_clocks_of_a_lone_warp():
    code = "\n".join(
        f"        /*{index:04x}*/                   {text} ;"
        for index, text in enumerate(
            ("LDS.128 R4, [R2]", "FFMA.FTZ R8, R4, R5, R6", "SHFL.BFLY PT, R9, R8, 0x1, 0x1f")
        )
    )
    (block,) = blocks(code)[:1]
    found = work_of(Step(one, 2.0) for one in block.instructions)
    assert (found.total, found.fma, found.shuffles, found.shared) == (6.0, 2.0, 2.0, 8.0)
    # The load begins at clock 1, its result comes 30 clocks later, and arithmetic takes 4 more.
    assert found.alone == 2.0 * (1 + 30 + 4)


def test_few_warps_and_waits_lengthen_a_round():
    # A scheduler has two warps; each is ready half of the time, so they fill 3/4 of the clocks.
    one = round_of(GPU, WORK, 8.0, 2e-6, 4e4, Traffic(2e4, 2e4))
    assert (one.issued, one.pipe) == (1e-6, "issue")
    assert one.alone == pytest.approx(2e-6 + 1e-6 / 0.75)
    busy = round_of(GPU, WORK._replace(special=200.0, exchanges=2.0), 8.0, 0.0, 4e4, Traffic(1, 1))
    assert (busy.issued, busy.pipe) == (3.2e-6, "special")
    assert busy.alone == pytest.approx(3.2e-6 + 2 * EXCHANGE)


def test_rounds_share_memory_and_pipes():
    times = Times(reads=1.0, writes=0.0, pipes=1.0, own=0.0)
    # With two equal stations, n rounds reach n / (n + 1) of a station's speed (product form).
    assert [rate(times, n) for n in (1, 2, 3)] == pytest.approx([1 / 2, 2 / 3, 3 / 4])
    # The memory takes 2 s for the reads and writes of a round; other rounds compute meanwhile.
    assert rate(times._replace(writes=1.0), 9) == pytest.approx(0.5, rel=1e-3)


def test_a_prediction_is_the_formula_by_hand():
    # 20 bytes a ns on a multiprocessor, so 1 µs for what a round reads and 1 µs for what it writes.
    one = Round(4e4, Traffic(2e4, 2e4), issued=1e-6, alone=2e-6, copied_ahead=0, pipe="issue")
    # One round on each multiprocessor takes 4 µs. Two take 6 µs, and a copy of their bytes 5 µs.
    assert seconds(GPU, one, Grid(100, 1, 1, 100)) == pytest.approx(4e-6)
    found = shares(GPU, one, Grid(200, 2, 1, 200))
    assert found.prediction == pytest.approx(5e-6 / 6e-6)
    assert found[:4] == pytest.approx((2.0, 0.5, 1.0, 1.0))
    assert found.limit == "overlap"
    # The last of three waves has two blocks.
    assert shares(GPU, one, Grid(202, 3, 1, 202)).waves == pytest.approx(2.02 / 3)
    # The port of a multiprocessor limits a lone block to 64 bytes a ns.
    assert seconds(GPU, one, Grid(1, 1, 1, 1)) == pytest.approx(2e-6 + 4e4 / 64e9)


def test_rows_that_are_copied_ahead_are_computed_one_at_a_time():
    one = Round(4e4, Traffic(2e4, 2e4), issued=1e-6, alone=3e-6, copied_ahead=2, pipe="issue")
    assert shares(GPU, one, Grid(1000, 10, 1, 100)).overlap == pytest.approx(2 / 3)
    assert rate(*times_of(GPU, one, Grid(1000, 10, 1, 100))) < 1 / 3e-6
    assert shares(GPU, one, Grid(1000, 10, 2, 200)).overlap == pytest.approx(4 / 3)


def test_param_grad_takes_the_time_of_its_bytes_or_of_its_serial_loads():
    assert param_grad_time(GPU, None) == 0.0
    written = 2.0**20 / GPU.copy
    found = param_grad_time(GPU, ParamGrad(1 << 20, 30.0))
    assert found == pytest.approx(written + between(GPU) + 30e-6)
    assert param_grad_time(GPU, ParamGrad(1 << 20, 0.0)) == pytest.approx(
        2 * written + between(GPU)
    )
