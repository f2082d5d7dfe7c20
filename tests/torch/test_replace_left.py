# SPDX-License-Identifier: MIT
"""The modules that replace_norms leaves, with the reason, and those that it does not report."""

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
    LastAxis,
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


def unchanged(m, x):
    return x


def with_attribute(module, name, value):
    setattr(module, name, value)
    return module


class WithModules(nn.LayerNorm):
    """A norm that runs its submodules not only on the norm's result, one after another."""

    def __init__(self, run):
        super().__init__(WIDTH)
        self.drop, self.act, self.run = nn.Identity(), nn.SiLU(), run

    def forward(self, x):
        return self.run(self, x, super().forward)


class Attention(nn.Module):
    """A module that calls torch's norm, but is more than a norm."""

    def __init__(self):
        super().__init__()
        self.query, self.proj = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.proj(nn.functional.layer_norm(self.query(x), (WIDTH,)))


class VideoNorm(nn.Module):
    """The norm of the VAEs of Wan and Qwen-Image: it divides by 1e-12 at least."""

    def __init__(self):
        super().__init__()
        self.scale, self.gamma = WIDTH**0.5, nn.Parameter(torch.ones(WIDTH, 1, 1))
        self.bias = 0.0

    def forward(self, x):
        return nn.functional.normalize(x, dim=1) * self.scale * self.gamma + self.bias


