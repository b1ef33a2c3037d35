"""Source code in a form that renaming does not change: what a function computes, not how its author calls things.

Parameters, locals, annotations, docstrings and decorators differ between versions of a library. Names of attributes and
of keyword arguments belong to other objects, so they count.
"""

from __future__ import annotations

import ast
import builtins
import hashlib
import inspect
import textwrap
import types
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

from cute_ops_torch.composite.constant import constant

# The attribute of a function that was made from another one's tree: its own.
DEFINITION = "_cute_definition"


@cache
def definition(function: Any) -> ast.FunctionDef | None:
    """The syntax tree of a function beneath its decorators, without annotations and docstring; None without source."""
    made: ast.FunctionDef | None = getattr(inspect.unwrap(function), DEFINITION, None)
    if made is not None:
        return made
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body[0]
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(tree, ast.FunctionDef):
        return None
    if ast.get_docstring(tree) is not None:
        tree.body = tree.body[1:]
    tree.decorator_list, tree.returns = [], None
    found: ast.FunctionDef = _Plain().visit(tree)
    return found


def copied(tree: Any) -> Any:
    """A copy of a syntax tree; ``copy.deepcopy`` takes five times as long. Nodes without fields are shared, as by
    Python's parser.
    """
    if isinstance(tree, list):
        return [copied(each) for each in tree]
    if not isinstance(tree, ast.AST) or not tree._fields:
        return tree
    made = (kind := type(tree)).__new__(kind)  # of Python 3.13 on, a call without fields warns
    vars(made).update({name: copied(value) for name, value in vars(tree).items()})
    return made


@cache
def _nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """The nodes of a definition, which is kept."""
    return tuple(ast.walk(tree))


def caller(module: Any, model: Any) -> tuple[ast.FunctionDef, str] | None:
    """The definition of the ``forward`` of the module around another one, and how that is called there; None where
    there is no such module, or no source.
    """
    for parent in model.modules():
        name = next((name for name, child in parent.named_children() if child is module), None)
        if name is not None:
            tree = definition(getattr(type(parent), "forward", None))
            return None if tree is None else (tree, f"{tree.args.args[0].arg}.{name}")
    return None


def only_reads(forward: Any) -> bool:
    """Whether a ``forward`` assigns to no attribute, and refers to nothing but its arguments and globals."""
    tree = definition(forward) if forward else None
    if tree is None or forward.__code__.co_freevars:
        return False
    return not any(isinstance(n, ast.Attribute) and not isinstance(n.ctx, ast.Load) for n in _nodes(tree))


@constant
def source_digest(function: object, helpers: bool = True) -> str | None:
    """A digest of a function's parameters and body, the same under other names; None where its source is unknown.

    Parameters that are only passed on, ``f(mask=mask)``, count as one, whatever their number and names: see
    :class:`Parameters`. With ``helpers``, Python functions that it calls by a global name count by their digests.
    """
    return _digest(function, helpers)


