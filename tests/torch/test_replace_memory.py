# SPDX-License-Identifier: MIT
"""replace_norms keeps no user's class alive, and probes equal modules only once in a call."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402

from cunorm.torch import replace_norms, restore_norms  # noqa: E402
from tests.support.torch_norms import WIDTH, Formula, LlamaNorm, norm, rms, x_of  # noqa: E402


def with_formula():
    """Return a class of norms; its forward refers to the class by super()."""

    class SomeNorm(LlamaNorm):
        def forward(self, x):
            return super().forward(x)

    return SomeNorm


def with_torchs_forward():
    return type("SomeNorm", (nn.LayerNorm,), {})


def without_recipe():
    def forward(self, x):
        return self.weight * rms(x, self.eps) + 1.0

    return type("SomeNorm", (Formula,), {"forward": forward})


def model_of(make):
    """Return a model of two norms of a new class after a run, and a weak reference to the class."""
    kind = make()
    model = nn.Sequential(kind(WIDTH), kind(WIDTH))
    replace_norms(model)
    model(x_of()).sum().backward()
    return model, weakref.ref(kind)


@pytest.mark.parametrize("restored", [True, False])
@pytest.mark.parametrize("make", [with_formula, with_torchs_forward, without_recipe])
def test_the_class_of_a_norm_dies_with_its_last_module(make, restored):
    model, kind = model_of(make)
    swapped = weakref.ref(type(model[0]))
    if restored:
        restore_norms(model)
    del model
    gc.collect()
    assert kind() is None and swapped() is None


@pytest.mark.parametrize("kind", [LlamaNorm, nn.LayerNorm])
def test_modules_of_one_class_and_plan_share_a_swapped_class_while_a_module_lives(kind):
    model = nn.Sequential(kind(WIDTH), kind(WIDTH))
    replace_norms(model)
    swapped = type(model[0])
    del model[1]
    gc.collect()
    other = kind(WIDTH)
    replace_norms(other)
    copies = copy.copy(other), copy.deepcopy(model[0]), pickle.loads(pickle.dumps(other))
    assert {type(module) for module in (other, *copies)} == {swapped}
    assert issubclass(swapped, kind) and kind.__subclasses__().count(swapped) == 1


def counted(calls):
    def forward(self, x):
        calls.append(1)
        return self.weight * rms(x.float(), self.eps).to(x.dtype)

    return type("SomeNorm", (Formula,), {"forward": forward})


def test_equal_modules_of_a_model_are_probed_once():
    calls: list[int] = []
    kind = counted(calls)
    replace_norms(kind())
    once = len(calls)
    assert once > 0
    replace_norms(nn.Sequential(kind(), kind()))
    assert len(calls) == 2 * once
    replace_norms(nn.Sequential(kind(WIDTH), kind(WIDTH + 2)))
    assert len(calls) == 4 * once


def test_a_class_with_another_forward_is_probed_again(monkeypatch):
    kind = with_formula()
    assert "weight_offset" not in replace_norms(kind()).replaced[0].runs
    monkeypatch.setattr(kind, "forward", lambda m, x: rms(x, m.eps) * (1.0 + m.weight))
    assert "weight_offset=1.0" in replace_norms(kind()).replaced[0].runs


def test_modules_whose_attributes_have_the_same_text_are_probed_apart():
    class Plain(tuple):
        def __repr__(self):
            return "plain"

    def forward(self, x):
        return rms(x, self.eps) * (self.weight + len(self.offsets))

    kind, runs = norm(forward), []
    for offsets in ((), (0,)):
        module = kind()
        module.offsets = Plain(offsets)
        runs.append(replace_norms(module).replaced[0].runs)
    assert ["weight_offset=1.0" in text for text in runs] == [False, True]
