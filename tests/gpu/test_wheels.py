"""The archive of `make gpu-wheels`, and the one-line refusals of `make test-gpu`."""

import json
import platform
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from benchmarks.gpu import wheels
from tools.lock import read_pins
from trainyard.python_env.resolve import normal_name

TOP = Path(__file__).resolve().parents[2]
SAFE = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}  # from Python 3.11.4 on


def wheel(folder: Path, name: str, files: list[str]) -> Path:
    package = name.split("-")[0]
    info = f"{package}-1.0.dist-info"
    file = folder / f"{name}.whl"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as target:
        for path in files:
            target.writestr(path, path)
        metadata = {"METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"}
        metadata["WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        for part, text in metadata.items():
            target.writestr(f"{info}/{part}", text)
        record = [f"{path},," for path in (*files, *(f"{info}/{part}" for part in metadata), f"{info}/RECORD")]
        target.writestr(f"{info}/RECORD", "\n".join(record) + "\n")
    return file


@pytest.mark.slow
def test_repacked_wheels_have_one_cuda_library_and_install(tmp_path: Path) -> None:
    libraries = ["cpu", "cuda118", "cuda128", "cuda130", "cuda132", "rocm72"]
    source = wheel(
        tmp_path,
        "bitsandbytes-1.0-py3-none-any",
        [
            "bitsandbytes/__init__.py",
            "bitsandbytes/x.pyi",
            *(f"bitsandbytes/libbitsandbytes_{each}.so" for each in libraries),
        ],
    )
    out = tmp_path / "wheels.tar.xz"
    assert wheels.pack([source], out, "13") == out.stat().st_size
    with tarfile.open(out) as archive:
        archive.extractall(tmp_path / "unpacked", **SAFE)
    repacked = tmp_path / "unpacked" / source.name
    with zipfile.ZipFile(repacked) as made:
        names = [name for name in made.namelist() if not name.startswith("bitsandbytes-")]
        record = made.read("bitsandbytes-1.0.dist-info/RECORD").decode()
    kept = [
        "bitsandbytes/__init__.py",
        "bitsandbytes/libbitsandbytes_cpu.so",
        "bitsandbytes/libbitsandbytes_cuda130.so",
    ]
    assert names == kept
    assert [line.split(",")[0] for line in record.splitlines()][:3] == kept
    target = tmp_path / "site"
    words = ["-m", "pip", "install", "-q", "--no-index", "--no-deps", "--target", str(target), str(repacked)]
    subprocess.run([sys.executable, *words], check=True)
    assert (target / "bitsandbytes" / "libbitsandbytes_cuda130.so").exists()


def test_requirements_pin_the_versions_of_the_project() -> None:
    pinned, constraints = read_pins("constraints-gpu.txt"), read_pins("constraints.txt")
    assert pinned.keys() == {normal_name(name) for name in wheels.PACKAGES}
    differing = {name for name, version in pinned.items() if constraints.get(name, version) != version}
    assert not differing, "run make lock ARGS=gpu"


@pytest.mark.parametrize(
    ("python", "cuda", "message"),
    [
        ("3.10", "13.0", "GPU_PYTHON: got 3.10"),
        ("3.12", "11.8", "GPU_CUDA: got 11.8"),
        ("3.12", "x", "GPU_CUDA: got x"),
    ],
)
def test_other_machines_are_refused(python: str, cuda: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(wheels.WheelError, match=message):
        wheels.build(python, cuda, tmp_path)


def stand_in_torch(folder: Path, version: str, cuda: str = "13.0") -> dict[str, str]:
    """Return an environment whose Python finds a torch of this version."""
    (folder / "torch").mkdir()
    (folder / "torch" / "__init__.py").write_text(
        f"import types\n__version__ = {version!r}\nversion = types.SimpleNamespace(cuda={cuda!r})\n"
        "cuda = types.SimpleNamespace(is_available=lambda: False)\n"
    )
    return {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder), "HOME": str(folder)}


@pytest.mark.parametrize(
    ("version", "manifest", "message"),
    [
        ("2.7.1+cu128", None, "has torch 2.7.1+cu128, expected 2.8 or newer"),
        ("2.11.0", {"python": "3.9", "cuda": "13"}, "is for Python 3.9 and CUDA 13, this Python is "),
        ("2.11.0", {"python": platform.python_version()[:4], "cuda": "12"}, "run make gpu-wheels GPU_PYTHON="),
        ("2.11.0+cpu", None, "torch 2.11.0+cpu finds no CUDA GPU here"),
    ],
)
def test_gpu_test_refuses_with_one_line(
    version: str, manifest: dict[str, str] | None, message: str, tmp_path: Path
) -> None:
    environment = stand_in_torch(tmp_path, version) | {"GPU_WHEELS": str(tmp_path / "wheels")}
    if manifest:
        (tmp_path / "wheels").mkdir()
        (tmp_path / "wheels" / "manifest.json").write_text(json.dumps(manifest))
    done = subprocess.run(
        [TOP / "tools/gpu-test", sys.executable], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("error: ") and message in done.stderr


def test_gpu_test_refuses_a_python_without_torch(tmp_path: Path) -> None:
    environment = stand_in_torch(tmp_path, "2.11.0")
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('no such library')\n")
    done = subprocess.run(
        [TOP / "tools/gpu-test", sys.executable], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1 and "has no torch (no such library)" in done.stderr
