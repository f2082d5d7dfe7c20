# SPDX-License-Identifier: MIT
"""A user's script, which `test_typed_script.py` gives to type checkers. Nothing runs it.

`# type: ignore` marks each line where a checker must find an error.
"""

# pyright: strict, reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax
    import numpy as np
    import torch
    from numpy.typing import NDArray
    from typing_extensions import assert_type

    import cunorm
    import cunorm.jax
    import cunorm.torch
    from cunorm import rmsnom  # type: ignore[attr-defined]  # noqa: F401

    Array = NDArray[np.float32]


def of_numpy(x: Array, weight: Array, half: NDArray[np.float16]) -> None:
    assert_type(cunorm.rms_norm(x), Array)
    assert_type(cunorm.layer_norm(x, weight, gate=half, out=half), Array)
    assert_type(cunorm.l2_norm(x, dtype="float16"), Array)
    assert_type(cunorm.normalize(x, gate=x, gate_activation="gelu", gate_position="pre"), Array)
    assert_type(cunorm.group_norm(x, 2, weight, activation="silu", workspace=half), Array)
    assert_type(cunorm.instance_norm(x, dtype=half.dtype), Array)
    assert_type(cunorm.rms_norm(np.ones((2, 3))), np.ndarray[tuple[int, int], np.dtype[np.float64]])

    added = cunorm.add_rms_norm(x, None, weight)
    assert_type(added, cunorm.AddNorm[Array])
    y, stream = cunorm.add_layer_norm(x, added.residual, out=cunorm.AddNorm(residual=half))
    assert_type(y, Array)
    assert_type(stream, Array)


def gradients_of_numpy(x: Array, weight: Array, half: NDArray[np.float16]) -> None:
    saved = cunorm.layer_norm_forward(x, weight, residual=half, out=cunorm.NormForward(half))
    assert_type(saved, cunorm.NormForward[Array])
    assert_type(saved.mean, Array | None)
    grads = cunorm.layer_norm_backward(
        x, x, weight, mean=saved.mean, rstd=saved.rstd, needs=("x", "weight"), x_dtype=np.float16
    )
    assert_type(grads, cunorm.NormGrads[Array])
    assert_type(grads.dx, Array)
    assert_type(grads.dweight, Array | None)
    out = cunorm.NormGrads(dweight=weight)
    cunorm.rms_norm_backward(x, x, weight, rstd=saved.rstd, out=out, accumulate=True)
    cunorm.normalize_backward(x, x, rstd=saved.rstd, needs=["x"], out=cunorm.NormGrads(None, x))

    of_groups = cunorm.group_norm_forward(x, 2, weight)
    assert_type(of_groups, cunorm.GroupNormForward[Array])
    mean, rstd = of_groups.mean, of_groups.rstd
    group_grads = cunorm.group_norm_backward(x, x, 2, mean=mean, rstd=rstd, needs=("x",))
    assert_type(group_grads, cunorm.GroupNormGrads[Array])
    assert_type(cunorm.workspace_size("group_norm", x, num_groups=2), int)


def of_torch(x: torch.Tensor, weight: torch.nn.Parameter) -> None:
    assert_type(cunorm.rms_norm(x, weight, dtype=torch.bfloat16), torch.Tensor)
    assert_type(cunorm.add_rms_norm(x, x), cunorm.AddNorm[torch.Tensor])
    assert_type(cunorm.torch.rms_norm(x, weight, dtype="float16"), torch.Tensor)
    assert_type(cunorm.torch.group_norm(x, 2, activation="relu"), torch.Tensor)
    y, stream = cunorm.torch.add_rms_norm(x, None, weight, residual_dtype=torch.float32)
    assert_type(cunorm.torch.RMSNorm(8).forward(x), torch.Tensor)
    assert_type(y, torch.Tensor)
    assert_type(stream, torch.Tensor)


