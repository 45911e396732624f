"""Stands in for trainer.launch.torchrun where a test needs no torch: it runs rank 0 to its end, with the arguments of fake_rank.py."""

import os
import subprocess
import sys

if __name__ == "__main__":
    command = [sys.executable, os.environ["FAKE_RANK"], *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=os.environ | {"RANK": "0"}, check=False).returncode)
