# SPDX-License-Identifier: MIT
"""A backward whose teams copy their next row to shared memory gives what it gives without.

Everything runs in blocks, or clusters of them, that walk three rows and more.
"""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import pytest

from cunorm._builds import BackwardTypes
from cunorm._dtypes import DTYPES, FLOAT32
from cunorm._features import NONE, Features
from cunorm._plan import Walk, copies_rows, cuda_backward
from cunorm._teams import Team
from tests.support.bounds import check_backward
from tests.support.covers import label
from tests.support.operands import assert_same_bits

from .arrays import EPS, LAYOUTS, Operands, empty, saved
from .covered import BACKWARD, check_backward_case, telling
from .emulator import ORDERS, EmulationError, Order, compile_emulated, unavailable
from .kernels import Emulated, emulate_backward
from .mixed import mixed
from .mutants import Switch, switched
from .plans import Plan, emulated_source, family, team_of

pytestmark = pytest.mark.skipif(bool(unavailable()), reason=unavailable())

KERNEL = "row_norm_backward"
COPIES = Features(async_copies=True)
GRID = 2

# Widths of a group, and teams: None is the plan's own.
KINDS: dict[str, tuple[int, Team | None]] = {
    "warp teams": (100, None),
    "block team": (1028, None),
    "one at a time": (1003, None),
    "cluster": (1500, Team(threads=64, threads_per_row=256, pack=4, packs=2)),
}
# Arguments of cunorm.normalize, and the dtypes of dy, x and gate: the dtype of all others is x's.
NORMS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "float32": ({}, ("float32", "float32")),
    "centred bfloat16": ({"center": True}, ("bfloat16", "bfloat16")),
    "groups, gate": ({"groups": 2, "gate_position": "post"}, ("float32",) * 3),
    # a pack of float32 is two accesses
    "mixed, x * gate": (
        {"center": True, "gate_position": "pre"},
        ("bfloat16", "float32", "float16"),
    ),
}
TOO_NARROW = [("one at a time", "centred bfloat16"), ("one at a time", "mixed, x * gate")]
COPYING = [case for case in product(KINDS, NORMS) if case not in TOO_NARROW]
# Among these are every kind and every norm.
SOME = [
    ("warp teams", "groups, gate"),
    ("warp teams", "mixed, x * gate"),
    ("block team", "centred bfloat16"),
    ("one at a time", "groups, gate"),
    ("cluster", "mixed, x * gate"),
    ("cluster", "float32"),
]
EACH = [pytest.param(*c, marks=() if c in SOME else pytest.mark.exhaustive) for c in COPYING]