@cache
def _digest(function: object, helpers: bool) -> str | None:
    tree, plain = definition(function), inspect.unwrap(function) if callable(function) else None
    if tree is None or not isinstance(plain, types.FunctionType):
        return None
    if set(plain.__code__.co_freevars) - {"__class__"}:
        return None  # what it computes depends on values that its source does not tell
    me = plain.__code__.co_varnames[0] if plain.__code__.co_argcount else ""
    tree = _Collapsed(Parameters.of(plain), me).visit(copied(tree))
    arguments = [a.arg for a in ast.walk(tree.args) if isinstance(a, ast.arg)]
    numbered = _numbered([*arguments, *_assigned(tree)])
    keywords = {name: numbered[name] for name in arguments}
    scope = {**vars(builtins), **plain.__globals__}
    tree = _Renamed(numbered, keywords, lambda name: _meaning(name, scope.get(name), helpers)).visit(tree)
    text = "\n".join([ast.unparse(tree.args), *map(ast.unparse, tree.body)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _assigned(tree: ast.AST) -> list[str]:
    nodes = list(ast.walk(tree))
    names = [n.id for n in nodes if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)]
    return names + [a.arg for n in nodes if isinstance(n, ast.Lambda) for a in n.args.args]


def _numbered(names: Iterable[str]) -> dict[str, str]:
    return {name: f"${i}" for i, name in enumerate(dict.fromkeys(names))}


def _meaning(name: str, value: object, helpers: bool) -> str:
    """The text that stands for a global's value in a digest."""
    if isinstance(value, types.ModuleType | type):
        return value.__name__
    if helpers and isinstance(value, types.FunctionType) and not value.__module__.startswith("torch."):
        return source_digest(value, False) or name
    return name


class Parameters(NamedTuple):
    """The parameters of a method by what it does with them.

    Attributes:
        names: all that have a name, without ``self``, in order.
        defaults: values of those that have one.
        passed: those that are used once, to pass them on by their own name: ``f(mask=mask)``.
        used: the others, in order.
        copied: fields that a call takes from another object by their own names: ``Output(cache=outputs.cache)``.
    """

    names: tuple[str, ...]
    defaults: dict[str, Any]
    passed: tuple[str, ...]
    used: tuple[str, ...]
    copied: tuple[str, ...]

    @classmethod
    @cache
    def of(cls, function: Any) -> Parameters:
        """The parameters of the function beneath decorators, which has a source."""
        tree: Any = definition(function)
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        signature = inspect.signature(inspect.unwrap(function)).parameters
        named = {name: p for name, p in list(signature.items())[1:] if p.kind not in variadic}
        keywords = [k for n in _nodes(tree) if isinstance(n, ast.Call) for k in n.keywords]
        uses = [n.id for n in _nodes(tree) if isinstance(n, ast.Name)]
        passed = [k.arg for k in keywords if k.arg in named and _is_name(k.value, k.arg) and uses.count(k.arg) == 1]
        return cls(
            tuple(named),
            {name: p.default for name, p in named.items() if p.default is not p.empty},
            tuple(name for name in named if name in passed),
            tuple(name for name in named if name not in passed),
            tuple(k.arg for k in keywords if k.arg and _copied_from(k, next(iter(signature), ""))),
        )

    def bind(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        """The arguments of a call by name, with defaults; None for a call that the function does not take."""
        if len(args) > len(self.names):
            return None
        given = {**self.defaults, **kwargs}
        for name, value in zip(self.names, args, strict=False):
            if name in kwargs:
                return None
            given[name] = value
        return given if all(name in given for name in self.used) else None


def unify(template: str, statements: Sequence[ast.stmt]) -> dict[str, str] | None:
    """The names in ``statements`` for those in ``template``, of which they are a renaming; None where they are not.

    ``self`` and ``torch`` stand for themselves.
    """
    kinds, left, names = _template(template)
    if kinds != [type(statement) for statement in statements]:
        return None
    right, others = _by_appearance(statements)
    found = dict(zip(names, others, strict=False))
    return found if left == right and all(found.get(name, name) == name for name in ("self", "torch")) else None


@cache
def _template(text: str) -> tuple[list[type[ast.stmt]], list[str], list[str]]:
    """The kinds of a template's statements, and what :func:`_by_appearance` gives for them."""
    statements = [_Plain().visit(statement) for statement in ast.parse(textwrap.dedent(text)).body]
    return [type(statement) for statement in statements], *_by_appearance(statements)


@cache  # modules of a model have a few classes, whose definitions are kept
def find(template: str, tree: ast.AST) -> dict[str, str] | None:
    """The renaming, as of :func:`unify`, at the first place in ``tree`` with these statements one after another."""
    count = len(_template(template)[0])
    for node in _nodes(tree):
        blocks: list[Any] = [getattr(node, name, None) for name in ("body", "orelse")]
        for block in blocks:
            for i in range(len(block) - count + 1) if isinstance(block, list) else ():
                if (names := unify(template, block[i : i + count])) is not None:
                    return names
    return None


def _by_appearance(statements: Sequence[ast.stmt]) -> tuple[list[str], list[str]]:
    """Statements whose names are numbered by their first appearance, and the names."""
    numbered = _numbered(n.id for s in statements for n in ast.walk(s) if isinstance(n, ast.Name))
    renamed = _Renamed(numbered, {}, str)
    return [ast.unparse(renamed.visit(copied(s))) for s in statements], list(numbered)


def _is_name(node: ast.expr, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def _copied_from(keyword: ast.keyword, me: str) -> str:
    """The object, other than the method's own, of which a keyword argument is the attribute of its name; or ""."""
    value = keyword.value
    copied = isinstance(value, ast.Attribute) and value.attr == keyword.arg and isinstance(value.value, ast.Name)
    return value.value.id if copied and value.value.id != me else ""  # type: ignore[attr-defined]


class _Plain(ast.NodeTransformer):
    """Drops annotations."""

    def visit_arg(self, node: ast.arg) -> ast.arg:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.stmt | None:
        if node.value is None:
            return None
        return ast.copy_location(ast.Assign([node.target], self.visit(node.value), lineno=node.lineno), node)


class _Collapsed(ast.NodeTransformer):
    """Puts one mark for the parameters that a call passes on, and one for the fields that it copies."""

    def __init__(self, parameters: Parameters, me: str) -> None:
        self.parameters, self.me = parameters, me

    def visit_arguments(self, node: ast.arguments) -> ast.arguments:
        positional = [*node.posonlyargs, *node.args]
        values = [*[None] * (len(positional) - len(node.defaults)), *node.defaults]
        kept = [(a, v) for a, v in zip(positional, values, strict=True) if a.arg not in self.parameters.passed]
        node.posonlyargs, node.args, node.defaults = [], [a for a, _ in kept], [v for _, v in kept if v is not None]
        named = [
            (a, v)
            for a, v in zip(node.kwonlyargs, node.kw_defaults, strict=True)
            if a.arg not in self.parameters.passed
        ]
        node.kwonlyargs, node.kw_defaults = [a for a, _ in named], [v for _, v in named]
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        kept, marks = [], dict[str, ast.keyword]()
        for k in node.keywords:
            if k.arg in self.parameters.passed and _is_name(k.value, k.arg):
                marks["passed"] = ast.keyword("_passed", ast.Constant(True))
            elif source := _copied_from(k, self.me):
                marks[source] = ast.keyword("_copied", ast.Name(source, ast.Load()))
            else:
                kept.append(k)
        node.keywords = [*kept, *marks.values()]
        return node


class _Renamed(ast.NodeTransformer):
    """Numbers locals, gives keyword arguments the numbers of parameters, and says what global names stand for."""

    def __init__(self, numbered: dict[str, str], keywords: dict[str, str], meaning: Callable[[str], str]) -> None:
        self.numbered, self.keywords, self.meaning = numbered, keywords, meaning

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self.numbered.get(node.id) or self.meaning(node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self.numbered.get(node.arg, node.arg))

    def visit_keyword(self, node: ast.keyword) -> ast.keyword:
        return ast.keyword(self.keywords.get(node.arg or "", node.arg), self.visit(node.value))
