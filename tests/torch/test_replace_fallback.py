# SPDX-License-Identifier: MIT
"""Where cunorm's operators cannot run, a replaced norm runs its own forward, and says so once."""

from __future__ import annotations

import copy
import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch import nn  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402

from cunorm.torch import replace_norms, restore_norms  # noqa: E402
from tests.support.torch_norms import F64, WIDTH, LlamaNorm, x_of  # noqa: E402


class CallsTorch(nn.LayerNorm):
    """A norm that runs its own forward under autocast."""

    def forward(self, x):
        return nn.functional.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


NORMS = {
    "Llama's": LlamaNorm,
    "RMSNorm": lambda: nn.RMSNorm(WIDTH),
    "LayerNorm": lambda: nn.LayerNorm(WIDTH),
    "GroupNorm": lambda: nn.GroupNorm(4, 8),
    "one that calls torch's": lambda: CallsTorch(WIDTH),
}


class Subclassed(nn.Parameter):
    """A class of parameters with plain memory."""


class Renamed(torch.Tensor):
    """A tensor class that adds only a name."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, types, args, kwargs or {})


def fresh(name):
    """Return a norm of a class that no other test uses, as each class warns once."""
    module = NORMS[name]()
    module.__class__ = type("Fresh" + type(module).__name__, (type(module),), {})
    return module


def run(call, module):
    """Return the result of a call, and cunorm's warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        y = call(module)
    texts = [str(one.message) for one in caught]
    return y, [text for text in texts if "forward" in text]


def nested(m):
    rows = [torch.ones(8, WIDTH), torch.arange(2.0 * WIDTH).reshape(2, WIDTH)]
    return m(torch.nested.nested_tensor(rows, layout=torch.jagged)).values()


def forward_mode(m):
    with forward_ad.dual_level():
        y = m(forward_ad.make_dual(x_of(), torch.ones_like(x_of())))
        return forward_ad.unpack_dual(y).tangent


def jvp(m):
    return torch.func.jvp(m, (x_of(),), (torch.ones_like(x_of()),))


def complex_numbers(m):
    return m(x_of().to(torch.complex64))


# For each call: the norms whose own forward can run it, and the reason in the warning.
FALLBACKS = {
    nested: (["Llama's", "RMSNorm", "LayerNorm"], "a tensor is nested"),
    complex_numbers: (["RMSNorm"], "a tensor has dtype complex64"),
    forward_mode: (NORMS, "cunorm has no forward-mode derivatives"),
    jvp: (NORMS, "cunorm has no forward-mode derivatives"),
}


@pytest.mark.parametrize(
    "call, name", [(call, name) for call, (names, _) in FALLBACKS.items() for name in names]
)
def test_the_own_forward_runs_unsupported_calls_with_one_warning(call, name):
    module = fresh(name)
    kind, own = type(module), copy.deepcopy(module)
    assert replace_norms(module).replaced
    y, texts = run(call, module)
    assert texts == [f"{kind.__name__}: a replaced norm runs its own forward: {FALLBACKS[call][1]}"]
    torch.testing.assert_close(y, call(own))
    assert not run(call, module)[1]
    assert not run(lambda m: m(x_of()), module)[1]


@pytest.mark.parametrize(
    "name, call", [("Llama's", nested), ("RMSNorm", nested), ("RMSNorm", complex_numbers)]
)
def test_norms_that_cunorm_cannot_run_are_compiled_with_their_own_forward(name, call):
    module = fresh(name)
    own = copy.deepcopy(module)
    assert replace_norms(module).replaced
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    torch.testing.assert_close(call(compiled), call(own))
    assert torch.equal(compiled(x_of()), module(x_of()))


def with_parameters(m):
    for name, parameter in [*m._parameters.items()]:
        m._parameters[name] = Subclassed(parameter.detach())
    return m(x_of())


def negated(m):
    complex_x = torch.complex(x_of(F64), x_of(F64))
    return m.to(F64)(complex_x.conj().imag)


def no_items(m):
    weights = {name: p.detach().expand(0, *p.shape) for name, p in m.named_parameters()}
    both = torch.func.vmap(lambda p, x: torch.func.functional_call(m, p, (x,)), (0, None))
    return both(weights, x_of())


