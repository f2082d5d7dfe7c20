# SPDX-License-Identifier: MIT
"""What replace_norms leaves as it is, and the reasons that it gives."""

from __future__ import annotations

import copy
import re

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.nn.utils import parametrize, prune  # noqa: E402

import cunorm.torch  # noqa: E402
from cunorm.torch import replace_norms  # noqa: E402
from tests.support.torch_norms import (  # noqa: E402
    BF16,
    WIDTH,
    Formula,
    GateRequiredNorm,
    Identity,
    LlamaNorm,
    arguments,
    rms,
)


def rms_of(x, eps):
    return torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def norm(formula, **options):
    """Return what makes a module of a formula, of itself and x, whose name says that it is one."""
    return lambda: type("SomeNorm", (Formula,), {"forward": formula})(**options)


def outside(m, x):
    return m.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + m.eps)


def dropped(m, x):
    return nn.functional.dropout(m.weight * rms(x, m.eps), training=m.training)


class BufferedNorm(Formula):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        return self.weight * rms(x, self.eps) * self.scale


def with_own_forward():
    module = LlamaNorm()
    module.forward = lambda x: x
    return module


def pruned():
    return prune.l1_unstructured(nn.LayerNorm(WIDTH), "weight", 0.5)


def parametrized():
    module = nn.LayerNorm(WIDTH)
    parametrize.register_parametrization(module, "weight", Identity())
    return module


class TensorLike(nn.Parameter):
    """A parameter that stands for something else, as a DTensor does."""


def with_a_parameter_of_another_kind():
    module = nn.RMSNorm(WIDTH)
    module._parameters["weight"] = TensorLike(torch.ones(WIDTH))
    return module


NO_RECIPE = "results in float32 are no recipe's"
LEFT = {
    "detached statistics": (  # of the right results
        norm(lambda m, x: m.weight * x * rms_of(x, m.eps).detach()),
        "results of rms_norm.*, but not its gradients",
    ),
    "eps outside the root": (norm(outside), f"{NO_RECIPE}.*off"),
    "a small eps outside the root": (norm(outside, eps=1e-9), f"{NO_RECIPE}.*off"),
    "dropout": (norm(dropped), NO_RECIPE),
    "a formula by the number of axes": (
        norm(lambda m, x: m.weight * rms(x, m.eps) * (x.shape[1] if x.dim() == 4 else 1)),
        NO_RECIPE,
    ),
    "a formula for evaluation": (
        norm(lambda m, x: m.weight * rms(x, m.eps) * (1 if m.training else 2)),
        NO_RECIPE,
    ),
    "no numbers": (
        norm(lambda m, x: m.weight * rms(x, m.eps) * float("nan")),
        f"{NO_RECIPE}.*of another kind",
    ),
    "a first axis": (
        norm(lambda m, x: (rms(x.movedim(1, -1), m.eps) * m.weight).movedim(-1, 1)),
        "forward fails on the CPU: RuntimeError",
    ),
    "rounding everywhere": (
        lambda: norm(lambda m, x: m.weight * rms(x, m.eps))().to(BF16),
        "in bfloat16 are no recipe's",
    ),
    "buffers": (BufferedNorm, "has buffers"),
    "a width of 1": (lambda: LlamaNorm(1), "its width is 1"),
    "float8": (lambda: nn.LayerNorm(WIDTH, dtype=torch.float8_e4m3fn), "weight is .*float8"),
    "hooks in forward's place": (with_own_forward, "forward was set on the instance"),
    "a parametrization": (parametrized, "is parametrized"),
    "a pruned weight": (pruned, "parameters are bias, weight_orig, not weight and bias"),
    "another kind of parameter": (with_a_parameter_of_another_kind, "weight is a TensorLike"),
    "batch norm": (lambda: nn.BatchNorm1d(WIDTH), "of torch.nn, only"),
    "one of ours": (lambda: cunorm.torch.RMSNorm(WIDTH), "runs cunorm already"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about float8
@pytest.mark.parametrize("name", LEFT)
def test_what_is_no_norm_of_cunorms_is_left_and_said_why(name):
    make, reason = LEFT[name]
    module = make()
    kind = type(module)
    done = replace_norms(module)
    assert not done.replaced and type(module) is kind
    (left,) = done.left
    assert (left.name, left.kind) == ("", kind.__name__)
    assert re.search(reason, left.reason), left.reason


def test_what_is_neither_called_a_norm_nor_is_one_is_not_reported():
    class Unnamed(Formula):
        forward = outside

    module = nn.Sequential(nn.Linear(4, 4), nn.PairwiseDistance(), Unnamed(4))
    done = replace_norms(module)
    assert done.replaced == done.left == ()
    assert str(done) == "0 norms replaced"


def test_exact_leaves_what_is_a_unit_in_the_last_place_off():
    module = GateRequiredNorm()
    assert replace_norms(copy.deepcopy(module)).replaced
    assert "within" not in replace_norms(copy.deepcopy(module), exact=True).replaced[0].runs
    x, gate = arguments("Qwen3-Next's", BF16)
    half = module.to(BF16)
    expected = half(x, gate)
    replace_norms(module, exact=True)
    assert torch.equal(half(x, gate), expected)


def test_a_probe_disturbs_nothing():
    module = norm(dropped, eps=3e-5)()  # which no other test has, as what is found is kept
    module.register_forward_hook(lambda *_: pytest.fail("a hook was run"))
    module.train()
    weight = module.weight
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        replace_norms(module)
    assert torch.equal(torch.rand(1), expected)
    assert module.weight is weight and weight.grad is None and module.training
