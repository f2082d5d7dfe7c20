# SPDX-License-Identifier: MIT
"""Memory that kernels are lent: never to two at once, and little of it is kept."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cunorm import _scratch
from cunorm._scratch import _LARGEST, _PIECES, lend, lent, take_back
from tests.support.calls import (
    anew,
    assert_same,
    call_of,
    change,
    nothing_known,
    planning_forbidden,
)
from tests.support.operands import at

BYTES = 8  # of an element


@pytest.fixture(autouse=True)
def kept(monkeypatch):
    """Begin with nothing that is kept."""
    pieces = []
    monkeypatch.setattr(_scratch, "_kept", pieces)
    return pieces


def bytes_of(operand):
    return operand.form.shape[0] * operand.form.dtype.itemsize


def test_memory_that_is_lent_to_several_at_once_is_not_the_same():
    for _ in range(2):
        pieces = [lend(100) for _ in range(5)]
        assert len({piece.pointer for piece in pieces}) == 5
        for piece in pieces:
            take_back(piece)


@pytest.mark.parametrize("size", [1, 8, 9, 1000, 4 * BYTES * _LARGEST])
def test_as_many_bytes_are_lent_as_are_asked_for(size):
    assert size <= bytes_of(lend(size)) < size + BYTES


def test_what_is_given_back_is_lent_again(kept):
    first = lend(1000)
    take_back(first)
    for size in (1000, 8, 1000):
        again = lend(size)
        assert again is first
        assert not kept
        take_back(again)


def test_a_piece_that_is_too_small_is_replaced(kept):
    small = lend(1000)
    take_back(small)
    large = lend(1001)
    assert large is not small
    assert bytes_of(large) >= 1001
    take_back(large)
    assert kept == [large]


def test_a_piece_that_is_too_large_is_not_kept(kept):
    largest, larger = lend(BYTES * _LARGEST), lend(BYTES * _LARGEST + 1)
    take_back(larger)
    assert not kept
    take_back(largest)
    assert kept == [largest]


def test_only_so_many_pieces_are_kept(kept):
    pieces = [lend(8) for _ in range(_PIECES + 2)]
    for piece in pieces:
        take_back(piece)
    assert kept == pieces[:_PIECES]


# --- kernels that are lent memory -----------------------------------------------------------------


def test_kernels_are_lent_memory_while_they_run(kept):
    seen = []
    run = lent(1000, lambda pointers: seen.append((pointers, len(kept))))
    take_back(lend(1000))
    (piece,) = kept
    run([5, 6, 0])
    run((5, 6, 0))
    assert seen == 2 * [([5, 6, piece.pointer], 0)]
    assert kept == [piece]


def test_kernels_that_are_given_memory_or_need_none_are_lent_none(kept):
    seen = []
    take_back(lend(8))
    lent(8, seen.append)([5, 7])
    assert seen == [[5, 7]]
    assert lent(0, seen.append) == seen.append
    assert len(kept) == 1


def test_what_is_lent_comes_back_from_kernels_that_fail(kept):
    with pytest.raises(TypeError):
        lent(8, None)([0])
    assert len(kept) == 1


CALLS = [
    ("group_norm", (2, 64, 64, 64)),
    ("group_norm_backward", (2, 64, 64, 64)),
    ("layer_norm_backward", (600, 257)),
]


@pytest.mark.parametrize(("name", "shape"), CALLS)
def test_threads_that_make_the_same_call_at_once_are_lent_memory_of_their_own(
    monkeypatch, name, shape
):
    """The calls are all one that is remembered, each on its own arrays."""
    nothing_known(monkeypatch)
    calls = [call_of(name, shape) for _ in range(2)]
    for number, call in enumerate(calls):
        change(call.arrays, f"of {number}")
    expected = [anew(call.make) for call in calls]
    calls[0].make()
    start = threading.Barrier(2)

    def work(call, right):
        start.wait()
        for turn in range(30):
            with at(turn):
                assert_same(call.make(), right)

    with planning_forbidden(), ThreadPoolExecutor(2) as pool:
        list(pool.map(work, calls, expected))
