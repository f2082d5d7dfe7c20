# SPDX-License-Identifier: MIT
"""What cunorm.torch keeps for a backward, and that it neither changes nor copies its operands."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from tests.support import calls, group_norm_cases

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import cunorm.torch as ct  # noqa: E402
from tests.support.torch_cases import Watch  # noqa: E402
from tests.support.torch_norms import BF16, F32, drawn  # noqa: E402

ROWS, WIDTH, IMAGES, CHANNELS = (5, 7), 96, (3, 12, 5, 4), 12
IMAGE = {"num_groups": 4, "activation": "silu", "channel_axis": 1}


def rows(*names, **dtypes):
    """Draw operands of a row norm; a weight and a bias are of a row."""
    shapes = dict.fromkeys(("weight", "bias"), (WIDTH,))
    return {
        name: drawn(*shapes.get(name, (*ROWS, WIDTH)), seed=seed, dtype=dtypes.get(name, F32))
        for seed, name in enumerate(names)
    }


def images(layout):
    x = drawn(*IMAGES).to(memory_format=layout)
    return {"x": x, "weight": drawn(CHANNELS, seed=1), "bias": drawn(CHANNELS, seed=2)}


# Each function, what makes its operands, and what else it is told.
NORMS = {
    "rms_norm": (ct.rms_norm, lambda: rows("x", "weight"), {}),
    "gated rms_norm": (ct.rms_norm, lambda: rows("x", "gate", "weight"), {}),
    "add_rms_norm": (ct.add_rms_norm, lambda: rows("x", "residual", "weight"), {}),
    "add_rms_norm, narrow": (
        ct.add_rms_norm,
        lambda: rows("x", "residual", "weight", x=BF16),
        {},
    ),
    "layer_norm": (ct.layer_norm, lambda: rows("x", "weight", "bias"), {}),
    "l2_norm": (ct.l2_norm, lambda: rows("x"), {}),
    "group_norm": (ct.group_norm, lambda: images(torch.contiguous_format), IMAGE),
    "group_norm, channels last": (ct.group_norm, lambda: images(torch.channels_last), IMAGE),
}


class Ran:
    """A call, with what it was given and what it gave."""

    def __init__(self, name):
        function, make, said = NORMS[name]
        self.operands = {key: one.requires_grad_() for key, one in make().items()}
        made = function(**self.operands, **said)
        self.results = made if isinstance(made, tuple) else (made,)
        self.arriving = [torch.ones_like(one) for one in self.results]
        # what was normalised: x, or the new stream
        self.normalised = self.results[1] if len(self.results) > 1 else self.operands["x"]

    def backward(self):
        found = torch.autograd.grad(self.results, list(self.operands.values()), self.arriving)
        return dict(zip(self.operands, found, strict=True))


@pytest.mark.parametrize("name", NORMS)
def test_only_what_was_normalised_statistics_gate_and_parameters_are_kept(name):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, id):
        ran = Ran(name)
    named = [ran.operands[key] for key in ("weight", "bias", "gate") if key in ran.operands]
    expected = {one.data_ptr() for one in (ran.normalised, *named)}
    assert expected <= {one.data_ptr() for one in kept}

    statistics = [one for one in kept if one.data_ptr() not in expected]
    centred = name.startswith(("layer_norm", "group_norm"))
    assert len(statistics) == (2 if centred else 1)
    shape = (IMAGES[0], IMAGE["num_groups"]) if name.startswith("group_norm") else ROWS
    assert all(one.shape == shape and one.dtype == F32 for one in statistics)
    # No array is kept that is as large as y, and none twice.
    size = sum(one.nbytes for one in (ran.normalised, *named, *statistics))
    assert sum(one.nbytes for one in kept) == size


@pytest.mark.parametrize("name", NORMS)
def test_no_operand_and_no_gradient_that_arrives_is_changed(name):
    ran, fresh = Ran(name), NORMS[name][1]()
    given = [*ran.operands.values(), *ran.arriving, *ran.results]
    before = [one.detach().clone() for one in given]
    versions = [one._version for one in given]
    ran.backward()
    assert versions == [one._version for one in given]
    assert all(map(torch.equal, before, given))
    assert all(torch.equal(one, fresh[key]) for key, one in ran.operands.items())
    assert all(one._version == fresh[key]._version for key, one in ran.operands.items())


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("way", [nullcontext, Watch], ids=["recorded", "operator"])
def test_kernels_get_the_callers_own_memory(name, way, monkeypatch):
    seen = calls.launched(monkeypatch)
    copied = group_norm_cases.copies(monkeypatch) if name.startswith("group_norm") else []
    with way():
        ran = Ran(name)
        gradients = ran.backward()
    there, back = seen
    assert not copied
    expected = {"y": ran.results[0], **ran.operands}
    read = {"dy": ran.arriving[0], "x": ran.normalised, "dx": gradients["x"]}
    for key in {"weight", "bias", "gate"} & ran.operands.keys():
        read |= {key: ran.operands[key], f"d{key}": gradients[key]}
    if len(ran.results) > 1:
        expected["new_residual"], read["d_residual"] = ran.results[1], ran.arriving[1]
    for call, arrays in ((there, expected), (back, read)):
        for key, one in arrays.items():
            assert getattr(call, key).pointer == one.data_ptr(), key
