# SPDX-License-Identifier: MIT
"""Blocks whose forward runs a group norm and then an activation: both become one call.

The forward's source is rewritten, for example from::

    x = self.norm2(x)
    x = self.nonlinearity(x)

to ``x = self._cunorm_fused("norm2", "nonlinearity", x)``, which is the same for any modules: it
runs them one after another if it cannot run them as one. Nothing else can read the norm's result,
because the next statement assigns to its name. The activation may also follow an ``if`` whose
branches end with norms; other uses of the same modules stay as they are.
"""

import __future__

import ast
import copy
import inspect
from collections.abc import Callable
from functools import lru_cache, reduce, update_wrapper
from operator import or_
from types import CellType, CodeType, FunctionType
from typing import Any, NamedTuple

from torch.nn import Module

from cunorm.torch._replace.after import Activation, activation_of

Forward = Callable[..., Any]
Pair = tuple[str, str]  # the names of a norm and of the submodule that follows it
_BLOCKS = (ast.If, ast.For, ast.While, ast.With)
_FUTURE = reduce(
    or_, (getattr(__future__, one).compiler_flag for one in __future__.all_feature_names)
)


class Fusion(NamedTuple):
    """The plan of a block: by a norm and the submodule that follows it, the activation."""

    activations: dict[Pair, Activation]


def fusion_of(block: Module, is_group_norm: Callable[[object], bool], exact: bool) -> Fusion | None:
    """Return which of a block's submodules can be fused, or None if there are none."""
    modules = block._modules
    found: dict[Pair, Activation] = {}

    def can_be_one(norm: str, act: str) -> bool:
        following = modules.get(act)
        if is_group_norm(modules.get(norm)) and following is not None:
            activation = activation_of([following], exact)
            if activation is not None and activation.name != "identity":
                found[norm, act] = activation
        return (norm, act) in found

    if any(map(is_group_norm, modules.values())) and rewritten(type(block), can_be_one):
        return Fusion(found)
    return None


def rewritten(kind: type[Module], can_be_one: Callable[[str, str], bool]) -> Forward | None:
    """Return a class's forward in which such pairs of norm and submodule are one call.

    It is None if there is no pair, if the forward is not what its source says, or if it has a
    wrapper that does not keep what it wraps in its closure.
    """
    try:
        own: Any = inspect.unwrap(kind.forward)
        if not isinstance(own, FunctionType) or own.__code__.co_freevars:
            return None
        function = copy.deepcopy(_source_of(own))
        rewriter = _Rewriter(can_be_one)
        function.body = rewriter.fused(function.body)
        return _wrapped(kind.forward, own, _defined(function, own)) if rewriter.count else None
    except (OSError, TypeError, SyntaxError, ValueError):  # there is no source, or another one
        return None


def _source_of(own: FunctionType) -> ast.FunctionDef:
    """Return the definition of a function; raise ValueError if the source says something else."""
    tree = _parsed("".join(inspect.findsource(own)[0]))
    # The compiler treats the names of imported modules in a way of its own.
    imports = [one for one in tree.body if isinstance(one, (ast.Import, ast.ImportFrom))]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and node.name == own.__name__:
            lines = [node.lineno, *(one.lineno for one in node.decorator_list)]
            if min(lines) == own.__code__.co_firstlineno and _is_plain(node):
                code = _compiled([*imports, node], own)
                if any(_parts(own.__code__) == _parts(one) for one in code.co_consts):
                    return node
    raise ValueError(own)


@lru_cache(maxsize=1)
def _parsed(source: str) -> ast.Module:
    return ast.parse(source)


def _parts(code: Any) -> object:
    """Return what a code does, without its positions; of any other constant, its text."""
    if not isinstance(code, CodeType):
        return repr(code)
    return code.co_code, code.co_names, code.co_varnames, [*map(_parts, code.co_consts)]


def _is_plain(function: ast.FunctionDef) -> bool:
    """Return whether the names in a method mean what they seem to."""
    nodes = [*ast.walk(function)]
    names = [getattr(node, "attr", getattr(node, "id", "")) for node in nodes]
    is_mangled = any(name.startswith("__") and not name.endswith("__") for name in names)
    is_changed = any(
        isinstance(node, ast.Global)
        or (isinstance(node, ast.Name) and node.id == "self" and isinstance(node.ctx, ast.Store))
        for node in nodes
    )
    return [one.arg for one in function.args.args[:1]] == ["self"] and not is_mangled | is_changed


