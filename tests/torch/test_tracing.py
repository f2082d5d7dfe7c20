# SPDX-License-Identifier: MIT
"""Tracers record cunorm.torch's operators or are refused, so no graph has wrong constants."""

import io

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.func import functionalize, grad, vmap  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import cunorm  # noqa: E402
import cunorm.torch as ct  # noqa: E402
from tests.support import internals  # noqa: E402
from tests.support.torch_cases import CASES, case, factors  # noqa: E402
from tests.support.torch_norms import WIDTH, Mixer, drawn  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit"),
    pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning"),  # about constant shapes
]

X = torch.linspace(-2, 3, 24).reshape(3, 8).cos()
OTHER = X.flip(0) + 1


def gradients(call, tensors):
    leaves = [one.detach().requires_grad_() for one in tensors]
    results = call(*leaves)
    results = results if isinstance(results, tuple) else (results,)
    return [*results, *torch.autograd.grad(results, leaves, [factors(one) for one in results])]


@pytest.mark.parametrize("name", CASES)
def test_a_traced_norm_gives_results_and_gradients_of_other_inputs(name):
    call, tensors = case(name)
    traced = torch.jit.trace(call, tuple(one.detach() for one in tensors))
    others = [one.detach() + 0.5 for one in tensors]
    assert all(map(torch.equal, gradients(traced, others), gradients(call, others)))


def test_traced_modules_are_saved_loaded_and_run_on_other_numbers_of_rows():
    model, file = Mixer(), io.BytesIO()
    torch.jit.save(torch.jit.trace(model, drawn(3, WIDTH)), file)
    file.seek(0)
    loaded, rows = torch.jit.load(file), drawn(6, WIDTH)
    assert torch.equal(loaded(rows), model(rows))
    loaded(rows).sin().sum().backward()
    model(rows).sin().sum().backward()
    for one, other in zip(loaded.parameters(), model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("module", [ct.LayerNorm(7, elementwise_affine=False), ct.GroupNorm(2, 6)])
def test_a_traced_module_checks_the_shape_of_x(module):
    with pytest.raises(ValueError, match=r"Norm: x has shape \(3, 8\), expected"):
        torch.jit.trace(module, X)


OF_SIZES = {  # calls whose scalars follow from x's shape
    "groups": lambda x: ct.rms_norm(x, groups=x.shape[-1] // 4),
    "num_groups": lambda x: ct.group_norm(x, x.shape[-1] // 4),
    "eps": lambda x: ct.rms_norm(x, eps=x.shape[0] * 2.0**-20),
    "weight_offset": lambda x: ct.rms_norm(x, x[0], weight_offset=x.shape[0] / 2),
    "center": lambda x: ct.normalize(x, center=x.shape[0] > 2),
    "an int c": lambda x: ct.normalize(x, c=x.shape[-1]),
    "a float c": lambda x: ct.add_normalize(x, x, c=x.shape[-1] / 4)[0],
}
TRACERS = {
    "jit": torch.jit.trace,
    "make_fx": lambda call, x: make_fx(call, tracing_mode="symbolic")(x),
}


@pytest.mark.parametrize("scalar", OF_SIZES)
@pytest.mark.parametrize("tracer", TRACERS)
def test_a_number_that_follows_from_a_traced_shape_is_a_scalar(tracer, scalar):
    call = OF_SIZES[scalar]
    assert torch.equal(TRACERS[tracer](call, X)(OTHER), call(OTHER))


def test_a_tensor_is_a_scalar_only_if_it_is_a_number_of_a_trace():
    with pytest.raises(TypeError, match=r"^rms_norm: eps is of type Tensor, expected a number"):
        torch.jit.trace(lambda x: ct.rms_norm(x, eps=torch.ones(1)), X)
    learnt = torch.ones((), requires_grad=True)
    with pytest.raises(RuntimeError, match="Cannot insert a Tensor that requires grad"):
        torch.jit.trace(lambda x: ct.rms_norm(x, eps=learnt), X)  # raised by the repr of `learnt`
    torch._C._set_tracing_state(None)  # the error leaves it set


def derivative(x):
    return grad(lambda x: ct.rms_norm(x).sin().sum())(x)


def test_a_batch_is_traced_and_a_derivative_is_refused():
    batch = vmap(lambda x, weight: ct.rms_norm(x, weight))
    traced = torch.jit.trace(batch, (X, OTHER))
    assert torch.equal(traced(OTHER, X), batch(OTHER, X))
    with pytest.raises(RuntimeError, match=r"^rms_norm: torch\.jit\.trace cannot follow deriv"):
        torch.jit.trace(derivative, X)


def test_functionalize_accepts_norms_and_refuses_their_derivatives():
    for norm in (ct.rms_norm, lambda x: ct.group_norm(x, 2), vmap(ct.rms_norm)):
        assert torch.equal(functionalize(norm)(X), norm(X))
    assert "cunorm.row_norm_forward" in make_fx(functionalize(lambda x: ct.rms_norm(x)))(X).code
    for transformed in (
        functionalize(derivative),
        grad(functionalize(lambda x: ct.rms_norm(x)[0, 0])),
    ):
        with pytest.raises(RuntimeError, match=r"^rms_norm: torch\.func\.functionalize cannot"):
            transformed(X)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_records_both_directions(mode):
    def both(x):
        x = x.detach().requires_grad_()
        y = ct.group_norm(ct.rms_norm(x), 2)
        return y, torch.autograd.grad(y.sin().sum(), x)[0]

    graph = make_fx(both, tracing_mode=mode)(X)
    assert graph.code.count("torch.ops.cunorm") == 4
    assert all(map(torch.equal, graph(OTHER), both(OTHER)))
    assert torch.equal(make_fx(derivative)(X)(OTHER), derivative(OTHER))


def test_make_fx_records_the_backward_of_an_earlier_call():
    x = X.clone().requires_grad_()
    y = ct.rms_norm(x)

    def backward(dy):
        return torch.autograd.grad(y, x, dy, retain_graph=True)[0]

    assert torch.equal(make_fx(backward)(X)(OTHER), backward(OTHER))


PLAIN = {
    "rms_norm": lambda x: cunorm.rms_norm(x),
    "group_norm": lambda x: cunorm.group_norm(x, 2),
    "layer_norm": lambda x: cunorm.layer_norm_forward(x).y,
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_functions_are_refused_where_a_tracer_would_not_see_them(name):
    call = PLAIN[name]
    call(X)  # cached, so that equal calls are not checked again
    cache = internals._dispatch.cache_entry.cache_info
    before = cache().currsize
    for trace in (torch.jit.trace, lambda f, x: make_fx(f)(x)):
        with pytest.raises(TypeError, match=rf"^{name}\w*: x is .* torch records .* cunorm\.torch"):
            trace(call, X)
    assert cache().currsize == before


@pytest.mark.parametrize("module", [ct.RMSNorm(8), ct.LayerNorm(8), ct.GroupNorm(2, 8)])
def test_scripting_a_module_is_refused_by_name(module):
    for given in (module, torch.nn.Sequential(torch.nn.Linear(8, 8), module)):
        with pytest.raises(TypeError, match=rf"^{type(module).__name__}: torch\.jit\.script"):
            torch.jit.script(given)


def test_a_proxy_is_refused_by_name():
    with pytest.raises(TypeError, match=r"^rms_norm: x is of type Proxy, expected"):
        torch.fx.symbolic_trace(lambda x: ct.rms_norm(x))
