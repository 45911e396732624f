"""Hostile strings through every template of the roles: a value never becomes another directive, line or word.

Every template is rendered with Ansible's own lookup, from the role's defaults and the inventory below. Each value that appears
in the result is replaced by each hostile string. The result must have the directives of the original, or the template must
refuse the value. A new template is covered as soon as it exists; it may need values in INVENTORY.
"""

import copy
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleError
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import filter_loader, init_plugin_loader, lookup_loader
from ansible.template import Templar, trust_as_template
from hostile import HOSTILE_STRINGS
from tables import table

from trainyard.provision.config_syntax import config_line, config_string, config_word, exports_path, systemd_quote

ROOT = Path(__file__).resolve().parents[2]
TEMPLATES = sorted(ROOT.glob("roles/*/templates/*"))
INJECTIONS = table("template_injections")
ODD = [text for text in HOSTILE_STRINGS if len(text) < 600]

# What an inventory and earlier tasks add to the defaults of the roles.
INVENTORY: dict[str, Any] = table("template_variables")
# Templates that another host of the inventory renders, in addition to the first.
OTHER_HOSTS = {"chrony.conf.j2": "node2"}

Directives = list[tuple[str, ...]]


def systemd(text: str) -> Directives:
    """Return section, key and number of words of every assignment (systemd.syntax(7))."""
    found: Directives = []
    section = ""
    for line in re.sub(r"\\[\n\r]", " ", text).replace("\r", "\n").split("\n"):
        if line.strip().startswith(("#", ";")) or not line.strip():
            continue
        if line.startswith("["):
            section = line.strip()
        else:
            key, _, value = line.partition("=")
            listed = key in ("Environment", "BindPaths", "ReadWritePaths", "ExecStart")
            found.append((section, key, *(["word"] * len(systemd_words(value)) if listed else [])))
    return found


def systemd_words(value: str) -> list[str]:
    """Split a value of systemd into words, without quotes, escapes and the percent signs of specifiers."""
    words = re.findall(r'"(?:[^"\\]|\\.)*"|\S+', value.strip(), re.DOTALL)
    return [unescape(word[1:-1]) if word.startswith('"') else word for word in words]


def unescape(text: str) -> str:
    def character(match: re.Match[str]) -> str:
        return chr(int(match[1][1:], 16)) if match[1].startswith("u") else match[1]

    return re.sub(r"\\(u[0-9a-f]{4}|.)", character, text, flags=re.DOTALL).replace("%%", "%")


def words(text: str) -> Directives:
    """Return the first word and the number of words of every line; quotes group words."""
    found: Directives = []
    for line in re.split(r"[\n\r]", text):
        split = re.findall(r'(?:"[^"]*"|[^\s"])+', line)
        if split and not split[0].startswith("#"):
            name = "" if split[0].startswith(('"', "/")) or "==" in split[0] else split[0].partition("=")[0]
            found.append((name, *["word"] * (len(split) - 1)))
    return found


def assignments(text: str) -> Directives:
    """Return the name of every `name = value`, and the sections, of a file such as rsyncd.conf(5)."""
    lines = [line.strip() for line in re.split(r"[\n\r]", re.sub(r"\\[\n\r]", "", text))]
    return [
        ("[]",) if line.startswith("[") else (line.partition("=")[0].strip(),)
        for line in lines
        if line and not line.startswith(("#", ";"))
    ]


def parser(path: Path) -> Callable[[str], Directives]:
    """Return the parser for the file that a template writes."""
    text = path.read_text()
    if re.search(r"(?m)^\[[A-Z]\w*\]$", text):
        return systemd
    return assignments if re.search(r"(?m)^\w[\w ]* = ", text) else words


@cache
def loaders() -> tuple[DataLoader, Any]:
    init_plugin_loader()
    filter_loader.add_directory(str(ROOT / "plugins/filter"))
    loader = DataLoader()
    return loader, Templar(loader=loader)


def read(path: Path) -> dict[str, Any]:
    """Return the variables of a YAML file, as templates that Ansible may evaluate."""

    def trusted(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: trusted(entry) for key, entry in value.items()}
        if isinstance(value, list):
            return [trusted(entry) for entry in value]
        return trust_as_template(value) if isinstance(value, str) else value

    return trusted(yaml.safe_load(path.read_text()) or {}) if path.exists() else {}


