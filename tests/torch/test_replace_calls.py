# SPDX-License-Identifier: MIT
"""Calls in which a replaced norm runs its own forward, the report of them, and warnings."""

import copy
import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

from cunorm.torch import replace_norms, restore_norms  # noqa: E402
from tests.support.torch_norms import (  # noqa: E402
    BF16,
    F64,
    WIDTH,
    Formula,
    Gated,
    GateRequiredNorm,
    LastAxis,
    LlamaNorm,
    T5Norm,
    arguments,
    drawn,
    rms,
    x_of,
)

X, GATE = arguments("a gate after")


class CastNorm(nn.LayerNorm):
    """timm's norm: under autocast it first rounds x to autocast's dtype."""

    def forward(self, x):
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = self.weight.to(x.dtype), self.bias.to(x.dtype)
            return nn.functional.layer_norm(x, self.normalized_shape, weight, bias, self.eps)


class CastFormula(Formula):
    """A CastNorm with a formula of its own."""

    def forward(self, x):
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        return (rms(x.float(), self.eps) * self.weight.float()).to(x.dtype)


class OptionalArguments(Formula):
    """A norm whose gate has a formula that cunorm lacks, with a further argument."""

    def forward(self, x, gate=None, more=0.0):
        return rms(x, self.eps) * self.weight * (1.0 if gate is None else gate.cos()) + more


class RowsNorm(Formula):
    """A norm that accepts only two or three axes."""

    def forward(self, x):
        batch, width = x.flatten(0, x.dim() - 2).shape if x.dim() < 4 else x.shape
        return (rms(x.reshape(batch, width), self.eps) * self.weight).reshape(x.shape)


class OwnGroupNorm(nn.GroupNorm):
    """timm's norm: a subclass of torch's with a forward of its own."""

    def forward(self, x):
        return nn.functional.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class ConvNeXtNorm(Formula):
    """A norm of axis 1 of images, and of the last axis of other x."""

    def forward(self, x):
        if x.dim() < 4:
            return self.weight * rms(x, self.eps)
        return (self.weight * rms(x.movedim(1, -1), self.eps)).movedim(-1, 1)


def under_autocast(m):
    with torch.autocast("cpu", BF16):
        return m(X)


HALF = "bfloat16, float16, bfloat16/float32, float16/float32"  # in these, rms(x) rounds each step
# By name: the module, where the report says that its own forward runs, and such calls.
OWN = {
    "torch's norm, rounded under autocast": (
        lambda: CastNorm(WIDTH),
        "for bfloat16/float32, float16/float32, under autocast",
        [under_autocast, lambda m: m(X.bfloat16())],
    ),
    "a formula, rounded under autocast": (CastFormula, "under autocast", [under_autocast]),
    "groups without positions": (
        lambda: OwnGroupNorm(2, 8),
        "for an x of 2 axes",
        [lambda m: m(X[:, :, 0])],
    ),
    "an error for some numbers of axes": (RowsNorm, f"for {HALF}", []),
    "some pairs of dtypes": (
        T5Norm,
        "for float32/bfloat16, float32/float16",
        [lambda m: m.to(BF16)(X)],
    ),
    "without a gate": (
        OptionalArguments,
        f"for {HALF} without a gate, with a gate",
        [
            lambda m: m(X, GATE),
            lambda m: m(X, GATE, 1.0),
            lambda m: m(X, None, 2.0),
            lambda m: m(X, more=2.0),
        ],
    ),
    "a gate of another shape or dtype": (
        Gated,
        "",
        [lambda m: m(X, GATE[..., :1]), lambda m: m(X, GATE.bfloat16())],
    ),
}
# Calls in which cunorm runs, although they are unusual.
OURS = {
    "a formula under autocast": (LlamaNorm, under_autocast),
    "x and gate by name": (GateRequiredNorm, lambda m: m(gate=GATE, hidden_states=X)),
    "gate by name": (GateRequiredNorm, lambda m: m(X, gate=GATE)),
    "torch's norm under autocast": (LastAxis, under_autocast),
    "rows": (ConvNeXtNorm, lambda m: m(X[0])),
    "images": (ConvNeXtNorm, lambda m: m(drawn(2, WIDTH, 5, WIDTH))),
    "videos": (ConvNeXtNorm, lambda m: m(drawn(2, WIDTH, 3, 5, 7))),
    "groups": (lambda: OwnGroupNorm(2, WIDTH), lambda m: m(drawn(2, WIDTH, 5, 7))),
}


def counted(patch, kind):
    """Return a list that grows with each call of a class's own forward."""
    calls, own = [], kind.forward
    patch.setattr(kind, "forward", lambda *given, **named: calls.append(1) or own(*given, **named))
    return calls


