"""Distributions that site.yml supports, and the line about others, from recorded texts of /etc/os-release."""

import re
from pathlib import Path

import pytest
from tables import table

from plugins.filter.distribution import distribution_error

TOP = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = table("distributions")


@pytest.mark.parametrize("name", DISTRIBUTIONS["supported"])
def test_debian_ubuntu_and_their_derivatives_are_supported(name: str) -> None:
    assert distribution_error(DISTRIBUTIONS["supported"][name]) == ""


@pytest.mark.parametrize("name", DISTRIBUTIONS["others"])
def test_another_distribution_is_refused_by_its_name(name: str) -> None:
    error = distribution_error(DISTRIBUTIONS["others"][name])
    assert error.startswith(f"site.yml does not support {name}: ") and "set cluster_managed: false" in error


def test_what_the_line_says_is_missing_is_what_the_roles_install() -> None:
    error = distribution_error("ID=fedora\n")
    installing = {
        path.parts[-3]
        for path in TOP.glob("roles/*/tasks/*.yml")
        if re.search("ansible.builtin.apt:|tasks_from: packages", path.read_text())
    }
    # cluster installs for the others; pull serves nfs and ollama; python installs a compiler for the extra deepspeed only.
    assert installing - {"cluster", "pull", "python"} == {
        role for role in installing if re.search(rf"\b{role}\b", error)
    }
    for role, package in (("firewall", "ufw"), ("system", "chrony"), ("system", "libtcmalloc-minimal4")):
        assert any(
            f"cluster_packages: [{package}]\n" in path.read_text() for path in TOP.glob(f"roles/{role}/tasks/*.yml")
        )
        assert package in error


@pytest.mark.parametrize(
    ("text", "shown"), [*table("distribution")["hostile_texts"], ("ID=x\nPRETTY_NAME=" + "A" * 4000, "A" * 77 + "...")]
)
def test_a_hostile_text_is_one_printable_line(text: str, shown: str) -> None:
    error = distribution_error(text)
    assert error.startswith(f"site.yml does not support {shown}: ")
    assert error.isprintable() and len(error) < 600
