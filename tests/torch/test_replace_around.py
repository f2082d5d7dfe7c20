# SPDX-License-Identifier: MIT
"""The model around replaced norms: its report, state and classes, probes, and restore_norms."""

import copy
import gc
import pickle
import weakref

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrize  # noqa: E402

from cunorm.torch import replace_norms, restore_norms  # noqa: E402
from tests.support.torch_norms import (  # noqa: E402
    WIDTH,
    Formula,
    LastAxis,
    LlamaNorm,
    norm,
    results,
    rms,
    x_of,
)


class Unnamed(Formula):
    """A module that is no norm of cunorm's, but has an eps."""

    def forward(self, x):
        return self.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([nn.Sequential(LlamaNorm(), nn.GELU()) for _ in range(3)])
        self.final = nn.LayerNorm(WIDTH)
        self.shared = self.layers[0][0]
        self.batch = nn.Sequential(nn.BatchNorm1d(8), Unnamed())
        self.final.weight = self.shared.weight  # tied

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.final(self.batch(self.shared(x)))


def test_the_report_is_a_summary_by_kind():
    model = Model()
    assert str(replace_norms(model)) == (
        "4 norms replaced\n"
        "  LlamaNorm: rms_norm(eps=1e-05, round_before_weight=True)\n"
        "    layers.*.0 (3)\n"
        "  LayerNorm: layer_norm(eps=1e-05)\n"
        "    final\n"
        "2 modules left\n"
        "  BatchNorm1d: of torch.nn, only RMSNorm, LayerNorm and GroupNorm are replaced\n"
        "    batch.0\n"
        f"  Unnamed: {replace_norms(Unnamed()).left[0].reason}\n"
        "    batch.1"
    )
    reasons = {left.reason for left in replace_norms(model).left[:4]}
    assert reasons == {"it runs cunorm already: restore_norms undoes that"}
    assert "(the model itself)" in str(replace_norms(LlamaNorm()))


def test_replacing_changes_only_classes_and_restoring_gives_the_classes_back():
    model, x, seen = Model().eval(), x_of(), []
    kinds = [type(module) for module in model.modules()]
    expected = results(model, x)
    state, parameters = model.state_dict(), list(model.parameters())
    hook = model.shared.register_forward_hook(lambda *args: seen.append(args))
    replace_norms(model)
    model(x)
    assert len(seen) == 2
    hook.remove()
    assert [type(module) for module in model.modules()] != kinds
    assert list(model.state_dict()) == list(state)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert model.final.weight is model.shared.weight and model.shared is model.layers[0][0]
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert copied.final.weight is copied.shared.weight is not model.shared.weight
        assert torch.equal(copied(x), model(x))
        assert restore_norms(copied) == 4 and type(copied.final) is nn.LayerNorm
    assert type(model.final) is not nn.LayerNorm
    assert restore_norms(model) == 4
    assert [type(module) for module in model.modules()] == kinds
    assert all(torch.equal(a, b) for a, b in zip(results(model, x), expected, strict=True))
    assert restore_norms(model) == 0


def test_a_model_with_changed_norms_is_not_restored_halfway():
    model = nn.Sequential(nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH))
    replace_norms(model)
    kind = type(model[0])
    parametrize.register_parametrization(model[1], "weight", nn.Identity())
    with pytest.raises(ValueError, match="restore_norms: 1 has got the class ParametrizedCunormL"):
        restore_norms(model)
    assert type(model[0]) is kind
    parametrize.remove_parametrizations(model[1], "weight")
    model[1].forward = model[1].forward  # as hooks of accelerate do
    with pytest.raises(ValueError, match="restore_norms: 1 has got a forward of its instance"):
        restore_norms(model)
    assert type(model[0]) is kind
    del model[1].forward
    assert restore_norms(model) == 2


def test_a_model_on_meta_is_replaced_before_it_has_numbers():
    with torch.device("meta"):
        model = nn.Sequential(norm(LlamaNorm.forward)(), nn.LayerNorm(WIDTH))
        assert len(replace_norms(model).replaced) == 2
    usual = nn.Sequential(LlamaNorm(), LastAxis())
    model.to_empty(device="cpu").load_state_dict(usual.state_dict())
    torch.testing.assert_close(model(x_of()), usual(x_of()))


@pytest.mark.parametrize(
    "call, text",
    [
        (lambda m: replace_norms(m, exact=1), "replace_norms: exact is 1, expected True or False"),
        (lambda m: replace_norms([m]), "replace_norms: model is of type list, expected a torch"),
        (lambda m: restore_norms([m]), "restore_norms: model is of type list, expected a torch"),
    ],
)
def test_a_wrong_argument_is_an_error_that_replaces_nothing(call, text):
    model = nn.LayerNorm(2)
    with pytest.raises(TypeError, match=f"^{text}"):
        call(model)
    assert type(model) is nn.LayerNorm


# --- classes and probes ---------------------------------------------------------------------------


def with_super():
    """Return a class of norms; its forward refers to the class by super()."""

    class SomeNorm(LlamaNorm):
        def forward(self, x):
            return super().forward(x)

    return SomeNorm


CLASSES = {
    "a formula": with_super,
    "torch's forward": lambda: type("SomeNorm", (nn.LayerNorm,), {}),
    "no recipe": lambda: norm(lambda m, x: m.weight * rms(x, m.eps) + 1.0),
}


@pytest.mark.parametrize("restored", [True, False])
@pytest.mark.parametrize("name", CLASSES)
def test_the_class_of_a_norm_dies_with_its_last_module(name, restored):
    kind = CLASSES[name]()
    model, dead = nn.Sequential(kind(WIDTH), kind(WIDTH)), weakref.ref(kind)
    del kind
    replace_norms(model)
    model(x_of()).sum().backward()
    swapped = weakref.ref(type(model[0]))
    if restored:
        restore_norms(model)
    del model
    gc.collect()
    assert dead() is None and swapped() is None


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


def test_equal_modules_of_a_model_are_probed_once():
    calls, counts = [], []
    kind = norm(lambda m, x: calls.append(1) or LlamaNorm.forward(m, x))
    for modules in ([kind()], [kind(), kind()], [kind(), kind(WIDTH + 2)]):
        calls.clear()
        replace_norms(nn.ModuleList(modules))
        counts.append(len(calls))
    once = counts[0]
    assert once > 0 and counts == [once, once, 2 * once]


def test_a_class_with_another_forward_is_probed_again(monkeypatch):
    kind = with_super()
    assert "weight_offset" not in replace_norms(kind()).replaced[0].runs
    monkeypatch.setattr(kind, "forward", lambda m, x: rms(x, m.eps) * (1.0 + m.weight))
    assert "weight_offset=1.0" in replace_norms(kind()).replaced[0].runs


def test_modules_whose_attributes_have_the_same_text_are_probed_apart():
    class Plain(tuple):
        def __repr__(self):
            return "plain"

    kind = norm(lambda m, x: rms(x, m.eps) * (m.weight + len(m.offsets)))
    model = nn.ModuleList([kind(), kind()])
    model[0].offsets, model[1].offsets = Plain(), Plain((0,))
    runs = [one.runs for one in replace_norms(model).replaced]
    assert ["weight_offset=1.0" in text for text in runs] == [False, True]
