import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from lab_hosts import bare, hosts, lab, metal  # noqa: F401  fixtures
