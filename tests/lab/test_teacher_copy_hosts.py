"""distill.yml -e teacher_copy=true with real servers on lab hosts: the model passes from host to host."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import tarfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from lab_hosts import NEEDS_LAB, Host, Lab, run_playbook

from trainyard.ollama.answers import answers_path

pytestmark = [*NEEDS_LAB, pytest.mark.slow]
OLLAMA = shutil.which("ollama")
TOP = Path(__file__).resolve().parents[2]
# Only the owner of a store may read it. The last host has another model, from which its store is known.
STORES = ("/var/lib/one/models", "/var/lib/two/models", "/srv/three/models")
START = """
    getent passwd ollama >/dev/null || useradd --system --shell /usr/sbin/nologin ollama
    mkdir -p {store}; chown ollama: {store}; chmod 750 {store}
    systemd-run -q --collect --unit=real-ollama --uid=ollama -E HOME={store} -E OLLAMA_MODELS={store} \\
        -E OLLAMA_HOST={address}:11434 -E OLLAMA_DEBUG=1 /opt/real/bin/ollama serve
"""
BALLAST = 6 << 20  # bytes that make the model larger than what the playbook itself sends


def tags(host: Host) -> dict[str, str]:
    with urllib.request.urlopen(f"http://{host.address}:11434/api/tags", timeout=10) as answer:
        return {model["name"]: model["digest"] for model in json.load(answer)["models"]}


def wait_for(host: Host) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            tags(host)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


def create(lab: Lab, host: Host, name: str) -> None:
    head = f"FROM /opt/real/tiny.gguf\nLICENSE {name} {'x' * BALLAST if name != 'other' else ''}\n"
    subprocess.run([*lab.ssh(host), "cat > /tmp/Modelfile"], input=head.encode(), check=True)
    lab.inside(
        host, f"cd /tmp && HOME=/tmp OLLAMA_HOST={host.address}:11434 /opt/real/bin/ollama create {name} -f Modelfile"
    )


@pytest.fixture
def servers(lab: Lab, hosts: list[Host]) -> Any:
    if OLLAMA is None:
        pytest.skip("needs `ollama` on PATH")
    top = Path(os.path.realpath(OLLAMA)).parents[1]
    if not (top / "tiny.gguf").exists():
        pytest.skip("creating a model needs tiny.gguf next to this ollama")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for part in ("bin", "lib", "tiny.gguf"):
            tar.add(top / part, part)
    for host, store in zip(hosts, STORES, strict=True):
        unpack = "sudo mkdir -p /opt/real && sudo tar -C /opt/real --no-same-owner -x && sudo chmod -R a+rX /opt/real"
        subprocess.run([*lab.ssh(host), unpack], input=packed.getvalue(), check=True)
        lab.inside(host, START.format(store=store, address=host.address))
    for host in hosts:
        wait_for(host)
    yield
    for host in hosts:
        lab.inside(
            host, "systemctl stop real-ollama; rm -rf /opt/real /var/lib/one /var/lib/two /srv/three; userdel ollama"
        )


def test_a_missing_teacher_is_copied_from_a_host_that_has_it(
    lab: Lab, hosts: list[Host], servers: None, tmp_path: Path
) -> None:
    name = f"copied{os.getpid()}"
    create(lab, hosts[0], name)
    create(lab, hosts[2], "other")
    document = yaml.safe_load(lab.inventory.read_text())
    document["all"]["children"]["cluster"].setdefault("vars", {})["ollama_port"] = 11434
    document["all"]["hosts"] = {hosts[1].name: {"ollama_models": STORES[1]}}
    inventory = tmp_path / "inventory.yml"
    inventory.write_text(yaml.safe_dump(document, sort_keys=False))
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(24)))
    given = {"teacher": name, "prompts": str(prompts), "model": "tiny", "teacher_copy": True, "max_tokens": 16}
    given |= {"keep_cut": True, "near_duplicates": 0, "max_steps": 2, "seq_length": 64, "run": name}
    try:
        checked = run_playbook("playbooks/distill.yml", inventory, given, "--check")
        assert checked.rc == 0, checked.stdout
        assert f"copying {name} from node1 to node2, node3" in checked.stdout
        assert not [host for host in hosts[1:] if f"{name}:latest" in tags(host)]
        sent = Path(f"/sys/class/net/trainyard{lab.running.net}/statistics/tx_bytes")
        before = int(sent.read_text())
        # All prompts are evaluation prompts, so that no student trains: its traffic would be counted, too.
        played = run_playbook("playbooks/distill.yml", inventory, given | {"eval_prompts": str(prompts)})
        used = int(sent.read_text()) - before
        print(f"{used} bytes left the controller; the model has more than {BALLAST} bytes, and went to two hosts")
        assert played.rc and "24 of 24 answers are not trained" in played.stdout, played.stdout
        assert len({tags(host).get(f"{name}:latest") for host in hosts}) == 1
        assert f"{name} teaches on node1, node2, node3" in played.stdout
        assert used < BALLAST / 2
        for host, store in zip(hosts, STORES, strict=True):
            assert lab.inside(host, f"find {store} ! -user ollama; ls /var/lib/trainyard | grep ollama-copy || :") == ""
        again = run_playbook("playbooks/distill.yml", inventory, given)
        assert again.rc == 0 and "copying" not in again.stdout, again.stdout
    finally:
        answers = answers_path(TOP / ".trainyard", name)
        for file in (answers, *(TOP / ".trainyard/distill").glob(f"{answers.stem}-*.jsonl")):
            file.unlink(missing_ok=True)
