"""The pins of constraints*.txt, which tools/lock.py writes."""

import io
import re

import pytest
from packaging.requirements import Requirement
from tables import table

from tools import lock
from trainyard.python_env.resolve import normal_name


@pytest.mark.parametrize("name", list(lock.flavours()))
def test_every_requirement_has_a_pin_that_it_accepts(name: str) -> None:
    flavour = lock.flavours()[name]
    pins = lock.read_pins(flavour.file)
    for requirement in map(Requirement, flavour.wanted):
        if requirement.name != "pip":
            pinned = pins[normal_name(requirement.name)]
            assert pinned in requirement.specifier, f"{requirement} and {pinned}: run make lock"
    text = (lock.TOP / flavour.file).read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    digests = r"( --hash=sha256:[0-9a-f]{64})+"
    marker = r"(; (python_version \S+ '3\.\d+'|platform_machine == 'x86_64'))?"
    assert all(re.fullmatch(rf"[a-z0-9-]+==[^\s;]+{marker}{digests}", line) for line in lines)


def test_no_requirement_excludes_a_later_release_without_a_reason() -> None:
    """Exact versions are in the pins. A bound excludes a major version of a library whose classes the code uses."""
    wanted = [requirement for flavour in lock.flavours().values() for requirement in map(Requirement, flavour.wanted)]
    bounds = {each.name for each in wanted if any(part.operator not in (">=",) for part in each.specifier)}
    assert bounds == {"mkdocs", "starlette", "transformers"}


def test_a_package_may_have_two_versions_and_one_machine() -> None:
    linux = "sys_platform == 'linux'"
    both = f"((platform_machine == 'aarch64' and {linux}) or (platform_machine == 'x86_64' and {linux}))"
    old = {"marker": f"python_full_version < '3.14' and {both}"}
    new = {"marker": f"python_full_version >= '3.14' and python_full_version < '3.15' and {both}"}
    only = {"marker": f"python_full_version < '3.15' and platform_machine == 'x86_64' and {linux}"}
    assert lock.marker_of(old, True) == "python_version < '3.14'"
    assert lock.marker_of(new, True) == "python_version >= '3.14'"
    assert lock.marker_of(old, False) == "" and lock.marker_of(only, False) == "platform_machine == 'x86_64'"
    pins = lock.Pins({"2.19": "python_version < '3.14'", "2.21": ""}, {"b", "a"})
    assert pins.lines("ansible-core") == [
        "ansible-core==2.19; python_version < '3.14' --hash=sha256:a --hash=sha256:b",
        "ansible-core==2.21 --hash=sha256:a --hash=sha256:b",
    ]


@pytest.mark.parametrize(("name", "listed"), table("lock")["the_digests_are_those_of_the_files_that_hosts_install"])
def test_the_digests_are_those_of_the_files_that_hosts_install(name: str, listed: bool) -> None:
    assert bool(lock.WHEEL.search(name)) is listed


def test_the_builds_of_torch_have_their_digests(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    digest = {"cpu": "c" * 64, "cu130": "0" * 64}

    def answer(url: str, timeout: float) -> io.BytesIO:
        build = url.split("/")[-3]
        if build not in digest:
            return io.BytesIO(b"<html>")
        links = [f"torch-2.13.0%2B{build}-cp312-cp312-manylinux_2_28_x86_64.whl#sha256={digest[build]}"]
        links += [f"torch-2.13.0%2B{build}-cp312-cp312-win_amd64.whl#sha256={'e' * 64}"]
        return io.BytesIO("".join(f'<a href="/whl/{link}">' for link in links).encode())

    monkeypatch.setattr(lock.urllib.request, "urlopen", answer)
    assert lock.torch_digests("2.13.0") == {build: {each} for build, each in digest.items()}

    def refuse(url: str, timeout: float) -> io.BytesIO:
        raise OSError("no route")

    monkeypatch.setattr(lock.urllib.request, "urlopen", refuse)
    pins = lock.Pins({"2.13.0": ""}, {"a"})
    held = "# Builds of torch: cpu.\ntorch==2.13.0 --hash=sha256:a --hash=sha256:b\n"
    assert lock.add_builds(pins, held) == "cpu" and pins.digests == {"a", "b"}
    assert "does not answer (no route): the digests of torch's builds stay" in capsys.readouterr().err
    newer = lock.Pins({"2.14.0": ""}, {"c"})
    assert lock.add_builds(newer, held) == "" and newer.digests == {"c"}, "a new version has other files"
