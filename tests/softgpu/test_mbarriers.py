# SPDX-License-Identifier: MIT
"""Right and wrong ways to send data between the blocks of a cluster by means of mbarriers."""

from __future__ import annotations

import numpy as np
import pytest

from tests import softgpu
from tests.softgpu.launching import cupy, launch, raises
from tests.softgpu.test_races import ORDERS, asm

TWO = "__cluster_dims__(2, 1, 1)"
BEGIN = """if (t == 0) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;"
    :: "r"(bar) : "memory");"""
FENCE = asm("fence.mbarrier_init.release.cluster")
MEET = asm("barrier.cluster.arrive.relaxed.aligned", "barrier.cluster.wait.acquire.aligned")
EXPECT = """if (t == 0) asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 256;"
    :: "r"(bar) : "memory");"""
SEND = """asm volatile("{.reg .b32 a, b; mapa.shared::cluster.u32 a, %0, %2;"
    "mapa.shared::cluster.u32 b, %1, %2;"
    "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [a], %3, [b];}"
    :: "r"(place), "r"(bar), "r"(other), "r"(100 * other + t) : "memory");"""
WAIT = """asm volatile("{.reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], 0;"
    "@!p bra again;}" :: "r"(bar) : "memory");"""
READ = "x[blockIdx.x * 64 + t] = v[t ^ 33];"

# Each thread of two blocks of 64 sends a number to the other block, and waits for all numbers.
PARTS = [BEGIN, FENCE, MEET, EXPECT, SEND, WAIT, READ]


def run(parts: list[str], schedule: str = "lockstep", copies: str = "late", races: bool = True):
    body = f"""int* x) {{ __shared__ int s[64]; __shared__ unsigned long long begun;
        volatile int* v = s; int t = threadIdx.x, other = 1 - blockIdx.x;
        unsigned bar = __cvta_generic_to_shared(&begun), place = __cvta_generic_to_shared(s + t);
        {" ".join(parts)} }}"""
    x = cupy.zeros(128, "i")
    with softgpu.settings(races=races, schedule=schedule, copies=copies):
        launch(body, x, grid=2, block=64, head=TWO)
    return x.get()


def without(part: str, instead: str = "") -> list[str]:
    return [instead if one == part else one for one in PARTS]


def test_messages_have_arrived_after_the_wait():
    sent = np.arange(64) ^ 33
    for order in ORDERS:
        assert np.array_equal(run(PARTS, *order), np.concatenate([sent, 100 + sent]))


AGAIN = SEND.replace("100 *", "7 *")
WRONG = {
    "no wait": (without(WAIT), "a race for shared memory|which has ended"),
    "a fence is missing": (without(FENCE), "a race for shared memory|no mbarrier is initialized"),
    "no barrier of the cluster": (without(MEET), "a race for shared|no mbarrier is initialized"),
    "sent again to a block that reads": (without(READ, READ + AGAIN), "a race for shared memory"),
    "nothing is expected": (without(EXPECT), "for ever.* 1 arrivals and -256 bytes are missing"),
    "too much is expected": (
        without(EXPECT, EXPECT.replace("256", "260")),
        "for ever.* 0 arrivals and 4 bytes are missing",
    ),
    "expected twice": (
        without(EXPECT, EXPECT.replace("256", "260") * 2),
        "an mbarrier gets more arrivals than its count",
    ),
    "nobody waits": (
        PARTS[:-2],
        "a block ends without waiting for what is sent|which has ended",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_wrong_messages_are_detected_in_every_order_of_threads(what):
    parts, error = WRONG[what]
    for order in ORDERS:
        with raises(rf"(?s){error}"):
            run(parts, *order)


def test_sending_to_a_block_that_has_ended_is_an_error():
    parts = [BEGIN, FENCE, MEET, "if (blockIdx.x == 1) return;", asm("bar.sync 0"), SEND]
    with raises(r"(?s)block 1 of the cluster, which has ended.*PTX line \d+: .*st.async"):
        run(parts, "reverse")


def test_messages_without_a_wait_have_arrived_only_if_copies_are_early():
    parts = [BEGIN, FENCE, MEET, SEND, MEET, READ, EXPECT, WAIT]
    for copies in ("early", "late"):
        has_come = run(parts, copies=copies, races=False)[64] == 133
        assert has_come == (copies == "early")
