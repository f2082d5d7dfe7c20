# SPDX-License-Identifier: MIT
"""replace_norms on norms of images, as in timm and diffusers, and on norms with an activation."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

from cunorm.torch import replace_norms, restore_norms  # noqa: E402
from tests.support.torch_norms import BF16, EPS, F32, F64, check_results, drawn, results  # noqa: E402

CHANNELS = 12
IMAGE = (2, CHANNELS, 5, 7)
VIDEO = (2, CHANNELS, 3, 5, 2)


def draw_parameters(module):
    """Give the parameters of a norm other values than 0 and 1, and return the norm."""
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters(recurse=False), 1):
            parameter.copy_(drawn(*parameter.shape, seed=seed))
    return module


class LayerNorm2d(nn.LayerNorm):
    """timm's norm of axis 1."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class LayerNorm2dFp32(nn.LayerNorm):
    """timm's norm of axis 1 that computes in float32."""

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        y = F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)
        return y.permute(0, 3, 1, 2)


class LayerNormExp2d(nn.LayerNorm):
    """timm's norm of axis 1 that has another formula in channels_last memory."""

    def forward(self, x):
        if x.is_contiguous():
            return LayerNorm2d.forward(self, x)
        s, u = torch.var_mean(x, dim=1, unbiased=False, keepdim=True)
        x = (x - u) * torch.rsqrt(s + self.eps)
        return x * self.weight[:, None, None] + self.bias[:, None, None]


class RmsNorm2d(nn.Module):
    """timm's RMS norm of axis 1, which computes in float32 if `wide`."""

    def __init__(self, wide=False, shape=(CHANNELS,)):
        super().__init__()
        self.eps, self.wide = EPS, wide
        self.weight = nn.Parameter(torch.ones(shape))

    def forward(self, x):
        rows, weight = (x.float(), self.weight.float()) if self.wide else (x, self.weight)
        y = rows * torch.rsqrt(rows.pow(2).mean(1, keepdim=True) + self.eps)
        weight = weight.reshape(1, -1, 1, 1) if weight.dim() == 1 else weight
        return (y * weight).to(x.dtype)


class PerChannelNorm(nn.Module):
    """The norm of LTX-2's VAE, which has no parameters and accepts any number of axes."""

    def __init__(self):
        super().__init__()
        self.channel_dim, self.eps = 1, 1e-8

    def forward(self, x):
        return x / torch.sqrt(torch.mean(x**2, dim=self.channel_dim, keepdim=True) + self.eps)


class FP32LayerNorm(nn.LayerNorm):
    """diffusers' norm of tokens that computes in float32."""

    def forward(self, x):
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).to(x.dtype)


class GroupNorm1(nn.GroupNorm):
    """timm's group norm, a subclass of torch's with a forward of its own."""

    def forward(self, x):
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


def with_act(base, *arguments, act, drop=None):
    """Return timm's norm with an activation, whose class is made from that of the norm."""

    def forward(self, x):
        x = base.forward(self, x)
        x = self.drop(x)
        return self.act(x)

    module = type(f"{base.__name__}Act", (base,), {"forward": forward})(*arguments)
    module.drop, module.act = drop or nn.Identity(), act
    return module


def groups_with(act, drop=None):
    return with_act(GroupNorm1, 3, CHANNELS, act=act, drop=drop)


