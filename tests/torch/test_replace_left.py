# SPDX-License-Identifier: MIT
"""The modules that replace_norms leaves, with the reason."""

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
    GateRequiredNorm,
    LlamaNorm,
    arguments,
    norm,
    rms,
    x_of,
)


def outside(m, x):
    return m.weight * x / (x.square().mean(-1, keepdim=True).sqrt() + m.eps)


def dropped(m, x):
    return nn.functional.dropout(m.weight * rms(x, m.eps), training=m.training)


def detached(m, x):
    return m.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + m.eps).detach()


def parametrized(module):
    return parametrize.register_parametrization(module, "weight", nn.Identity())


def with_attribute(module, name, value):
    setattr(module, name, value)
    return module


class Reducing(nn.LayerNorm):
    """A norm with its own way to copy and pickle."""

    def __reduce__(self):
        return type(self), (WIDTH,)


class TensorLike(nn.Parameter):
    """A parameter that represents another tensor, like a DTensor: it has operators of its own."""

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


class Tagged:
    """A base class that requires a keyword from each subclass."""

    def __init_subclass__(cls, *, tag):
        super().__init_subclass__()


class TaggedLlamaNorm(LlamaNorm, Tagged, tag="Llama"):
    pass


class TaggedLayerNorm(nn.LayerNorm, Tagged, tag="torch"):
    pass


class LazyEps(nn.Module):
    @property
    def eps(self):
        raise RuntimeError("not loaded")


NO_RECIPE = {
    "eps outside the root": outside,
    "dropout": dropped,
    "the number of axes": lambda m, x: (
        m.weight * rms(x, m.eps) * (x.shape[1] if x.ndim == 4 else 1)
    ),
    "another in eval()": lambda m, x: m.weight * rms(x, m.eps) * (1 if m.training else 2),
    "an L2 norm": lambda m, x: m.weight * nn.functional.normalize(x, dim=-1, eps=m.eps),
    "no numbers": lambda m, x: m.weight * rms(x, m.eps) * float("nan"),
}
REASON = "results in float32 are no recipe's.*(off|of another kind)"
LEFT = {name: (norm(formula), REASON) for name, formula in NO_RECIPE.items()} | {
    "detached statistics": (norm(detached), "results of rms_norm.*, but not its gradients"),
    "a small eps outside the root": (lambda: norm(outside)(eps=1e-9), "in float32 are no recipe's"),
    "a first axis": (
        norm(lambda m, x: (rms(x.movedim(1, -1), m.eps) * m.weight).movedim(-1, 1)),
        r"forward fails on the CPU, with rows \(3, \d+, \d+\): RuntimeError",
    ),
    "rounding everywhere": (
        lambda: norm(lambda m, x: m.weight * rms(x, m.eps))().to(BF16),
        "in bfloat16 are no recipe's",
    ),
    "buffers": (lambda: with_attribute(LlamaNorm(), "scale", nn.Buffer(x_of())), "has buffers"),
    "a width of 1": (lambda: LlamaNorm(1), "its width is 1"),
    "float8": (lambda: nn.LayerNorm(WIDTH, dtype=torch.float8_e4m3fn), "weight is .*float8"),
    "hooks in forward's place": (
        lambda: with_attribute(LlamaNorm(), "forward", lambda x: x),
        "forward was set on the instance",
    ),
    "a parametrization": (lambda: parametrized(nn.LayerNorm(WIDTH)), "is parametrized"),
    "a pruned weight": (
        lambda: prune.l1_unstructured(nn.LayerNorm(WIDTH), "weight", 0.5),
        "parameters are bias, weight_orig, not weight and bias",
    ),
    "another kind of parameter": (
        lambda: with_attribute(nn.RMSNorm(WIDTH), "weight", TensorLike(torch.ones(WIDTH))),
        "weight is of type TensorLike, not a plain Parameter",
    ),
    "an attribute of an option's name": (
        lambda: with_attribute(nn.GroupNorm(2, WIDTH), "activation", "relu"),
        "an attribute activation of its own",
    ),
    "a group norm with another forward": (
        lambda: type("Other", (nn.GroupNorm,), {"forward": lambda m, x: x * m.weight})(2, WIDTH),
        "^of torch.nn.GroupNorm only the class's own forward is replaced, this one has another$",
    ),
    "a keyword of its subclasses": (TaggedLlamaNorm, "its class raises TypeError: .*'tag'"),
    "a norm of torch's with such a keyword": (
        lambda: TaggedLayerNorm(WIDTH),
        "class raises TypeError",
    ),
    "an eps that raises": (LazyEps, "its class raises RuntimeError: not loaded"),
    "another form of copies": (lambda: Reducing(WIDTH), "its own form of copies"),
    "batch norm": (lambda: nn.BatchNorm1d(WIDTH), "of torch.nn, only"),
    "one of ours": (lambda: cunorm.torch.RMSNorm(WIDTH), "it runs cunorm already$"),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about float8
@pytest.mark.parametrize("name", LEFT)
def test_a_module_that_is_no_norm_of_cunorm_is_left_with_a_reason(name):
    make, reason = LEFT[name]
    module = make()
    kind = type(module)
    done = replace_norms(module)
    assert not done.replaced and type(module) is kind
    (left,) = done.left
    assert (left.name, left.kind) == ("", kind.__name__)
    assert re.search(reason, left.reason), left.reason


def test_exact_leaves_calls_that_are_a_unit_in_the_last_place_off():
    module = GateRequiredNorm()
    assert replace_norms(copy.deepcopy(module)).replaced
    assert "within" not in replace_norms(copy.deepcopy(module), exact=True).replaced[0].runs
    x, gate = arguments("Qwen3-Next's", BF16)
    half = module.to(BF16)
    expected = half(x, gate)
    replace_norms(module, exact=True)
    assert torch.equal(half(x, gate), expected)


def test_only_calls_that_are_a_unit_off_are_reported_as_a_unit_off():
    def forward(m, x, gate=None):
        y = LlamaNorm.forward(m, x)
        return y if gate is None else (y * nn.functional.silu(gate.float())).to(x.dtype)

    plain, gated = replace_norms(norm(forward)()).replaced[0].runs.split("; ")
    assert "gate" in gated and "within a unit in the last place" in gated
    assert "within" not in plain


def test_a_probe_disturbs_nothing():
    module = norm(dropped)()
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


class Hidden(nn.Module):
    """A norm whose attribute `weight` is not the parameter that its forward reads."""

    def __init__(self):
        super().__init__()
        self._parameters["weight"] = nn.Parameter(torch.ones(8))
        self.eps = 1e-6

    @property
    def weight(self):
        return self._parameters["weight"] + 1

    def forward(self, x):
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self._parameters["weight"]


def test_a_norm_whose_attribute_is_not_its_parameter_is_left():
    (left,) = replace_norms(Hidden()).left
    assert left.reason == "its attribute weight is not the parameter weight"