# Calls that cunorm runs itself: with kernels, or on meta without kernels.
SILENT = {
    "meta": lambda m: m.to("meta")(x_of().to("meta")),
    "subclasses of parameters": with_parameters,
    "subclasses of tensors": lambda m: m(x_of().as_subclass(Renamed)),
    "a lazy negation": negated,
    "a batch of none": no_items,
    "functionalize": lambda m: torch.func.functionalize(m)(x_of()),
    "trace": lambda m: torch.jit.trace(m, (x_of(),))(x_of()),
}


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("call", SILENT)
def test_calls_that_cunorm_runs_give_no_warning(call, name):
    module = fresh(name)
    own = copy.deepcopy(module)
    assert replace_norms(module).replaced
    y, texts = run(SILENT[call], module)
    expected, _ = run(SILENT[call], own)
    assert not texts and type(y) is type(expected)
    if call == "meta":
        assert y.is_meta and (y.shape, y.dtype) == (expected.shape, expected.dtype)
    else:
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_whose_parameters_are_plain_subclasses_is_replaced(name):
    module = fresh(name)
    expected = with_parameters(module)
    assert replace_norms(module).replaced
    torch.testing.assert_close(module(x_of()), expected)


@pytest.mark.parametrize("name", NORMS)
def test_calls_that_the_own_forward_refuses_raise_its_error_without_a_warning(name):
    module = fresh(name)
    own = copy.deepcopy(module)
    replace_norms(module)
    wrong = [[1.0], x_of().to(torch.int64), torch.ones(4, 7, WIDTH + 1)]
    for x in wrong:
        try:
            own(x)
        except Exception as error:
            with pytest.raises(type(error)) as caught:
                run(lambda m, x=x: m(x), module)
            assert str(caught.value) == str(error)
    assert not run(lambda m: m(x_of()), module)[1]


def test_an_error_that_is_no_reason_for_a_fallback_is_raised(monkeypatch):
    """A lack of memory is no reason to run the own forward, which needs even more memory."""

    def fail(*_, **__):
        raise torch.OutOfMemoryError("no memory")

    module = fresh("Llama's")
    replace_norms(module)
    calls = dict.fromkeys(module._cunorm_calls, fail)
    monkeypatch.setattr(type(module), "_cunorm_calls", calls)
    with pytest.raises(torch.OutOfMemoryError, match="no memory"):
        module(x_of())


def test_each_reason_warns_once_up_to_a_limit(monkeypatch):
    def fail(*_, **__):
        raise ValueError(next(reasons))

    module, reasons = fresh("Llama's"), iter(["one", "two", "one", *map(str, range(99))])
    replace_norms(module)
    calls = dict.fromkeys(module._cunorm_calls, fail)
    monkeypatch.setattr(type(module), "_cunorm_calls", calls)
    first, second, third, *others = [run(lambda m: m(x_of()), module)[1] for _ in range(102)]
    assert [text[-5:] for text in (*first, *second)] == [": one", ": two"]
    assert not third and others[0] and not others[-1]


@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "GroupNorm"])
def test_x_has_the_name_that_torchs_forward_gives_it(name):
    module = fresh(name)
    replace_norms(module)
    argument = "x" if name == "RMSNorm" else "input"
    assert torch.equal(module(**{argument: x_of()}), module(x_of()))
    with pytest.raises(TypeError, match=rf"^{name}.forward\(\) got an unexpected keyword"):
        module(y=x_of())


@pytest.mark.filterwarnings("ignore:.torch.jit")
@pytest.mark.parametrize("name", ["RMSNorm", "LayerNorm", "GroupNorm"])
def test_a_scripted_model_has_its_own_norms_again(name):
    norm = fresh(name)
    kind, model = type(norm), nn.Sequential(norm, nn.ReLU())
    expected = model(x_of())
    replace_norms(model)
    scripted, (text,) = run(torch.jit.script, model)
    assert text.endswith("so the norm has its own again: call replace_norms afterwards")
    assert torch.equal(scripted(x_of()), expected)
    assert model[0] is norm and type(norm) is kind and restore_norms(model) == 0
