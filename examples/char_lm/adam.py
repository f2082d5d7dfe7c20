# SPDX-License-Identifier: MIT
"""The optimizer Adam, and the learning rate of each step."""

from __future__ import annotations

import math

import numpy as np

from .layers import Arrays


class Adam:
    """Adam (Kingma and Ba, arXiv:1412.6980). It changes the parameters in place."""

    def __init__(
        self, parameters: Arrays, beta1: float = 0.9, beta2: float = 0.99, eps: float = 1e-8
    ) -> None:
        self.parameters, self.beta1, self.beta2, self.eps = parameters, beta1, beta2, eps
        self.means = {name: np.zeros_like(array) for name, array in parameters.items()}
        self.squares = {name: np.zeros_like(array) for name, array in parameters.items()}
        self.steps = 0

    def step(self, grads: Arrays, rate: float) -> None:
        """Take one step against the gradients."""
        self.steps += 1
        # The averages begin at zero: correct their bias.
        rate *= math.sqrt(1 - self.beta2**self.steps) / (1 - self.beta1**self.steps)
        for name, parameter in self.parameters.items():
            mean, square, grad = self.means[name], self.squares[name], grads[name]
            mean += (1 - self.beta1) * (grad - mean)
            square += (1 - self.beta2) * (grad * grad - square)
            parameter -= rate * mean / (np.sqrt(square) + self.eps)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Return the rate of a step: a linear warm-up over a tenth of the steps, then a cosine to 0."""
    warm_up = max(1, steps // 10)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / (steps - warm_up)))
