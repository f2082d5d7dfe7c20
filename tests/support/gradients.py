# SPDX-License-Identifier: MIT
"""The inputs that each gradient of a row norm depends on, and sets of gradients to request."""

# The inputs of each gradient, by the gate's position. Only centered norms have a mean.
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
# Each gradient alone, and some gradients together.
NEEDS = [(position, (name,)) for position, gradients in INPUTS_OF.items() for name in gradients]
NEEDS += [(None, ("weight", "bias")), ("pre", ("weight", "x", "gate")), ("post", ("bias", "gate"))]
