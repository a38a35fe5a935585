"""The scripts of the example import one another as programs do: by their file names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "plays"))
