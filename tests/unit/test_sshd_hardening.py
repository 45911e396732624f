"""The drop-in for sshd only makes settings stricter: the real sshd on several configurations."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from ansible.module_utils import config_digest
from module_runs import NEEDS_ROOT, run_module

from plugins.module_utils.sshd_config import ALIVE, TARGETS, alive_seconds, read_settings, strictness, with_drop_in
from plugins.modules import service_reload, sshd_hardening

SSHD = "/usr/sbin/sshd"
pytestmark = [NEEDS_ROOT, pytest.mark.skipif(not Path(SSHD).exists(), reason="needs sshd (package openssh-server)")]
Capture = pytest.CaptureFixture[str]

STOCK = "KbdInteractiveAuthentication no\nUsePAM yes\nX11Forwarding yes\n"
STRICT = (
    "PermitRootLogin no\nMaxAuthTries 3\nLoginGraceTime 20\nPasswordAuthentication no\nX11Forwarding no\n"
    "KbdInteractiveAuthentication no\nClientAliveInterval 15\nClientAliveCountMax 2\n"
)
BASES = {
    "stock": STOCK,
    "empty": "",
    "weak": "PermitRootLogin yes\nMaxAuthTries 20\nLoginGraceTime 0\nPermitEmptyPasswords yes\nPasswordAuthentication yes\n",
    "strict": STRICT,
    "review": "PermitRootLogin no\nMaxAuthTries 3\nLoginGraceTime 20\n",
    "CIS": "PermitRootLogin no\nMaxAuthTries 4\nLoginGraceTime 60\nClientAliveInterval 300\nClientAliveCountMax 3\nX11Forwarding no\n",
    "backup by root": "PermitRootLogin forced-commands-only\nLoginGraceTime 2m\nClientAliveInterval 10\nClientAliveCountMax 30\n",
    "Match": "PermitRootLogin yes\nMatch User root\n  PermitRootLogin no\n  MaxAuthTries 2\nMatch all\n  X11Forwarding no\n",
}


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


def effective(etc: Path, *arguments: str) -> dict[str, str]:
    """Return what `sshd -T` prints."""
    argv = [SSHD, "-T", "-f", etc / "sshd_config", *arguments]
    return read_settings(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)


def harden(etc: Path, capsys: Capture, **more: str) -> dict[str, object]:
    arguments = {"path": str(etc / "conf.d/10-trainyard.conf"), "config": str(etc / "sshd_config"), "user": "nobody"}
    result = run_module(sshd_hardening, capsys, **arguments | more)
    assert "failed" not in result, result
    return result


@pytest.mark.parametrize("name", BASES)
@pytest.mark.parametrize("connection", [[], ["-C", "user=root,host=h,addr=10.0.0.1"]], ids=["all", "root"])
def test_no_setting_becomes_weaker(name: str, connection: list[str], etc: Path, capsys: Capture) -> None:
    write(etc, BASES[name])
    before = effective(etc, *connection)
    assert harden(etc, capsys)["changed"] is (name != "strict")
    after = effective(etc, *connection)
    for setting, target in TARGETS.items():
        old, new = (strictness(setting, settings[setting.lower()]) for settings in (before, after))
        assert new >= old and (new >= strictness(setting, target) or new == old), f"{setting} {before} {after}"
        if not connection:
            assert new >= strictness(setting, target)
    assert alive_seconds(after) <= min(alive_seconds(before), 120) and 0 < int(after["logingracetime"]) <= 30
    changed = {key for key in after if after[key] != before.get(key)}
    assert changed <= {key.lower() for key in (*TARGETS, *ALIVE)}
    assert harden(etc, capsys)["changed"] is False
    assert harden(etc, capsys, state="absent")["changed"] is (name != "strict")
    assert effective(etc, *connection) == before and not list((etc / "conf.d").iterdir())


def test_the_settings_of_the_review_stay(etc: Path, capsys: Capture) -> None:
    write(etc, BASES["review"])
    harden(etc, capsys)
    after = effective(etc)
    assert [after[key] for key in ("permitrootlogin", "maxauthtries", "logingracetime")] == ["no", "3", "20"]


def test_a_base_that_becomes_stricter_or_weaker_is_followed(etc: Path, capsys: Capture) -> None:
    """The drop-in depends on the files of the host, not on its own former content."""
    drop_in = etc / "conf.d/10-trainyard.conf"
    write(etc, STRICT)
    harden(etc, capsys)
    assert not drop_in.exists()
    write(etc, "", _50_other="MaxAuthTries 10\nPermitRootLogin yes\n")
    harden(etc, capsys)
    assert {"MaxAuthTries 6", "PermitRootLogin prohibit-password"} <= set(drop_in.read_text().splitlines())
    write(etc, "", _50_other="MaxAuthTries 2\nPermitRootLogin no\n")
    harden(etc, capsys)
    assert effective(etc)["maxauthtries"] == "2" and "PermitRootLogin" not in drop_in.read_text()


def test_settings_that_the_drop_in_cannot_change_are_reported(etc: Path, capsys: Capture) -> None:
    write(etc, STOCK, _01_first="PasswordAuthentication yes\n")
    warning = str(harden(etc, capsys)["warnings"])
    assert "PasswordAuthentication is yes: another file" in warning and "conf.d/10-trainyard.conf" in warning
    (etc / "conf.d/01-first.conf").rename(etc / "conf.d/20-later.conf")
    assert "warnings" not in harden(etc, capsys)
    (etc / "sshd_config").write_text(f"HostKey {etc}/key\nX11Forwarding yes\n")
    assert "X11Forwarding is yes" in str(harden(etc, capsys)["warnings"])
    write(etc, "Match User nobody\n  PasswordAuthentication yes\n")
    assert "PasswordAuthentication is yes for nobody" in str(harden(etc, capsys)["warnings"])


@pytest.mark.parametrize(
    "methods", ["publickey,keyboard-interactive:pam", "publickey,password publickey,keyboard-interactive"]
)
def test_a_second_factor_stays_enabled(methods: str, etc: Path, capsys: Capture) -> None:
    write(etc, f"KbdInteractiveAuthentication yes\nMatch Group people\n  AuthenticationMethods {methods}\n")
    harden(etc, capsys)
    after = effective(etc)
    assert after["kbdinteractiveauthentication"] == "yes"
    assert after["passwordauthentication"] == ("yes" if "password" in methods else "no")


def test_a_configuration_that_sshd_rejects_is_one_line(etc: Path, capsys: Capture) -> None:
    write(etc, "MaxAuthTries many\n")
    arguments = {"path": str(etc / "conf.d/10-trainyard.conf"), "config": str(etc / "sshd_config")}
    result = run_module(sshd_hardening, capsys, **arguments)
    assert result["failed"] and "sshd rejects its configuration, nothing was written" in result["msg"]
    assert "\n" not in result["msg"] and not list((etc / "conf.d").iterdir())


def test_includes_name_their_files_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "conf.d"
    folder.mkdir()
    for name in ("20-b", "05-a"):
        (folder / f"{name}.conf").write_text(f"# {name}\n")
    main = tmp_path / "sshd_config"
    main.write_text(f"include {folder}/*.conf {tmp_path}/none*\nPort 22\nMatch all\n Include={folder}/20*\n")
    drop_in, candidate = folder / "10-trainyard.conf", tmp_path / "candidate"
    text, others = with_drop_in(main, drop_in, candidate)
    first = f'Include "{folder}/05-a.conf" "{candidate}" "{folder}/20-b.conf"'
    assert text.splitlines() == [first, "Port 22", "Match all", f'Include "{folder}/20-b.conf"']
    assert "# 05-a" in others and "Port 22" in others
    drop_in.write_text("MaxAuthTries 6\n")
    assert "trainyard" not in with_drop_in(main, drop_in, None)[0]
    shutil.rmtree(folder)
    assert with_drop_in(main, drop_in, None)[0].splitlines() == ["", "Port 22", "Match all", ""]


def test_a_reload_is_due_until_sshd_has_read_the_drop_in(
    etc: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config_digest, "DIGESTS", etc / "read")
    reload = {"name": "ssh", "files": [str(etc / "conf.d/10-trainyard.conf")], "command": ["true"]}
    write(etc, STOCK)
    assert harden(etc, capsys)["reload_is_due"]
    killed = harden(etc, capsys)
    assert killed["up_to_date"] and killed["reload_is_due"], "a play that ended between the drop-in and the reload"
    assert run_module(service_reload, capsys, **reload)["changed"]
    assert not harden(etc, capsys)["reload_is_due"] and not run_module(service_reload, capsys, **reload)["changed"]
    assert harden(etc, capsys, state="absent")["reload_is_due"]
    assert run_module(service_reload, capsys, **reload)["changed"]
    assert not harden(etc, capsys, state="absent")["reload_is_due"]
