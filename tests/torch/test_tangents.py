# SPDX-License-Identifier: MIT
"""The plain functions refuse tensors with a forward-mode tangent, which they would drop."""

from __future__ import annotations

import pytest

import cunorm

torch = pytest.importorskip("torch")
forward_ad = pytest.importorskip("torch.autograd.forward_ad")

# torch's own, when it first makes a dual tensor
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")

REFUSAL = r" has a forward-mode tangent.* cunorm\.torch .*\.detach\(\)$"


def some_tensor():
    return torch.arange(12.0).reshape(3, 4)


def dual():
    return forward_ad.make_dual(some_tensor(), torch.ones(3, 4))


CALLS = {
    "x": lambda x: cunorm.rms_norm(x),
    "gate": lambda x: cunorm.rms_norm(some_tensor(), gate=x),
    "out": lambda x: cunorm.rms_norm(some_tensor(), out=x),
    "dy": lambda x: cunorm.rms_norm_backward(x, some_tensor(), rstd=torch.ones(3)),
}


@pytest.mark.parametrize("argument", CALLS)
def test_a_tangent_is_refused_also_where_the_call_was_made_before(argument):
    call = CALLS[argument]
    for _ in range(2):
        call(some_tensor())  # of these, calls like them are made again unchecked
    with (
        forward_ad.dual_level(),
        torch.no_grad(),  # which is of reverse mode alone
        pytest.raises(ValueError, match=f"{argument}{REFUSAL}"),
    ):
        call(dual())


def test_a_group_norm_refuses_it_too():
    with forward_ad.dual_level(), pytest.raises(ValueError, match=f"^group_norm: x{REFUSAL}"):
        cunorm.group_norm(dual(), 2)


def test_tensors_without_a_tangent_are_taken_where_others_have_one():
    expected = cunorm.rms_norm(some_tensor())
    with forward_ad.dual_level():
        for x in (some_tensor(), dual().detach(), forward_ad.unpack_dual(dual()).primal):
            assert torch.equal(cunorm.rms_norm(x), expected)
        with torch.inference_mode():  # where PyTorch's own functions drop tangents
            assert torch.equal(cunorm.rms_norm(dual()), expected)
