"""The files that the role dashboard installs: the settings of the service, and the program."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trainer.common.errors import UserError
from trainyard.dashboard.dashboard_service import KEY, read_config, service_config
from trainyard.dashboard.pack import pack
from trainyard.wire.connection import Host, Login

TOP = Path(__file__).resolve().parents[2]


def test_the_settings_have_no_secret_and_log_in_with_the_key_of_the_service(tmp_path: Path) -> None:
    login = Login("controller.example", "ubuntu", 2222, "/home/me/.ssh/id", ("-o", "ProxyCommand=evil"))
    host = Host(
        "node1",
        "10.0.0.1",
        "/srv/t",
        "/srv/t/venv/bin/python",
        env={"TOKEN": "secret"},
        ollama_urls=("http://o:1",),
        login=login,
    )
    groups = {"cluster": ["node1"]}
    text = service_config([host], groups, "10.0.0.1", 5443)
    assert not any(word in text for word in ("secret", "evil", "/home/me", "controller.example"))
    (tmp_path / "config.json").write_text(text)
    hosts, queue, options = read_config(tmp_path)
    assert queue == "node1" and (options.dashboard_listen, options.dashboard_port) == ("10.0.0.1", 5443)
    assert options.dashboard_password_file == str(tmp_path / "password") and options.dashboard_certificate == ""
    assert hosts[0].ollama_urls == ("http://o:1",)
    there = hosts[0].login
    assert (there.address, there.user, there.port, there.key_file) == (
        "10.0.0.1",
        "ubuntu",
        2222,
        str(Path.home() / KEY),
    )
    assert "UserKnownHostsFile=/etc/ssh/ssh_known_hosts" in there.extra_arguments
    (tmp_path / "certificate.pem").touch()
    assert read_config(tmp_path)[2].dashboard_key == str(tmp_path / "key.pem")
    for broken in ("{", "[]", '{"hosts": [{}], "queue": "", "address": "10.0.0.1", "port": 1}'):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(UserError, match="is unreadable"):
            read_config(tmp_path)


@pytest.mark.slow
def test_the_packed_program_runs_without_the_project(tmp_path: Path) -> None:
    found = pack(tmp_path)
    assert found == pack(tmp_path) and "cryptography" in found["requirements"]
    with zipfile.ZipFile(found["file"]) as archive:
        archive.extractall(tmp_path / "program")
    source = TOP / "trainyard/dashboard"
    for folder in ("static", "templates"):
        files = {path.relative_to(source) for path in (source / folder).rglob("*.*") if path.suffix != ".LICENSE"}
        assert files and all((tmp_path / "program/trainyard/dashboard" / path).is_file() for path in files)
    words = [sys.executable, "-P", "-m", "trainyard.dashboard.dashboard_service", str(tmp_path)]
    environment = {"PYTHONPATH": str(tmp_path / "program"), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(words, cwd="/", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "config.json is unreadable" in done.stderr and len(done.stderr.splitlines()) == 1


def test_the_server_does_not_load_numpy() -> None:
    """It would take 12 MB of its memory."""
    modules = "trainyard.commands.table, trainyard.dashboard.server, trainyard.dashboard.dashboard_service"
    check = f"import sys, {modules}; print([name for name in ('numpy', 'torch', 'tensorboard') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], cwd=TOP, capture_output=True, text=True, check=False)
    assert done.stdout == "[]\n", done.stderr
