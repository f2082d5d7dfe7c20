# SPDX-License-Identifier: MIT
"""PyTorch's private names are in one module, and calls work without most of them."""

import ast
import pkgutil
import re
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch.fx.experimental.proxy_tensor import make_fx  # noqa: E402

import cunorm  # noqa: E402
import cunorm.torch as ct  # noqa: E402
from cunorm._arrays import _torch_private  # noqa: E402
from cunorm.torch import _autograd  # noqa: E402
from tests.support.torch_cases import Watch, tensor  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit", "ignore::torch.jit.TracerWarning")

HOME = Path(_torch_private.__file__)
PACKAGE = HOME.parents[1]
IMPORT = r"^\s*(import|from) torch\b"
OF_MODULES = {"_parameters", "_buffers", "_modules"}  # of torch.nn.Module, for subclasses


def names_in(tree):
    """Return the names that a file defines, and those that it reads or imports from torch."""
    defined, read = set(), set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                defined.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                defined.add(name)
            case ast.Constant(value=str(name)) if name.startswith("_cunorm"):
                defined.add(name)
            case ast.Attribute(attr=name):
                read.add(name)
            case ast.ImportFrom(module=str(module)) if module.startswith("torch"):
                read |= {f"{module}.{alias.name}" for alias in node.names}
            case ast.Import(names=names):
                read |= {alias.name for alias in names if alias.name.startswith("torch.")}
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=name), *_]
            ):
                read.add(name)
    return defined, read


def test_private_names_are_in_one_module():
    texts = {path: path.read_text("utf-8") for path in PACKAGE.rglob("*.py")}
    users = [path for path, text in texts.items() if re.search(IMPORT, text, re.M)]
    names = {path: names_in(ast.parse(texts[path])) for path in users}
    at_home = set().union(*names.pop(HOME))  # it also sets private attributes
    own = OF_MODULES.union({"_torch_private"}, *(defined for defined, _ in names.values()))
    found = {
        f"{path.relative_to(PACKAGE)}: {name}"
        for path, (_, read) in names.items()
        for name in read - own
        if any(part.startswith("_") and not part.endswith("__") for part in name.split("."))
    }
    assert not found
    assert {"_current_level", "_dynamo_marked_constant"} <= at_home - own


# --- fallbacks ------------------------------------------------------------------------------------

X, W = tensor("x", 3, 4, 6), tensor("weight", 6)
REQUIRED = (
    "_C._SetExcludeDispatchKeyGuard",
    "_C._are_functorch_transforms_active",
    "_C._TorchDispatchModeKey.FAKE",
    "_C._TorchDispatchModeKey.PROXY",
    "utils._python_dispatch.TorchDispatchMode",
    "autograd.forward_ad._set_fwd_grad_enabled",
    "_C._functorch.get_unwrapped",
    "_C._functorch.maybe_get_bdim",
    "_C._functorch.maybe_get_level",
    "_C._functorch._add_batch_dim",
    "_C._functorch.unwrap_if_dead",
)


class Subclass(torch.Tensor):
    pass


def gradients(function):
    y = function(X, W)
    return torch.autograd.grad(y, (X, W), torch.ones_like(y))


def escaped():
    """Return a tensor that outlives its transform."""
    kept = []
    torch.func.grad(lambda x: kept.append(x) or x.sum())(X.detach())
    return kept[0]


def in_mode(mode, function):
    with mode:
        return function(X.detach(), W.detach())


def watched():
    with Watch() as watch:
        ct.rms_norm(X, W).sum().backward(inputs=(W,))
    return torch.tensor(len(watch.seen))


def with_tangent():
    with forward_ad.dual_level():
        return cunorm.rms_norm(forward_ad.make_dual(X.detach(), X.detach()))


def vectorised():
    return torch.autograd.functional.jacobian(lambda w: ct.rms_norm(X[0, 0], w), W, vectorize=True)


def second_derivatives():
    dx, dweight = torch.autograd.grad(ct.rms_norm(X, W).sin().sum(), (X, W), create_graph=True)
    return torch.autograd.grad(dx.sin().sum() + dweight.sin().sum(), (X, W))


def zero_gradient():
    y = ct.rms_norm(X, W)
    zeros = torch._efficientzerotensor(y.shape, dtype=y.dtype)
    return torch.autograd.grad(y, (X, W), zeros)


