# SPDX-License-Identifier: MIT
"""What the gradients of a row norm are made of, and which of them to ask for."""

from itertools import combinations

# What each gradient is made of. Without center there is no mean, without a gate no gate.
MADE_OF = {
    None: {
        "bias": {"dy"},
        "weight": {"dy", "x", "rstd", "mean"},
        "x": {"dy", "x", "rstd", "mean", "weight", "d_residual"},
    },
    "pre": {
        "bias": {"dy"},
        "weight": {"dy", "x", "rstd", "mean", "gate"},
        "x": {"dy", "x", "rstd", "mean", "gate", "weight", "d_residual"},
        "gate": {"dy", "x", "rstd", "mean", "gate", "weight"},
    },
    "post": {
        "bias": {"dy", "gate"},
        "weight": {"dy", "x", "rstd", "mean", "gate"},
        "x": {"dy", "x", "rstd", "mean", "gate", "weight", "d_residual"},
        "gate": {"dy", "x", "rstd", "mean", "gate", "weight", "bias"},
    },
}
# Each gradient alone, and all but each.
NEEDS = [
    (position, needs)
    for position, gradients in MADE_OF.items()
    for size in (1, len(gradients) - 1)
    for needs in combinations(gradients, size)
]
