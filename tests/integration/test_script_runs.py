"""A script instead of the trainer, over local processes: it is stopped, resumes, and is collected; and one that fails is named."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
from run_hosts import Bed, bed, until
from test_run_session import hosts, local, session_of_spec

from trainyard.run.follow.manage_runs import manage_runs
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.session import RunSession
from trainyard.wire.run_errors import PlanError, RunError

__all__ = ["bed"]
pytestmark = pytest.mark.slow
SUMMING = Path(__file__).parents[1] / "support/summing_script.py"


def session(bed: Bed, script: Path, lines: list[str], run: str, **options: Any) -> RunSession:
    fields = {"script": str(script), "run": run, "max_steps": 200, "checkpoint_interval": 50}
    return session_of_spec(bed, fields, lines, progress_interval=0.1, **options)


@pytest.mark.long
def test_a_script_stops_with_a_checkpoint_and_resumes(bed: Bed) -> None:
    lines: list[str] = []
    first = session(bed, SUMMING, lines, "sum")
    running = threading.Thread(target=first.run, daemon=True)
    running.start()
    until(lambda: first.state.phase == "running" and bed.state(1, "sum").get("step", 0) >= 5, 180, "step 5 of rank 1")
    stopped = manage_runs("stopped", "sum", hosts(bed.folder), local, LaunchOptions(), lines.append, grace=30)
    assert stopped["hosts"] == {"node1": "stopped", "node2": "stopped"}
    running.join(60)
    assert first.state.status == "stopped" and any(line.startswith("step ") for line in lines)
    saved = [max(bed.run_dir(host, "sum").glob("checkpoints/step-*")).name for host in (0, 1)]
    assert saved[0] == saved[1] != "step-00000200"

    lines.clear()
    again = session(bed, SUMMING, lines, "sum", collect_to=str(bed.folder / "copy"))
    result = again.run()["result"]
    assert result["total"] == 2 * sum(range(201)) and result["world_size"] == 2 and result["step"] == 200
    assert result["first"] == int(saved[0].removeprefix("step-")), "it continued from the checkpoint"
    assert any(line.endswith("script summing_script.py") for line in lines), "the plan"
    assert any("finished: 200 of 200 steps on 2 ranks, 2 hosts" in line for line in lines), lines
    assert json.loads((bed.folder / "copy/sum/result.json").read_text())["total"] == result["total"]
    assert session(bed, SUMMING, lines, "sum").run()["lines"][0] == "run sum is finished: nothing to do"
    other = bed.folder / "other.py"
    other.write_text("pass\n")
    with pytest.raises(PlanError, match="run sum exists with another spec"):
        session(bed, other, lines, "sum").plan()
    assert not bed.live_processes()


def test_a_script_that_fails_is_named_with_its_last_line(bed: Bed) -> None:
    script = bed.folder / "broken.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1':\n    raise KeyError('no such column')\ntime.sleep(300)\n"
    )
    with pytest.raises(
        RunError, match=r"^rank 1 on node2: ScriptError: 'broken-\w{12}.py' ended with exit code 1: KeyError"
    ) as raised:
        session(bed, script, [], "broken").run()
    assert any("raise KeyError('no such column')" in line for line in raised.value.details["lines"])
    assert not any("trainer/loop/script.py" in line for line in raised.value.details["lines"])
    assert not bed.live_processes()
