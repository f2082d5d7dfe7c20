# SPDX-License-Identifier: MIT
"""The cache of calls: its size and keys, clear_cache, and that it keeps no class alive."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Sized
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

import cunorm
from tests.support.calls import cached_calls_only, empty_call_cache
from tests.support.kinds import Foreign
from tests.support.processes import in_process
from tests.support.remembered import caches, name

KINDS = ["numpy", "torch"] if find_spec("torch") else ["numpy"]


def test_the_last_1024_shapes_are_in_the_cache_and_a_shape_that_is_used_now_and_then(monkeypatch):
    empty_call_cache(monkeypatch)
    x = np.ones((1200, 4), np.float32)
    for rows in range(1, 1201):
        cunorm.l2_norm(x[:rows])
        cunorm.l2_norm(x[:7])
    with cached_calls_only():
        for rows in (7, *range(1200, 1200 - 1023, -1)):
            cunorm.l2_norm(x[:rows])
        with pytest.raises(TypeError, match="'NoneType' object is not callable"):
            cunorm.l2_norm(x[: 1200 - 1023])


class Sub(np.ndarray):
    """An array subclass without other state."""


def misaligned(array: Any) -> Any:
    memory = np.empty(array.nbytes + 1, np.uint8)[1:]
    copy = memory.view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


@pytest.mark.parametrize(
    "convert",
    [np.asfortranarray, misaligned, lambda array: array.view(Sub)],
    ids=["Fortran", "odd", "subclass"],
)
def test_calls_that_copy_and_calls_of_subclasses_are_in_the_cache(convert, monkeypatch):
    empty_call_cache(monkeypatch)
    x = np.arange(40, dtype=np.float32).reshape(5, 8)
    expected, others = cunorm.rms_norm(x), cunorm.rms_norm(x[::-1].copy())
    np.testing.assert_array_equal(cunorm.rms_norm(convert(x)), expected)
    with cached_calls_only():
        found = cunorm.rms_norm(convert(x[::-1].copy()))
    assert type(found) is np.ndarray
    np.testing.assert_array_equal(found, others)


def test_needs_that_cannot_be_hashed_are_in_the_cache(monkeypatch):
    cache = empty_call_cache(monkeypatch)
    x = np.ones((5, 8), np.float32)
    rstd = cunorm.rms_norm_forward(x).rstd
    for _ in range(2):
        for needs in (("x", "weight"), ["x", "weight"]):
            cunorm.rms_norm_backward(x, x, x[0], rstd=rstd, needs=needs)
    assert len(cache) == 2  # the forward and the backward


def test_new_memory_in_out_is_no_new_call(monkeypatch):
    cache = empty_call_cache(monkeypatch)
    x, kept = np.ones((5, 8), np.float32), []
    for _ in range(100):
        kept.append(np.empty_like(x))  # so that no address occurs twice
        cunorm.rms_norm(x, out=kept[-1])
    assert len(cache) == 1


# --- clear_cache ----------------------------------------------------------------------------------


def sizes() -> dict[str, int]:
    """Return the sizes of all module-level containers and caches of cunorm."""
    found = {
        f"{module.__name__}.{name}": len(value)
        for module in list(sys.modules.values())
        if module.__name__.startswith("cunorm.")
        for name, value in vars(module).items()
        if isinstance(value, Sized) and hasattr(value, "clear") and not name.startswith("__")
    }
    for one in caches():
        found[f"{name(one)} {id(one)}"] = one.cache_info().currsize
    return found


# Tables of types and dtypes may keep entries, which are few or weakly referenced.
TABLES = {"_arrays.registry.library_types", "_dispatch.library_types", "_core.dtypes._FROM_NUMPY"}
TABLES |= {"_core.dtypes._NUMPY", "_arrays.registry._user_types"}


def test_the_first_call_on_a_type_of_array_is_in_the_cache_and_clear_cache_leaves_nothing_behind():
    """Modules are imported before the first count. Builds stay on disk for other tests."""
    code = """
from tests.memory.test_cache_of_calls import *
from tests.support.calls import FUNCTIONS, call_of
from tests.support.internals import _cache
_cache._our_files = lambda folder: []
for name in cunorm.__all__:
    getattr(cunorm, name)
for kind in KINDS:
    if kind == "torch":
        import cunorm.torch
    call = call_of("rms_norm", kind=kind)
    call.make()  # imports the adapter
    with cached_calls_only():
        call.make()
if find_spec("jax"):
    import jax, cunorm.jax
    for norm in (cunorm.rms_norm, cunorm.jax.rms_norm):
        norm(jax.numpy.ones((2, 8)))
cunorm.clear_cache()
before = sizes()
for kind in KINDS:
    for name in FUNCTIONS:
        call_of(name, kind=kind).make()
if "torch" in KINDS:
    import torch
    x = torch.ones(3, 8, requires_grad=True)
    cunorm.torch.rms_norm(x).sum().backward()
    model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.RMSNorm(8))
    cunorm.torch.replace_norms(model)
    model(x)
if find_spec("jax"):
    x = jax.numpy.ones((3, 8))
    for norm in (cunorm.rms_norm, cunorm.jax.rms_norm, jax.vmap(cunorm.jax.rms_norm)):
        norm(x)
    jax.grad(lambda x: cunorm.jax.rms_norm(x).sum())(x)
cunorm.rms_norm(Foreign(np.ones((3, 8), np.float32)))
full = sizes()
assert sum(full.values()) > sum(before.values()) + 50
cunorm.clear_cache()
left = {name: size for name, size in sizes().items() if size > before.get(name, 0)}
assert not {name.removeprefix("cunorm.") for name in left} - TABLES, left
"""
    in_process(code)


# --- lifetimes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [np.ndarray, Foreign])
def test_a_users_class_is_not_kept_alive(base):
    own, x = type("Own", (base,), {}), np.ones((3, 8), np.float32)
    x = x.view(own) if base is np.ndarray else own(x)
    for _ in range(2):
        cunorm.rms_norm(x)
    seen = weakref.ref(own)
    del own, x
    gc.collect()
    assert seen() is None
