"""The modules of bench/gpu/ are scripts beside each other, and import each other so."""

from __future__ import annotations

import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parents[3] / "bench/gpu"
sys.path.insert(0, str(BENCH))