def of_jax(x: jax.Array, weight: Array) -> None:
    assert_type(cunorm.rms_norm(x, weight, dtype=jax.numpy.bfloat16), jax.Array)
    assert_type(cunorm.jax.rms_norm(x, weight, dtype=x.dtype), jax.Array)
    assert_type(cunorm.jax.rms_norm(weight), jax.Array)
    assert_type(cunorm.jax.instance_norm(x, activation="tanh"), jax.Array)
    assert_type(cunorm.jax.add_layer_norm(x, None, weight), cunorm.AddNorm[jax.Array])


def compiled_ahead() -> None:
    cunorm.warmup("rms_norm", [64, 128], ("float32", np.float16), device="cpu", rows=range(8))
    names = "group_norm_forward", "group_norm_backward"
    made = cunorm.warmup(
        names, 64, "float32", device="cpu", num_groups=4, positions=256, layout="channels_first",
        activation=[None, "silu"], weight=True, needs=("x",),
    )  # fmt: skip
    assert_type(made.builds, int)


def wrong(x: Array, tensor: torch.Tensor, array: jax.Array, name: str) -> None:
    cunorm.rms_norm([1.0, 2.0])  # type: ignore[type-var]
    cunorm.rms_norm(1.0)  # type: ignore[type-var]
    cunorm.rms_norm(None)  # type: ignore[type-var]
    cunorm.rms_norm(x, 3)  # type: ignore[arg-type]
    cunorm.rms_norm(x, gate=x, gate_activation="slu")  # type: ignore[arg-type]
    cunorm.rms_norm(x, gate=x, gate_activation=name)  # type: ignore[arg-type]
    cunorm.rms_norm(x, gate=x, gate_position="before")  # type: ignore[arg-type]
    cunorm.rms_norm(x, dtype="fp16")  # type: ignore[arg-type]
    cunorm.rms_norm(x, dtype=float)  # type: ignore[arg-type]
    cunorm.rms_norm(x, out=cunorm.AddNorm(x))  # type: ignore[arg-type]
    cunorm.rms_norm(x, epsilon=1e-6)  # type: ignore[call-arg]
    cunorm.add_rms_norm(x, x, out=x)  # type: ignore[arg-type]
    cunorm.group_norm(x, 2, activation="swoosh")  # type: ignore[arg-type]
    cunorm.rms_norm_backward(x, x, rstd=x, needs=("y",))  # type: ignore[arg-type]
    cunorm.rms_norm_backward(x, x, rstd=x, needs="x")  # type: ignore[arg-type]
    cunorm.group_norm_backward(x, x, 2, mean=x, rstd=x, needs=("gate",))  # type: ignore[arg-type]
    cunorm.rms_norm_forward(x).mean.sum()  # type: ignore[union-attr]
    cunorm.warmup("rms_norm", 64, "float32", device="cpu", layout="NCHW")  # type: ignore[arg-type]
    cunorm.no_such_norm(x)  # type: ignore[attr-defined]
    cunorm.torch.no_such_norm(x)  # type: ignore[attr-defined]
    cunorm.jax.no_such_norm(x)  # type: ignore[attr-defined]
    cunorm.torch.rms_norm(x)  # type: ignore[arg-type]
    cunorm.torch.rms_norm(tensor, gate=tensor, gate_activation="slu")  # type: ignore[arg-type]
    cunorm.torch.group_norm(tensor, 2, activation="slu")  # type: ignore[arg-type]
    cunorm.torch.GatedRMSNorm(8, gate_activation="slu")  # type: ignore[arg-type]
    cunorm.torch.GroupNorm(2, 8, activation="slu")  # type: ignore[arg-type]
    cunorm.jax.rms_norm([1.0, 2.0])  # type: ignore[arg-type]
    cunorm.jax.rms_norm(array, gate=array, gate_activation="slu")  # type: ignore[arg-type]
    cunorm.jax.rms_norm(array, out=array)  # type: ignore[call-arg]
