"""Deferred imports of optional dependencies, with the command that installs them."""

import importlib
from types import ModuleType

from rlinf_plugins.core.errors import MissingExtraError


def require(module: str, extra: str) -> ModuleType:
    """Import ``module``, or say which extra brings it.

    Args:
        module: Dotted module name, e.g. ``"bm25s"``.
        extra: Extra of this distribution that installs it, e.g. ``"search"``.

    Returns:
        The imported module.

    Raises:
        MissingExtraError: The module is not installed. A module that is installed but fails to import raises its
            own error, so that the cause is not hidden.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise
        raise MissingExtraError(
            f"{module!r} is not installed and this feature needs it: pip install 'rlinf-plugins[{extra}]'"
        ) from error
