# SPDX-License-Identifier: MIT
"""What cunorm.torch keeps for a backward, and that it neither changes nor copies its operands."""

from __future__ import annotations

import pytest

from tests.support import calls, group_norm_cases
from tests.support.operands import draw

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cunorm.torch as ct  # noqa: E402

ROWS, WIDTH, IMAGES, CHANNELS = (5, 7), 96, (3, 12, 5, 4), 12
IMAGE = {"num_groups": 4, "activation": "silu", "channel_axis": 1}


def tensor(name, *shape, dtype=torch.float32):
    return torch.from_numpy(draw(name, shape, "float32")).to(dtype).requires_grad_()


def rows(*names):
    return {name: tensor(name, *ROWS, WIDTH) for name in names}


def parameters(*names, size=WIDTH):
    return {name: tensor(name, size) for name in names}


def narrow_branch():
    return {"x": tensor("x", *ROWS, WIDTH, dtype=torch.bfloat16), **rows("residual")}


def channels_last():
    x = tensor("x", *IMAGES).detach().to(memory_format=torch.channels_last).requires_grad_()
    return {"x": x, **parameters("weight", "bias", size=CHANNELS)}


# Each function, its operands, and of what each statistic has one: a row, or a group of a sample.
NORMS = {
    "rms_norm": (ct.rms_norm, lambda: {**rows("x"), **parameters("weight")}, {}),
    "gated rms_norm": (ct.rms_norm, lambda: {**rows("x", "gate"), **parameters("weight")}, {}),
    "add_rms_norm": (
        ct.add_rms_norm,
        lambda: {**rows("x", "residual"), **parameters("weight")},
        {},
    ),
    "add_rms_norm, narrow": (
        ct.add_rms_norm,
        lambda: {**narrow_branch(), **parameters("weight")},
        {},
    ),
    "layer_norm": (ct.layer_norm, lambda: {**rows("x"), **parameters("weight", "bias")}, {}),
    "l2_norm": (ct.l2_norm, lambda: rows("x"), {}),
    "group_norm": (
        ct.group_norm,
        lambda: {"x": tensor("x", *IMAGES), **parameters("weight", "bias", size=CHANNELS)},
        IMAGE,
    ),
    "group_norm, channels last": (ct.group_norm, channels_last, IMAGE),
}


def several(result):
    return tuple(result) if isinstance(result, tuple) else (result,)


def kept_by(call):
    """Return what a call keeps for its backward, and its results."""
    kept = []

    def keep(one):
        kept.append(one)
        return one

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda one: one):
        results = several(call())
    return kept, results


@pytest.mark.parametrize("name", NORMS)
def test_only_what_was_normalised_statistics_gate_and_parameters_are_kept(name):
    function, make, said = NORMS[name]
    operands = make()
    kept, results = kept_by(lambda: function(**operands, **said))
    normalised = results[1] if len(results) > 1 else operands["x"]  # the new stream
    named = [operands[key] for key in ("weight", "bias", "gate") if key in operands]
    expected = {one.data_ptr() for one in (normalised, *named)}
    assert expected <= {one.data_ptr() for one in kept}

    statistics = [one for one in kept if one.data_ptr() not in expected]
    centred = name.startswith(("layer_norm", "group_norm"))
    assert len(statistics) == (2 if centred else 1)
    shape = (IMAGES[0], IMAGE["num_groups"]) if name.startswith("group_norm") else ROWS
    assert all(one.shape == shape and one.dtype == torch.float32 for one in statistics)
    # No array is kept that is as large as y, and none twice.
    size = sum(one.nbytes for one in (normalised, *named, *statistics))
    assert sum(one.nbytes for one in kept) == size


@pytest.mark.parametrize("name", NORMS)
def test_no_operand_and_no_gradient_that_arrives_is_changed(name):
    function, make, said = NORMS[name]
    operands = make()
    results = several(function(**operands, **said))
    arriving = [torch.ones_like(one) for one in results]
    given = [*operands.values(), *arriving]
    before = [one.detach().clone() for one in (*given, *results)]
    versions = [one._version for one in (*given, *results)]
    torch.autograd.grad(results, list(operands.values()), arriving)
    assert versions == [one._version for one in (*given, *results)]
    assert all(map(torch.equal, before, (*given, *results)))
    fresh = make()
    assert all(torch.equal(one, fresh[key]) for key, one in operands.items())
    assert all(one._version == fresh[key]._version for key, one in operands.items())


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("way", ["recorded", "operator"])
def test_kernels_get_the_callers_own_memory(name, way, monkeypatch):
    function, make, said = NORMS[name]
    operands = make()
    groups = name.startswith("group_norm")
    seen = (group_norm_cases if groups else calls).launched(monkeypatch)
    copied = group_norm_cases.copies(monkeypatch) if groups else []
    cases = pytest.importorskip("tests.support.torch_cases")
    with cases.Watch() if way == "operator" else torch.enable_grad():
        results = several(function(**operands, **said))
        arriving = [torch.ones_like(one) for one in results]
        asked = list(operands.values())
        gradients = dict(zip(operands, torch.autograd.grad(results, asked, arriving), strict=True))
    there, back = seen
    assert not copied
    for key, one in operands.items():
        assert getattr(there, key).pointer == one.data_ptr(), key
    assert there.y.pointer == results[0].data_ptr()
    assert back.dy.pointer == arriving[0].data_ptr()
    assert back.x.pointer == (results[1] if len(results) > 1 else operands["x"]).data_ptr()
    for key in ("weight", "bias", "gate"):
        if key in operands:
            assert getattr(back, key).pointer == operands[key].data_ptr()
            assert getattr(back, f"d{key}").pointer == gradients[key].data_ptr()
    assert back.dx.pointer == gradients["x"].data_ptr()
    if len(results) > 1:
        assert there.new_residual.pointer == results[1].data_ptr()
        assert back.d_residual.pointer == arriving[1].data_ptr()