@pytest.mark.parametrize("name", OWN)
def test_the_own_forward_runs_where_the_report_says_so(name, monkeypatch):
    make, condition, unusual = OWN[name]
    module = make()
    own, kind = copy.deepcopy(module), type(module)
    *_, last = replace_norms(module).replaced[0].runs.split("; ")
    assert last == f"its own forward {condition}" if condition else "own forward" not in last
    calls = counted(monkeypatch, kind)
    y = module(X)
    assert not calls
    torch.testing.assert_close(y, own(X))
    for call in unusual:
        expected = call(own)
        calls.clear()
        y = call(module)
        assert len(calls) == 1 and y.dtype == expected.dtype and torch.equal(y, expected)


def test_the_report_says_which_x_has_its_rows_along_axis_1():
    first, second, _ = replace_norms(ConvNeXtNorm()).replaced[0].runs.split("; ")
    assert first == "rms_norm(eps=1e-05)" and second == "axis=(1,) for an x of 4 or 5 axes"


@pytest.mark.parametrize("name", OURS)
def test_the_own_forward_runs_nowhere_else(name, monkeypatch):
    make, call = OURS[name]
    module = make()
    kind, expected = type(module), call(module)
    replace_norms(module)
    calls = counted(monkeypatch, kind)
    torch.testing.assert_close(call(module), expected)
    assert not calls


def test_an_x_that_is_given_twice_is_refused():
    module = Gated()
    replace_norms(module)
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        module(X, x=X)


# --- calls that cunorm's operators cannot run -----------------------------------------------------


NORMS = {
    "Llama's": LlamaNorm,
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "GroupNorm": lambda: nn.GroupNorm(4, 8),
    "one that calls torch's": LastAxis,
}
OF_TORCH = ["RMSNorm", "LayerNorm", "GroupNorm"]


class Subclassed(nn.Parameter):
    """A class of parameters with plain memory."""


class Renamed(torch.Tensor):
    """A tensor class that adds only a name."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def fresh(name):
    """Return a norm of a class that no other test uses, as each class warns once; and a copy."""
    module = NORMS[name]()
    module.__class__ = type("Fresh" + type(module).__name__, (type(module),), {})
    own = copy.deepcopy(module)
    assert replace_norms(module).replaced
    return module, own


def run(call, module):
    """Return the result of a call, and cunorm's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = call(module)
    texts = [str(one.message) for one in caught]
    return y, [text for text in texts if "forward" in text]


def plain(m):
    return m(X)


def nested(m):
    rows = [torch.ones(8, WIDTH), torch.arange(2.0 * WIDTH).reshape(2, WIDTH)]
    return m(torch.nested.nested_tensor(rows, layout=torch.jagged)).values()


def forward_mode(m):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(m(forward_ad.make_dual(X, torch.ones_like(X)))).tangent


def jvp(m):
    return torch.func.jvp(m, (X,), (torch.ones_like(X),))


def complex_numbers(m):
    return m(X.to(torch.complex64))


# For each call: the norms whose own forward can run it, and the reason in the warning.
FALLBACKS = {
    nested: (["Llama's", "RMSNorm", "LayerNorm"], "a tensor is nested"),
    complex_numbers: (["RMSNorm"], "a tensor has dtype complex64"),
}


@pytest.mark.parametrize(
    "call, name", [(call, name) for call, (names, _) in FALLBACKS.items() for name in names]
)
def test_the_own_forward_runs_unsupported_calls_with_one_warning(call, name):
    module, own = fresh(name)
    y, texts = run(call, module)
    kind, reason = type(own).__name__, FALLBACKS[call][1]
    assert texts == [f"{kind}: a replaced norm runs its own forward: {reason}"]
    torch.testing.assert_close(y, call(own))
    assert not run(call, module)[1] and not run(plain, module)[1]


@pytest.mark.parametrize(
    "name, call", [("Llama's", nested), ("RMSNorm", nested), ("RMSNorm", complex_numbers)]
)
def test_norms_that_cunorm_cannot_run_are_compiled_with_their_own_forward(name, call):
    module, own = fresh(name)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(call(compiled), call(own))
    assert torch.equal(compiled(X), module(X))


def with_parameters(m):
    for name, parameter in [*m._parameters.items()]:
        m._parameters[name] = Subclassed(parameter.detach())
    swapped = m(X)
    if restore_norms(m):
        assert replace_norms(m).replaced
    return torch.stack([swapped, m(X)])


def no_items(m):
    weights = {name: p.detach().expand(0, *p.shape) for name, p in m.named_parameters()}
    both = torch.func.vmap(lambda p, x: torch.func.functional_call(m, p, (x,)), (0, None))
    return both(weights, X)


