"""The tests of the store share helpers, and run the campaigns of ``scripts/``: both can be imported by name."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2] / "scripts")]
settings.register_profile("store", deadline=None, max_examples=60)  # a slow machine is no failure
settings.load_profile("store")
