"""Pack what the role dashboard installs on a host: the program, and the versions of its packages.

    python -m trainyard.dashboard.pack FOLDER

writes the program into FOLDER and prints, as JSON: `file`, its path; `sha256` of the program; `requirements` and `constraints`, the
contents of files for pip; `packages`, their digest.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import trainer
import trainyard
from trainer.common.files import write_atomic
from trainyard.project_folder import shared_folder
from trainyard.python_env.resolve import EnvironmentBuildError, read_constraints, requirements, without_digests
from trainyard.wire.trainer_archive import zip_packages

SUFFIXES = (".py", ".html", ".css", ".js", ".svg")


def pack(folder: Path) -> dict[str, str]:
    """Write the program into `folder`; return the result of the module. Raises EnvironmentBuildError."""
    program = zip_packages(trainyard, trainer, suffixes=SUFFIXES)
    digest = hashlib.sha256(program).hexdigest()
    target = folder / f"program-{digest[:16]}.zip"
    if not target.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(target, program)
    shared = shared_folder()
    texts = {
        "requirements": requirements(shared / "pyproject.toml", ["dashboard"], torch=False),
        "constraints": without_digests(read_constraints(shared / "constraints.txt")),
    }
    contents = {name: "".join(f"{line}\n" for line in lines) for name, lines in texts.items()}
    packages = hashlib.sha256(json.dumps(contents).encode()).hexdigest()[:16]
    return {"file": str(target), "sha256": digest, "packages": packages, **contents}


def main() -> int:
    """Pack; see the module."""
    try:
        print(json.dumps(pack(Path(sys.argv[1]))))
    except (EnvironmentBuildError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
