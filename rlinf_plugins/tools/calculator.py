"""A second tool, as an example of how little one takes: arithmetic, evaluated without ``eval`` and within limits."""

import ast
import math
import operator
from collections.abc import Callable, Hashable, Sequence

from rlinf_plugins.tools.results import Failure, FailureKind, Outcome, Success
from rlinf_plugins.tools.tool import Tool

_MAX_CHARS = 200
_MAX_BITS = 4096
_OPERATORS: dict[type[ast.AST], Callable[..., float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}
_FUNCTIONS: dict[str, Callable[..., float]] = {
    name: getattr(math, name) for name in ("sqrt", "log", "exp", "floor", "ceil")
} | {"abs": abs, "round": round, "min": min, "max": max}


class Calculator(Tool[str, str]):
    """Evaluates one arithmetic expression per request, e.g. ``"(3 + 4) * sqrt(2)"``."""

    name = "calculator"
    version = "1"

    def key(self, request: str) -> Hashable:
        """Equal expressions share one evaluation."""
        return request.strip()

    def check(self, request: str) -> Failure | None:
        """Refuse what is empty or too long to be arithmetic."""
        if 0 < len(request.strip()) <= _MAX_CHARS:
            return None
        return Failure(kind=FailureKind.INVALID_REQUEST, message=f"an expression has 1 to {_MAX_CHARS} characters")

    async def run(self, requests: Sequence[str], timeout_s: float) -> Sequence[Outcome[str]]:
        """Evaluate each; a mistake in one does not touch the others."""
        return [self._one(request) for request in requests]

    @staticmethod
    def _one(request: str) -> Outcome[str]:
        try:
            return Success(str(_value(ast.parse(request.strip(), mode="eval").body)))
        except (ValueError, TypeError, ArithmeticError, SyntaxError, RecursionError, MemoryError) as error:
            return Failure(kind=FailureKind.TOOL_ERROR, message=f"{request!r}: {error}")


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
            return _OPERATORS[type(op)](_value(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            return _apply(type(op), _value(left), _value(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*map(_value, arguments))
    raise ValueError(f"{ast.unparse(node)!r} is not arithmetic")


def _apply(op: type[ast.AST], left: float, right: float) -> float:
    # The size of an integer result is bounded before it is computed: 9**9**9 would fill the memory.
    if isinstance(left, int) and isinstance(right, int):
        growth: dict[type[ast.AST], int] = {
            ast.Pow: left.bit_length() * max(right, 0),
            ast.Mult: left.bit_length() + right.bit_length(),
        }
        if growth.get(op, 0) > _MAX_BITS:
            raise ValueError(f"the result would exceed {_MAX_BITS} bits")
    result = _OPERATORS[op](left, right)
    if isinstance(result, complex):
        raise ValueError("the result is not a real number")
    return result
