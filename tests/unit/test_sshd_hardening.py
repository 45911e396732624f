"""The drop-in for sshd only makes settings stricter: the real sshd on several configurations."""

import subprocess
from pathlib import Path

import pytest
from module_runs import NEEDS_ROOT
from tables import table

from plugins.filter.sshd import (
    ALIVE,
    TARGETS,
    alive_seconds,
    read_settings,
    sshd_hardening,
    sshd_ineffective,
    strictness,
)

SSHD = "/usr/sbin/sshd"
pytestmark = [NEEDS_ROOT, pytest.mark.skipif(not Path(SSHD).exists(), reason="needs sshd (package openssh-server)")]

STOCK = "KbdInteractiveAuthentication no\nUsePAM yes\nX11Forwarding yes\n"
BASES = table("sshd_hardening")["bases"]


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """A folder of a configuration of sshd, with a host key."""
    Path("/run/sshd").mkdir(exist_ok=True)
    (tmp_path / "conf.d").mkdir()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    return tmp_path


def write(etc: Path, text: str, **files: str) -> None:
    """Write sshd_config, which includes the folder of drop-ins first as on Debian, and other files of the folder."""
    (etc / "sshd_config").write_text(f"Include {etc}/conf.d/*.conf\nHostKey {etc}/key\n{text}")
    for name, content in files.items():
        (etc / "conf.d" / f"{name.strip('_').replace('_', '-')}.conf").write_text(content)


def printed(etc: Path, *arguments: str) -> str:
    """Return what `sshd -T` prints."""
    argv = [SSHD, "-T", "-f", etc / "sshd_config", *arguments]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def harden(etc: Path, methods: str = "") -> dict[str, list[str]]:
    """Write the drop-in that the role writes."""
    (etc / "conf.d/10-trainyard.conf").unlink(missing_ok=True)
    result = sshd_hardening(printed(etc), methods)
    (etc / "conf.d/10-trainyard.conf").write_text("\n".join([*result["lines"], ""]))
    return result


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("connection", [[], ["-C", "user=root,host=h,addr=10.0.0.1"]], ids=["all", "root"])
def test_no_setting_becomes_weaker(name: str, connection: list[str], etc: Path) -> None:
    write(etc, BASES[name])
    before = read_settings(printed(etc, *connection))
    assert bool(harden(etc)["lines"]) is (name != "strict")
    after = read_settings(printed(etc, *connection))
    for setting, target in TARGETS.items():
        old, new = (strictness(setting, settings[setting.lower()]) for settings in (before, after))
        assert new >= old and (new >= strictness(setting, target) or new == old), f"{setting} {before} {after}"
        if not connection:
            assert new >= strictness(setting, target)
    assert alive_seconds(after) <= min(alive_seconds(before), 120) and 0 < int(after["logingracetime"]) <= 30
    changed = {key for key in after if after[key] != before.get(key)}
    assert changed <= {key.lower() for key in (*TARGETS, *ALIVE)}


def test_a_setting_that_would_become_weaker_is_refused_by_name(etc: Path) -> None:
    write(etc, BASES["review"])
    result = harden(etc)
    assert result["refused"] == ["PermitRootLogin no", "MaxAuthTries 3", "LoginGraceTime 20"]
    after = read_settings(printed(etc))
    assert [after[key] for key in ("permitrootlogin", "maxauthtries", "logingracetime")] == ["no", "3", "20"]


def test_settings_that_the_drop_in_cannot_change_are_named(etc: Path) -> None:
    write(etc, STOCK, _01_first="PasswordAuthentication yes\n")
    lines = harden(etc)["lines"]
    assert sshd_ineffective(lines, printed(etc)) == ["PasswordAuthentication is yes"]
    (etc / "conf.d/01-first.conf").rename(etc / "conf.d/20-later.conf")
    assert sshd_ineffective(lines, printed(etc)) == []
    (etc / "sshd_config").write_text(f"HostKey {etc}/key\nX11Forwarding yes\n")
    assert "X11Forwarding is yes" in sshd_ineffective(lines, printed(etc))
    write(etc, "Match User nobody\n  PasswordAuthentication yes\n")
    settings = printed(etc, "-C", "user=nobody,host=h,addr=::1")
    assert sshd_ineffective(lines, settings) == ["PasswordAuthentication is yes"]


@pytest.mark.parametrize(
    "methods", ["publickey,keyboard-interactive:pam", "publickey,password publickey,keyboard-interactive"]
)
def test_a_second_factor_stays_enabled(methods: str, etc: Path) -> None:
    text = f"KbdInteractiveAuthentication yes\nMatch Group people\n  AuthenticationMethods {methods}\n"
    write(etc, text)
    refused = harden(etc, text)["refused"]
    assert "KbdInteractiveAuthentication yes (AuthenticationMethods needs it)" in refused
    after = read_settings(printed(etc))
    assert after["kbdinteractiveauthentication"] == "yes"
    assert after["passwordauthentication"] == ("yes" if "password" in methods else "no")
