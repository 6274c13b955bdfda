"""The config edge: a mapping becomes a frozen dataclass once, with every mistake named.

Inside the library configuration is trusted; nothing is checked twice.
"""

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rlinf_plugins.core.errors import ConfigError

T = TypeVar("T")


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build the dataclass ``cls`` from ``values``, nested dataclasses included.

    A dataclass may define ``validate(self, where: str) -> None`` to reject impossible combinations; it is called
    for each nested config, innermost first.

    Args:
        cls: A dataclass type whose fields are annotated.
        values: Plain mapping (of plain mappings), e.g. from YAML.
        where: Path of the mapping in the user's configuration, e.g. ``"trainer.v1.m2flow"``.

    Raises:
        ConfigError: An unknown key (valid ones are listed, the nearest is suggested), a wrong type, a missing value
            or whatever ``validate`` refuses.
    """
    _check_keys(cls, values, where)
    try:
        config = msgspec.convert(dict(values), cls, strict=True)
    except msgspec.ValidationError as error:
        raise ConfigError(_describe(str(error), cls, values, where)) from error
    validate(config, where)
    return config


def suggest(name: str, valid: typing.Iterable[str]) -> str:
    """Return ``"did you mean 'x'? valid: a, b, x"`` for a mistyped name."""
    options = sorted(valid)
    near = difflib.get_close_matches(name, options, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}valid: {', '.join(options) or 'none'}"


def _check_keys(cls: Any, values: Mapping[str, Any], where: str) -> None:
    if not isinstance(values, Mapping):
        raise ConfigError(f"{where} must be a mapping of options, got {type(values).__name__}: {values!r}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    for key, value in values.items():
        if key not in fields:
            raise ConfigError(f"unknown option {where}.{key}; {suggest(str(key), fields)}")
        _check_value(fields[key], value, f"{where}.{key}")


def _check_value(hint: Any, value: Any, where: str) -> None:
    """Check the keys of whatever dataclasses ``value`` holds: itself, or as elements of a sequence or mapping."""
    for nested in _dataclasses_in(hint):
        if isinstance(value, Mapping):
            _check_keys(nested, value, where)
    origin, arguments = typing.get_origin(hint), [a for a in typing.get_args(hint) if a is not Ellipsis]
    if origin in (list, tuple, set, frozenset) and isinstance(value, list | tuple) and len(arguments) == 1:
        for index, element in enumerate(value):
            _check_value(arguments[0], element, f"{where}[{index}]")
    elif origin is dict and isinstance(value, Mapping):
        for name, element in value.items():
            _check_value(arguments[1], element, f"{where}.{name}")


def _dataclasses_in(hint: Any) -> list[Any]:
    if dataclasses.is_dataclass(hint):
        return [hint]
    if typing.get_origin(hint) is not None and type(None) in typing.get_args(hint):
        return [arg for arg in typing.get_args(hint) if dataclasses.is_dataclass(arg)]
    return []


def _describe(message: str, cls: Any, values: Mapping[str, Any], where: str) -> str:
    """Turn msgspec's ``Expected `float`, got `str` - at `$.a.b``` into a message with the option's path and value."""
    expected, _, path = message.partition(" - at `$")
    keys = [key for key in path.rstrip("`").split(".") if key]
    value: Any = values
    hint: Any = cls
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
        nested = _dataclasses_in(hint)
        hint = typing.get_type_hints(nested[0]).get(key) if nested else None
    path = ".".join([where, *keys])
    choices = _choices(hint)
    if choices and isinstance(value, str):
        return f"{path}: there is no {value!r}; {suggest(value, choices)}"
    shown = f" (value: {value!r})" if keys else ""
    return f"{path}: {expected}{shown}"


def _choices(hint: Any) -> list[str]:
    """Return the strings that a ``Literal``, optional or not, allows."""
    if typing.get_origin(hint) is typing.Literal:
        return [choice for choice in typing.get_args(hint) if isinstance(choice, str)]
    return [choice for part in typing.get_args(hint) for choice in _choices(part)]


def validate(config: Any, where: str) -> None:
    """Let a dataclass and those in it refuse impossible values, innermost first.

    Raises:
        ConfigError: Whatever their ``validate`` methods refuse.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            validate(value, f"{where}.{field.name}")
    check = getattr(config, "validate", None)
    if check is not None:
        check(where)