def _compiled(body: list[ast.stmt], own: FunctionType) -> CodeType:
    flags = own.__code__.co_flags & _FUTURE
    tree = ast.fix_missing_locations(ast.Module(body, type_ignores=[]))
    return compile(tree, own.__code__.co_filename, "exec", flags=flags, dont_inherit=True)


def _defined(function: ast.FunctionDef, own: FunctionType) -> Forward:
    """Return the function of a definition, without its decorators; nothing of it runs here."""
    function.decorator_list = []
    codes = [one for one in _compiled([function], own).co_consts if isinstance(one, CodeType)]
    (code,) = (one for one in codes if one.co_name == own.__name__)
    return _copied(own, code, None)


def _wrapped(outer: Any, own: FunctionType, forward: Forward) -> Forward:
    """Return a function with copies of the wrappers that `outer` has around `own`.

    Decorators do not run again: a copy shares all with its wrapper but the cell of what it wraps.
    """
    if outer is own:
        return forward
    inner = outer.__wrapped__
    cells = outer.__closure__ or ()
    if not isinstance(outer, FunctionType) or all(
        cell.cell_contents is not inner for cell in cells
    ):
        raise ValueError(outer)
    new = _wrapped(inner, own, forward)
    closure = tuple(CellType(new) if cell.cell_contents is inner else cell for cell in cells)
    copied: Any = _copied(outer, outer.__code__, closure)
    copied.__wrapped__ = new
    return copied  # type: ignore[no-any-return]  # a Forward


def _copied(own: FunctionType, code: CodeType, closure: tuple[CellType, ...] | None) -> Forward:
    """Return a function with another code and closure."""
    new = FunctionType(code, own.__globals__, own.__name__, own.__defaults__, closure)
    new.__kwdefaults__ = own.__kwdefaults__
    update_wrapper(new, own)
    del new.__wrapped__  # type: ignore[attr-defined]  # `update_wrapper` set it
    return new


class _Call(NamedTuple):
    target: str
    name: str  # of the submodule
    given: list[str | None]  # the names of the arguments


def _submodule_call(statement: ast.stmt) -> _Call | None:
    """Return the parts of a statement ``target = self.name(given, ...)``."""
    match statement:
        case ast.Assign(
            targets=[ast.Name(id=target)],
            value=ast.Call(
                func=ast.Attribute(value=ast.Name(id="self"), attr=name), args=args, keywords=[]
            ),
        ):
            return _Call(target, name, [getattr(one, "id", None) for one in args])
    return None


class _Rewriter:
    """Lets statements that end with a norm also run the activation that follows them."""

    def __init__(self, can_be_one: Callable[[str, str], bool]) -> None:
        self.can_be_one = can_be_one
        self.count = 0  # of fused calls

    def fused(self, body: list[ast.stmt]) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        for statement in body:
            if isinstance(statement, _BLOCKS):
                statement.body = self.fused(statement.body)
                if not isinstance(statement, ast.With):
                    statement.orelse = self.fused(statement.orelse)
            act = _submodule_call(statement)
            if act is not None and done and act.given == [act.target] and self.ends(done[-1], act):
                self.append(done[-1], act, statement)
            else:
                done.append(statement)
        return done

    def ends(self, statement: ast.stmt, act: _Call) -> bool:
        """Return whether a statement, or a branch of an if, ends with a norm for act."""
        if isinstance(statement, ast.If):
            branches = statement.body, statement.orelse
            return any(self.ends(branch[-1], act) for branch in branches if branch)
        norm = _submodule_call(statement)
        return (
            norm is not None and norm.target == act.target and self.can_be_one(norm.name, act.name)
        )

    def append(self, statement: Any, act: _Call, activation: ast.stmt) -> None:
        """Let a statement, or each branch of an if, also run the activation."""
        if isinstance(statement, ast.If):
            for branch in (statement.body, statement.orelse):
                if branch and self.ends(branch[-1], act):
                    self.append(branch[-1], act, activation)
                else:
                    branch.append(copy.deepcopy(activation))
            return
        names = [ast.Constant(statement.value.func.attr), ast.Constant(act.name)]
        statement.value.args[:0] = names
        statement.value.func.attr = "_cunorm_fused"
        self.count += 1
