# SPDX-License-Identifier: MIT
"""Calls that are made again, of all sorts and in any order, give what they give when made anew.

Most of what a call does is remembered, by what was said, by the forms of arrays and by where they
lie. Here calls differ in any of that, right and wrong ones; at the end all is forgotten, and each
is made once more: errors are the same, results to the bit.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from tests.support.calls import FUNCTIONS, GROUP_NORMS, call_of, parameters_of
from tests.support.operands import at
from tests.support.repeated import PLACES, Memory, Told, assert_made_alike, caches, forget_all, make

LIBRARIES = ["numpy", "torch"] if find_spec("torch") else ["numpy"]
ROWS = [(5, 8), (3, 8), (5, 16), (2, 5, 8), (0, 8), (10, 8)]
IMAGES = [(3, 8, 8), (2, 4, 8), (3, 8, 16), (3, 2, 4, 8), (0, 8, 8)]
# Right and wrong values of options, which are no other kernels.
SAID = {
    "eps": [1.0, 2, 0.0, -0.0, True, -1.0],
    "c": [None, 2, 2.0, 0.0, -0.0, True, "2"],
    "weight_offset": [1.0, 2, True],
    "groups": [1, 2, True, 3],
    "axis": [-1, 1, True],
    "num_groups": [4, 2, 1, True, 3],
    "channel_axis": [-1, 1, -1.0],
    "needs": [("x", "weight", "bias", "gate"), ("x",), ("weight",), ["x"], ("y",), "x"],
    "accumulate": [False, True, 0],
    "round_before_weight": [False, 0],
    "center": [True, 1],
}
WRONG = ("workspace", "read only")
DEFAULT = {"weight_offset": 1.0, "eps": 1.0}
OTHERS = ("gate", "residual", "d_residual", "bias")


@st.composite
def calls(draw, names, kinds):
    """Draw a call, most of whose options are as they are by default."""
    name = draw(st.sampled_from(names))
    has = call_of(name)
    taken, group = parameters_of(name), name in GROUP_NORMS
    said = {key: value for key, value in DEFAULT.items() if key in taken}
    halves = draw(st.booleans())
    return Told(
        name,
        draw(st.sampled_from(IMAGES if group else ROWS)),
        draw(st.sampled_from(kinds)),
        "float16" if halves else "float32",
        tuple(key for key in OTHERS if key in has.arrays) if halves else (),
        tuple(said.items()),
        given=tuple(draw(st.sampled_from([(), (*has.out, "workspace"), has.parts()]))),
    )


def sayable(name):
    return [key for key in SAID if key in parameters_of(name)]


def places_of(name):
    has = call_of(name)
    places = [*has.arrays, *(f"out.{field}" for field in has.out), "workspace"]
    return [place for place in places if place in PLACES]


class Repeated(RuleBasedStateMachine):
    """A process that makes calls of a function, and of another."""

    names, kinds, remembering = (), (), ()

    def __init__(self):
        super().__init__()
        self.memory = Memory("cupy" if "cupy" in self.kinds else "numpy")
        self.told, self.made = [], []

    def call(self, told):
        self.told.append(told)
        self.made.append((told, make(told, self.memory)))

    @initialize(data=st.data())
    def first(self, data):
        self.call(data.draw(calls(self.names[:1], self.kinds)))

    @rule(data=st.data())
    def another_call(self, data):
        self.call(data.draw(calls(self.names, self.kinds)))

    def earlier(self, data):
        return self.told[data.draw(st.integers(0, len(self.told) - 1))]

    @rule(data=st.data(), seed=st.integers(0, 2))
    def with_other_numbers(self, data, seed):
        """In the same arrays, or in those that were the same but for that."""
        self.call(self.earlier(data)._replace(seed=seed))

    @rule(data=st.data())
    def saying_something_else(self, data):
        told = self.earlier(data)
        key = data.draw(st.sampled_from(sayable(told.name)))
        said = dict(told.said) | {key: data.draw(st.sampled_from(SAID[key]))}
        self.call(told._replace(said=tuple(said.items())))

    @rule(data=st.data(), distance=st.sampled_from([0, 4, 8, 16, 64, 1]))
    def with_an_array_elsewhere(self, data, distance):
        """Aligned to other numbers of bytes, among them to none."""
        told = self.earlier(data)
        key = data.draw(st.sampled_from(places_of(told.name)))
        distance = 32 if distance == 1 and told.kind != "numpy" else distance
        self.call(told._replace(moved=((key, distance),)))

    @rule(data=st.data())
    def with_an_array_in_anothers_place(self, data):
        """Exactly in place, or overlapping it in part."""
        told = self.earlier(data)
        key, other = (data.draw(st.sampled_from(places_of(told.name))) for _ in range(2))
        moved = data.draw(st.sampled_from([(), ((key, 16),), ((key, 512),)]))
        self.call(told._replace(instead=((key, other),), moved=moved))

    @rule(data=st.data())
    def given_other_memory(self, data):
        told = self.earlier(data)
        parts = call_of(told.name).parts()
        given = tuple(part for part in parts if data.draw(st.booleans()))
        self.call(told._replace(given=given, instead=()))

    @rule(data=st.data(), steps=st.sampled_from(["dense", "padded", "every other", "spread"]))
    def with_other_strides(self, data, steps):
        self.call(self.earlier(data)._replace(steps=steps))

    @rule(data=st.data())
    def of_the_other_library(self, data):
        told = self.earlier(data)
        if len(self.kinds) > 1:
            mixed = data.draw(st.sampled_from(["", "x", "weight", "dy"]))
            other = {"numpy": "torch", "torch": "numpy"}[told.kind]
            told = told._replace(of_other=mixed, kind=told.kind if mixed else other)
            self.call(told._replace(moved=()))

    @rule(
        data=st.data(), wrong=st.sampled_from(["", "weight", "x", "rstd", "workspace", "read only"])
    )
    def with_a_wrong_array(self, data, wrong):
        self.call(self.earlier(data)._replace(wrong=wrong))

    def teardown(self):
        memory = Memory("cupy" if "cupy" in self.kinds else "numpy")
        for told, made in self.made:
            forget_all(self.remembering)
            with at(told):
                assert_made_alike(made, make(told, memory))


def run(names, kinds, examples, steps):
    of = {"names": names, "kinds": kinds, "remembering": caches()}
    machine = type("Calls", (Repeated,), of)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],
            report_multiple_bugs=False,
        ),
    )


@pytest.mark.parametrize("number", range(len(FUNCTIONS)), ids=FUNCTIONS)
def test_calls_made_again_are_as_calls_made_anew(number):
    """Of each function, in turn with the next one."""
    run([FUNCTIONS[number], FUNCTIONS[number - 1]], LIBRARIES, 6, 30)
