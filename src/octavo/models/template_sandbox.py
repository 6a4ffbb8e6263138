"""The environment that chat templates run in: transformers' features inside limits.

Owns what a template may name (filters, methods, globals, all by list) and makes every operation that creates a value ask its
``RenderBudget``. Templates come with model files and nobody has vetted them: what is not listed is refused by name.
Imports jinja2, so import this module only when a template is compiled.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, update_wrapper
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import BlockReference, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError, safe_range
from jinja2.utils import Cycler, Joiner, Namespace, pass_context
from jinja2.visitor import NodeTransformer

from octavo.models import template_limits as limits
from octavo.models.chat_messages import TemplateError

MAX_SOURCE_CHARS = 1 << 18
_MAX_SENTENCE_CHARS = 1000
_MAX_INDENT = 64
_MAX_PRECISION = 20

_current: ContextVar[limits.RenderBudget] = ContextVar("render_budget")

_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format", "groupby", "indent", "int"),
    *("items", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "safe"),
    *("select", "selectattr", "sort", "string", "sum", "title", "trim", "truncate", "unique", "upper", "wordcount"),
)
_TEXT_METHODS = (
    *("capitalize", "casefold", "center", "count", "endswith", "find", "format", "format_map", "index", "isalnum", "isalpha", "isascii"),
    *("isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "join", "ljust"),
    *("lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex", "rjust", "rpartition", "rsplit"),
    *("rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper", "zfill"),
)
_METHODS: tuple[tuple[type, frozenset[str]], ...] = (
    (str, frozenset(_TEXT_METHODS)),
    (dict, frozenset(("copy", "get", "items", "keys", "values"))),
    (list, frozenset(("copy", "count", "index"))),
    (tuple, frozenset(("count", "index"))),
    (LoopContext, frozenset(("changed", "cycle"))),
    (Cycler, frozenset(("next", "reset"))),
)


class TemplateRaised(TemplateError):
    """The template itself refused the messages (``raise_exception``); the message is its sentence."""


class _OpaqueNamespace(Namespace):
    """A namespace that does not print what it holds: it can hold itself, or others that do."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _GenerationTag(Extension):
    """``{% generation %}`` marks the assistant's tokens for training; here its body is just its body."""

    tags = {"generation"}

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Accounting(NodeTransformer):
    """Puts loops, literals and concatenations, which no hook of the environment sees, through filters that count."""

    def __init__(self, environment: jinja2.Environment) -> None:
        self._environment = environment

    def visit_For(self, node: Any) -> nodes.Node:
        if node.recursive:
            raise TemplateError(f"chat template, line {node.lineno}: recursive loops are not supported")
        self.generic_visit(node)
        node.iter = self._through("octavo_steps", node.iter)
        return node

    def visit_Concat(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return self._through("octavo_concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return self._through("octavo_made", node)

    visit_Dict = visit_List

    def visit_Tuple(self, node: Any) -> nodes.Node:
        return self.visit_List(node) if node.ctx == "load" else node

    def _through(self, name: str, node: nodes.Expr) -> nodes.Filter:
        call = nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)
        call.set_environment(self._environment)
        return call


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """transformers' environment (trim and lstrip blocks, loop controls, generation tag), with every filter, method and global listed."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag], finalize=_output)
        self.optimized = False  # nothing runs while a template is compiled
        self.filters = {name: _counted(FILTERS[name]) for name in _FILTERS}
        self.filters.update(join=_join, tojson=_counted(_tojson), octavo_steps=_steps, octavo_concat=_concat, octavo_made=_made)
        self.tests["none"] = lambda value: value == None  # noqa: E711 - content may be null that prints as no text
        self.globals = {
            "range": safe_range,
            "dict": dict,
            "cycler": Cycler,
            "joiner": Joiner,
            "namespace": _OpaqueNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def concat(self, parts: Any) -> str:  # type: ignore[override]
        """Joins what a block, macro or ``set`` block wrote."""
        return _budget().join("", parts)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        budget = _budget()
        if operator == "*":
            _check_product(budget, left, right)
        elif operator == "**":
            if isinstance(left, int) and isinstance(right, int) and right > 0:
                limits.check_bits(left.bit_length() * right)
        elif isinstance(left, str):
            if operator == "%":
                limits.check_percent_format(left)
            elif isinstance(right, str):
                budget.reserve(len(left) + len(right))
        return budget.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __callee: Any, *args: Any, **kwargs: Any) -> Any:  # as the base class: any keyword may be the callee's
        budget = _budget()
        budget.step()
        args = _checked_call(budget, __callee, args)
        return budget.made(super().call(__context, __callee, *args, **kwargs))


def _budget() -> limits.RenderBudget:
    return _current.get()


@pass_context
def _output(_context: Any, value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    _budget().wrote(len(text))
    return text


@pass_context
def _steps(_context: Any, iterable: Any) -> Any:
    return _budget().steps(iterable)


@pass_context
def _made(_context: Any, value: Any) -> Any:
    return _budget().made(value)


@pass_context
def _concat(_context: Any, parts: list[Any]) -> str:
    return _budget().join("", parts)


@pass_context
def _join(context: Any, value: Any, d: str = "", attribute: Any = None) -> str:
    items = value if attribute is None else map(make_attrgetter(context.environment, attribute), value)
    return _budget().join(str(d), items)


def _counted(function: Any) -> Any:
    """A filter that checks its arguments and counts its result. It takes the context, so it never runs at compile time."""
    takes = getattr(getattr(function, "jinja_pass_arg", None), "name", None)
    check = _FILTER_CHECKS.get(function.__name__)

    def counted(context: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget()
        budget.step()
        if check is not None:
            check(budget, *args, **kwargs)
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}.get(takes or "")
        return budget.made(function(*args, **kwargs) if first is None else function(first, *args, **kwargs))

    return pass_context(update_wrapper(counted, function, updated=()))


def _check_replace(budget: limits.RenderBudget, s: Any, old: Any, new: Any, count: Any = None) -> None:
    budget.reserve(limits.replaced_chars(str(s), str(old), str(new), -1 if count is None else count))


def _check_indent(budget: limits.RenderBudget, s: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    size = width if isinstance(width, int) else len(str(width))
    if size > _MAX_INDENT:
        raise limits.LimitExceeded(f"the chat template indents by {size}; at most {_MAX_INDENT}")
    budget.reserve(len(str(s)) + (str(s).count("\n") + 1) * size)


def _check_format(_budget: Any, value: Any, *_: Any, **__: Any) -> None:
    limits.check_percent_format(str(value))


def _check_round(_budget: Any, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    if not isinstance(precision, int) or abs(precision) > _MAX_PRECISION:
        raise limits.LimitExceeded(f"the chat template rounds to {precision!r} digits; at most {_MAX_PRECISION}")


def _check_sum(_budget: Any, iterable: Any, attribute: Any = None, start: Any = 0) -> None:
    if not isinstance(start, (int, float)):  # sums of lists take time that grows with the square of their size
        raise limits.LimitExceeded("the chat template sums values that are not numbers")


_FILTER_CHECKS: dict[str, Callable[..., None]] = {
    "do_replace": _check_replace,
    "do_indent": _check_indent,
    "do_format": _check_format,
    "do_round": _check_round,
    "do_sum": _check_sum,
    "sync_do_sum": _check_sum,
}


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """transformers' ``tojson``: no HTML escapes, other than jinja2's own."""
    if indent is not None and (indent if isinstance(indent, int) else len(str(indent))) > _MAX_INDENT:
        raise limits.LimitExceeded(f"the chat template indents by {indent!r}; at most {_MAX_INDENT}")
    if separators is not None:
        separators = tuple(str(part)[:_MAX_INDENT] for part in separators)
    if indent is None:
        return json.dumps(value, ensure_ascii=ensure_ascii, separators=separators, sort_keys=sort_keys)
    # Indentation multiplies by depth, so this form is written piece by piece; the library does the same inside.
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return _budget().join("", encoder.iterencode(value))


def _raise_exception(message: Any) -> Any:
    raise TemplateRaised(str(message)[:_MAX_SENTENCE_CHARS])


def _strftime_now(form: str) -> str:
    if re.search(r"%[^A-Za-z%]*\d", form):
        raise limits.LimitExceeded("the chat template formats a date with a width")
    return datetime.now().strftime(form)


def _check_product(budget: limits.RenderBudget, left: Any, right: Any) -> None:
    if isinstance(right, (str, list, tuple)):
        left, right = right, left
    if isinstance(left, (str, list, tuple)) and isinstance(right, int):
        size = len(left) if isinstance(left, str) else limits.size_of(left, budget.value_chars)
        budget.reserve(size * max(right, 0))
    elif isinstance(left, int) and isinstance(right, int):
        limits.check_bits(left.bit_length() + right.bit_length())


_CALLABLE = (Macro, BlockReference, Joiner, Undefined)
_FUNCTIONS = frozenset((safe_range, dict, Cycler, Joiner, _OpaqueNamespace, _raise_exception, _strftime_now))


def _checked_call(budget: limits.RenderBudget, callee: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments to call with, if ``callee`` is on the lists and its result will not be too large."""
    # A Namespace answers any attribute from its own contents, so the type is asked first.
    if isinstance(callee, _CALLABLE):
        return args
    if isinstance(callee, (type, FunctionType)) and callee in _FUNCTIONS:
        return args
    method = callee.__dict__.get("__wrapped__", callee) if isinstance(callee, FunctionType) else callee  # the sandbox wraps str.format
    if isinstance(method, (BuiltinMethodType, MethodType)):
        owner, name = method.__self__, method.__name__
        for kind, names in _METHODS:
            if isinstance(owner, kind) and name in names:
                return _checked_text_method(budget, owner, name, args) if isinstance(owner, str) else args
    raise SecurityError(f"a chat template may not call {getattr(type(callee), '__name__', '?')} {getattr(method, '__name__', '')!r}")


def _checked_text_method(budget: limits.RenderBudget, text: str, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    if name == "join" and len(args) == 1:
        joined = list(args[0])
        budget.reserve(sum(len(part) for part in joined if isinstance(part, str)) + len(text) * len(joined))
        return (joined,)
    if name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        budget.reserve(limits.replaced_chars(text, args[0], args[1], args[2] if len(args) > 2 else -1))
    elif name in ("center", "ljust", "rjust", "zfill") and args and isinstance(args[0], int):
        budget.reserve(args[0])
    elif name in ("format", "format_map"):
        limits.check_brace_format(text)
    return args


@lru_cache(maxsize=1)
def _environment() -> TemplateEnvironment:
    return TemplateEnvironment()


@lru_cache(maxsize=32)
def compiled(source: str) -> jinja2.Template:
    """The template of ``source``, compiled once. TemplateError names line and fault, without quoting the source."""
    if len(source) > MAX_SOURCE_CHARS:
        raise TemplateError(f"chat template: {len(source)} characters; at most {MAX_SOURCE_CHARS}")
    environment = _environment()
    try:
        tree = _Accounting(environment).visit(environment.parse(source))
        return environment.from_string(tree)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"chat template, line {error.lineno}: {error.message}") from None
    except (RecursionError, MemoryError, SyntaxError, ValueError) as error:
        if isinstance(error, TemplateError):
            raise
        raise TemplateError(f"chat template: cannot be compiled ({type(error).__name__})") from None


def run(template: jinja2.Template, variables: dict[str, Any]) -> str:
    """Render within the limits. TemplateRaised for the template's own refusal, TemplateError for every other failure."""
    budget = limits.RenderBudget(variables)
    token = _current.set(budget)
    try:
        return budget.join("", template.root_render_func(template.new_context(variables)))
    except TemplateError:
        raise
    except RecursionError:
        raise TemplateError("chat template: calls itself too deeply") from None
    except Exception as error:  # whatever an unvetted template provokes is a fault of template or messages, never of the server
        raise TemplateError(f"chat template: {str(error)[:_MAX_SENTENCE_CHARS] or type(error).__name__}") from None
    finally:
        _current.reset(token)
