# SPDX-License-Identifier: MIT
"""The checked scalars of row norms in forward mode."""

from dataclasses import dataclass

from cunorm._core import validate
from cunorm._core.dtypes import DType, promoted
from cunorm._core.memo import axis_key, memoize
from cunorm._core.operands import DTypes, Specs, present
from cunorm._row_norm.spec import GATE_DEFAULTS, Options, RowNormSpec, Scalars
from cunorm._row_norm.split_spec import check_statistics, piece


@dataclass(frozen=True, slots=True, eq=False)
class RowJvpSpec(RowNormSpec):
    dtype: DType | None
    x_dtype: DType | None  # the dtype of the x that was added to the stream, if it is not x's

    output_names = ("out",)

    def result_dtypes(self, dtypes: DTypes) -> dict[str, DType]:
        return {"y_tangent": dtypes["y_tangent"] or self.dtype or self._own_dtype(dtypes)}

    def _own_dtype(self, dtypes: DTypes) -> DType:
        """Return y's dtype if neither an option nor a given array decides it."""
        x, weight = self.x_dtype or present(dtypes["x"]), dtypes["weight"]
        return promoted(x, weight) if self.round_before_weight and weight else x

    def numbers(self, width: int) -> tuple[float, ...]:
        """Return the numbers in the kernel's arguments."""
        return (self.k(width), self.weight_offset)

    def check_options(self, inputs: Specs) -> None:
        RowNormSpec.check_options(self, inputs)  # super() fails in a dataclass with slots
        function = self.function
        if self.gate_position == "branch":
            raise ValueError(
                f"{function}: gate_position is 'branch', expected 'pre' or 'post': x_tangent is "
                "the tangent of the stream, to which a gate of the branch belongs: leave it out"
            )
        check_statistics(self, inputs)
        for name in ("weight", "gate"):
            if inputs[name] is None:
                tangent = inputs[f"{name}_tangent"]
                validate.absent(function, f"{name}_tangent", tangent, f"{name} is None")
        if not any(one for name, one in inputs.items() if name.endswith("_tangent")):
            raise ValueError(f"{function}: all tangents are None, expected at least one")


def jvp_scalars(
    function: str,
    options: Options,
    *,
    center: bool = False,
    c: object = None,
    dtype: object = None,
    x_dtype: object = None,
) -> Scalars:
    return (function, axis_key(options[0]), *options[1:], center, c, dtype, x_dtype)


@memoize()
def jvp_spec(
    spec: RowNormSpec, dtype: DType | None = None, x_dtype: DType | None = None
) -> RowJvpSpec:
    """Return the spec of y's tangent; a gate of the branch is no operand of it."""
    gate = GATE_DEFAULTS if spec.gate_position == "branch" else {}
    return piece(RowJvpSpec, spec, **gate, dtype=dtype, x_dtype=x_dtype)


@memoize()
def second_spec(spec: RowNormSpec, dtype: DType | None = None) -> RowJvpSpec:
    """Return the spec of the tangent of a backward's dx, without a gate."""
    own = {"round_before_weight": False, "dtype": dtype, "x_dtype": None}
    return piece(RowJvpSpec, spec, **GATE_DEFAULTS, **own)
