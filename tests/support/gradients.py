# SPDX-License-Identifier: MIT
"""What the gradients of a row norm are made of, and which of them to ask for."""

# What each gradient is made of. Without center there is no mean, without a gate no gate.
INPUTS_OF = {
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
# Each gradient alone, those of parameters, and all but one of a parameter.
NEEDS = [(position, (name,)) for position, gradients in INPUTS_OF.items() for name in gradients]
NEEDS += [(None, ("weight", "bias")), ("pre", ("weight", "x", "gate")), ("post", ("bias", "gate"))]
