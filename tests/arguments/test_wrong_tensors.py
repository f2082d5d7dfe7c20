# SPDX-License-Identifier: MIT
"""Arrays that are not plain memory, traced values, and arrays on another device are refused."""

from __future__ import annotations

from functools import partial
from itertools import product

import numpy as np
import pytest

from tests.arguments.wrong_memory import (
    CONTIGUOUS,
    OUTPUTS,
    SIZE,
    UNUSABLE,
    UNWRITABLE,
    workspace_cases,
)
from tests.support.calls import (
    FUNCTIONS,
    arrays_of,
    assert_same,
    call_of,
    fields,
    names,
    parameters_of,
    to,
)
from tests.support.operands import at
from tests.support.refused import Case, check_error, check_refused

RECORDS = (
    "requires grad, which this function does not record: use cunorm.torch, torch.no_grad() or {}"
    ".detach()"
)
NO_MEMORY = (
    "has no memory behind it (freed storage, or a zero tensor of autograd's), expected a tensor "
    "with data: pass {}.clone() of one that has"
)
SUBCLASS = (
    "is of type tests.arguments.test_wrong_tensors.Logged, a tensor subclass whose memory may not "
    "be what it stands for, expected a plain torch.Tensor: pass its local or plain tensor "
    "({}.to_local() for a DTensor)"
)


def freed(tensor):
    tensor = tensor.clone()
    tensor.untyped_storage().resize_(0)
    return tensor


STATES = [
    (lambda tensor: tensor.detach().requires_grad_(), ValueError, RECORDS),
    (freed, ValueError, NO_MEMORY),
    (lambda t: t.as_subclass(type("Logged", (type(t),), {})), TypeError, SUBCLASS),
]


def tensor_arguments(call):
    """Yield for each array of a call: its container, its key, and its name in errors."""
    for named in (call.arrays, call.out):
        for key in arrays_of(named):
            label = "out" if call.result is None else f"out.{key}"
            yield named, key, label if named is call.out else key
    if call.workspace is not None:
        yield vars(call), "workspace", "workspace"


@names
def test_a_tensor_that_is_not_plain_memory_is_refused_even_after_valid_calls(name):
    """tests/arrays/test_refused_torch.py has further tensors that are refused."""
    pytest.importorskip("torch", reason="PyTorch is not installed")
    call = call_of(name, kind="torch")
    if call.workspace is not None:
        call.workspace = call.workspace.view(call.arrays["x"].dtype)  # bytes cannot require grad
    for named, key, argument in tensor_arguments(call):
        plain = named[key]
        for make, error, text in STATES:
            call.run()
            call.make()
            named[key] = make(plain)
            with at(argument):
                case = Case(name, error, f"{argument} {text.format(argument)}", {})
                check_error(case, call.run)
                if named is call.arrays:
                    check_error(case, call.make)
            named[key] = plain


@names
def test_a_tensor_that_requires_grad_is_accepted_where_no_grad_is_recorded(name):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    call = call_of(name, kind="torch")
    expected = call.make()
    for argument, tensor in arrays_of(call.arrays).items():
        call.arrays[argument] = torch.nn.Parameter(tensor)
    with torch.no_grad():
        results = call.make()
    assert_same(results, expected)
    assert not any(tensor.requires_grad for tensor in fields(results).values())


# --- memory of the frameworks ---------------------------------------------------------------------


def test_a_tensor_that_cannot_be_a_workspace_is_refused():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    for dtype in (torch.uint8, torch.float32):
        memory = torch.zeros(64, 64, dtype=dtype)
        for view in (memory[::2], memory.T, memory[:, 1:], memory[:1].expand(64, 64)):
            text = f"has strides {view.stride()}, expected {CONTIGUOUS}"
            check_refused(workspace_cases(ValueError, text, view))
        check_refused(workspace_cases(ValueError, UNUSABLE, memory.view(-1)[8 // dtype.itemsize :]))
    text = "has dtype bool, expected float16, bfloat16, float32 or float64"
    check_refused(workspace_cases(TypeError, text, torch.zeros(SIZE, dtype=torch.bool)))
    # `workspace_view` has separate code for tensors of bytes.
    text = NO_MEMORY.format("workspace")
    check_refused(workspace_cases(ValueError, text, freed(torch.zeros(SIZE, dtype=torch.uint8))))


def test_jax_arrays_are_refused_as_outputs_and_workspaces():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    check_refused(
        output.case(ValueError, UNWRITABLE, jax.numpy.asarray(output.right)) for output in OUTPUTS
    )
    check_refused(workspace_cases(ValueError, UNUSABLE, jax.numpy.ones(SIZE, "float32")))


# --- traced arrays --------------------------------------------------------------------------------


def test_a_jax_tracer_is_refused_and_pointed_to_the_jax_front_end():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    for name, transform in product(FUNCTIONS, (jax.jit, jax.grad, jax.vmap)):
        call = call_of(name)
        with pytest.raises(TypeError, match=rf"^{name}: x is a JAX tracer.+use cunorm\.jax there"):
            transform(lambda x, call=call: call.make(x=x))(call.arrays["x"])


SCALARS = {
    **dict.fromkeys(("eps", "c", "weight_offset"), "a number"),
    **dict.fromkeys(("groups", "num_groups", "channel_axis"), "an int"),
    "axis": "an int or a tuple of ints",
    **dict.fromkeys(("center", "round_before_weight"), "True or False"),
}
REMEDY = "under jax.jit, bind it with functools.partial or name it in static_argnames"


def test_traced_scalars_are_refused_with_a_remedy():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    import cunorm.jax

    for name in cunorm.jax.__all__:
        call = call_of(name)
        for scalar in SCALARS.keys() & parameters_of(name):
            bound = {key: value for key, value in call.options.items() if key != scalar}
            compiled = jax.jit(partial(getattr(cunorm.jax, name), **bound))
            expected = SCALARS[scalar]
            if scalar == "axis" and name.endswith("_quantized"):
                expected = "an int"
            text = f"{scalar} is traced by JAX, expected {expected}: {REMEDY}"
            given = arrays_of(call.arrays) | {scalar: 1}
            check_error(Case(name, TypeError, text, {}), partial(compiled, **given))
    wrong = Case("rms_norm", TypeError, "eps is [1.0], expected a number", {})
    check_error(wrong, partial(cunorm.jax.rms_norm, np.ones((2, 8), np.float32), eps=[1.0]))


# --- other devices --------------------------------------------------------------------------------


@pytest.mark.gpu
@names
def test_an_array_on_another_device_than_x_is_refused(name):
    call = call_of(name)
    inputs = {key: array for key, array in arrays_of(call.arrays).items() if key != "x"}
    workspace = {} if call.workspace is None else {"workspace": np.empty(SIZE, np.uint8)}
    for key, array in (inputs | workspace).items():
        case = Case(name, ValueError, f"{key} is on cuda:0, expected cpu, the device of x", {})
        with at(case):
            check_error(case, partial(call.make, **{key: to("cupy", array)}))