PROGRAMS = {
    "plain": lambda: cunorm.rms_norm(X.detach(), W.detach()),
    "eager": lambda: ct.rms_norm(X, W),
    "gradients": lambda: gradients(ct.rms_norm),
    "a batch": lambda: torch.func.vmap(ct.layer_norm)(X),
    "derivatives": lambda: torch.func.grad(lambda x: ct.rms_norm(x, W).sin().sum())(X),
    "second derivatives": second_derivatives,
    "functionalize": lambda: torch.func.functionalize(ct.rms_norm)(X.detach()),
    "a traced call": lambda: torch.jit.trace(ct.rms_norm, (X, W))(X + 1, W),
    "a vectorised Jacobian": vectorised,
    "a gradient of zeros": zero_gradient,
    "a subclass": lambda: torch.Tensor(ct.rms_norm(X.detach().as_subclass(Subclass))),
    "a mode": watched,
    "a plain call in a mode": lambda: in_mode(Watch(), cunorm.rms_norm),
    "an escaped tensor": lambda: ct.rms_norm(escaped()),
    # The following programs are refused, whether names are missing or not.
    "a batch that is over": lambda: ct.rms_norm(escaped_batch()),
    "a tangent": with_tangent,
    "a traced derivative": lambda: torch.jit.trace(
        torch.func.grad(lambda x: ct.rms_norm(x, W).sin().sum()), (X.detach(),)
    ),
    "a plain call on fakes": lambda: in_mode(FakeTensorMode(), lambda *_: cunorm.rms_norm(X)),
    "a plain call that is traced": lambda: torch.jit.trace(cunorm.rms_norm, (X.detach(),)),
    "a plain call that make_fx traces": lambda: make_fx(cunorm.rms_norm)(X.detach()),
}
REFUSED = [*PROGRAMS][-6:]
FALLBACKS = {  # name: the programs that may be refused without it
    "_C._will_engine_execute_node": (),
    "_C._is_tracing": (),
    "_C._len_torch_dispatch_stack": (),
    "_C._functorch.get_interpreter_stack": ("functionalize",),
    "_C._get_dispatch_mode": ("a plain call in a mode",),
    "_C._cuda_getCurrentRawStream": (),
    "_C._functorch.is_functorch_wrapped_tensor": ("an escaped tensor",),
    "_C._functorch.is_batchedtensor": ("an escaped tensor",),
    "_C._functorch.is_legacy_batchedtensor": (),
    "Tensor._is_zerotensor": (),
    "_subclasses.fake_tensor.FakeTensor": (),
    "_subclasses.functional_tensor.FunctionalTensor": (),
    "nn.modules.module._has_any_global_hook": (),
}


def escaped_batch():
    kept = []
    torch.func.vmap(lambda x: kept.append(x) or x)(X.detach())
    return kept[0]


def outcome(program):
    """Return the tensors that a program returns, or the type of its error."""
    try:
        found = PROGRAMS[program]()
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        return type(error)
    return [one.detach() for one in (found if isinstance(found, tuple) else (found,))]


@pytest.fixture(scope="module")
def usual():
    found = {program: outcome(program) for program in PROGRAMS}
    assert [program for program in PROGRAMS if isinstance(found[program], type)] == REFUSED
    return found


def module_without(monkeypatch, *names):
    """Return the module of private names as it is with a PyTorch that lacks the given names."""
    resolve = pkgutil.resolve_name

    def resolve_others(name):
        if name.removeprefix("torch.") in names:
            raise AttributeError(name)
        return resolve(name)

    spec = spec_from_file_location("names", HOME)
    module = module_from_spec(spec)
    with monkeypatch.context() as patch:
        patch.setattr(pkgutil, "resolve_name", resolve_others)
        spec.loader.exec_module(module)
    return module


def check_outcomes(monkeypatch, module, usual, may_refuse):
    """Make cunorm use `module`; check that programs give the same, or are refused if allowed.

    A fallback may be a formula instead of a kernel, which rounds otherwise.
    """
    own = {name: one for name, one in vars(_torch_private).items() if not name.startswith("__")}
    for user in [one for name, one in sys.modules.items() if name.startswith("cunorm.")]:
        for name in own.keys() & vars(user).keys():
            if own[name] is vars(user)[name]:
                monkeypatch.setattr(user, name, getattr(module, name))
    monkeypatch.setattr(_autograd, "_apply", module.untransformed_apply(_autograd._Norm))
    for program, expected in usual.items():
        found = outcome(program)
        if isinstance(expected, type) or isinstance(found, type):
            assert isinstance(found, type), program
            assert program in (*may_refuse, *REFUSED), f"{program}: {found}"
        else:
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=program)


@pytest.mark.parametrize("name", FALLBACKS)
def test_without_a_private_name_calls_give_the_same_or_are_refused(name, usual, monkeypatch):
    module = module_without(monkeypatch, name)
    check_outcomes(monkeypatch, module, usual, FALLBACKS[name])


def test_without_the_level_of_duals_and_with_a_plain_apply_calls_agree(usual, monkeypatch):
    module = module_without(monkeypatch)
    module.forward_ad = SimpleNamespace(unpack_dual=forward_ad.unpack_dual)
    module.untransformed_apply = lambda function: function.apply
    check_outcomes(monkeypatch, module, usual, ())


@pytest.mark.parametrize("name", REQUIRED)
def test_without_a_name_that_nothing_replaces_the_import_names_the_tested_versions(
    name, monkeypatch
):
    message = rf"PyTorch .* has no torch\.{name}, .* tested with PyTorch 2\.6 to "
    with pytest.raises(ImportError, match=message):
        module_without(monkeypatch, name)


def test_fallbacks_and_required_names_are_all_private_names(monkeypatch):
    seen = []
    resolve = pkgutil.resolve_name
    monkeypatch.setattr(pkgutil, "resolve_name", lambda name: seen.append(name) or resolve(name))
    module_without(monkeypatch)
    assert {name.removeprefix("torch.") for name in seen} == {*REQUIRED, *FALLBACKS}