class Run(NamedTuple):
    """A backward with every operand."""

    kind: str
    norm: str
    layout: str = "contiguous"
    in_place: bool = False

    def __call__(self, features: Features = COPIES, rows: int | None = None, **plan) -> Emulated:
        """Run it, of four rows for a team and for some of them three, and hold it to the oracle."""
        width, team = KINDS[self.kind]
        norm, dtypes = NORMS[self.norm]
        plan = Plan(**{"team": team, "features": features, "grid": GRID, **plan})
        make = Operands((1, 2, rows or self.rows // 2, width * norm.get("groups", 1)))
        dy, x, *gate = (make.rows(dtype, self.layout) for dtype in dtypes)
        d_residual = make.rows(dtypes[1], self.layout)
        weight, bias = make.param(dtypes[1]), make.param(dtypes[1])
        gated = norm | {"gate": gate[0] if gate else None}
        options = gated | {"d_residual": d_residual}
        over = {"dx": x, "dgate": gated["gate"]}
        out = {
            name: array if self.in_place else empty(array.shape, str(array.dtype), self.layout)
            for name, array in over.items()
            if array is not None
        }
        ran = emulate_backward(
            dy, x, weight, bias, **options, **saved(x, **gated), out=out, plan=plan
        )
        check_backward(ran.result, dy, x, weight, bias, **options, eps=EPS)
        return ran

    @property
    def rows(self) -> int:
        teams = GRID * team_of(self(rows=1, grid=None).launch).rows_per_block
        return (4 * teams - teams // 2) // 2 * 2


def copies(ran: Emulated) -> bool:
    return ("ASYNC_COPIES", "true") in ran.launch.build.macros


def assert_same(ran: Emulated, other: Emulated) -> None:
    """Compare results by their bits, and the bytes of each array."""
    for name, field, expected in zip(ran.result._fields, ran.result, other.result, strict=True):
        if field is not None:
            assert_same_bits(field, expected, name)
    assert ran.result.dx is not None and ran.result.dweight is not None
    assert ran.moved == other.moved


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("kind", "norm"), EACH)
def test_copies_change_no_bit_of_a_result_and_no_byte_that_is_moved(kind, norm, order):
    run = Run(kind, norm)
    ran, other = run(order=order), run(NONE)
    assert copies(ran) and not copies(other)
    assert_same(ran, other)


@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
@pytest.mark.parametrize("kind", ["warp teams", "block team"])
def test_rows_with_strides_are_copied(kind, layout):
    run = Run(kind, "float32", layout)
    ran = run()
    assert copies(ran)
    assert_same(ran, run(NONE))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(("kind", "norm"), SOME)
def test_results_may_be_written_over_the_rows_that_are_copied(kind, norm, order):
    ran = Run(kind, norm, in_place=True)(order=order)
    assert copies(ran)
    assert_same(ran._replace(moved={}), Run(kind, norm)(NONE)._replace(moved={}))


@pytest.mark.parametrize(
    ("norm", "offset", "can"),
    [
        ("float32", 1, True),
        ("float32", 2, True),
        ("centred bfloat16", 2, True),
        ("centred bfloat16", 1, False),  # two bytes
    ],
)
def test_misaligned_rows_are_copied_by_four_bytes_at_least(norm, offset, can):
    run = Run("warp teams", norm)
    ran = run(offset=offset)
    assert copies(ran) == can
    assert_same(ran, run(NONE, offset=offset))


# The emulator's copies arrive when they are waited for. These arrive at once, as others may.
COPY = "emulation_async_copy(shared, global, bytes);"
COPY_AT_ONCE = "emulation_access(global, bytes, bytes, false); memcpy(shared, global, bytes);"


def at_once(text: str) -> str:
    assert text.count(COPY) == 1
    return text.replace(COPY, COPY_AT_ONCE)


@pytest.mark.parametrize(("kind", "norm"), SOME)
def test_it_does_not_matter_when_copies_arrive(kind, norm):
    run = Run(kind, norm, in_place=True)
    ran = run(sources={KERNEL: at_once(emulated_source(KERNEL))})
    assert_same(ran, run())


# What stands in the kernel's text, and what in its place; {0} is the number of the mutant.
CHANGES = (
    ("    async_commit();", "    {{ if (!without({0})) async_commit(); }}"),
    ("stage ^= 1;", "stage ^= without({0}) ? 0 : 1;"),
    ("storage.dy.load(stage, i)", "storage.dy.load(stage ^ int(without({0})), i)"),
    ("async_wait<1>();", "{{ if (without({0})) async_wait<2>(); else async_wait<1>(); }}"),
    ("i + share.blocks * Team", "i + (without({0}) ? 1 : share.blocks) * Team"),
    (
        "  copy_row(arguments, team, share, share",
        "  if (!without({0})) copy_row(arguments, team, share, share",
    ),
)
OF_COPIES = ("copy: ", "take: ", "copy_row: ")  # how the names of barriers and guards begin


def mutants_of_copies() -> tuple[str, dict[int, str]]:
    """Return a text that is all mutants, and what those of copies lack or have, by number."""
    text, names = switched(emulated_source(KERNEL))
    found = {n: name for n, name in enumerate(names) if name.startswith(OF_COPIES)}
    for number, (before, after) in enumerate(CHANGES, len(names)):
        assert text.count(before) == 1, before
        text = text.replace(before, after.format(number))
        found[number] = after
    return text, found


@pytest.mark.parametrize(
    ("kind", "norm"),
    [("warp teams", "groups, gate"), ("block team", "float32"), ("cluster", "mixed, x * gate")],
)
def test_without_any_wait_commit_or_guard_of_copies_the_backward_fails(kind, norm):
    late, found = mutants_of_copies()
    run = Run(kind, norm)
    rows, macros = run.rows // 2, run().launch.build.macros
    left = set(found)
    for text in (late, at_once(late)):
        switch = Switch([compile_emulated(text, KERNEL, macros)._library])
        run(rows=rows, sources={KERNEL: text})
        assert all(switch.reached(number) for number in found)
        for number in sorted(left):
            with switch.at(number):
                if any(fails(run, rows, order, text) for order in ORDERS):
                    left.remove(number)
    assert len(found) == len(CHANGES) + 4  # and a wait, two guards of packs and one of rows
    assert not [found[number] for number in left]


def fails(run: Run, rows: int, order: Order, text: str) -> bool:
    """Whether a run shows a wrong answer or an EmulationError."""
    try:
        run(rows=rows, order=order, sources={KERNEL: text})
    except (AssertionError, EmulationError):
        return True
    return False


# Of a cover of all backwards, few would have copies.
NARROW = BACKWARD | {
    **{"width": (4, 64, 100, 256, 1000), "rows": ("several",), "grid": (1,)},
    **{"features": ("async_copies",), "weight": (None, "float32")},
    "place": (("start", None), ("start", 2), ("end", 0), ("end", 4)),
}


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", mixed(NARROW, telling), ids=label)
def test_backward_with_copies_is_right_for_every_pair_of_choices(case):
    check_backward_case(case)


def types(dtype: str = "float32", *, gate: bool = False) -> BackwardTypes:
    rows = dict.fromkeys(("dy", "x", "dx"), DTYPES[dtype])
    rows |= dict.fromkeys(("gate", "dgate"), DTYPES[dtype]) if gate else {}
    return BackwardTypes(compute=FLOAT32, weight=DTYPES[dtype], dweight=True, **rows)


@pytest.mark.parametrize(
    ("types", "width", "can"),
    [
        (types(), 64, True),
        (types(), 2048, True),
        (types(), 4096, False),  # both stages take 64 KiB
        (types("bfloat16"), 4096, True),
        (types("bfloat16"), 8192, False),
        (types(gate=True), 1024, True),
        (types(gate=True), 2048, False),
        (types("bfloat16", gate=True), 2048, True),
        (types(), 1001, True),
        (types("bfloat16"), 1001, False),  # an access is of two bytes
        (types("bfloat16"), 1002, True),
    ],
)
def test_rows_are_copied_where_two_of_them_fit_and_an_access_has_four_bytes(types, width, can):
    launch = cuda_backward(types, Walk(1 << 20, width), 16, 132, COPIES)
    assert (("ASYNC_COPIES", "true") in launch.build.macros) == can
    assert ("ASYNC_COPIES", "true") not in cuda_backward(
        types, Walk(1 << 20, width), 16, 132
    ).build.macros


def test_rows_are_copied_where_a_team_has_more_than_one():
    launch = cuda_backward(types(), Walk(1 << 20, 100), 16, 132, COPIES)
    team = team_of(launch)
    teams = launch.parts * team.rows_per_block
    assert family(launch) == "warp teams"
    assert not copies_rows(types(), teams, team, 16, launch.parts)
    assert copies_rows(types(), teams + 1, team, 16, launch.parts)


def test_streamed_rows_are_not_copied():
    launch = cuda_backward(types(), Walk(1 << 20, 1 << 18), 16, 132, COPIES)
    assert family(launch) == "streamed"
    assert ("ASYNC_COPIES", "true") not in launch.build.macros
