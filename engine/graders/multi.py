"""Formulas over parts' scores: `0.2 * shape + 0.8 * exact`. Arithmetic only, in floats, so that nothing can grow large."""

import ast
import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any, NoReturn

from simpleeval import InvalidExpression, SimpleEval

from core.errors import InvalidInput

FUNCTIONS: dict[str, Callable[..., Any]] = {
    "min": min, "max": max, "abs": abs, "floor": math.floor, "ceil": math.ceil, "exp": math.exp, "sqrt": math.sqrt, "log": math.log,
}  # fmt: skip
_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv, ast.Mod: operator.mod,
    # math.pow: floats only, so 9**9**9 overflows at once instead of computing a huge integer, and a root of -1 is an error.
    ast.Pow: math.pow,
    ast.UAdd: operator.pos, ast.USub: operator.neg,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
_NODES = (ast.Expression, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Call, ast.Name, ast.Load, ast.Constant, *_OPERATORS)


def evaluate(formula: str, scores: Mapping[str, float]) -> float:
    """The formula's value.

    Args:
        scores: value of each part by name.
    Raises:
        ArithmeticError, ValueError: undefined at these scores (division by zero, overflow, logarithm of 0).
    """
    evaluator = SimpleEval(operators=_OPERATORS, functions=FUNCTIONS, names={k: float(v) for k, v in scores.items()})
    try:
        value: Any = evaluator.eval(formula, previously_parsed=_parsed(formula))
    except InvalidExpression as error:
        raise ValueError(str(error)) from error
    return float(value)


def validate_formula(formula: str, names: Iterable[str], *, param: str) -> None:
    """Refuses a formula that could fail later.

    It is parsed, its names are compared with the parts, and it is tried where parts are 0, 0.5 and 1, together and one at a time:
    a string_check gives just 0 and 1, so a formula that is undefined there would exclude rows by the dozen.

    Raises:
        InvalidInput: syntax, an unknown name or function, or undefined at a probe.
    """
    parts = sorted(set(names))

    def refuse(reason: str) -> NoReturn:
        raise InvalidInput(f"The formula {formula[:80]!r} {reason}.", param=param)

    if clash := sorted(FUNCTIONS.keys() & set(parts)):
        refuse(f"can't tell the part {clash[0]!r} from the function of that name; rename the part")
    try:
        tree = _parsed(formula)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        refuse(f"can't be read ({error}); write arithmetic such as '0.2 * a + 0.8 * b'")
    for node in ast.walk(tree):
        if not isinstance(node, _NODES):
            refuse(f"uses {type(node).__name__}, which formulas don't have; only + - * / ** % ( ), comparisons and {', '.join(FUNCTIONS)}")
        if isinstance(node, ast.Call) and (not isinstance(node.func, ast.Name) or node.func.id not in FUNCTIONS or node.keywords):
            refuse(f"calls something unknown; the functions are {', '.join(FUNCTIONS)}")
        if isinstance(node, ast.Constant) and (isinstance(node.value, bool) or not isinstance(node.value, (int, float))):
            refuse(f"holds {node.value!r}; only numbers are allowed")
        if isinstance(node, ast.Name) and node.id not in parts and node.id not in FUNCTIONS:
            refuse(f"names {node.id!r}, which is no part; the parts are {', '.join(parts)}")
    for probe in _probes(parts):
        try:
            value = evaluate(formula, probe)
        except (ArithmeticError, ValueError, TypeError, RecursionError, LookupError) as error:
            refuse(f"is undefined at {_shown(probe)} ({error}); keep it defined where parts are 0 and 1, e.g. by adding a small number")
        if not math.isfinite(value):
            refuse(f"is {value} at {_shown(probe)}; keep it finite where parts are 0 and 1")


@lru_cache(maxsize=256)
def _parsed(formula: str) -> ast.expr:
    return ast.parse(formula.strip(), mode="eval").body


def _probes(parts: list[str]) -> list[dict[str, float]]:
    same = [dict.fromkeys(parts, value) for value in (0.0, 0.5, 1.0)]
    alone = [dict.fromkeys(parts, 1.0 - value) | {name: value} for name in parts for value in (0.0, 1.0)]
    return same + alone


def _shown(probe: Mapping[str, float]) -> str:
    return ", ".join(f"{name}={value:g}" for name, value in probe.items())
