# SPDX-License-Identifier: MIT
"""What cunorm.torch keeps for a backward, and that it neither changes nor copies its operands."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from tests.support.calls import launched

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from tests.support.torch_cases import Watch, case, operands  # noqa: E402

# Each, and the shapes of the statistics that it keeps.
CASES = {
    "rms_norm": [(2, 4)],
    "groups": [(2, 4, 2)],
    "add_rms_norm": [(2, 4)],
    "layer_norm": [(2, 4)] * 2,
    "l2_norm": [(2, 4)],
    "group_norm": [(2, 2)] * 2,
    "channels last": [(2, 2)] * 2,
}
names = pytest.mark.parametrize("name", CASES)


class Ran:
    """A call, with what it was given and what it gave."""

    def __init__(self, name):
        call, tensors = case(name)
        self.operands = dict(zip(operands(name), tensors, strict=True))
        self.results = call(*tensors)
        self.arriving = [torch.ones_like(one) for one in self.results]
        # what was normalised: x, or the new stream
        self.normalised = self.results[1] if len(self.results) > 1 else self.operands["x"]

    def backward(self):
        found = torch.autograd.grad(self.results, list(self.operands.values()), self.arriving)
        return dict(zip(self.operands, found, strict=True))


@names
def test_only_what_was_normalised_statistics_gate_and_parameters_are_kept(name):
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, id):
        ran = Ran(name)
    named = [ran.operands[key] for key in ("weight", "bias", "gate") if key in ran.operands]
    expected = {one.data_ptr() for one in (ran.normalised, *named)}
    assert expected <= {one.data_ptr() for one in kept}
    statistics = [one for one in kept if one.data_ptr() not in expected]
    assert [one.shape for one in statistics] == CASES[name]
    # No array is kept that is as large as y, and none twice.
    size = sum(one.nbytes for one in (ran.normalised, *named, *statistics))
    assert sum(one.nbytes for one in kept) == size


@names
def test_no_operand_and_no_gradient_that_arrives_is_changed(name):
    ran, fresh = Ran(name), operands(name)
    given = [*ran.operands.values(), *ran.arriving, *ran.results]
    before = [(one.detach().clone(), one._version) for one in given]
    ran.backward()
    for one, (numbers, version) in zip(given, before, strict=True):
        assert torch.equal(one, numbers)
        assert one._version == version
    for key, one in ran.operands.items():
        assert torch.equal(one, fresh[key])
        assert one._version == fresh[key]._version


@names
@pytest.mark.parametrize("way", [nullcontext, Watch], ids=["recorded", "operator"])
def test_kernels_get_the_callers_own_memory(name, way, monkeypatch):
    seen = launched(monkeypatch)
    with way():
        ran = Ran(name)
        gradients = ran.backward()
    there, back = seen
    expected = {"y": ran.results[0], **ran.operands}
    read = {"dy": ran.arriving[0], "x": ran.normalised, "dx": gradients["x"]}
    for key in {"weight", "bias", "gate"} & ran.operands.keys():
        read |= {key: ran.operands[key], f"d{key}": gradients[key]}
    if len(ran.results) > 1:
        expected["new_residual"], read["d_residual"] = ran.results[1], ran.arriving[1]
    for call, arrays in ((there, expected), (back, read)):
        for key, one in arrays.items():
            assert getattr(call, key).pointer == one.data_ptr(), key
