"""Which versions of the host the integration is tested with, and the check of what is installed."""

from importlib.metadata import PackageNotFoundError, version

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from rlinf_plugins.core.errors import UnsupportedVersionError

SUPPORTED: dict[str, str] = {
    "verl": ">=0.9.1,<0.9.2",
    "TransferQueue": ">=0.1.10,<0.2",
    "ray": ">=2.41",
    "transformers": ">=5.5.3,<5.11",
    "tensordict": ">=0.8,!=0.9.0,<0.11",
    "torch": ">=2.8",
}
"""Distribution name -> range the suite is run against. Torch is the user's own build; only a floor is declared."""


def installed(distribution: str) -> str | None:
    """Return the installed version of ``distribution``, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def in_range(found: str, supported: str) -> bool:
    """Whether version ``found`` lies in ``supported``; local parts such as ``+cpu`` are ignored."""
    return Version(found).public in SpecifierSet(supported, prereleases=True)


def check_host() -> None:
    """Refuse a veRL outside the tested range: its private seams are used and may have moved.

    Raises:
        UnsupportedVersionError: veRL is absent or outside the range.
    """
    found = installed("verl")
    if found is None or not in_range(found, SUPPORTED["verl"]):
        raise UnsupportedVersionError(
            f"rlinf-plugins works with verl{SUPPORTED['verl']}, found {found or 'none'}; "
            f"pip install 'verl{SUPPORTED['verl']}', or uninstall rlinf-plugins to run another verl"
        )
