"""Files of another Ollama or Slurm, which site.yml does not replace. Standard library only."""

import contextlib
import re
from pathlib import Path

UNITS = "etc/systemd/system"
FILES = {
    "ollama": (f"{UNITS}/ollama.service", f"{UNITS}/ollama.service.d/*", "usr/local/bin/ollama", "usr/bin/ollama"),
    # clustername: slurmctld ends if its state belongs to another cluster.
    "queue": ("etc/slurm/slurm.conf", f"{UNITS}/slurm*d.service", "usr/local/sbin/slurm*d", "var/lib/slurm/slurmctld/clustername"),
}  # fmt: skip
# A user's drop-in may set what the unit of the role does not.
SET = re.compile(rb"^\s*(ExecStart|User|Group)=|OLLAMA_(HOST|MODELS)=", re.MULTILINE)


def foreign_files(service: str, root: Path = Path("/")) -> list[str]:
    """Return the files of another `service`, one of FILES."""
    found = []
    for path in (path for pattern in FILES[service] for path in sorted(root.glob(pattern))):
        with contextlib.suppress(OSError), path.open("rb") as file:
            text = file.read(1 << 16)
            drop_in = path.parent.suffix == ".d"
            if SET.search(text) if drop_in else b"trainyard" not in text + bytes(path.resolve()):
                found.append(str(path))
    return found
