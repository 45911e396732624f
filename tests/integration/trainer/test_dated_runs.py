"""A chat template that prints the date and the time: one date per run, on every host and after every resume."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainer_runs import Cluster, Here, free_port

from trainer.common.files import sha256_file

# 26 hours apart: never the same day.
EARLY, LATE = "Etc/GMT+12", "Etc/GMT-14"
TEMPLATE = (
    "Today: {{ strftime_now('%d %b %Y %H:%M:%S') }}\n{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}"
    "{{ eos_token }}\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
FEW = {"epochs": 20, "checkpoint_interval": 1, "eval_split": 0}


@pytest.fixture(autouse=True)
def _zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.fixture(scope="module")
def dated_model(model_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dated") / "model"
    shutil.copytree(model_folder, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = [
        [{"role": "user", "content": f"question {number}"}, {"role": "assistant", "content": f"answer {number}"}]
        for number in range(12)
    ]
    path.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in rows))
    return path


def in_zone(zone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()


def date_of(run_dir: Path) -> str:
    newest = max((run_dir / "checkpoints").glob("step-*/state.json"))
    return str(json.loads(newest.read_text())["template_date"])


@pytest.mark.slow
def test_a_resume_on_another_day_has_the_samples_of_the_first_start(
    here: Here, dated_model: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"model": dated_model, "dataset": chats, **FEW}
    in_zone(EARLY, monkeypatch)
    assert here(**fields, max_steps=2) == 0, here.err
    first = date_of(here.run_dir())
    shutil.copytree(here.run_dir(), here.run_dir().with_name("again"))
    in_zone(LATE, monkeypatch)
    for run, same in (("again", True), ("new", False)):
        run_dir = here.run_dir().with_name(run)
        (run_dir / "result.json").unlink(missing_ok=True)
        shutil.rmtree(run_dir / "checkpoints/step-00000002", ignore_errors=True)
        assert here(**fields, run=run, max_steps=2) == 0, here.err
        assert (date_of(run_dir) == first) is same
    adapters = [here.run_dir().with_name(run) / "adapter/adapter_model.safetensors" for run in ("r", "again", "new")]
    digests = [sha256_file(path) for path in adapters]
    assert digests[0] == digests[1] != digests[2]
    assert TEMPLATE.splitlines()[0] in (here.run_dir() / "adapter/chat_template.jinja").read_text()


@pytest.mark.slow
def test_hosts_in_distant_time_zones_have_the_same_samples(
    cluster: Cluster, dated_model: Path, chats: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"model": dated_model, "dataset": chats, "max_steps": 2, **FEW}
    port, launchers = free_port(), []
    for host, zone in enumerate((EARLY, LATE)):
        monkeypatch.setenv("TZ", zone)
        words = cluster._command(host, ["--nnodes=2", f"--node-rank={host}"], 1, "r", port, fields)
        launchers.append(cluster._launch(host, "r", words))
    assert cluster.wait(launchers) == [0, 0]
    assert date_of(cluster.run_dir(0)) == date_of(cluster.run_dir(1))
