"""The trainer as one zip file on the controller, which the hosts run it from."""

from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import trainer
from trainer.files import write_atomic


def trainer_archive(work: Path) -> Path:
    """Return the trainer as one zip file. Equal sources give equal bytes, so it is staged only when it changed."""
    package = Path(trainer.__file__).parent
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(package.rglob("*.py")):
            entry = zipfile.ZipInfo(str(path.relative_to(package.parent)), date_time=(1980, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, path.read_bytes(), zipfile.ZIP_DEFLATED)
    target = work / "stage" / f"trainer-{hashlib.sha256(buffer.getvalue()).hexdigest()[:16]}.zip"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, buffer.getvalue())
    return target
