"""The pins of constraints*.txt, which tools/lock.py writes."""

from __future__ import annotations

import re

import pytest
from packaging.requirements import Requirement

from tools import lock
from trainyard.python_env.resolve import MACHINES, normal_name


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
    digests = r"( --hash=sha256:[0-9a-f]{64})+" if flavour.complete else ""
    marker = r"(; (python_version \S+ '3\.\d+'|platform_machine == 'x86_64'))?"
    assert all(re.fullmatch(rf"[a-z0-9-]+==[^\s;]+{marker}{digests}", line) for line in lines)


def test_no_requirement_excludes_a_later_release_without_a_reason() -> None:
    """Exact versions are in the pins. A bound excludes a major version of a library whose classes the code uses."""
    wanted = [requirement for flavour in lock.flavours().values() for requirement in map(Requirement, flavour.wanted)]
    bounds = {each.name for each in wanted if any(part.operator not in (">=",) for part in each.specifier)}
    assert bounds == {"mkdocs", "starlette", "transformers"}


def test_a_package_may_have_two_versions() -> None:
    pins = lock.Pins({"3.11": "2.19", "3.14": "2.21"}, {"b", "a"}, set(MACHINES))
    assert pins.lines("ansible-core", MACHINES) == [
        "ansible-core==2.19; python_version < '3.14' --hash=sha256:a --hash=sha256:b",
        "ansible-core==2.21; python_version >= '3.14' --hash=sha256:a --hash=sha256:b",
    ]


def test_a_package_that_one_architecture_needs_has_a_marker() -> None:
    pins = lock.Pins({"3.11": "0.1"}, {"a"}, {"x86_64"})
    assert pins.lines("xformers", MACHINES) == ["xformers==0.1; platform_machine == 'x86_64' --hash=sha256:a"]
    assert pins.lines("xformers", ["x86_64"]) == ["xformers==0.1 --hash=sha256:a"]
    pins.versions["3.14"] = "0.2"
    assert [line.partition("; ")[2] for line in pins.lines("xformers", MACHINES)] == [
        "python_version < '3.14' and platform_machine == 'x86_64' --hash=sha256:a",
        "python_version >= '3.14' and platform_machine == 'x86_64' --hash=sha256:a",
    ]
