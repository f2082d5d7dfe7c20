# SPDX-License-Identifier: MIT
"""The private names of PyTorch that cunorm uses; some have a fallback for versions without them.

A fallback is slower or refuses more calls, but never lets a wrong call through.
"""

from collections.abc import Callable, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor
from torch.autograd import Function, forward_ad

_F = TypeVar("_F", bound=Callable[..., object])
TESTED = "2.6 to 2.14"


def _private(name: str, fallback: Any = None) -> Any:
    """Return PyTorch's object of a name, or the fallback; with neither, raise an ImportError."""
    try:
        return resolve_name(f"torch.{name}")
    except (AttributeError, ImportError):
        if fallback is None:
            raise ImportError(
                f"PyTorch {torch.__version__} has no torch.{name}, which cunorm needs: it is "
                f"tested with PyTorch {TESTED}"
            ) from None
        return fallback


# --- the state of torch ---------------------------------------------------------------------------

is_tracing: Callable[[], bool] = _private(
    "_C._is_tracing",
    torch.jit.is_tracing,  # type: ignore[attr-defined]
)
count_modes: Callable[[], int] = _private("_C._len_torch_dispatch_stack", lambda: 1)
is_transforming: Callable[[], bool] = _private("_C._are_functorch_transforms_active")
_levels: Callable[[], Sequence[Any] | None] = _private(
    "_C._functorch.get_interpreter_stack", lambda: None
)
_mode: Callable[[Any], object] = _private(
    "_C._get_dispatch_mode", lambda key: count_modes() or None
)
FAKE, PROXY = map(_private, ("_C._TorchDispatchModeKey.FAKE", "_C._TorchDispatchModeKey.PROXY"))
raw_stream: Callable[[int], int] = _private(
    "_C._cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)


def transforms() -> set[str]:
    """Return the names of torch.func's active transforms; assume a gradient if they are unknown."""
    return {level.key().name for level in _levels() or ()} or {"Grad"}


def has_dual_level() -> bool:
    """Whether tensors may have forward-mode tangents."""
    return getattr(forward_ad, "_current_level", 0) >= 0


# Sets whether operations propagate forward-mode tangents, also those of outer transforms.
set_tangents: Callable[[bool], Any] = _private("autograd.forward_ad._set_fwd_grad_enabled")


def has_mode(key: object) -> bool:
    return _mode(key) is not None


# Whether hooks of all modules are registered.
has_global_hooks: Callable[[], object] = _private(
    "nn.modules.module._has_any_global_hook", lambda: True
)

# --- tensors --------------------------------------------------------------------------------------

# Whether a transform of torch.func, perhaps an ended one, made a tensor.
is_wrapped: Callable[[Tensor], bool] = _private(
    "_C._functorch.is_functorch_wrapped_tensor", lambda tensor: False
)
is_batch: Callable[[Tensor], bool] = _private("_C._functorch.is_batchedtensor", is_wrapped)
# Legacy batches are those of `torch.autograd.grad(..., is_grads_batched=True)`.
is_legacy_batch: Callable[[Tensor], bool] = _private(
    "_C._functorch.is_legacy_batchedtensor", lambda tensor: True
)
is_zero: Callable[[Tensor], bool] = _private("Tensor._is_zerotensor", lambda tensor: True)
# The tensor subclasses that torch defines and that handle every operator.
_WRAPPERS: tuple[type, ...] = (
    _private("_subclasses.fake_tensor.FakeTensor", type(None)),
    _private("_subclasses.functional_tensor.FunctionalTensor", type(None)),
)
_COLLECTIVE = ("torch.distributed._functional_collectives", "AsyncCollectiveTensor")


_excluding: Callable[[Any, bool], Any] = _private("_C._SetExcludeDispatchKeyGuard")


def has_tangent(tensor: Tensor) -> bool:
    """Return whether a tensor has a forward-mode tangent, also in an operator or a mode."""
    with _excluding(torch._C.DispatchKey.ADInplaceOrView, False):
        return forward_ad.unpack_dual(tensor).tangent is not None


_unwrapped, _batch_axis, _level, _batched = (
    _private(f"_C._functorch.{name}")
    for name in ("get_unwrapped", "maybe_get_bdim", "maybe_get_level", "_add_batch_dim")
)


def primal(tensor: Tensor) -> Tensor:
    """Return a tensor without its tangent of the innermost level of forward mode."""
    if is_batch(tensor):  # `unpack_dual` has no rule for batches
        of_items = primal(_unwrapped(tensor))
        return _batched(of_items, _batch_axis(tensor), _level(tensor))  # type: ignore[no-any-return]
    return forward_ad.unpack_dual(tensor).primal


def is_wrapper(kind: type) -> bool:
    return issubclass(kind, _WRAPPERS) or is_collective(kind)


def is_collective(kind: type) -> bool:
    """Return whether tensors of a type are results of collectives that may still be running."""
    return (kind.__module__, kind.__name__) == _COLLECTIVE


def wait(tensor: Tensor | None) -> Tensor | None:
    """Return a tensor; if it is the result of a collective, wait for it."""
    if tensor is None or not is_collective(type(tensor)):
        return tensor
    found: Tensor = tensor.wait()  # type: ignore[attr-defined]
    return found


# --- autograd and torch.compile -------------------------------------------------------------------

_will_run: Callable[[Any], bool] = _private("_C._will_engine_execute_node", lambda node: True)


def is_used(node: Any) -> bool:
    """Return whether the backward that runs uses what a node of the graph gets."""
    try:
        return _will_run(node)
    except RuntimeError:  # for a leaf of `torch.autograd.grad`, or outside of the engine
        return True


_unwrapped_if_dead: Callable[[Tensor], Tensor] = _private("_C._functorch.unwrap_if_dead")


def saved_tensors(ctx: Any) -> Sequence[Tensor | None]:
    """Return the saved tensors of a Function, without wrappers of transforms that have ended.

    torch.func's dispatch of a Function fails on such wrappers.
    """
    found: Sequence[Tensor | None] = ctx.saved_tensors
    return [one if one is None else _alive(one) for one in found] if is_transforming() else found


def _alive(tensor: Tensor) -> Tensor:
    inner = _unwrapped_if_dead(tensor)
    return tensor if inner is tensor else _alive(inner)


def untransformed_apply(function: type[Function]) -> Callable[..., Any]:
    """Return the `apply` of a Function without its search for torch.func's transforms."""
    return getattr(super(Function, function), "apply", function.apply)


def assume_constant(function: _F) -> _F:
    """Let torch.compile call a function that it cannot trace, while it traces the caller.

    `torch.compiler.assume_constant_result` also imports the compiler, which takes seconds.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@assume_constant
def is_differentiating() -> bool:
    """Whether torch.func or a dual level differentiates what torch.compile traces."""
    return has_dual_level() or (is_transforming() and bool(transforms() & {"Grad", "Jvp"}))


if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    TorchDispatchMode = _private("utils._python_dispatch.TorchDispatchMode")


class OperatorMode(TorchDispatchMode):
    """A mode that gets the calls of operators of torch's dispatcher."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # with True, torch would spend seconds on importing the compiler