HALF = "its own forward for bfloat16, float16, bfloat16/float32, float16/float32"
# For each name: what creates the norm, the shape of x, and what the report says.
NORMS = {
    "LayerNorm2d": (lambda: LayerNorm2d(CHANNELS), IMAGE, "layer_norm(eps=1e-05, axis=(1,))"),
    "LayerNorm2dFp32": (
        lambda: LayerNorm2dFp32(CHANNELS),
        IMAGE,
        "layer_norm(eps=1e-05, axis=(1,))",
    ),
    "LayerNorm2d without parameters": (
        lambda: LayerNorm2d(CHANNELS, elementwise_affine=False),
        IMAGE,
        "layer_norm(eps=1e-05, axis=(1,))",
    ),
    "LayerNorm2d without bias": (
        lambda: LayerNorm2d(CHANNELS, bias=False),
        IMAGE,
        "layer_norm(eps=1e-05, axis=(1,))",
    ),
    "another formula in channels_last memory": (
        lambda: LayerNormExp2d(CHANNELS),
        IMAGE,
        f"layer_norm(eps=1e-05, axis=(1,)); {HALF}",
    ),
    "RmsNorm2d": (RmsNorm2d, IMAGE, f"rms_norm(eps=1e-05, axis=(1,)); {HALF}"),
    "RmsNorm2dFp32": (lambda: RmsNorm2d(True), IMAGE, "rms_norm(eps=1e-05, axis=(1,))"),
    "a weight of three axes": (
        lambda: RmsNorm2d(True, (CHANNELS, 1, 1)),
        IMAGE,
        "rms_norm(eps=1e-05, axis=(1,))",
    ),
    "a weight of four axes": (
        lambda: RmsNorm2d(True, (CHANNELS, 1, 1, 1)),
        VIDEO,
        "rms_norm(eps=1e-05, axis=(1,))",
    ),
    "PerChannelNorm": (PerChannelNorm, VIDEO, "rms_norm(eps=1e-08, axis=(1,))"),
    "FP32LayerNorm": (lambda: FP32LayerNorm(CHANNELS), (2, 9, CHANNELS), "layer_norm(eps=1e-05)"),
    "FP32LayerNorm without parameters": (
        lambda: FP32LayerNorm(CHANNELS, elementwise_affine=False),
        (2, 9, CHANNELS),
        "layer_norm(eps=1e-05)",
    ),
    "GroupNorm1": (lambda: GroupNorm1(1, CHANNELS), IMAGE, "group_norm(1, eps=1e-05)"),
    "groups": (lambda: GroupNorm1(3, CHANNELS), VIDEO, "group_norm(3, eps=1e-05)"),
    "groups without parameters": (
        lambda: GroupNorm1(3, CHANNELS, affine=False),
        IMAGE,
        "group_norm(3, eps=1e-05)",
    ),
    "each channel a group": (
        lambda: GroupNorm1(CHANNELS, CHANNELS),
        IMAGE,
        "group_norm(12, eps=1e-05)",
    ),
    "GroupNormAct": (
        lambda: groups_with(nn.SiLU(inplace=True)),
        IMAGE,
        "group_norm(3, eps=1e-05, activation=silu)",
    ),
    "GroupNormAct with another activation": (
        lambda: groups_with(nn.Hardswish()),
        IMAGE,
        "group_norm(3, eps=1e-05), then drop, act",
    ),
    "LayerNormAct2d": (
        lambda: with_act(LayerNorm2d, CHANNELS, act=nn.ReLU(inplace=True)),
        IMAGE,
        "layer_norm(eps=1e-05, axis=(1,)), then drop, act",
    ),
    "RmsNormAct2d": (
        lambda: with_act(RmsNorm2d, True, act=nn.SiLU(inplace=True)),
        IMAGE,
        "rms_norm(eps=1e-05, axis=(1,)), then drop, act",
    ),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_norm_of_images_runs_the_kernels_of_its_formula(name, channels_last, monkeypatch):
    make, shape, runs = NORMS[name]
    x = drawn(*shape, seed=3)
    x = x.movedim(1, -1).contiguous().movedim(-1, 1) if channels_last else x
    assert check_results(draw_parameters(make()), (x,), monkeypatch).startswith(runs)


# Those that compute in float32 and round once; fused activations are compared below.
EXACT = [
    name
    for name, (_, _, runs) in NORMS.items()
    if HALF not in runs and name not in ("PerChannelNorm", "GroupNormAct")
]


@pytest.mark.parametrize("name", EXACT)
def test_a_norm_of_images_keeps_its_bits_in_half_precision(name, monkeypatch):
    make, shape, _ = NORMS[name]
    module = draw_parameters(make()).to(BF16)
    check_results(module, (drawn(*shape, seed=3, dtype=BF16),), monkeypatch)


ACTIVATIONS = {
    "relu": nn.ReLU(),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "identity": nn.Identity(),
}


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_fused_activation_is_nearer_to_the_exact_result_than_two_roundings(activation):
    """In bfloat16 the module's own norm is rounded before its activation, cunorm's is not."""
    module = draw_parameters(groups_with(ACTIVATIONS[activation])).to(BF16)
    x = drawn(*IMAGE, seed=3, dtype=BF16)
    exact = copy.deepcopy(module).to(F64)(x.double())
    own = module(x)
    done = replace_norms(module).replaced[0]
    assert f", activation={activation})" in done.runs
    y = module(x)
    # Half a unit of the result, and 2**-20 of the largest terms, as documented.
    allowed = 2.0**-8 * exact.abs() + 2.0**-20 * exact.abs().max()
    assert ((y.double() - exact).abs() <= allowed).all()
    if activation in ("relu", "identity"):
        assert torch.equal(y, own)


def test_exact_fuses_only_activations_that_commute_with_a_rounding():
    runs = {}
    for name, act in ACTIVATIONS.items():
        (done,) = replace_norms(groups_with(act), exact=True).replaced
        runs[name] = "activation=" in done.runs
    assert {name for name, is_fused in runs.items() if is_fused} == {"relu", "identity"}


class Doubled(nn.Module):
    """An activation whose gradient is not that of its formula."""

    def forward(self, x):
        return x + (x.relu() - x).detach()


class AtZero(nn.Module):
    """A ReLU whose gradient at 0 is 1."""

    def forward(self, x):
        return x.clamp(min=0)


class Called(nn.ReLU):
    def __call__(self, x):
        return super().__call__(x) * 2


class Swish(nn.Module):
    """An activation with a setting."""

    def __init__(self):
        super().__init__()
        self.beta = 1.0

    def forward(self, x):
        return x * torch.sigmoid(self.beta * x)


NOT_FUSED = {
    "two activations": (nn.ReLU(), nn.Tanh()),
    "dropout": (nn.SiLU(), nn.Dropout(0.5)),
    "parameters": (nn.PReLU(), None),
    "another gradient": (Doubled(), None),
    "a bound of large numbers": (nn.ReLU6(), None),
    "a bound of larger numbers": (nn.Hardtanh(0, 25.0), None),
    "another gradient at 0": (AtZero(), None),
    "a call of its own": (Called(), None),
}


@pytest.mark.parametrize("name", NOT_FUSED)
def test_other_submodules_run_after_the_norm(name):
    module = draw_parameters(groups_with(*NOT_FUSED[name]))
    own, x = copy.deepcopy(module), drawn(*IMAGE)
    (done,) = replace_norms(module).replaced
    assert ", then drop, act" in done.runs
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = results(own, x)
        torch.manual_seed(0)
        actual = results(module, x)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_hooks_and_new_submodules_of_a_norm_with_a_fused_activation_take_effect():
    module, x, seen = groups_with(nn.SiLU()), drawn(*IMAGE), []
    own = copy.deepcopy(module)
    assert "activation=silu" in replace_norms(module).replaced[0].runs
    hook = module.act.register_forward_hook(lambda _, given, y: seen.append((*given, y)))
    torch.testing.assert_close(module(x), own(x))
    torch.testing.assert_close(seen[0][0], GroupNorm1.forward(own, x))
    hook.remove()
    module.act = own.act = nn.Tanh()
    torch.testing.assert_close(module(x), own(x))
    assert len(seen) == 1


CHANGES = {
    "approximate": (nn.GELU, lambda m: setattr(m.act, "approximate", "tanh")),
    "another GELU": (nn.GELU, lambda m: setattr(m, "act", nn.GELU("tanh"))),
    "a probability": (nn.SiLU, lambda m: setattr(m.drop, "p", 0.5)),
    "a factor": (Swish, lambda m: setattr(m.act, "beta", 2.0)),
    "a tensor": (Swish, lambda m: setattr(m.act, "beta", torch.tensor(2.0))),
    "a forward": (nn.SiLU, lambda m: setattr(m.act, "forward", torch.tanh)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_later_settings_of_a_fused_activation_take_effect(name):
    kind, change = CHANGES[name]
    module, x = groups_with(kind(), nn.Dropout(0.0)), drawn(*IMAGE)
    own = copy.deepcopy(module)
    assert "activation=" in replace_norms(module).replaced[0].runs
    torch.testing.assert_close(module(x), own(x))
    for one in (module, own):
        change(one)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        expected = own(x)
        torch.manual_seed(0)
        torch.testing.assert_close(module(x), expected)


def test_a_failing_submodule_raises_its_own_error():
    module = groups_with(nn.Hardswish())
    replace_norms(module)
    module.act.forward = lambda x: (_ for _ in ()).throw(ValueError("the activation's"))
    with pytest.raises(ValueError, match="the activation's"):
        module(drawn(*IMAGE))


class ByShape(nn.LayerNorm):
    """A norm of axis 1 if that has the norm's width, otherwise of the last axis."""

    def forward(self, x):
        is_first = x.dim() == 4 and x.shape[1] == self.normalized_shape[0]
        return LayerNorm2d.forward(self, x) if is_first else super().forward(x)


class OnlyByShape(ByShape):
    def forward(self, x):
        if x.dim() != 4:
            raise ValueError("it takes images")
        return super().forward(x)


def test_a_norm_that_finds_its_axis_by_the_shape_runs_itself():
    module = draw_parameters(ByShape(CHANNELS))
    own = copy.deepcopy(module)
    (done,) = replace_norms(module).replaced
    assert "its own forward for an x of 4 axes" in done.runs
    for shape in (IMAGE, (2, 5, 7, CHANNELS), (2, CHANNELS, 5, CHANNELS), (3, 5, CHANNELS)):
        torch.testing.assert_close(module(drawn(*shape)), own(drawn(*shape)))
    (left,) = replace_norms(OnlyByShape(CHANNELS)).left
    assert left.reason == "the axis of its rows depends on x's shape"


class Cast(nn.LayerNorm):
    """timm's "fast norm": under autocast it first rounds x to autocast's dtype."""

    def forward(self, x):
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class ReadsDevice(LayerNorm2d):
    """A norm like Apex's, which has its own kernels on a GPU."""

    def forward(self, x):
        if x.is_cuda:
            raise NotImplementedError
        return super().forward(x)


AUTOCAST = {
    "torch's norm": (lambda: LayerNorm2d(CHANNELS), {"cpu": False, "cuda": True}),
    "a group norm": (lambda: GroupNorm1(3, CHANNELS), {"cpu": False, "cuda": True}),
    "float32 and back": (lambda: LayerNorm2dFp32(CHANNELS), {"cpu": False, "cuda": False}),
    "a formula": (lambda: RmsNorm2d(True), {"cpu": False, "cuda": False}),
    "a rounded x": (lambda: Cast(7), {}),
    "another GPU's": (lambda: ReadsDevice(CHANNELS), {"cpu": False}),
}


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast_changes_dtypes_as_in_the_module_itself(name):
    """On CUDA, autocast runs torch's norms in float32; a mode of the probe does so on a CPU."""
    make, wide = AUTOCAST[name]
    module = make()
    usual, x = copy.deepcopy(module), drawn(*IMAGE)
    (done,) = replace_norms(module).replaced
    assert type(module)._cunorm_plan.autocast == wide
    own = {0: ", under autocast", 1: "; its own forward under autocast on a GPU", 2: ""}[len(wide)]
    assert done.runs.endswith(own) and bool(own) == ("autocast" in done.runs)
    for given in (x, x.to(BF16)):
        with torch.autocast("cpu", BF16):
            y, expected = module(given), usual(given)
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected)
    key = ("cuda", (BF16, F32), False, True)
    call = module._cunorm_calls.get(key)
    if call is not None:
        y = call(x.to(BF16), module.weight, eps=module.eps, gate=None)
        assert y.dtype == (F32 if wide["cuda"] else BF16)


@pytest.mark.parametrize("name", ["LayerNorm2d", "GroupNormAct", "LayerNormAct2d"])
def test_a_norm_of_images_is_copied_restored_and_compiled(name):
    make, shape, _ = NORMS[name]
    module, x = draw_parameters(make()), drawn(*shape)
    own = copy.deepcopy(module)
    replace_norms(module)
    y = module(x)
    copied = copy.deepcopy(module)
    assert type(copied) is type(module) and torch.equal(copied(x), y)
    assert list(module.state_dict()) == list(own.state_dict())
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), y)
    assert restore_norms(module) == 1 and type(module) is type(own)
    assert torch.equal(module(x), own(x))


def test_a_norm_of_images_is_pickled():
    module, x = draw_parameters(LayerNorm2d(CHANNELS)), drawn(*IMAGE)
    replace_norms(module)
    loaded = pickle.loads(pickle.dumps(module))
    assert type(loaded) is type(module) and torch.equal(loaded(x), module(x))
