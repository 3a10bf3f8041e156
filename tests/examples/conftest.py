"""The examples are scripts, not a package: tests import them from their folders."""

import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
sys.path[:0] = [str(EXAMPLES / "quickstart"), str(EXAMPLES / "calculator"), str(EXAMPLES)]
