"""lock_unsloth.py: pin the packages of the environment python_flavour=unsloth, with digests, in constraints-unsloth.txt.

uv resolves the newest versions for Linux on x86_64 that pyproject.toml and unsloth allow. It reads metadata only and downloads no
wheels. The lock has the digests of the wheels for every supported version of Python.
"""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

TOP = Path(__file__).resolve().parents[1]
LOCK = TOP / "constraints-unsloth.txt"
PYTHONS = ("3.11", "3.12", "3.13")  # the oldest first: its versions run on all of them
PLATFORM = "x86_64-manylinux_2_28"
HEADER = """\
# Pinned versions and digests of the environment python_flavour=unsloth: Linux on x86_64, CPython 3.11 to 3.13.
# 'make lock-unsloth' writes this file. torch is the build of the package index.
"""


def requirements() -> list[str]:
    """Return the requirements of a node with a GPU and of the extra unsloth."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["node"], *extras["unsloth"], *extras["nvml"]]


def compile_lock(uv: Path, folder: Path, python: str, pinned: dict[str, str]) -> dict[str, tuple[str, set[str]]]:
    """Return version and digests of every package by name, for one version of Python. `pinned`: versions to keep."""
    (folder / "requirements.in").write_text("\n".join(requirements()), encoding="utf-8")
    (folder / "pinned.txt").write_text(
        "\n".join(f"{name}=={version}" for name, version in pinned.items()), encoding="utf-8"
    )
    index = os.environ.get("PIP_INDEX_URL", "https://pypi.org/simple")
    command = [uv, "pip", "compile", "--quiet", "--only-binary=:all:", "--default-index", index, "--format=pylock.toml"]
    command += [f"--python-version={python}", f"--python-platform={PLATFORM}", "--constraints", folder / "pinned.txt"]
    command += ["--no-config", "--output-file", folder / "pylock.toml", folder / "requirements.in"]
    subprocess.run(command, check=True, env=os.environ | {"UV_CACHE_DIR": str(folder / "cache")})
    packages = tomllib.loads((folder / "pylock.toml").read_text(encoding="utf-8"))["packages"]
    (folder / "pylock.toml").unlink()
    return {
        package["name"]: (package["version"], {wheel["hashes"]["sha256"] for wheel in package["wheels"]})
        for package in packages
    }


def main() -> int:
    """Write the lock."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        venv.create(folder / "venv", with_pip=True)
        subprocess.run([folder / "venv/bin/python", "-m", "pip", "install", "--quiet", "uv"], check=True)
        versions: dict[str, str] = {}
        digests: dict[str, set[str]] = {}
        for python in PYTHONS:
            for name, (version, found) in compile_lock(folder / "venv/bin/uv", folder, python, versions).items():
                versions[name] = version
                digests.setdefault(name, set()).update(found)
    lines = [
        f"{name}=={versions[name]} " + " ".join(f"--hash=sha256:{digest}" for digest in sorted(digests[name]))
        for name in sorted(versions)
    ]
    assert all(re.fullmatch(r"[a-z0-9-]+==\S+( --hash=sha256:[0-9a-f]{64})+", line) for line in lines)
    LOCK.write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
    print(f"wrote {LOCK.name}: {len(lines)} packages")
    return 0


if __name__ == "__main__":
    sys.exit(main())
