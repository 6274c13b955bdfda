"""Guarded patches of veRL, as data.

A patch names its target, the versions and the exact source it was written against, why it exists and when it can go.
Applying is idempotent and reversible, and refuses rather than guesses: a target whose source changed, or that somebody
else has already wrapped, is left alone and reported.
"""

import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rlinf_plugins.core.errors import PatchRefusedError
from rlinf_verl.versions import in_range, installed


@dataclass(frozen=True, kw_only=True, slots=True)
class PatchSpec:
    """One change to an attribute of a veRL module.

    Attributes:
        name: Short name shown by ``doctor``.
        module: Module that holds the target.
        attribute: Dotted path of the target in the module.
        source_of: Dotted path whose source the patch relies on; usually the target itself.
        fingerprint: First 16 hex digits of the SHA-256 of that source.
        versions: veRL versions the patch was written against.
        needed_when: The flag that makes it necessary.
        reason: What goes wrong without it.
        upstream: Where veRL would have to change.
        remove_when: Condition under which the patch is deleted.
        build: Makes the replacement from the original.
    """

    name: str
    module: str
    attribute: str
    fingerprint: str
    versions: str
    needed_when: str
    reason: str
    upstream: str
    remove_when: str
    build: Callable[[Any], Any]
    source_of: str = ""

    @property
    def target(self) -> str:
        """The target as ``module:attribute``."""
        return f"{self.module}:{self.attribute}"


_originals: dict[str, Any] = {}
"""Patch name -> the attribute it replaced, for every patch in force in this process."""


def fingerprint(thing: Any) -> str:
    """Return the first 16 hex digits of the SHA-256 of the dedented source of ``thing``."""
    source = textwrap.dedent(inspect.getsource(thing))
    return hashlib.sha256(source.encode()).hexdigest()[:16]


def apply(spec: PatchSpec) -> bool:
    """Put the patch in force in this process.

    Returns:
        True when it was applied now, False when it already was.

    Raises:
        PatchRefusedError: Another veRL version, another source, or a target somebody else replaced.
    """
    holder, leaf = _holder(spec)
    current = getattr(holder, leaf)
    if spec.name in _originals:
        if getattr(current, "__rlinf_patch__", None) == spec.name:
            return False
        raise PatchRefusedError(f"{spec.target} was replaced after patch {spec.name!r} was applied; {_advice(spec)}")
    found = installed("verl")
    if found is None or not in_range(found, spec.versions):
        raise PatchRefusedError(f"patch {spec.name!r} is for verl{spec.versions}, found {found}; {_advice(spec)}")
    source = _resolve(importlib.import_module(spec.module), spec.source_of or spec.attribute)
    actual = fingerprint(source)
    if actual != spec.fingerprint:
        raise PatchRefusedError(
            f"the source of {spec.module}:{spec.source_of or spec.attribute} is not what patch {spec.name!r} was "
            f"written against (fingerprint {actual}, expected {spec.fingerprint}); it was edited or wrapped by "
            f"somebody else; {_advice(spec)}"
        )
    replacement = spec.build(current)
    replacement.__rlinf_patch__ = spec.name
    setattr(holder, leaf, replacement)
    _originals[spec.name] = current
    return True


def revert(spec: PatchSpec) -> bool:
    """Take the patch out of force; False when it was not in force.

    Raises:
        PatchRefusedError: Somebody replaced the target after us, so that putting the original back would undo their
            change.
    """
    if spec.name not in _originals:
        return False
    holder, leaf = _holder(spec)
    if getattr(getattr(holder, leaf), "__rlinf_patch__", None) != spec.name:
        raise PatchRefusedError(f"{spec.target} was replaced after patch {spec.name!r}; revert that change first")
    setattr(holder, leaf, _originals.pop(spec.name))
    return True


def in_force(spec: PatchSpec) -> bool:
    """Whether the patch is in force in this process."""
    return spec.name in _originals


def would_apply(spec: PatchSpec) -> str:
    """Return why :func:`apply` would refuse the patch, or an empty string."""
    found = installed("verl")
    if found is None or not in_range(found, spec.versions):
        return f"verl {found} is outside {spec.versions}"
    if in_force(spec):
        return ""
    actual = fingerprint(_resolve(importlib.import_module(spec.module), spec.source_of or spec.attribute))
    return "" if actual == spec.fingerprint else f"source differs: {actual}, expected {spec.fingerprint}"


def _holder(spec: PatchSpec) -> tuple[Any, str]:
    path, _, leaf = spec.attribute.rpartition(".")
    module = importlib.import_module(spec.module)
    return (_resolve(module, path) if path else module), leaf


def _resolve(root: Any, path: str) -> Any:
    for part in path.split("."):
        root = getattr(root, part)
    return root


def _advice(spec: PatchSpec) -> str:
    return f"it is needed because {spec.reason} (needed when {spec.needed_when})"
