# SPDX-License-Identifier: MIT
"""The derivatives of a row norm's gradients and of its tangent, by kernels.

P(v) is the derivative of r = (x - mean) * rstd along v, and T(a, b) is that of P(a) along b. Both
are symmetric. With w = weight + weight_offset::

    y = k * r * w + bias
    tangent(x', weight', bias') = k * P(x') * w + k * r * weight' + bias'
    gradients(dy) = k * P(dy * w), sum(dy * k * r), sum(dy)
    second(dy, x') = k * T(dy * w, x')

A norm with a gate, or rounded before weight, is torch's operations around such a norm.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cunorm._arrays.torch import TORCH_DTYPES
from cunorm._core.dtypes import parse_dtype, parse_optional_dtype
from cunorm._core.memo import memoize
from cunorm._core.plan import backward_spec
from cunorm._row_norm.jvp_plan import ROW_SECOND
from cunorm._row_norm.jvp_spec import jvp_spec, second_spec
from cunorm._row_norm.plan import ROW_BACKWARD
from cunorm._row_norm.spec import GATE_DEFAULTS, RowForwardSpec
from cunorm.torch._differentiable import derivative
from cunorm.torch._formulas import (
    Operand,
    compute_of,
    gated_row,
    pulled,
    pushed,
    row_formula,
    with_rows_last,
)
from cunorm.torch._library import Operator, present, to_text
from cunorm.torch._pair import OpPair
from cunorm.torch._second import Named, Point, Rules, given, jvp_of, vjp_of

_WEIGHTED = ("x", "weight", "bias")


def _of_plain_rows(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that has the rule by kernels for plain rows, and for others that of Rules.

    Both have the same name.
    """
    by_formula = getattr(Rules, rule.__name__)

    def chosen(self: "RowRules", point: Point, *arguments: Any) -> Any:
        at = _Rows(self, point)
        if at.has_more or isinstance(point.forward.axis, tuple):
            return by_formula(self, point, *arguments)
        return rule(self, at, point, *arguments)

    return chosen