class Affine(nn.Module):
    """A module that calls torch's norm, but has neither the name nor the eps of a norm."""

    def forward(self, x):
        return nn.functional.layer_norm(x, (WIDTH,)) * 2


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
        return rms(x, self.eps) * self._parameters["weight"]


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
SUBMODULES = "^it has submodules: drop, act$"
NO_EPS = "^it has no eps: no number variance_epsilon, eps,"
LEFT = {
    "eps alone": (type("Scaled", (Formula,), {"forward": lambda m, x: x * m.weight}), REASON),
    "detached statistics": (norm(detached), "results of rms_norm.*, but not its gradients"),
    "detached statistics of images": (
        norm(lambda m, x: (detached if x.dim() > 3 else LlamaNorm.forward)(m, x)),
        "results of rms_norm.*, but not its gradients",
    ),
    "detached statistics in evaluation": (
        norm(lambda m, x: (LlamaNorm.forward if m.training else detached)(m, x)),
        "results of rms_norm.*, but not its gradients",
    ),
    "a small eps that is a lower bound": (
        lambda: norm(
            lambda m, x: m.weight * x * x.square().mean(-1, keepdim=True).clamp(min=m.eps).rsqrt()
        )(eps=1e-16),
        REASON,
    ),
    "an eps that is too small": (lambda: LlamaNorm(eps=1e-30), "its eps is 1e-30, too small"),
    "a small eps outside the root": (lambda: norm(outside)(eps=1e-9), "in float32 are no recipe's"),
    "an x of other sizes": (
        norm(lambda m, x: m.weight * rms(x.reshape(7, 11, 13, WIDTH), m.eps)),
        r"forward fails on the CPU, with an x of shape \(3, \d+, 32\): RuntimeError.*; "
        r"its forward fails on the CPU, with an x of shape \(3, 32, 2, \d+\): RuntimeError",
    ),
    "a simple norm of timm's": (
        norm(lambda m, x: x * torch.rsqrt(x.var(-1, keepdim=True) + m.eps) * m.weight),
        REASON,
    ),
    "a statistic of all rows of a wide x": (
        lambda: norm(
            lambda m, x: m.weight * x * torch.rsqrt(x.square().mean((-2, -1), True) + m.eps)
        )(2048),
        REASON,
    ),
    "a statistic of a whole image": (
        norm(
            lambda m, x: (
                (x * torch.rsqrt(x.square().mean((1, 2, 3), keepdim=True) + m.eps))
                * m.weight[:, None, None]
            )
        ),
        REASON,
    ),
    "rounding everywhere": (
        lambda: norm(lambda m, x: m.weight * rms(x, m.eps))().to(BF16),
        "in bfloat16 are no recipe's",
    ),
    "a submodule before the norm": (
        lambda: WithModules(lambda m, x, norm: norm(m.act(x))),
        SUBMODULES,
    ),
    "a submodule beside the norm": (
        lambda: WithModules(lambda m, x, norm: m.drop(norm(x)) + m.act(x)),
        SUBMODULES,
    ),
    "something after the submodules": (
        lambda: WithModules(lambda m, x, norm: m.act(norm(x)) + 1),
        SUBMODULES,
    ),
    "something between the submodules": (
        lambda: WithModules(lambda m, x, norm: m.act(m.drop(norm(x)) + 1)),
        SUBMODULES,
    ),
    "a submodule in training only": (
        lambda: WithModules(
            lambda m, x, norm: m.act(m.drop(norm(x))) if m.training else m.act(norm(x))
        ),
        SUBMODULES,
    ),
    "submodules without an eps": (Attention, "^it has submodules: query, proj$"),
    "two axes of a row": (
        lambda: type("OwnForward", (nn.LayerNorm,), {"forward": unchanged})(
            (4, WIDTH), elementwise_affine=False
        ),
        r"^its normalized_shape is \(4, 32\), more than one axis$",
    ),
    "an eps that is a lower bound": (
        VideoNorm,
        "^it calls normalize, whose eps is a lower bound of the norm, not added to the mean square",
    ),
    "buffers": (lambda: with_attribute(LlamaNorm(), "scale", nn.Buffer(x_of())), "has buffers"),
    "a width of 1": (lambda: LlamaNorm(1), "its width is 1"),
    "float8": (lambda: nn.LayerNorm(WIDTH, dtype=torch.float8_e4m3fn), "weight is .*float8"),
    "hooks in forward's place": (
        lambda: with_attribute(LlamaNorm(), "forward", lambda x: x),
        "forward was set on the instance",
    ),
    "a parametrization": (
        lambda: parametrize.register_parametrization(nn.LayerNorm(8), "weight", nn.Identity()),
        "is parametrized",
    ),
    "a pruned weight": (
        lambda: prune.l1_unstructured(nn.LayerNorm(WIDTH), "weight", 0.5),
        "parameters are bias, weight_orig, not weight and bias",
    ),
    "another kind of parameter": (
        lambda: with_attribute(nn.RMSNorm(WIDTH), "weight", TensorLike(torch.ones(WIDTH))),
        "weight is of type TensorLike, not a plain Parameter",
    ),
    "an attribute in place of a parameter": (
        Hidden,
        "^its attribute weight is not the parameter weight$",
    ),
    "an attribute of an option's name": (
        lambda: with_attribute(nn.GroupNorm(2, WIDTH), "activation", "relu"),
        "an attribute activation of its own",
    ),
    "an attribute of an option's name that torch has elsewhere": (
        lambda: with_attribute(nn.RMSNorm(WIDTH), "bias", False),
        "an attribute bias of its own",
    ),
    "a group norm with another forward": (
        lambda: type("Other", (nn.GroupNorm,), {"forward": lambda m, x: x * m.weight})(2, WIDTH),
        REASON,
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
    "a name that ends otherwise": (type("RMSNorm2", (nn.Module,), {"forward": unchanged}), NO_EPS),
    "small letters": (type("mynorm", (nn.Module,), {"forward": unchanged}), NO_EPS),
    "a call of torch's norm": (Affine, NO_EPS),
    "a script": (lambda: torch.jit.script(nn.LayerNorm(WIDTH)), "^it is a ScriptModule"),
}
LEFT |= {name: (norm(formula), REASON) for name, formula in NO_RECIPE.items()}
LEFT |= {f"eps={eps!r}": (lambda e=eps: LlamaNorm(eps=e), NO_EPS) for eps in (True, None, "1e-5")}


@pytest.mark.filterwarnings("ignore::UserWarning")  # of torch, about float8
@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("name", LEFT)
def test_whatever_may_normalise_but_is_no_norm_of_cunorm_is_left_with_a_reason(name):
    make, reason = LEFT[name]
    module = make()
    kind = type(module)
    done = replace_norms(nn.ModuleList([nn.Linear(2, 2), module]))
    assert not done.replaced and type(module) is kind
    (left,) = done.left
    assert left[:2] == ("1", "LayerNorm" if name == "a script" else kind.__name__)
    assert re.search(reason, left.reason), left.reason


class Block(nn.Module):
    """A module that is no norm, although the name of one of its modules suggests it."""

    def __init__(self):
        super().__init__()
        self.layer_norm, self.attention = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.attention(self.layer_norm(x))


def test_nothing_else_is_reported():
    """CosineSimilarity, which has an eps, and a compiled module around a norm are no norms."""
    compiled = torch.compile(LlamaNorm(), backend="eager")
    done = replace_norms(nn.ModuleList([Block(), nn.CosineSimilarity(), compiled]))
    assert [one.name for one in done.replaced] == ["0.layer_norm", "2._orig_mod"]
    assert not done.left


def test_the_recipe_of_a_class_is_not_used_for_an_object_with_other_settings():
    done = replace_norms(nn.ModuleList([LastAxis(), LastAxis(first=True)]))
    assert ["axis=(1,)" in one.runs for one in done.replaced] == [False, True]


@pytest.mark.parametrize("eps", [0.0, 2e-20, 1e-16, 1e-12, 1e-8])
def test_norms_with_a_small_eps_are_replaced(eps):
    for module in (LlamaNorm(eps=eps), LastAxis(first=True)):
        module.eps = eps
        (done,) = replace_norms(module).replaced
        assert f"eps={eps}" in done.runs and "float16" not in done.runs


def test_a_norm_may_ask_for_the_class_and_settings_of_its_submodules():
    def forward(m, x):
        y = nn.LayerNorm.forward(m, x)
        return m.act(y) if isinstance(m.act, nn.LeakyReLU) and m.act.negative_slope else y

    module = type("ActNorm", (nn.LayerNorm,), {"forward": forward})(WIDTH)
    module.act = nn.LeakyReLU()
    expected = module(x_of())
    (done,) = replace_norms(module).replaced
    assert "then act" in done.runs
    torch.testing.assert_close(module(x_of()), expected)


def test_exact_leaves_calls_that_are_a_unit_in_the_last_place_off():
    module = GateRequiredNorm()
    (done,) = replace_norms(copy.deepcopy(module), exact=True).replaced
    assert "within" not in done.runs and "; its own forward for bfloat16, float16" in done.runs
    given = arguments("Qwen3-Next's", BF16)
    half = module.to(BF16)
    expected = half(*given)
    replace_norms(module, exact=True)
    assert torch.equal(half(*given), expected)


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
    weight = module.weight
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    with torch.inference_mode():
        replace_norms(module)
    assert torch.equal(torch.rand(1), expected)
    assert module.weight is weight and weight.grad is None and module.training
