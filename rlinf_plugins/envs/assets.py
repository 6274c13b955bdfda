"""Simulators that lack a file ask on standard input whether to download it; here they never wait for an answer."""

import contextlib
import io
import sys
from collections.abc import Iterator
from unittest import mock

from rlinf_plugins.core.errors import MissingAssetError


@contextlib.contextmanager
def no_questions(what: str, fix: str) -> Iterator[None]:
    """Run a simulator's code with an empty standard input, and turn its way of missing files into our error.

    Args:
        what: What needs the files.
        fix: How to get them.

    Raises:
        MissingAssetError: It asked a question, left with a status, or did not find a file; says which, if it said so.
    """
    try:
        with mock.patch.object(sys, "stdin", io.StringIO()):
            yield
    except MissingAssetError:
        raise
    except (EOFError, SystemExit, FileNotFoundError) as error:
        raise MissingAssetError(
            f"{what} needs files that are not here ({type(error).__name__}: {error}); {fix}"
        ) from error