class RowRules(Rules):
    """The rules of row norms, by kernels; `functions` are the norm and its derivatives."""

    def __init__(self, pair: OpPair, functions: Any) -> None:
        super().__init__(pair, self._formula)
        self.functions = functions
        second = Operator("row_norm_second", ROW_SECOND).run
        vjp = self._second_vjp
        self.second = derivative(second, ROW_SECOND, vjp, self._second_jvp, vjp)

    def _formula(self, forward: Any, x_dtype: torch.dtype, **operands: Any) -> Tensor:
        if isinstance(forward.axis, tuple):
            return with_rows_last(partial(self._formula, x_dtype=x_dtype), forward, **operands)

        def norm(x: Tensor, weight: Operand, bias: Operand) -> Tensor:
            spec = _plain(forward, weight is not None, x.dtype)
            y: Tensor = self.functions.norm(x, weight, bias, None, None, to_text(spec))[0]
            return y

        return gated_row(norm, forward, x_dtype, **operands)

    @_of_plain_rows
    def gradients_vjp(
        self, at: "_Rows", point: Point, wanted: Sequence[str], cotangents: Sequence[Operand]
    ) -> Named:
        named = point.named
        of_dx, of_dweight, of_dbias, _, of_dresidual = cotangents
        dy, weight, x = point.tensors["dy"], named["weight"], at.x
        u = of_dx if of_dresidual is None else at.sum(at.compute, of_dx, of_dresidual)
        found: Named = {}
        if "dresidual_out" in wanted and u is not None:
            found["dresidual_out"] = u.to(point.tensors["dresidual_out"].dtype)
        if "dy" in wanted:
            found["dy"] = at.tangent(u, of_dweight, of_dbias, weight=weight, dtype=dy.dtype)
        if "x" in wanted:
            found["x"] = at.total(x.dtype, at.of_dx(dy, weight, u, of_dweight))
        if "weight" in wanted and u is not None:
            found["weight"] = at.summed(dy, u, point.tensors["weight"])
        return found

    @_of_plain_rows
    def gradients_jvp(self, at: "_Rows", point: Point, tangents: Named) -> list[Operand]:
        named = point.named
        dy, weight, of_x = point.tensors["dy"], named["weight"], tangents["x"]
        of_dy, of_weight, of_dres = (tangents[n] for n in ("dy", "weight", "dresidual_out"))
        like, found = self.like_gradients(point), Named()
        if of_dy is not None and {*point.spec.needs} - {"x"}:
            parameters = [name for name in point.spec.needs if name != "x"]
            found |= at.gradients(of_dy, weight, named["bias"], parameters)
        if of_x is not None and "weight" in like:
            own = at.summed(dy, of_x, like["weight"])
            found["weight"] = at.sum(own.dtype, found.get("weight"), own)
        if "x" in like:
            terms = at.of_dx(dy, weight, of_x, of_weight)
            if of_dy is not None:
                terms.append(partial(at.dx, of_dy, weight))
            ds = at.sum(at.compute, at.total(at.compute, terms), of_dres)
            if ds is not None:
                found |= {n: ds.to(like[n].dtype) for n in ("x", "residual") if n in like}
        zeros = {name: torch.zeros_like(one) for name, one in like.items() if name not in found}
        return [(found | zeros).get(name) for name in self.outputs]

    @_of_plain_rows
    def tangent_vjp(
        self, at: "_Rows", point: Point, wanted: Sequence[str], cotangents: Sequence[Operand]
    ) -> Named:
        named = point.named
        dy, weight = next(one for one in cotangents if one is not None), named["weight"]
        of_x, of_weight = named["x_tangent"], named["weight_tangent"]
        needs = [name for name in _WEIGHTED if f"{name}_tangent" in wanted]
        found: Named = {}
        if needs:
            pulled_back = at.gradients(dy, weight, named["bias_tangent"], needs)
            found = {f"{name}_tangent": one for name, one in pulled_back.items()}
        if "x" in wanted:
            found["x"] = at.total(at.x.dtype, at.of_dx(dy, weight, of_x, of_weight))
        if "weight" in wanted and of_x is not None:
            found["weight"] = at.summed(dy, of_x, point.tensors["weight"])
        return found

    @_of_plain_rows
    def tangent_jvp(self, at: "_Rows", point: Point, tangents: Named) -> list[Operand]:
        named = point.named
        of_x, weight = named["x_tangent"], named["weight"]
        again = [tangents[f"{name}_tangent"] for name in _WEIGHTED]
        terms: list[Any] = [partial(at.tangent, *again, weight=weight)]
        if (moved := tangents["x"]) is not None:
            if of_x is not None:
                terms.append(partial(at.weighted_second, of_x, weight, moved))
            if (of_weight := named["weight_tangent"]) is not None:
                terms.append(partial(at.tangent, moved, weight=of_weight, offset=False))
        if (moved := tangents["weight"]) is not None and of_x is not None:
            terms.append(partial(at.tangent, of_x, weight=moved, offset=False))
        dtype = TORCH_DTYPES[point.spec.dtype]
        found = at.total(dtype, terms)
        return [torch.zeros_like(at.x, dtype=dtype) if found is None else found]

    # --- the second derivative's own derivatives, by the formula ----------------------------------

    def _second_vjp(
        self, point: Point, wanted: Sequence[str], cotangents: Sequence[Operand]
    ) -> Named:
        return vjp_of(_second, point, wanted, cotangents[0])

    def _second_jvp(self, point: Point, tangents: Named) -> list[Operand]:
        like = point.tensors["x"].to(TORCH_DTYPES[point.spec.dtype])
        return [jvp_of(_second, point, tangents, like)]


def _second(point: Point) -> Tensor:
    """Return the derivative of dx along x's tangent by the formula."""
    tensors, weight = point.tensors, point.named["weight"]
    compute = tensors["rstd"].dtype
    dy, x, tangent = (tensors[name].to(compute) for name in ("dy", "x", "x_tangent"))
    formula = partial(row_formula, point.forward, compute, gate=None, weight=weight, bias=None)
    found: Tensor = pushed(lambda x: pulled(formula, (x,), dy)[0], (x,), (tangent,), x)
    return found.to(TORCH_DTYPES[point.spec.dtype])


