"""The example tool, on the same pool as search."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf_plugins.tools.calculator import Calculator
from rlinf_plugins.tools.pool import ToolPool
from rlinf_plugins.tools.results import Failure, FailureKind, Source, Success


@pytest.mark.parametrize(
    ("expression", "value"),
    [("1 + 2 * 3", "7"), (" (3 + 4) / 2", "3.5"), ("-2 ** 2", "-4"), ("sqrt(16)", "4.0"), ("max(1, 2, 3) % 2", "1")],
)
async def test_arithmetic(expression, value):
    pool = ToolPool(Calculator())
    assert await pool.call(expression) == Success(value)
    assert (await pool.call(expression)).source is Source.CACHED


@pytest.mark.parametrize(
    "expression",
    [
        "1 / 0",
        "9 ** 9 ** 9",
        "2 ** 100000",
        "(-1) ** 0.5",
        "__import__('os').system('id')",
        "().__class__",
        "[1] * 10",
        "'a' * 3",
        "True + 1",
        "x",
        "1 +",
        "exp(10000)",
        "sqrt(-1)",
        "sqrt(x=1)",
        "(" * 90 + ")" * 90,
        "round(1e308 * 10)",
        "1\x00",
    ],
)
async def test_what_is_not_arithmetic_or_too_large_fails_alone(expression):
    pool = ToolPool(Calculator())
    bad, good = await pool.call_many([expression, "1 + 1"])
    assert bad.kind is FailureKind.TOOL_ERROR
    assert good.unwrap() == "2"


async def test_limits_of_length():
    pool = ToolPool(Calculator())
    for expression in ("", "  ", "1+" * 200 + "1"):
        assert (await pool.call(expression)).kind is FailureKind.INVALID_REQUEST


@given(st.text(alphabet="0123456789+-*/%().e sqrtlogx_'[]", max_size=60))
async def test_any_text_gives_a_typed_outcome(expression):
    outcomes = await Calculator().run([expression], 1.0)
    assert isinstance(outcomes[0], Success | Failure)
