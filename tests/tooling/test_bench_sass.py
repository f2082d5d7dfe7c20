# SPDX-License-Identifier: MIT
"""`python -m bench static`: counts from SASS, and the predictions of the model."""

from __future__ import annotations

from itertools import product

import pytest

from bench.plans.model import (
    ARCHITECTURES,
    EXCHANGE,
    GPUS,
    Gpu,
    Traffic,
    Work,
    between,
    issue_clocks,
    occupancy,
    param_grad_time,
)
from bench.plans.paths import Step, work_of
from bench.plans.plan import TWO_LAUNCHES
from bench.plans.planned import feature_sets, grid, plans
from bench.plans.reads import Operands, Packs, executed, loads_at_once, read
from bench.plans.rounds import Grid, Round, Times, prediction, rate, round_of, seconds, times_of
from bench.plans.sass import blocks
from bench.plans.speed import block_elements, call_traffic
from bench.timing.cases import DIRECTIONS, OPERATORS, QUANTIZED


def sass(text: str) -> str:
    """Return a disassembly of labels and instructions, some in a line, as nvdisasm prints it."""
    parts = (part.strip() for line in text.splitlines() for part in line.split(";"))
    return "\n".join(
        part if part.endswith(":") else f"        /*0000*/                   {part} ;"
        for part in parts
        if part
    )


# A forward of bfloat16 rows, 16 elements a thread, in a loop over rows: all of x is loaded first, a
# root has a slow path, and weight is loaded for each pack. The arguments begin at 0x210.
KEPT = sass("""
LDC.64 R6, c[0x0][0x300]; ULDC.64 UR4, c[0x0][0x210]; ULDC.64 UR6, c[0x0][0x2a0]; S2R R4, SR_TID.X
.L_x_1:
LEA R2, P0, R4, UR4, 0x1; LEA.HI.X R3, R4, UR5, R5, 0x1, P0
LDG.E.128 R8, desc[UR8][R2.64]; LDG.E.128 R12, desc[UR8][R2.64+0x400]
FFMA.FTZ R20, R8, R12, R9; @!P1 BRA `(.L_x_2)
MOV R30, 0xc0; CALL.REL.NOINC `($__internal_0_$__cuda_sm20_sqrt_slowpath); BRA `(.L_x_3)
.L_x_2:
MUFU.RSQ R20, R20; FMUL.FTZ R21, R20, R20; FMUL.FTZ R22, R20, R20; FMUL.FTZ R23, R20, R20
.L_x_3:
IMAD.WIDE.U32 R16, R4, 0x2, R6; LEA R18, P0, R4, UR6, 0x1
LDG.E.128 R24, desc[UR8][R16.64]; FMUL.FTZ R8, R8, R24; STG.E.128 desc[UR8][R18.64], R8
LDG.E.128 R24, desc[UR8][R16.64+0x400]; FMUL.FTZ R12, R12, R24
STG.E.128 desc[UR8][R18.64+0x400], R12; @P2 BRA `(.L_x_1); EXIT
.L_x_4:
BRA `(.L_x_4); NOP
$__internal_0_$__cuda_sm20_sqrt_slowpath:
LDG.E.128 R40, desc[UR8][R2.64]; RET.REL.NODEC R30 `(row_norm_forward)
""")
OPERANDS = Operands(
    {0: 2, 144: 2}, frozenset((240, 248)), frozenset((0, 144, 240, 248, 256, 264)), 16.0
)


def test_late_loads_waits_and_the_usual_path_of_a_kept_row_are_counted():
    found = read(KEPT, "90", OPERANDS)
    assert found.late_loads == 1  # the second load of weight; the slow path does not count
    assert found.work.total == 6 + 4 + 9  # before, on and after the fast path
    assert found.work_once.total == 4 + 1
    assert (found.parameter_waits, found.waits_once) == (2, 0)
    assert (found.loaded, found.waits) == (32, 1)


def test_loads_before_the_first_store_and_loads_of_statistics_are_not_late():
    early = KEPT.replace("LDG.E.128 R24, desc[UR8][R16.64+0x400]", "NOP")
    statistic = KEPT.replace("R16.64+0x400", "R28.64").replace(
        "LDC.64 R6", "LDC.64 R28, c[0x0][0x310] ;\n /*0008*/ LDC.64 R6"
    )
    assert [read(text, "90", OPERANDS).late_loads for text in (early, statistic)] == [0, 0]


def test_loads_in_flight_together_are_those_before_a_value_is_needed():
    pointers = frozenset((0, 144, 240))
    assert [loads_at_once(KEPT, "90", slot, pointers) for slot in (0, 240)] == [2, 1]


# --- group norms ----------------------------------------------------------------------------------


