# SPDX-License-Identifier: MIT
"""The race check finds unordered accesses, and only those, in every order of threads."""

from __future__ import annotations

import pytest

from tests import softgpu
from tests.softgpu.launching import cupy, launch, raises

S = "int* x) { __shared__ int s[256]; volatile int* v = s; int t = threadIdx.x;"
TWO = "__cluster_dims__(2, 1, 1)"


def asm(*lines: str) -> str:
    return "".join(f'asm volatile("{line};" ::: "memory");' for line in lines)


COMMIT, WAIT = asm("cp.async.commit_group"), asm("cp.async.wait_group 0")
ARRIVE, LEAVE = asm("barrier.cluster.arrive.aligned"), asm("barrier.cluster.wait.aligned")
RELAXED = asm("barrier.cluster.arrive.relaxed.aligned")
REMOTE = """int got; asm volatile("{.reg .b32 a; mapa.shared::cluster.u32 a, %1, %2;"
    "ld.shared::cluster.u32 %0, [a];}" : "=r"(got) : "r"((unsigned)__cvta_generic_to_shared(s + t)),
    "r"((blockIdx.x + 1) % 2) : "memory"); x[blockIdx.x * 64 + t] = got;"""


def copy(to: str, source: str) -> str:
    return f"""asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::
        "r"((unsigned)__cvta_generic_to_shared({to})), "l"({source}) : "memory");"""


# A kernel's text, and the launch options that differ from one block of 64 threads.
ORDERED = {
    "a barrier": (S + "v[t] = t; __syncthreads(); x[t] = v[t ^ 33];", {}),
    "a barrier after a read": (S + "v[t] = t; __syncthreads(); int r = v[t ^ 33];"
        "__syncthreads(); v[t] = r;", {}),
    "a barrier of the warp": (S + "v[t] = t; __syncwarp(); x[t] = v[t ^ 1];", {}),
    "different halves of a word": ("short* x) { __shared__ short s[64]; volatile short* v = s;"
        "v[threadIdx.x] = 1; x[threadIdx.x] = v[threadIdx.x];", {}),
    "a cluster's barrier": (S + f"v[t] = t; {ARRIVE} {LEAVE} {REMOTE} {ARRIVE} {LEAVE}",
        {"grid": 2, "head": TWO}),
    "a block's barrier within a cluster's": (S + "__shared__ volatile int u[64]; v[t] = t;"
        f"{ARRIVE} u[t] = t; __syncthreads(); {LEAVE} {REMOTE}"
        f"x[blockIdx.x * 64 + t] += u[t ^ 33]; {ARRIVE} {LEAVE}", {"grid": 2, "head": TWO}),
    "a copy that its thread waits for": (S + copy("s + t", "x + t") + COMMIT + WAIT
        + "x[t] = v[t];", {}),
    "a copy, a wait, a barrier": (S + copy("s + t", "x + t") + COMMIT + WAIT
        + "__syncthreads(); x[t + 64] = v[t ^ 33];", {}),
}  # fmt: skip

RACES = {
    "no barrier": (S + "v[t] = t; x[t] = v[t ^ 33];", {}),
    "no barrier within a warp": (S + "v[t] = t; x[t] = v[t ^ 1];", {}),
    "a barrier of another warp": (S + "v[t] = t; __syncwarp(); x[t] = v[t ^ 32];", {}),
    "a shuffle, which orders no memory": (S + "v[t] = t; int r = __shfl_xor_sync(~0u, t, 1);"
        "x[t] = v[t ^ 1] + r;", {}),
    "a reduction of a warp, which orders no memory": (S + "v[t] = t;"
        "int r = __reduce_add_sync(~0u, t); x[t] = v[t ^ 1] + r;", {}),
    "writes through a generic address": (S
        + 'asm volatile("st.b32 [%0], %1;" :: "l"(x), "r"(t) : "memory");', {}),
    "a read that others overwrite": (S + "v[t] = t; __syncthreads(); int r = v[t ^ 33]; v[t] = r;",
        {}),
    "one of many readers overwrites": (S + "if (t == 0) v[0] = 3; __syncthreads(); int r = v[0];"
        "if (t == 40) v[0] = r + 1; x[t] = r;", {}),
    "a word, and its halves": (S + "((volatile short*)s)[t] = t; if (t < 32) x[t] = v[t];", {}),
    "blocks that write the same": ("int* x) { x[threadIdx.x] = blockIdx.x;", {"grid": 2}),
    "blocks that read what others write": ("volatile int* x) { int b = blockIdx.x * 64, t ="
        "threadIdx.x; int r = x[t + (64 ^ b)]; x[t + b] = r;", {"grid": 2}),
    "a cluster's barrier that is relaxed": (S + f"v[t] = t; {RELAXED} {LEAVE} {REMOTE} {ARRIVE}"
        f"{LEAVE}", {"grid": 2, "head": TWO}),
    "a write after the arrival at a cluster's barrier": (S + f"v[t] = t; {ARRIVE} v[t] = 7;"
        f"{LEAVE} {REMOTE} {ARRIVE} {LEAVE}", {"grid": 2, "head": TWO}),
    "a copy that nobody waits for": (S + copy("s + t", "x + t") + COMMIT + "x[t] = v[t];", {}),
    "a copy, a wait, no barrier": (S + copy("s + t", "x + t") + COMMIT + WAIT
        + "x[t + 64] = v[t ^ 33];", {}),
    "a copy, a barrier, a wait": (S + copy("s + t", "x + t") + COMMIT + "__syncthreads();" + WAIT
        + "x[t + 64] = v[t ^ 33];", {}),
    "a wait for too few copies": (S + copy("s + t", "x + t") + COMMIT + copy("s + 64 + t", "x + t")
        + COMMIT + asm("cp.async.wait_group 1") + "x[t] = v[64 + t];", {}),
    "a copy that overwrites what others read": (S + "v[t] = t; __syncthreads(); int r = v[t ^ 33];"
        + copy("s + t", "x + 64 + t") + COMMIT + WAIT + "x[t] = r;", {}),
}  # fmt: skip

ORDERS = [(s, c) for s in ("lockstep", "serial", "reverse", "random") for c in ("late", "early")]


def run(what: tuple[str, dict], schedule: str, copies: str) -> None:
    body, options = what
    with softgpu.settings(races=True, schedule=schedule, copies=copies):
        launch(f"{body} }}", cupy.zeros(256, "i"), **{"block": 64, **options})


@pytest.mark.parametrize("what", ORDERED)
def test_accesses_that_are_ordered_are_no_race(what):
    for order in ORDERS:
        run(ORDERED[what], *order)


@pytest.mark.parametrize("what", RACES)
def test_a_race_is_found_in_every_order_of_threads(what):
    for order in ORDERS:
        with raises(r"(?s)a race for .* with thread \d+ of block .* PTX line \d+.* PTX line \d+"):
            run(RACES[what], *order)


def test_a_read_of_shared_memory_that_nothing_has_written_is_found():
    body = S + "if (t < 63) s[t] = t; __syncthreads(); x[t] = s[t ^ 1];"
    with raises(r"(?s)thread 62 of.* that nothing has written.*PTX line \d+: ld.shared"):
        run((body, {}), "lockstep", "late")
