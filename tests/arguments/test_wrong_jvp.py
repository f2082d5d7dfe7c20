# SPDX-License-Identifier: MIT
"""Wrong arguments of the functions of forward mode are errors before anything is computed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cunorm

X, ROW, RSTD = np.ones((2, 4), np.float32), np.ones(4, np.float32), np.ones(2, np.float32)
IMAGE, STATISTIC = np.ones((2, 3, 4), np.float32), np.ones((2, 2), np.float32)
OF_GROUPS = {"x": IMAGE, "num_groups": 2, "x_tangent": IMAGE, "mean": STATISTIC, "rstd": STATISTIC}
WRONG: list[tuple[str, dict[str, Any], str]] = [
    ("normalize_jvp", {"x_tangent": None}, "all tangents are None, expected at least one"),
    ("normalize_jvp", {"x_tangent": ROW}, r"x_tangent has shape (4,), expected (2, 4)"),
    ("normalize_jvp", {"x_tangent": X.astype(int)}, "x_tangent has dtype int64, expected"),
    ("normalize_jvp", {"weight_tangent": ROW}, "weight_tangent is given, expected None: weight is"),
    ("normalize_jvp", {"gate_tangent": X}, "gate_tangent is given, expected None: gate is None"),
    ("normalize_jvp", {"bias_tangent": X[0, :3]}, "bias_tangent has shape (3,), expected (4,)"),
    ("normalize_jvp", {"rstd": None}, "rstd is None, expected a NumPy, CuPy, PyTorch or JAX array"),
    ("normalize_jvp", {"rstd": RSTD.astype("f2")}, "rstd has dtype float16, expected float32 or"),
    ("normalize_jvp", {"rstd": ROW}, "rstd has shape (4,), expected (2,)"),
    (
        "normalize_jvp",
        {"center": True},
        "mean is None, expected the mean that the forward returned",
    ),
    ("normalize_jvp", {"mean": RSTD}, "mean is given, expected None: center is False"),
    ("normalize_jvp", {"x": X.astype("f8")}, "rstd has dtype float32, expected float64"),
    ("normalize_jvp", {"gate_position": "pre"}, "gate_position is 'pre', expected 'post' as gate"),
    (
        "normalize_jvp",
        {"gate": X, "gate_position": "branch"},
        "gate_position is 'branch', expected",
    ),
    ("normalize_jvp", {"gate": ROW}, "gate has shape (4,), expected (2, 4)"),
    ("normalize_jvp", {"dtype": "int8"}, "dtype is 'int8', expected"),
    ("normalize_jvp", {"out": ROW}, "out has shape (4,), expected (2, 4)"),
    (
        "normalize_jvp",
        {"out": X.astype("f8"), "dtype": "float32"},
        "out has dtype float64, expected",
    ),
    ("rms_norm_jvp", {"axis": 2}, "axis"),
    ("rms_norm_jvp", {"groups": 3}, "groups"),
    ("layer_norm_jvp", {"mean": None}, "mean is None, expected the mean"),
    ("l2_norm_jvp", {"x_tangent": None}, "all tangents are None"),
    ("group_norm_jvp", {"x_tangent": None}, "x_tangent is None, expected"),
    ("group_norm_jvp", {"weight_tangent": ROW}, "weight_tangent is given, expected None: weight"),
    ("group_norm_jvp", {"weight": ROW, "weight_tangent": ROW[:3]}, "weight_tangent has shape (3,)"),
    ("group_norm_jvp", {"mean": RSTD}, "mean has shape (2,), expected (2, 2)"),
    ("group_norm_jvp", {"num_groups": 3}, "num_groups"),
    ("group_norm_jvp", {"activation": "selu"}, "activation is 'selu', expected"),
]


def arguments(name: str) -> dict[str, Any]:
    if name == "group_norm_jvp":
        return OF_GROUPS
    return {"x": X, "x_tangent": X, "rstd": RSTD} | ({"mean": RSTD} if "layer" in name else {})


@pytest.mark.parametrize(("name", "wrong", "text"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments_are_errors_that_name_them(name, wrong, text):
    with pytest.raises((TypeError, ValueError)) as caught:
        getattr(cunorm, name)(**(arguments(name) | wrong))
    assert str(caught.value).startswith(f"{name}: ")
    assert text in str(caught.value)


def test_an_output_that_overlaps_an_input_is_an_error():
    memory = np.ones((3, 4), np.float32)
    with pytest.raises(ValueError, match=r"^normalize_jvp: out overlaps x"):
        cunorm.normalize_jvp(memory[:2], x_tangent=X, rstd=RSTD, out=memory[1:])
    with pytest.raises(ValueError, match=r"^normalize_jvp: out overlaps rstd"):
        cunorm.normalize_jvp(X[:, :1], x_tangent=X[:, :1], rstd=RSTD, out=RSTD[:, None])


def test_tensors_that_require_grad_and_arrays_of_another_library_are_errors():
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    x = torch.ones(2, 4, requires_grad=True)
    with pytest.raises(ValueError, match=r"^rms_norm_jvp: x_tangent requires grad"):
        cunorm.rms_norm_jvp(x.detach(), x_tangent=x, rstd=torch.ones(2))
