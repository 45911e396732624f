"""Collect what `make test-gpu` needs besides torch into one file of at most 60 MB, for a machine without a network.

    make gpu-wheels GPU_PYTHON=3.12 GPU_CUDA=13.0

pip downloads the wheels in constraints-gpu.txt for Linux on x86-64 and checks their SHA-256. Files that the checks never
import are removed: tests, headers, pyarrow's clients of remote services, and the libraries of bitsandbytes for other
CUDA versions. The wheels
are stored without compression in one .tar.xz, which compresses them together to less than half of their size.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import io
import json
import lzma
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
REQUIREMENTS = Path(__file__).parents[2] / "constraints-gpu.txt"
ARCHIVE, MANIFEST = "wheels.tar.xz", "manifest.json"
PYTHONS = ("3.11", "3.12", "3.13", "3.14")  # the oldest first: its versions run on all of them
LIMIT = 60_000_000  # bytes
SOURCE = "deepspeed"  # on the package index as source only; its wheel has no compiled code
# Library of bitsandbytes by the major version of CUDA: it takes the newest one of the same major version.
BITSANDBYTES = {"12": "128", "13": "130"}
# The trainer's packages, their dependencies without torch's own and without clients of the hub, and those that TRL adds.
PACKAGES = [
    "accelerate",
    "annotated-doc",
    "annotated-types",
    "anyio",
    "bitsandbytes",
    "certifi",
    "click",
    "datasets",
    "deepspeed",
    "dill",
    "einops",
    "filelock",
    "fsspec",
    "h11",
    "hjson",
    "httpcore2",
    "httpx2",
    "huggingface_hub",
    "idna",
    "liger-kernel",
    "markdown-it-py",
    "mdurl",
    "msgpack",
    "multiprocess",
    "ninja",
    "numpy",
    "nvidia-ml-py",
    "packaging",
    "pandas",
    "peft",
    "psutil",
    "py-cpuinfo",
    "pyarrow",
    "pydantic",
    "pydantic_core",
    "Pygments",
    "python-dateutil",
    "PyYAML",
    "regex",
    "requests",
    "rich",
    "safetensors",
    "shellingham",
    "tokenizers",
    "tqdm",
    "transformers",
    "trl",
    "truststore",
    "typer",
    "typing_extensions",
    "typing-inspection",
    "tzdata",
    "urllib3",
    "xxhash",
    "charset-normalizer",
]
# Files that no check imports, by package.
DROPPED = {
    "": r"/tests?/.*\.(py|npy|npz|json|csv|dat|txt|f|f90|pyi)$|\.pyi$",
    # Not f2py: a scipy of the machine imports every public name of numpy.
    "numpy": r"/tests/|/include/|/_simd\.|\.a$",
    "pandas": r"/tests/",
    "pyarrow": r"/tests/|/include/|/src/|flight|/_substrait|gandiva|s3fs|libarrow_s3|libarrow_python\.so$|"
    r"libarrow_python\.so\.\d+\.\d|\.(pyx|pxi|pxd|h|cc|jar)$",
    "transformers": r"/models/[^/]+/(modular|convert)_[^/]*\.py$",
}
_TAGS = ("manylinux_2_28", "manylinux_2_27", "manylinux_2_26", "manylinux_2_24", "manylinux_2_17", "manylinux2014")
_PLATFORMS = [
    f"--platform={tag}_x86_64" for tag in (*_TAGS, "manylinux_2_12", "manylinux2010", "manylinux_2_5", "manylinux1")
]


class WheelError(Exception):
    """The file cannot be created; one line."""


def pip(*arguments: str) -> None:
    """Run pip of this Python. Raises WheelError."""
    environment = os.environ | {"DS_BUILD_OPS": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise WheelError(f"pip {arguments[0]} failed: {lines[0] if lines else 'it wrote nothing'}")


def download(requirements: Path, python: str, folder: Path) -> None:
    """Download the wheels for a version of Python, and build those that exist as source only. Raises WheelError."""
    wanted, source = folder / "wheels.txt", folder / "source.txt"
    folder.mkdir(parents=True, exist_ok=True)
    blocks = re.split(r"\n(?=\S)", requirements.read_text().strip())
    wanted.write_text("\n".join(block for block in blocks if not block.startswith(SOURCE)) + "\n")
    source.write_text("\n".join(block for block in blocks if block.startswith(SOURCE)) + "\n")
    common = ["--quiet", "--no-deps", "--require-hashes"]
    target = [f"--python-version={python}", "--implementation=cp", "--only-binary=:all:", *_PLATFORMS]
    pip("download", *common, *target, f"--dest={folder}", f"--requirement={wanted}")
    pip("wheel", *common, "--no-build-isolation", f"--wheel-dir={folder}", f"--requirement={source}")


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def dropped(package: str, path: str, cuda: str) -> bool:
    """Return whether no check needs a file of a wheel."""
    if package == "bitsandbytes" and (library := re.search(r"/libbitsandbytes_(.*)\.so$", path)):
        return library.group(1) not in ("cpu", f"cuda{BITSANDBYTES[cuda]}")
    patterns = [DROPPED[""], DROPPED.get(package, "")]
    return any(pattern and re.search(pattern, path) for pattern in patterns)


def repack(wheel: Path, cuda: str) -> bytes:
    """Return the wheel without the files that no check needs, uncompressed, with a RECORD that lists the rest."""
    package, out = _normal(wheel.name.split("-")[0]), io.BytesIO()
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as target:
        kept = [entry for entry in source.infolist() if not dropped(package, entry.filename, cuda)]
        names = {entry.filename for entry in kept}
        for entry in kept:
            data = source.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                rows = [row for row in csv.reader(io.StringIO(data.decode())) if row and row[0] in names]
                text = io.StringIO()
                csv.writer(text, lineterminator="\n").writerows(rows)
                data = text.getvalue().encode()
            fresh = zipfile.ZipInfo(entry.filename, (2020, 1, 1, 0, 0, 0))
            fresh.external_attr = entry.external_attr
            target.writestr(fresh, data)
    return out.getvalue()


def pack(wheels: Iterable[Path], out: Path, cuda: str) -> int:
    """Write the archive; return its bytes."""
    # The first filter rewrites the addresses in x86 code, which then compresses better.
    filters = [{"id": lzma.FILTER_X86}, {"id": lzma.FILTER_LZMA2, "preset": 9}]
    with (
        lzma.open(out, "wb", format=lzma.FORMAT_XZ, filters=filters) as stream,
        tarfile.open(fileobj=stream, mode="w|") as archive,
    ):
        # Wheels with compiled code last: similar files compress better next to each other.
        for wheel in sorted(wheels, key=lambda file: ("none-any" not in file.name, file.name)):
            data = repack(wheel, cuda)
            entry = tarfile.TarInfo(wheel.name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return out.stat().st_size


def build(python: str, cuda: str, out: Path) -> str:
    """Make the archive for a version of Python and of CUDA; return one line about it. Raises WheelError."""
    if python not in PYTHONS:
        raise WheelError(f"GPU_PYTHON: got {python}, expected one of {', '.join(PYTHONS)}")
    major = cuda.partition(".")[0]
    if major not in BITSANDBYTES:
        raise WheelError(f"GPU_CUDA: got {cuda}, expected 12.x or 13.x: torch.version.cuda on the machine with the GPU")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work)
        download(REQUIREMENTS, python, folder)
        wheels = sorted(folder.glob("*.whl"))
        aside = out / f".{ARCHIVE}.tmp"
        size = pack(wheels, aside, major)
    if size > LIMIT:
        aside.unlink()
        raise WheelError(
            f"the wheels need {size / 1e6:.1f} MB, more than {LIMIT / 1e6:.0f} MB: extend DROPPED in {Path(__file__).name}"
        )
    aside.replace(out / ARCHIVE)
    manifest = {
        "python": python,
        "cuda": major,
        "sha256": _sha256(out / ARCHIVE),
        "wheels": [file.name for file in wheels],
    }
    (out / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")
    return f"{out / ARCHIVE}: {len(wheels)} wheels for Python {python} and CUDA {major}, {size / 1e6:.1f} MB"


def main() -> int:
    """Make the archive, or the requirements; return 1 with one line if that fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version of Python on the machine with the GPU")
    parser.add_argument("--cuda", default="13.0", help="version of CUDA of its torch")
    parser.add_argument("--out", type=Path, default=TOP / ".gpu-wheels")
    a = parser.parse_args()
    try:
        print(build(a.python, a.cuda, a.out))
    except (WheelError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
