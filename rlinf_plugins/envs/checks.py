"""Checks this part adds to ``rlinf-plugins doctor``."""

from collections.abc import Iterator

from rlinf_plugins.core.doctor import CheckResult


def checks() -> Iterator[CheckResult]:
    """Yield one result per checked fact."""
    yield from ()
