"""The record of whether the plugin attached to veRL in this process.

veRL loads plugins in every process and swallows whatever they raise, so a broken plugin would go unnoticed. The
outcome is therefore recorded here, and whatever uses the plugin first calls :func:`require`.
"""

import sys

from rlinf_plugins.core.errors import PluginNotLoadedError

_attached = False
_failure: BaseException | None = None


def record_attached() -> None:
    """Note that every hook and registration of the plugin is in place."""
    global _attached
    _attached = True


def record_failure(error: BaseException) -> None:
    """Note why the plugin could not attach, and say so at once on stderr."""
    global _failure
    _failure = error
    sys.stderr.write(f"[rlinf-plugins] the veRL plugin failed to load: {type(error).__name__}: {error}\n")


def failure() -> BaseException | None:
    """Return what the plugin raised while loading in this process, if it did."""
    return _failure


def attached() -> bool:
    """Whether the plugin attached in this process."""
    return _attached and _failure is None


def require() -> None:
    """Fail unless the plugin attached in this process.

    Raises:
        PluginNotLoadedError: With the recorded cause, or with the switch that disabled the plugin.
    """
    if attached():
        return
    if _failure is not None:
        raise PluginNotLoadedError(
            f"the rlinf veRL plugin failed to load in this process: {type(_failure).__name__}: {_failure}; "
            "run 'rlinf-plugins doctor' for the full picture"
        ) from _failure
    raise PluginNotLoadedError(
        "veRL did not load the rlinf plugin in this process: VERL_USE_EXTERNAL_PLUGINS is set to 'none' or to a list "
        "without 'rlinf', or rlinf-plugins is not installed here; unset the variable or install rlinf-plugins on "
        "every node"
    )