# A thread copies packs of 16 bytes, two at a time and then the rest, and writes results, two at a
# time. Divergence and division have slow paths.
TILE = sass("""
LDC.64 R2, c[0x0][0x210]; LDC.64 R4, c[0x0][0x228]; @P0 BRA `(.L_x_2)
.L_x_1:
LDGSTS.E.BYPASS.128 [R20], desc[UR8][R2.64]
LDGSTS.E.BYPASS.128 [R20+0x1000], desc[UR8][R2.64+0x100]; @P1 BRA `(.L_x_1)
.L_x_2:
LDGSTS.E.BYPASS.128 [R20], desc[UR8][R2.64]; @P2 BRA `(.L_x_2)
BAR.SYNC.DEFER_BLOCKING 0x0; BRA.DIV UR4, `(.L_x_9)
.L_x_5:
SHFL.BFLY PT, R17, R16, 0x1, 0x1f; @!P4 BRA `(.L_x_7)
MOV R30, 0x180; CALL.REL.NOINC `($__internal_0_$__cuda_sm3x_div_slowpath)
.L_x_7:
LDS.128 R8, [R20]; MUFU.EX2 R8, R8; STG.E.128 desc[UR8][R4.64], R8
LDS.128 R12, [R20+0x1000]; MUFU.EX2 R12, R12; STG.E.128 desc[UR8][R4.64+0x100], R12
@P1 BRA `(.L_x_7); EXIT
.L_x_9:
WARPSYNC.COLLECTIVE R30, `(.L_x_10)
.L_x_10:
BRA `(.L_x_5)
""")


def test_loops_count_for_all_packs_of_a_tile_and_remainder_loops_and_slow_paths_do_not():
    packs, pointers = Packs({0: 16, 24: 16}, 16, of_thread=8.0), frozenset((0, 24, 48, 56))
    once = 3 + 2 + 2 + 1
    found = executed(TILE, "90", pointers, packs)
    assert (found.total, found.special) == (once + 3 * 8 / 2 + 7 * 8 / 2, 2 * 8 / 2)
    assert executed(TILE, "90", pointers, packs._replace(of_thread=0.0)).total == once
    with pytest.raises(ValueError, match="no loops over packs"):
        executed(TILE.replace("128", "32"), "90", pointers, packs._replace(bytes={}))


def test_a_sample_that_l2_cannot_keep_between_launches_is_read_twice():
    clusters, none = feature_sets("90")
    operator = next(one for one in OPERATORS if one.label == "group_norm+silu NHWC")
    for channels, features, expected in (
        (128, clusters, Traffic(2, 2)),  # one launch
        (128, none, Traffic(2, 2)),  # 16 MiB, less than half of L2
        (320, clusters, Traffic(4, 2)),
    ):
        shape = (channels, 256, 256)
        last = plans(operator, "forward", "bfloat16", shape, "90", features)[-1]
        assert (last.before is not None) == (last.regime == TWO_LAUNCHES)
        assert call_traffic(last) == expected


def test_the_grid_has_every_kind_of_group_plan_and_tiles_fill_most_of_their_shared_memory():
    found = [plan for plan in grid(("90",)) if plan.memory and plan.chunk and not plan.features]
    assert {"one launch", "cluster of 16", TWO_LAUNCHES} <= {plan.regime for plan in found}
    for plan in found:
        tile = plan.launch.shared / plan.traffic.reads
        assert 0.5 * tile < block_elements(plan) <= tile


