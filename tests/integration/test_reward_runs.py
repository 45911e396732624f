"""A run that learns from rewards, from the controller to the ranks of two hosts over local processes."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
from run_hosts import Bed, bed, until
from test_run_session import session_of_spec
from trainer_runs import write_jsonl

from trainyard.run.session import RunSession
from trainyard.wire.run_errors import RunError

__all__ = ["bed"]
pytestmark = pytest.mark.slow
REWARD = """
import os, time

def reward_short(completions, answer, **_):
    with open({note!r}, "a") as file:
        file.write(f"{{os.getpid()}} {{len(completions)}}\\n")
    time.sleep(0.1)
    return [1 / (1 + len(text)) + (text == right) for text, right in zip(completions, answer)]
"""
# It halts its parents, up to the supervisor, and then what else runs here and is not a parent of it.
HALTS = """
import os, signal
from pathlib import Path

def reward(completions, **_):
    pid, run = os.getppid(), os.environ["TRAINYARD_RUN_DIR"].encode()
    while run in Path(f"/proc/{pid}/environ").read_bytes() or b"supervise" in Path(f"/proc/{pid}/cmdline").read_bytes():
        above = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(pid, signal.SIGSTOP)
        pid = above
    signal.pause()
"""


def session(bed: Bed, reward: Path, lines: list[str], run: str, **options: Any) -> RunSession:
    rows = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(30)]
    dataset = write_jsonl(bed.folder / "sums.jsonl", rows)
    fields = {"run": run, "model": "tiny", "dataset": str(dataset), "method": "grpo", "reward": f"{reward},exact:0.5"}
    fields |= {"seq_length": 48, "grpo_max_tokens": 8, "grpo_group_size": 4, "total_batch_size": 16, "epochs": 10}
    fields |= {"max_steps": 12, "checkpoint_interval": 2, "loggers": "none", "eval_split": 0.1, "balance": "even"}
    return session_of_spec(bed, fields, lines, progress_interval=0.1, **options)


@pytest.mark.long
def test_a_killed_rank_loses_no_completion(bed: Bed) -> None:
    note = bed.folder / "calls"
    reward = bed.folder / "short.py"
    reward.write_text(REWARD.format(note=str(note)), encoding="utf-8")
    lines: list[str] = []
    straight = session(bed, reward, lines, "straight").run()["result"]
    assert straight["step"] == 12 and straight["world_size"] == 2
    calls = [line.split() for line in note.read_text().splitlines()]
    assert len({process for process, _ in calls}) == 1, "one process on one host rates all completions"
    assert [count for _, count in calls].count("16") == 12

    killed = session(bed, reward, lines, "killed", max_restarts=2)
    running = threading.Thread(target=killed.run, daemon=True)
    running.start()
    until(lambda: bed.state(1, "killed").get("step", 0) >= 5, 180, "step 5 of rank 1")
    os.kill(bed.state(1, "killed")["pid"], signal.SIGKILL)
    running.join(180)
    assert killed.state.status == "finished"

    def completions(run: str) -> list[dict[str, Any]]:
        text = (bed.run_dir(0, run) / "completions.jsonl").read_text()
        return [json.loads(line) | {"start": ""} for line in text.splitlines()]

    assert completions("killed") == completions("straight")
    results = [json.loads((bed.run_dir(0, run) / "result.json").read_text()) for run in ("straight", "killed")]
    assert results[0]["adapter_sha256"] == results[1]["adapter_sha256"]
    assert not bed.live_processes()


@pytest.mark.long
def test_a_reward_that_halts_every_process_of_the_run_is_ended_by_the_controller(bed: Bed) -> None:
    reward = bed.folder / "halts.py"
    reward.write_text(HALTS, encoding="utf-8")
    with pytest.raises(RunError) as raised:
        session(bed, reward, [], "halted", max_restarts=0).run()
    said = str(raised.value)
    assert "halted" in said and "Traceback" not in said and not bed.live_processes()
