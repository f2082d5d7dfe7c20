# SPDX-License-Identifier: MIT
"""What replace_norms leaves of the model around the norms: everything; and restore_norms."""

from __future__ import annotations

import copy
import pickle

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402

from cunorm.torch import replace_norms, restore_norms  # noqa: E402
from tests.support.torch_norms import (  # noqa: E402
    WIDTH,
    Identity,
    LastAxis,
    LlamaNorm,
    results,
    x_of,
)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(LlamaNorm(), nn.GELU()) for _ in range(3)])
        self.final = nn.LayerNorm(WIDTH)
        self.shared = self.layers[0][0]
        self.batch = nn.BatchNorm1d(8)
        self.final.weight = self.shared.weight  # tied

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.final(self.batch(self.shared(x)))


def test_the_report_is_a_summary_by_kind():
    assert str(replace_norms(Model())) == (
        "4 norms replaced\n"
        "  LlamaNorm: rms_norm(eps=1e-05, round_before_weight=True)\n"
        "    layers.*.0 (3)\n"
        "  LayerNorm: layer_norm(eps=1e-05)\n"
        "    final\n"
        "1 module left\n"
        "  BatchNorm1d: of torch.nn, only RMSNorm, LayerNorm and GroupNorm are replaced\n"
        "    batch"
    )
    assert "(the model itself)" in str(replace_norms(LlamaNorm()))
    again = Model()
    replace_norms(again)
    assert {left.reason for left in replace_norms(again).left[:4]} == {"it runs cunorm already"}


def test_restoring_gives_everything_back():
    model, x = Model(), x_of()
    kinds = [type(module) for module in model.modules()]
    expected = results(model.eval(), x)
    state, parameters = model.state_dict(), list(model.parameters())
    replace_norms(model)
    assert [type(module) for module in model.modules()] != kinds
    assert list(model.state_dict()) == list(state)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.final.weight is model.shared.weight and model.shared is model.layers[0][0]
    assert restore_norms(model) == 4
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(a, b) for a, b in zip(results(model, x), expected, strict=True))
    assert restore_norms(model) == 0


def test_hooks_and_optimizers_go_on():
    model, x = Model(), x_of()
    seen = []
    model.shared.register_forward_hook(lambda *told: seen.append(told))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replace_norms(model)
    before = model.shared.weight.clone()
    model(x).square().sum().backward()
    optimizer.step()
    assert len(seen) == 2
    assert not torch.equal(model.shared.weight, before)


def test_a_copy_is_replaced_too_and_can_be_restored():
    model, x = Model().eval(), x_of()
    replace_norms(model)
    for again in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert type(again.shared) is type(model.shared)
        assert again.final.weight is again.shared.weight is not model.shared.weight
        assert torch.equal(again(x), model(x))
        assert restore_norms(again) == 4 and type(again.final) is nn.LayerNorm
        assert type(model.final) is not nn.LayerNorm


def test_what_was_changed_since_is_not_restored_halfway():
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH))
    replace_norms(model)
    kind = type(model[0])
    parametrize.register_parametrization(model[1], "weight", Identity())
    with pytest.raises(ValueError, match="restore_norms: 1 has got the class ParametrizedCunormL"):
        restore_norms(model)
    assert type(model[0]) is kind
    parametrize.remove_parametrizations(model[1], "weight")
    model[1].forward = model[1].forward  # as hooks of accelerate do, around what it was
    with pytest.raises(ValueError, match="restore_norms: 1 has got a forward of its instance"):
        restore_norms(model)
    assert type(model[0]) is kind
    del model[1].forward
    assert restore_norms(model) == 2


def test_a_model_on_meta_is_replaced_before_it_has_numbers():
    with torch.device("meta"):
        model = nn.Sequential(LlamaNorm(), nn.LayerNorm(WIDTH))
    assert len(replace_norms(model).replaced) == 2
    model.to_empty(device="cpu").load_state_dict(
        nn.Sequential(LlamaNorm(), LastAxis()).state_dict()
    )
    expected = LastAxis()(LlamaNorm()(x_of()))
    torch.testing.assert_close(model(x_of()), expected)


@pytest.mark.parametrize("function", [replace_norms, restore_norms])
def test_a_model_that_is_none_is_an_error(function):
    with pytest.raises(TypeError, match=f"{function.__name__}: model is a list, expected a torch"):
        function([nn.LayerNorm(2)])