class _Rows:
    """Normalised rows, and the derivatives at them."""

    def __init__(self, rules: RowRules, point: Point) -> None:
        self.rules, self.functions = rules, rules.functions
        self.forward, tensors = point.forward, point.tensors
        self.x, self.rstd, self.mean = tensors["x"], tensors["rstd"], point.named["mean"]
        self.compute = self.rstd.dtype
        rounds = self.forward.round_before_weight and point.x_dtype() is not self.compute
        self.has_more = point.named["gate"] is not None or rounds

    def gradients(
        self,
        dy: Tensor,
        weight: Operand,
        bias: Operand,
        needs: Sequence[str],
        *,
        dtype: torch.dtype | None = None,
        offset: bool = True,
    ) -> dict[str, Tensor]:
        """Return the gradients of a norm's operands, dx in a dtype; by default in x's."""
        forward, dtype = _plain(self.forward, offset, None), dtype or self.x.dtype
        # The backward finds its compute dtype from those of x and dx.
        computes = compute_of(self.x.dtype, dtype) is self.compute
        spec = _gradients_spec(forward, dtype if computes else self.compute, tuple(needs))
        arrays = (dy, None, self.x, weight, bias, None, self.mean, self.rstd, None)
        found = present(self.functions.gradients(*arrays, spec, forward))
        named = given(dict(zip(self.rules.outputs, found, strict=True)))
        return {name: named[name].to(dtype) if name == "x" else named[name] for name in needs}

    def dx(self, dy: Tensor, weight: Operand, **options: Any) -> Tensor:
        return self.gradients(dy, weight, None, ["x"], **options)["x"]

    def tangent(
        self,
        of_x: Operand,
        of_weight: Operand = None,
        of_bias: Operand = None,
        *,
        weight: Operand = None,
        dtype: torch.dtype,
        offset: bool = True,
    ) -> Operand:
        """Return the tangent of y, None if nothing has a tangent."""
        if of_x is None and of_weight is None and of_bias is None:
            return None
        forward = _plain(self.forward, offset, None)
        spec = _tangent_spec(forward, dtype)
        arrays = (self.x, weight, None, None, self.mean, self.rstd, of_x, of_weight, of_bias, None)
        y: Tensor = self.functions.tangent(*arrays, spec, forward)[0]
        return y

    def of_dx(
        self, dy: Tensor, weight: Operand, of_x: Operand, of_weight: Operand
    ) -> list[Callable[..., Operand]]:
        """Return the terms of dx's tangent along those of x and of weight."""
        terms: list[Callable[..., Operand]] = []
        if of_x is not None:
            terms.append(partial(self.second, dy, weight, of_x))
        if of_weight is not None:
            terms.append(partial(self.dx, dy, of_weight, offset=False))
        return terms

    def second(self, dy: Tensor, weight: Operand, of_x: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Return the tangent of dx."""
        forward = _plain(self.forward, True, None)
        spec = _second_spec(forward, dtype)
        arrays = (dy, self.x, weight, self.mean, self.rstd, of_x)
        dx: Tensor = self.rules.second(*arrays, spec, forward)[0]
        return dx

    def weighted_second(
        self, of_x: Tensor, weight: Operand, again: Tensor, *, dtype: torch.dtype
    ) -> Tensor:
        """Return the tangent along `again` of y's tangent along `of_x`."""
        if weight is None:
            return self.second(of_x, None, again, dtype=dtype)
        factor = weight.to(self.compute) + self.forward.weight_offset
        return (self.second(of_x, None, again, dtype=self.compute) * factor).to(dtype)

    def summed(self, dy: Tensor, of_x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of weight in dx, or in y's tangent."""
        of_r = self.tangent(of_x, dtype=self.compute)
        assert of_r is not None
        products = dy.to(self.compute) * of_r
        return products.sum_to_size(weight.shape).to(weight.dtype)

    def total(self, dtype: torch.dtype, terms: Sequence[Callable[..., Operand]]) -> Operand:
        """Return a sum of terms that are computed in a dtype, None if there is no term."""
        if len(terms) == 1:
            return terms[0](dtype=dtype)
        return self.sum(dtype, *(term(dtype=self.compute) for term in terms))

    def sum(self, dtype: torch.dtype, *terms: Operand) -> Operand:
        some = [one.to(self.compute) for one in terms if one is not None]
        return sum(some[1:], some[0]).to(dtype) if some else None


@memoize()
def _plain(forward: RowForwardSpec, offset: bool, dtype: torch.dtype | None) -> RowForwardSpec:
    """Return the spec of a norm without a gate, a rounding and a stream, for a dtype of y."""
    own: dict[str, Any] = dict(GATE_DEFAULTS)
    return replace(
        forward,
        **own,
        round_before_weight=False,
        weight_offset=forward.weight_offset if offset else 0.0,
        dtype=parse_optional_dtype(forward.function, "dtype", dtype),
        residual_dtype=None,
        streams=None,
        saves=True,
    )


@memoize()
def _gradients_spec(forward: RowForwardSpec, dtype: torch.dtype, needs: tuple[str, ...]) -> Any:
    return backward_spec(ROW_BACKWARD, forward, parse_dtype(forward.function, "x", dtype), needs)


@memoize()
def _tangent_spec(forward: RowForwardSpec, dtype: torch.dtype) -> Any:
    return jvp_spec(forward, parse_dtype(forward.function, "dtype", dtype))


@memoize()
def _second_spec(forward: RowForwardSpec, dtype: torch.dtype) -> Any:
    return second_spec(forward, parse_dtype(forward.function, "dtype", dtype))
