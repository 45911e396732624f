"""What pyproject.toml cannot declare: sdist and wheel hold the playbooks, roles and plugins, the wheel as `trainyard/share`."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

TOP = Path(__file__).parent
SHARED = (
    *("LICENSE", "ansible.cfg", "constraints*.txt", "pyproject.toml", "site.yml", "train.yml"),
    *("inventory/hosts.example.yml", "inventory/local.yml", "inventory/ollama.yml"),
    *("group_vars/all/cluster.yml", "playbooks/*.yml", "plugins/**/*.py", "roles/**/*"),
)


class BuildPy(build_py):
    """Build the packages, and copy the files of `SHARED`."""

    def _get_data_files(self) -> list[tuple[str, str, str, list[str]]]:
        return [*super()._get_data_files(), self._shared()]

    def get_data_files_without_manifest(self) -> list[tuple[str, str, str, list[str]]]:
        """Return what the sdist holds besides the modules."""
        return [*super().get_data_files_without_manifest(), self._shared()]

    def _shared(self) -> tuple[str, str, str, list[str]]:
        found = (path.relative_to(TOP) for pattern in SHARED for path in sorted(TOP.glob(pattern)) if path.is_file())
        names = [str(path) for path in found if "__pycache__" not in path.parts]
        return ("trainyard", ".", f"{self.build_lib}/trainyard/share", names)


setup(cmdclass={"build_py": BuildPy})