# Calls that cunorm runs itself: with kernels, or on meta without kernels.
SILENT = {
    "forward mode": forward_mode,
    "jvp": lambda m: torch.stack(jvp(m)),
    "meta": lambda m: m.to("meta")(X.to("meta")),
    "subclasses of parameters": with_parameters,
    "subclasses of tensors": lambda m: m(X.as_subclass(Renamed)),
    "a lazy negation": lambda m: m.to(F64)(torch.complex(x_of(F64), x_of(F64)).conj().imag),
    "a batch of none": no_items,
    "functionalize": lambda m: torch.func.functionalize(m)(X),
    "trace": lambda m: torch.jit.trace(m, (X,))(X),
}


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("call", SILENT)
def test_calls_that_cunorm_runs_give_no_warning(call, name):
    module, own = fresh(name)
    y, texts = run(SILENT[call], module)
    expected, _ = run(SILENT[call], own)
    assert not texts and type(y) is type(expected)
    if call == "meta":
        assert y.is_meta and (y.shape, y.dtype) == (expected.shape, expected.dtype)
    else:
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("name", NORMS)
def test_calls_that_the_own_forward_refuses_raise_its_error_without_a_warning(name):
    module, own = fresh(name)
    for x in ([1.0], X.to(torch.int64), X.bfloat16(), torch.ones(4, 7, WIDTH + 1)):
        try:
            own(x)
        except Exception as error:
            with pytest.raises(type(error)) as caught:
                run(lambda m, x=x: m(x), module)
            assert str(caught.value) == str(error)
    assert not run(plain, module)[1]


def test_each_reason_warns_once_up_to_a_limit_and_another_error_is_raised(monkeypatch):
    """A lack of memory is no reason to run the own forward, which needs even more memory."""

    def fail(*_, **__):
        raise next(errors)

    reasons = ["one", "two", "one", *map(str, range(99))]
    errors = iter([*map(ValueError, reasons), torch.OutOfMemoryError("no memory")])
    module, _ = fresh("Llama's")
    calls = dict.fromkeys(module._cunorm_calls, fail)
    monkeypatch.setattr(type(module), "_cunorm_calls", calls)
    first, second, third, *others = [run(plain, module)[1] for _ in reasons]
    assert [text[-5:] for text in (*first, *second)] == [": one", ": two"]
    assert not third and others[0] and not others[-1]
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        module(X)


@pytest.mark.parametrize("name", OF_TORCH)
def test_x_has_the_name_that_torchs_forward_gives_it(name):
    module, _ = fresh(name)
    argument = "x" if name == "RMSNorm" else "input"
    assert torch.equal(module(**{argument: X}), module(X))
    with pytest.raises(TypeError, match=rf"^{name}.forward\(\) got an unexpected keyword"):
        module(y=X)


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("name", OF_TORCH)
def test_a_scripted_model_has_its_own_norms_again(name):
    norm, own = fresh(name)
    model = nn.Sequential(norm, nn.ReLU())
    scripted, (text,) = run(torch.jit.script, model)
    assert text.endswith("so the norm has its own again: call replace_norms afterwards")
    assert torch.equal(scripted(X), own(X).relu())
    assert model[0] is norm and type(norm) is type(own) and restore_norms(model) == 0


def without_parameter(module):
    module.weight = None


def of_another_shape(module):
    module.weight = nn.Parameter(module.weight.detach().reshape(WIDTH, 1))


def with_bias(module):
    module.bias = nn.Parameter(drawn(WIDTH, seed=8))


def without_submodule(module):
    module.act = None


class Options3(nn.GroupNorm):
    """A norm that reads attributes that may be set later."""

    def __init__(self):
        super().__init__(4, WIDTH)
        self.act = nn.Hardswish()
        self.register_parameter("bias", None)

    def forward(self, x):
        weight = nn.functional.pad(self.weight, (0, 0)) if self.weight is not None else None
        weight = weight.mean(-1) if weight is not None and weight.dim() > 1 else weight
        y = nn.functional.group_norm(x, self.num_groups, weight, self.bias, self.eps)
        return y if self.act is None else self.act(y)


CHANGES = {
    "weight": without_parameter,
    "a weight's shape": of_another_shape,
    "bias": with_bias,
    "act": without_submodule,
    "num_groups": lambda module: setattr(module, "num_groups", 8),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_norm_whose_attributes_change_later_runs_itself(name):
    module, x = Options3(), drawn(2, WIDTH, 5, 3)
    own = copy.deepcopy(module)
    replace_norms(module)
    torch.testing.assert_close(module(x), own(x))
    for one in (module, own):
        CHANGES[name](one)
    with pytest.warns(UserWarning, match="its (weight|bias|act|num_groups) has changed since"):
        assert torch.equal(module(x), own(x))


LATER = {"activation": "relu", "bias": nn.Parameter(drawn(WIDTH, seed=8)), "weight_offset": 1.0}
LATER |= {"round_before_weight": True}


@pytest.mark.parametrize("name", LATER)
@pytest.mark.parametrize("make", [lambda: nn.RMSNorm(WIDTH), lambda: nn.GroupNorm(4, WIDTH)])
def test_attributes_that_torch_ignores_are_ignored(make, name):
    module, x = make(), drawn(6, WIDTH, dtype=torch.bfloat16)
    own = copy.deepcopy(module)
    replace_norms(module)
    for one in (module, own):
        assert hasattr(one, name) == (name == "bias" and isinstance(own, nn.GroupNorm))
        setattr(one, name, LATER[name])
    one, other = module.to(x.dtype)(x), own.to(x.dtype)(x)
    torch.testing.assert_close(one, other, rtol=2**-7, atol=0)
