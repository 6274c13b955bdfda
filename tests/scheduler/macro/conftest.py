"""Makes the stages of these tests importable by one name, here and in Ray's workers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
