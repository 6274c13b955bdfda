"""One flat vocabulary of errors.

Every error says what was wrong, with which value, and what to do about it. ``RlinfError`` is the boundary: whatever
the suite raises on purpose derives from it, so that a caller can tell a reported failure from a defect.
Areas add their classes under their own heading; none is defined elsewhere.
"""


class RlinfError(Exception):
    """Base of everything the suite raises on purpose."""


# --- configuration and installation -----------------------------------------------------------------------------


class ConfigError(RlinfError, ValueError):
    """A configuration value is unknown, of the wrong type, out of range or in conflict with another."""


class MissingExtraError(RlinfError, ImportError):
    """An optional dependency is not installed; the message names the extra that brings it."""


class UnsupportedVersionError(RlinfError):
    """A dependency is installed in a version outside the tested range."""


class UnknownNameError(RlinfError, LookupError):
    """A name is not registered; the message lists those that are."""


class MissingAssetError(RlinfError, FileNotFoundError):
    """A file the feature needs is absent; the message says which and where it comes from."""
