"""Parts for embodied and agentic RL that know nothing of a trainer.

Importing this package is cheap: it imports neither torch nor ray, starts nothing and reads no network.
The veRL integration lives in the package ``rlinf_verl``, installed by the same distribution.
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("rlinf-plugins")
except PackageNotFoundError:  # a source tree that was never installed
    __version__ = "0+unknown"

__all__ = ["__version__"]