def variables(path: Path, host: str = "node1") -> dict[str, Any]:
    """Return the variables with which a role renders a template."""
    role = path.parents[1]
    found = read(ROOT / "roles/cluster/defaults/main.yml") | read(ROOT / "roles/cluster/vars/main.yml")
    for file in ("defaults/main.yml", "vars/main.yml"):
        found |= read(role / file)
    return found | copy.deepcopy(INVENTORY) | {"inventory_hostname": host}


def render(path: Path, values: dict[str, Any]) -> str:
    """Return what the template action of Ansible writes. Raises AnsibleError."""
    loader, templar = loaders()
    templar = templar.copy_with_new_env(available_variables=values)
    lookup = lookup_loader.get("ansible.builtin.template", loader=loader, templar=templar)
    [text] = lookup.run([str(path)], variables=values)
    return str(text)


def leaves(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the place of every text and number in the variables."""
    if isinstance(value, dict):
        for key, entry in value.items():
            yield from leaves(entry, (*place, key))
    elif isinstance(value, list):
        for index, entry in enumerate(value):
            yield from leaves(entry, (*place, index))
    elif isinstance(value, str | int) and not isinstance(value, bool):
        yield place


def replaced(values: dict[str, Any], place: tuple[Any, ...], text: Any) -> dict[str, Any]:
    """Return a copy of the variables with another text at one place."""
    result = copy.deepcopy(values)
    inner: Any = result
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = text
    return result


def outcome(path: Path, values: dict[str, Any]) -> str | None:
    try:
        return render(path, values)
    except AnsibleError:
        return None


def used(path: Path, values: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return the places of the variables of operators and hosts that change the result."""
    base = render(path, values)
    derived = {"groups", "inventory_hostname", "cluster_members", "queue_phase"}
    derived |= set(read(ROOT / "roles/cluster/vars/main.yml"))
    derived |= set(read(path.parents[1] / "vars/main.yml"))
    places = [place for place in leaves(values) if place[0] not in derived]
    return [place for place in places if outcome(path, replaced(values, place, "7")) != base]


CASES = [(path, host) for path in TEMPLATES for host in ("node1", OTHER_HOSTS.get(path.name)) if host]
IDS = [f"{path.parents[1].name}-{path.name}-{host}" for path, host in CASES]


def check(path: Path, host: str, strings: list[str]) -> None:
    """Render a template with each string in each place, and compare the directives. The queue leaves out a host that it refuses."""
    parse = parser(path)
    values = variables(path, host)
    expected = parse(render(path, values))
    assert expected
    for place, text in product(used(path, values), strings):
        rendered = outcome(path, replaced(values, place, text))
        if rendered is not None and (found := parse(rendered)) != expected:
            refused = parse(render(path, replaced(values, place[:3], {}))) if "__queue_info" in place else expected
            assert found == refused, f"{place} is {text!r}:\n{rendered}"


@pytest.mark.slow
@pytest.mark.parametrize("strings", [INJECTIONS, pytest.param(ODD, marks=pytest.mark.long)], ids=["injection", "odd"])
@pytest.mark.parametrize(("path", "host"), CASES, ids=IDS)
def test_a_value_never_becomes_a_directive(path: Path, host: str, strings: list[str]) -> None:
    check(path, host, strings)


def test_the_suite_finds_an_injection(tmp_path: Path) -> None:
    """The suite fails for a template without a filter, so that a pass is meaningful."""
    template = tmp_path / "role/templates/a.service.j2"
    template.parent.mkdir(parents=True)
    template.write_text('[Service]\nEnvironment="A={{ ansible_user }}"\n')
    with pytest.raises(AssertionError, match="ansible_user"):
        check(template, "node1", INJECTIONS)


def test_values_that_are_only_unusual_are_written() -> None:
    """Escaping keeps the value; a template that refuses everything would also pass the suite."""
    path = ROOT / "roles/ollama/templates/ollama.service.j2"
    for text in ('say "hi"', "50 %", "C:\\models", "$HOME", "two\nlines", "tab\t", "\u2028", "日本語", "a # b", ""):
        values = variables(path) | {"ollama_environment": {"X": text}}
        [line] = [line for line in render(path, values).split("\n") if line.startswith('Environment="X=')]
        assert systemd_words(line.partition("=")[2]) == [f"X={text}"]


def test_python_makes_no_other_unit_files() -> None:
    """The text of units is rendered from templates, which the suite covers."""
    for folder in ("trainyard", "trainer", "plugins"):
        for path in (ROOT / folder).rglob("*.py"):
            assert not re.search(r"\[(Service|Unit|Mount|Timer)\]\\?n?", path.read_text()), path


@pytest.mark.parametrize("text", [*INJECTIONS, *ODD])
def test_filters_write_one_line_or_refuse(text: str) -> None:
    for write in (systemd_quote, config_line, exports_path, config_word, config_string):
        try:
            written = write(text)
        except ValueError as error:
            assert str(error).isprintable() and ("remove" in str(error) or "use letters" in str(error))
        else:
            assert len(written.splitlines()) <= 1 and not re.search(r"[\0-\x1f\x7f]", written)
            assert write is not systemd_quote or systemd_words(written) == [text]
            assert write is not config_word or len(written.split()) == 1


def test_filters_refuse_what_no_file_can_express() -> None:
    for text in ("a\0b", "\ud800", "\ufffe"):
        with pytest.raises(ValueError):
            systemd_quote(text)
    assert systemd_quote("$HOME/%h", command=True) == '"$$HOME/%%h"'
    assert exports_path('/srv/a "b"') == '"/srv/a \\042b\\042"'
    assert config_word("10.0.0.1") == "10.0.0.1" and config_string("~/a b") == '"~/a b"'


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    """systemd itself reports no unknown key, assignment or section, also with hostile values."""
    path = ROOT / "roles/ollama/templates/ollama.service.j2"
    hostile = {f"X{i}": text for i, text in enumerate([*INJECTIONS, *ODD]) if not re.search("[\0\uffff]", text)}
    values = variables(path) | {"ollama_environment": hostile, "_ollama_top": "/opt/a %n $x"}
    (tmp_path / "ollama.service").write_text(render(path, values))
    for name in ("mount", "automount"):
        path = ROOT / f"roles/nfs/templates/{name}.j2"
        (tmp_path / f"mnt-data.{name}").write_text(render(path, variables(path)))
    units = [str(unit) for unit in tmp_path.iterdir()]
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", *units], capture_output=True, text=True)
    own = [line for line in done.stderr.splitlines() if str(tmp_path) in line or "ollama" in line]
    assert not [line for line in own if "not executable" not in line and "No such file" not in line], done.stderr


@pytest.mark.skipif(not shutil.which("ssh"), reason="needs ssh")
def test_ssh_reads_only_the_options_of_the_role(tmp_path: Path) -> None:
    path = ROOT / "roles/ssh/templates/ssh_config.j2"
    if not path.exists():
        pytest.skip("the role writes no ssh_config")
    for text in INJECTIONS:
        rendered = outcome(path, variables(path) | {"ssh_key": text})
        if rendered is None:
            continue
        (tmp_path / "config").write_text(rendered)
        done = subprocess.run(["ssh", "-G", "-F", tmp_path / "config", "elsewhere"], capture_output=True, text=True)
        assert done.returncode == 0 and "evil" not in done.stdout, f"{text!r}: {done.stderr}"


# Variables of the role ollama ----------------------------------------------------------------------------------------

RULES = yaml.safe_load((Path(__file__).parents[2] / "roles/ollama/vars/main.yml").read_text())["_ollama_rules"]


@pytest.mark.parametrize(("name", "valid", "wrong"), table("ollama_parameters")["a_value_is_one_path_or_one_word"])
def test_a_value_is_one_path_or_one_word(name: str, valid: list[str], wrong: list[str]) -> None:
    pattern = RULES[f"ollama_{name}"]["pattern"]
    assert all(re.search(rf"^({pattern})\Z", text) for text in valid)
    assert not any(re.search(rf"^({pattern})\Z", text) for text in wrong)
