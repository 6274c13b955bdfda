"""veRL on virtual devices, for every test of the integration."""

import os

# Read by veRL when it is first imported, in this process and in the Ray workers it starts.
os.environ.setdefault("VERL_PLATFORM", "cpu")