def test_a_plan_with_a_quantised_result_has_the_pointers_of_its_argument_struct():
    features = feature_sets("90")[0]
    found = [plans(one, "forward", "bfloat16", (4096,), "90", features)[0] for one in QUANTIZED]
    q, x, residual, residual_out = (word * 8 for word in (0, 15, 27, 39))
    for plan in found:
        names = {slot: name for slot, (name, _) in plan.row_operands.items()}
        has_residual = plan.operator.startswith("add_")
        more = {residual: "residual", residual_out: "residual_out"} if has_residual else {}
        assert names == {q: "q", x: "x"} | more  # y has a type, but is not written
        assert plan.traffic == (Traffic(4, 3) if has_residual else Traffic(2, 1))
        words = {slot // 8 for slot in plan.pointers}
        assert words == {0, 6, *range(15, 45, 6), *range(45, 49)}  # scale; weight, bias, mean, rstd
        assert plan.parameters == {45 * 8, 46 * 8}


def test_two_samples_of_a_large_model_give_most_multiprocessors_a_block():
    features = feature_sets("90")[0]
    operators = [one for one in OPERATORS if one.name == "group_norm+silu"]
    shapes = ((320, 64, 64), (640, 32, 32), (960, 64, 64), (1280, 32, 32), (128, 256, 256))
    for one in product(operators, DIRECTIONS, ("float32", "bfloat16"), shapes):
        few, many = (plans(*one, "90", features, samples)[0] for samples in (2, 64))
        assert few.launch.grid >= 0.9 * GPUS["H100"].sm_count, one
        assert few.build == many.build
        assert few.launch.grid * many.chunk == many.launch.grid * few.chunk


# --- the model ------------------------------------------------------------------------------------

GPU = Gpu("90", sm_count=100, clock=1e9, copy=2e12, latency=1e-6, l2_latency=1e-6)
# Each of 8 warps has 500 instructions, half of them of integers, and waits only for loads.
WORK = Work(total=500.0, alone=1000.0, integer=250.0)
# 20 bytes a ns on a multiprocessor, so 1 µs for what a round reads and 1 µs for what it writes.
ROUND = Round(4e4, Traffic(2e4, 2e4), issued=1e-6, alone=2e-6, copied_ahead=0, pipe="issue")


# Threads, registers and bytes of shared memory of blocks, and how many of them fit a multiprocessor
# according to cuda_occupancy.h of CUDA 13.0.
BLOCKS = (
    *((32, 16, 0), (64, 16, 8192), (64, 24, 9250), (96, 33, 1), (128, 168, 49152)),
    *((256, 65, 12345), (288, 224, 0), (320, 40, 4095), (512, 128, 49152), (1024, 65, 1)),
)
FIT = {
    "75": (16, 8, 6, 10, 1, 3, 0, 3, 1, 0),
    "80": (32, 18, 16, 16, 3, 3, 0, 4, 1, 0),
    "86": (16, 11, 9, 16, 2, 3, 0, 4, 1, 0),
    "89": (24, 11, 9, 16, 2, 3, 0, 4, 1, 0),
    "90": (32, 25, 22, 16, 3, 3, 0, 4, 1, 0),
    "100": (32, 25, 22, 16, 3, 3, 0, 4, 1, 0),
    "120": (24, 11, 9, 16, 2, 3, 0, 4, 1, 0),
}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_occupancy_is_that_of_cuda_occupancy_h(architecture):
    limits = ARCHITECTURES[architecture]
    assert tuple(occupancy(limits, *block) for block in BLOCKS) == FIT[architecture]


def test_the_work_of_a_path_is_counted_by_pipe_and_in_clocks_of_a_lone_warp():
    code = "LDS.128 R4, [R2]; FFMA.FTZ R8, R4, R5, R6; SHFL.BFLY PT, R9, R8, 0x1, 0x1f"
    found = work_of(Step(one, 2.0) for one in blocks(sass(code))[0].instructions)
    assert (found.total, found.fma, found.shuffles, found.shared) == (6.0, 2.0, 2.0, 8.0)
    # The load begins at clock 1, its result comes 30 clocks later, and arithmetic takes 4 more.
    assert found.alone == 2.0 * (1 + 30 + 4)


def test_pairs_and_products_of_integers_take_the_pipe_of_fma_for_twice_as_long():
    code = "FFMA2.FTZ R4, R6, R8, R4; IMAD R9, R10, R11, R9; FFMA R12, R13, R14, R12; REDUX UR4, R5"
    found = work_of(Step(one, 1.0) for one in blocks(sass(code))[0].instructions)
    assert (found.half_fma, found.fma, found.integer, found.special) == (2.0, 1.0, 0.0, 1.0)
    for name, pipe in (("H100", 1.25), ("A100", 1.5)):
        assert issue_clocks(GPUS[name], found)["fma"] == pipe


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
    # One round on each multiprocessor takes 4 µs. Two take 6 µs, and a copy of their bytes 5 µs.
    assert seconds(GPU, ROUND, Grid(100, 1, 1, 100)) == pytest.approx(4e-6)
    assert prediction(GPU, ROUND, Grid(200, 2, 1, 200)) == (pytest.approx(5 / 6), "overlap")
    # The last of three waves has two blocks. Three rounds of 2 µs of memory end after 7 µs.
    waves = prediction(GPU, ROUND._replace(alone=1e-6), Grid(202, 3, 2, 202))
    assert waves == (pytest.approx(5.04 / 7), "waves")
    # The port of a multiprocessor limits a lone block to 64 bytes a ns.
    assert seconds(GPU, ROUND, Grid(1, 1, 1, 1)) == pytest.approx(2e-6 + 4e4 / 64e9)


def test_rows_that_are_copied_ahead_are_computed_one_at_a_time():
    one = ROUND._replace(alone=3e-6, copied_ahead=2)
    assert rate(*times_of(GPU, one, Grid(1000, 10, 1, 100))) < 1 / 3e-6
    assert prediction(GPU, one, Grid(1000, 10, 1, 100))[1] == "overlap"


def test_param_grad_takes_the_time_of_its_bytes_or_of_its_serial_loads():
    written = 2.0**20 / GPU.copy
    found = [param_grad_time(GPU, 1 << 20, serial) for serial in (30.0, 0.0)]
    assert found == pytest.approx([written + between(GPU) + 30e-6, 2 * written + between(GPU)])
