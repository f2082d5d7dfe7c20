# SPDX-License-Identifier: MIT
"""The model, with a gradient written by hand; every norm is a call of cunorm.

Arrays are channels last, (pictures, height, width, channels). NumPy's functions take CuPy arrays,
too.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

import cunorm

Array = Any  # of NumPy or CuPy
Arrays = dict[str, Array]


def convolution(x: Array, kernel: Array) -> Array:
    """Return the 3x3 convolution with a (3, 3, inputs, outputs) kernel, zero-padded."""
    return sum(part @ kernel[tap] for tap, part in _shifted(_padded(x)))


def convolution_backward(d_out: Array, x: Array, kernel: Array) -> tuple[Array, Array]:
    """Return the gradients of x and of the kernel."""
    d_padded, d_kernel = np.zeros_like(_padded(x)), np.empty_like(kernel)
    d_rows = d_out.reshape(-1, d_out.shape[-1])
    for (tap, part), (_, d_part) in zip(_shifted(_padded(x)), _shifted(d_padded), strict=True):
        d_kernel[tap] = part.reshape(-1, part.shape[-1]).T @ d_rows
        d_part += d_out @ kernel[tap].T
    return d_padded[:, 1:-1, 1:-1], d_kernel


def _padded(x: Array) -> Array:
    """Return a copy with a border of zeros."""
    return np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))


def _shifted(padded: Array) -> list[tuple[tuple[int, int], Array]]:
    """Return each tap (row, column) of a 3x3 kernel, and the view that it multiplies."""
    height, width = padded.shape[1] - 2, padded.shape[2] - 2
    return [
        ((row, column), padded[:, row : row + height, column : column + width])
        for row in range(3)
        for column in range(3)
    ]


class Forward(NamedTuple):
    """The model's output, and the arrays that its backward needs."""

    output: Array
    streams: tuple[Array, ...]  # the inputs of the three norms
    norms: tuple[cunorm.GroupNormForward, ...]  # with SiLU


class Denoiser:
    """A residual block between two convolutions computes a correction, which is added to a picture.

    Each gn is a group norm with SiLU, in one call, as in Stable Diffusion's autoencoder::

        stream = lift(picture)                                   3 -> channels
        stream = stream + conv2(gn2(conv1(gn1(stream))))         the residual block
        output = picture + out(gn3(stream))                      channels -> 3
    """

    def __init__(self, channels: int, groups: int, rng: np.random.Generator, xp: Any) -> None:
        self.groups = groups
        shapes = {
            "lift": (3, 3, 3, channels),
            "conv1": (3, 3, channels, channels),
            "conv2": (3, 3, channels, channels),
            "out": (3, 3, channels, 3),
        }
        self.parameters: Arrays = {
            name: xp.asarray(rng.standard_normal(shape) / np.sqrt(9 * shape[2]), np.float32)
            for name, shape in shapes.items()
        }
        self.parameters["out"] *= 0  # the model begins as the identity
        for name in ("gn1", "gn2", "gn3"):
            self.parameters[f"{name}.weight"] = xp.ones(channels, np.float32)
            self.parameters[f"{name}.bias"] = xp.zeros(channels, np.float32)

    def forward(self, picture: Array) -> Forward:
        """Return the denoised pictures."""
        kernels = self.parameters
        stream = convolution(picture, kernels["lift"])
        norm1 = self._norm("gn1", stream)
        branch = convolution(norm1.y, kernels["conv1"])
        norm2 = self._norm("gn2", branch)
        end = stream + convolution(norm2.y, kernels["conv2"])
        norm3 = self._norm("gn3", end)
        output = picture + convolution(norm3.y, kernels["out"])
        return Forward(output, (stream, branch, end), (norm1, norm2, norm3))

    def backward(self, d_output: Array, picture: Array, saved: Forward) -> tuple[Array, Arrays]:
        """Return the gradients of the pictures and of the parameters."""
        grads: Arrays = {}

        def backpropagate(d_out: Array, kernel: str, norm: int) -> Array:
            """Backpropagate through a convolution and the norm before it."""
            forward, name = saved.norms[norm - 1], f"gn{norm}"
            d_y, grads[kernel] = convolution_backward(d_out, forward.y, self.parameters[kernel])
            norm_grads = cunorm.group_norm_backward(
                d_y,
                saved.streams[norm - 1],
                self.groups,
                *self._affine(name),
                mean=forward.mean,
                rstd=forward.rstd,
                activation="silu",
            )
            grads[f"{name}.weight"], grads[f"{name}.bias"] = norm_grads.dweight, norm_grads.dbias
            return norm_grads.dx

        d_end = backpropagate(d_output, "out", 3)
        d_branch = backpropagate(d_end, "conv2", 2)
        d_stream = d_end + backpropagate(d_branch, "conv1", 1)
        d_picture, grads["lift"] = convolution_backward(d_stream, picture, self.parameters["lift"])
        return d_output + d_picture, grads

    def loss_and_gradients(self, noisy: Array, clean: Array) -> tuple[float, Array, Arrays]:
        """Return the mean squared error, and gradients of the noisy picture and the parameters."""
        saved = self.forward(noisy)
        error = saved.output - clean
        return float((error**2).mean()), *self.backward(2 * error / error.size, noisy, saved)

    def _norm(self, name: str, x: Array) -> cunorm.GroupNormForward:
        return cunorm.group_norm_forward(x, self.groups, *self._affine(name), activation="silu")

    def _affine(self, name: str) -> tuple[Array, Array]:
        return self.parameters[f"{name}.weight"], self.parameters[f"{name}.bias"]
