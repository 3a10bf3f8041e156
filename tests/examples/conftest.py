"""The examples are scripts, not a package: tests import them from their folders."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "quickstart"))
