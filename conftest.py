"""Lets bare `pytest` and `python -m benchmarks.NAME` work in a checkout where Penstock is not installed.

Finds `penstock.X` in the folder `X/` at the root, as `setup.py` does for an installation.
"""

import importlib.util
import sys
from pathlib import Path

if importlib.util.find_spec("penstock.orchestrator") is None:  # pragma: no cover - only without an install
    root = Path(__file__).parent
    sys.path.insert(0, str(root))
    import penstock

    penstock.__path__.append(str(root))
