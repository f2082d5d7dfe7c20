# SPDX-License-Identifier: MIT
"""The options of modules: their checks when a module is made, and their use in its calls."""

from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import Module

from cunorm._arrays.torch import TORCH_DTYPES
from cunorm._core import validate
from cunorm._core.dtypes import parse_dtype, parse_optional_dtype
from cunorm._dispatch import parse
from cunorm._row_norm.plan import ROW_FORWARD
from cunorm._row_norm.spec import RowOptions, forward_scalars
from cunorm.torch._groups import check_group
from cunorm.torch._tensors import is_dense


class Groups:
    """The groups of processes of a module, which copies of the module share."""

    def __init__(self, **options: Any) -> None:
        self.options = options

    def __deepcopy__(self, memo: object) -> "Groups":
        return self

    def __reduce__(self) -> NoReturn:
        names = " and ".join(self.options)
        raise TypeError(f"a module with {names} cannot be pickled: save its state_dict")


NO_GROUPS = Groups()


def set_groups(module: Any, process_group: Any, parameter_group: Any) -> None:
    """Check and keep the groups of processes that are given."""
    given = {"process_group": process_group, "parameter_group": parameter_group}
    options = {name: group for name, group in given.items() if group is not None}
    for name, group in options.items():
        check_group(type(module).__name__, name, group)
    if options:
        module._groups = Groups(**options)


def row_shape(module: Module, shape: Any) -> tuple[int, ...]:
    """Return normalized_shape as a tuple of ints, as torch keeps it."""
    kind = type(module).__name__
    try:
        sizes = [shape] if isinstance(shape, str) else [*shape]
    except TypeError:  # a number, or an array without axes
        sizes = [shape]
    found = tuple([validate.integer(kind, "normalized_shape", size) for size in sizes])
    if not found or min(found) < 1:
        raise ValueError(
            f"{kind}: normalized_shape is {found}, expected one axis or more, of at least one "
            "element each"
        )
    return found


def check_groups(module: Module, num_groups: int, num_channels: int) -> None:
    kind = type(module).__name__
    for name, value in (("num_groups", num_groups), ("num_channels", num_channels)):
        if validate.integer(kind, name, value) < 1:
            raise ValueError(f"{kind}: {name} is {value!r}, expected at least 1")
    if num_channels % num_groups:
        raise ValueError(
            f"{kind}: num_groups is {num_groups}, expected a divisor of num_channels, "
            f"{num_channels}"
        )


def check_dtype_and_flags(module: Module, dtype: object, **values: object) -> None:
    """Check a dtype and flags, and that no eps or flag is the name of an activation."""
    kind = type(module)
    parse_optional_dtype(kind.__name__, "dtype", dtype)
    if not isinstance(dtype, torch.dtype | None):
        raise TypeError(f"{kind.__name__}: dtype is {dtype!r}, expected a torch.dtype")
    for name, value in values.items():
        if isinstance(value, str) and hasattr(kind, "activation"):
            what = "a number" if name == "eps" else "True or False"
            raise TypeError(
                f"{kind.__name__}: {name} is {value!r}, expected {what}: an activation is a "
                f"keyword, activation={value!r}"
            )
        if name != "eps":
            validate.flag(kind.__name__, name, value)


def check_rms_norm(module: Any) -> None:
    """Check the options and the eps of an RMSNorm in the way that the functions check them."""
    kind = type(module).__name__
    given = {name: getattr(module, name) for name in module._cunorm_options}
    dtype, groups = given.pop("residual_dtype", None), given.pop("groups", 1)
    options, eps = RowOptions(-1, groups, **given), 0.0 if module.eps is None else module.eps
    # A module with a gate has no stream, so it has no branch.
    validate.choice(kind, "gate_position", options.gate_position, allowed=("pre", "post"))
    parse(ROW_FORWARD, forward_scalars(kind, options, eps, None, dtype))
    shape = module.normalized_shape
    if groups < 1 or shape[-1] % groups or (groups > 1 and len(shape) > 1):
        expected = f"a divisor of {shape[-1]}" if len(shape) == 1 else "1"
        raise ValueError(
            f"{kind}: groups is {groups!r}, expected {expected} as normalized_shape is {shape}"
        )


def changed_options(module: Any) -> str:
    """Return, for an extra_repr, the options that torch lacks and that are not the default."""
    kind, options = type(module), {n: getattr(module, n) for n in module._cunorm_options}
    return "".join(f", {name}={v!r}" for name, v in options.items() if v != getattr(kind, name))


ROW_SIZES = "its last axes to be normalized_shape, {}"


def check_sizes(
    module: Module, x: Tensor, axes: slice, sizes: tuple[int, ...], expected: str = ROW_SIZES
) -> None:
    """Check the sizes of some axes of x; the norm's function refuses an x that has no shape."""
    try:
        fits = x.shape[axes] == sizes
    except (AttributeError, RuntimeError):  # x is no tensor, or has no shape
        fits = True
    if not fits and isinstance(x, Tensor) and is_dense(x):
        shape = tuple(map(int, x.shape))  # torch.jit.trace has tensors in the shape
        wanted = expected.format(sizes)
        raise ValueError(f"{type(module).__name__}: x has shape {shape}, expected {wanted}")


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """Return float32 if torch.autocast computes norms in float32 and x is narrower, else None."""
    half = getattr(x, "is_cuda", False) and x.dtype in (torch.float16, torch.bfloat16)
    return torch.float32 if half and torch.is_autocast_enabled("cuda") else None


def options_of(module: Any, x: Tensor, residual: Tensor | None = None) -> dict[str, Any]:
    """Return an RMSNorm call's options; a default eps depends on the normalised array's dtype."""
    shape = module.normalized_shape
    options = {name: getattr(module, name) for name in module._cunorm_options}
    options |= {"eps": module.eps, "axis": -len(shape)}
    check_sizes(module, x, slice(-len(shape), None), shape)
    if module.eps is None:
        dtype: Any = getattr(x if residual is None else residual, "dtype", None)
        stream = options.get("residual_dtype")
        if stream is not None:
            dtype = TORCH_DTYPES[parse_dtype("add_rms_norm", "residual_dtype", stream)]
        options["eps"] = _DEFAULT_EPS.get(dtype, 0.0)
    return options


# For half precision without eps, torch takes float32's epsilon or, in old versions, that of x's
# dtype. 2**-6 in float16 becomes about 1 with float32's epsilon, less than 1/2 with float16's.
_small = torch.full((1,), 2.0**-6, dtype=torch.float16, device="cpu")
_IN_FLOAT32 = torch.nn.functional.rms_norm(_small, (1,)).item() > 0.5
_DEFAULT_EPS = {
    dtype: torch.finfo(torch.promote_types(dtype, torch.float32) if _IN_FLOAT32 else dtype).eps
    for dtype in TORCH_DTYPES.values()
}
