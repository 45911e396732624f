"""The versions that an interpreter reports, from packages that are installed for it as far as their metadata goes."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path

import pytest

from trainyard.remote.package_versions import package_versions


@pytest.mark.parametrize(("cuda", "found"), [("13.0", "2.28.9"), ("12.8", "2.27.3"), ("", None)])
def test_the_library_of_nccl_is_that_of_torch(tmp_path: Path, cuda: str, found: str | None) -> None:
    site = Path(sysconfig.get_path("purelib", vars={"base": str(tmp_path)}))
    for name, version in (("torch", "2.13.0"), ("nvidia_nccl_cu13", "2.28.9"), ("nvidia_nccl_cu12", "2.27.3")):
        info = site / f"{name}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: {version}\n")
    (site / "torch").mkdir()
    (site / "torch/__init__.py").touch()
    (site / "torch/version.py").write_text(f"cuda = {cuda or None!r}\n")
    (tmp_path / "pyvenv.cfg").write_text(f"home = {Path(sys.base_prefix, 'bin')}\n")
    (tmp_path / "bin").mkdir()
    python = tmp_path / "bin/python"
    python.symlink_to(Path(sys.executable).resolve())
    versions = package_versions(str(python), ("missing",))
    assert (versions["torch"], versions.get("cuda"), versions.get("nccl")) == ("2.13.0", cuda or None, found)
    assert "missing" not in versions
