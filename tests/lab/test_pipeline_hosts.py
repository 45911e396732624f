"""A pipeline over SSH: its losses are those of ddp, on any number of hosts, and the run continues without any of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_trial import DATA, Trial, questions, run_variables
from lab_hosts import NEEDS_LAB, Host, Lab, run_playbook

pytestmark = [*NEEDS_LAB, pytest.mark.slow]

FIELDS: dict[str, Any] = {
    "seq_length": 64,
    "total_batch_size": 6,
    "batch_size": 1,
    "checkpoint_interval": 2,
    "checkpoint_keep": 6,
}


def losses(lab: Lab, host: Host, run: str) -> list[float]:
    lines = lab.inside(host, f"cat {DATA}/runs/{run}/metrics.jsonl").splitlines()
    return [json.loads(line)["loss"] for line in lines]


@pytest.mark.long
@pytest.mark.parametrize("lora_r", [8, 0])
def test_a_pipeline_follows_ddp_and_resumes_on_fewer_and_on_more_hosts(
    lora_r: int, provisioned: Lab, hosts: list[Host], tmp_path: Path
) -> None:
    fields = FIELDS | {"dataset": str(questions(tmp_path)), "max_steps": 12, "lora_r": lora_r, "loggers": "none"}

    def train(run: str, strategy: str, count: int) -> list[float]:
        names = ",".join(host.name for host in hosts[:count])
        played = run_playbook(
            "train.yml", provisioned.inventory, fields | {"run": run, "strategy": strategy, "hosts": names}
        )
        assert played.rc == 0, played.stdout
        return losses(provisioned, hosts[0], run)

    def return_to(step: int) -> None:
        """Delete the result of the run `pipe` and its later checkpoints."""
        later = " ".join(f"checkpoints/step-{number:08}" for number in range(step + 1, 13))
        for host in hosts:
            provisioned.inside(host, f"cd {DATA}/runs/pipe{lora_r} && rm -rf result.json {later}")

    reference = train(f"ddp{lora_r}", "ddp", 2)
    on_three = train(f"pipe{lora_r}", "pipeline", 3)
    assert on_three == pytest.approx(reference, abs=1e-4)
    assert train(f"two{lora_r}", "pipeline", 2) == pytest.approx(reference, abs=1e-4)
    for step, count in ((4, 2), (8, 3)) if lora_r else ((4, 3),):  # with full weights, every host writes its own layers
        return_to(step)
        assert train(f"pipe{lora_r}", "pipeline", count) == pytest.approx(on_three, abs=1e-6)
        log = provisioned.inside(hosts[1], f"cat {DATA}/runs/pipe{lora_r}/logs/rank1.log")
        assert f"resuming from step {step} of 12" in log


@pytest.fixture
def trial(provisioned: Lab, hosts: list[Host], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trial]:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    variables = run_variables("lost", questions(tmp_path), 100_000)
    one = Trial(provisioned, provisioned.inventory, variables | {"strategy": "pipeline", "batch_size": 1})
    yield one
    one.clean()
    run_playbook("playbooks/stop.yml", one.inventory, {"run": "lost"})


@pytest.mark.parametrize("place", [0, 1])
def test_the_run_continues_without_a_host(place: int, trial: Trial, lab: Lab) -> None:
    trial.start()
    trial.wait_line(r"step \d+/", 0.0)
    fault = trial.inject("cut", lab.hosts[place], head=place == 0)
    assert f"{lab.hosts[place].name} has not answered" in fault.message
    assert trial.run_hosts() == [host for host in lab.hosts if host != lab.hosts[place]]
