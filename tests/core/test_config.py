from dataclasses import dataclass, field
from typing import Literal

import pytest

from rlinf_plugins.core.config import from_mapping
from rlinf_plugins.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    size: int = 1
    mode: str = "a"


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    rate: float
    inner: Inner = field(default_factory=Inner)

    def validate(self, where: str) -> None:
        if self.rate <= 0:
            raise ConfigError(f"{where}.rate must be positive, got {self.rate}")


def test_builds_nested():
    assert from_mapping(Outer, {"rate": 0.5, "inner": {"size": 3}}, "x") == Outer(rate=0.5, inner=Inner(size=3))


@pytest.mark.parametrize(
    ("values", "parts"),
    [
        ({"rate": 1.0, "inner": {"sizes": 3}}, ["x.inner.sizes", "did you mean 'size'", "mode"]),
        ({"ratee": 1.0}, ["x.ratee", "did you mean 'rate'"]),
        ({"rate": "fast"}, ["x.rate: ", "float", "'fast'"]),
        ({"rate": 1.0, "inner": {"size": 1.5}}, ["x.inner.size: ", "int", "1.5"]),
        ({}, ["rate"]),
        ({"rate": 0.0}, ["x.rate", "positive", "0.0"]),
        ({"rate": 1.0, "inner": 3}, ["inner"]),
        ([1], ["x", "mapping", "list"]),
    ],
)
def test_names_every_mistake(values, parts):
    with pytest.raises(ConfigError) as caught:
        from_mapping(Outer, values, "x")
    for part in parts:
        assert part in str(caught.value)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chooser:
    mode: Literal["temporal", "spatial"] = "temporal"
    device: Literal["cpu", "cuda"] | None = None
    inner: "Chooser | None" = None


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mode": "spacial"}, r"x\.mode: there is no 'spacial'; did you mean 'spatial'\? valid: spatial, temporal"),
        ({"device": "gpu"}, r"x\.device: there is no 'gpu'; .*valid: cpu, cuda"),
        ({"inner": {"mode": "auto"}}, r"x\.inner\.mode: there is no 'auto'; .*valid: spatial, temporal"),
        ({"mode": 3}, r"x\.mode: Expected `str`, got `int` \(value: 3\)"),
    ],
)
def test_a_choice_that_is_none_lists_those_that_are(values, message):
    with pytest.raises(ConfigError, match=message):
        from_mapping(Chooser, values, "x")


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    many: tuple[Inner, ...] = ()
    named: dict[str, Inner] = field(default_factory=dict)


@pytest.mark.parametrize(
    ("values", "where"),
    [
        ({"many": [{"size": 1}, {"sizes": 3}]}, r"x\.many\[1\]\.sizes"),
        ({"named": {"a": {"sizes": 3}}}, r"x\.named\.a\.sizes"),
    ],
)
def test_names_unknown_options_inside_sequences_and_mappings(values, where):
    with pytest.raises(ConfigError, match=where):
        from_mapping(Holder, values, "x")


def test_builds_sequences_and_mappings():
    values = {"many": [{"size": 1}], "named": {"a": {"size": 2}}}
    assert from_mapping(Holder, values, "x") == Holder(many=(Inner(size=1),), named={"a": Inner(size=2)})
