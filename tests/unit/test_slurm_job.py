"""Runs with `launcher=slurm`: the text of the batch script, what Slurm answers, and what the files of a job say."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.common.errors import UserError
from trainer.supervise import slurm_run as slurm
from trainer.supervise import slurm_state
from trainer.supervise.link_free import link_free
from trainer.supervise.run_files import SupervisorError, read_job
from trainer.supervise.status import is_active, read_state
from trainer.tools.slurm_script import gpus_of
from trainyard.run.launch.slurm_job import batch_script
from trainyard.run.launch_options import make_options
from trainyard.run.slurm_reasons import waiting_line
from trainyard.run.types import PlanEntry
from trainyard.wire.replies import checked_reply
from trainyard.wire.run_errors import PlanError

# Names that a shell, srun or Python's format could misread.
NAMES = st.text(st.characters(exclude_characters="/\0\n", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name not in (".", "..") and len(name.encode()) < 200
)
ASKED = {"slurm_nodes": 2, "slurm_partition": "gpu", "slurm_account": "lab7", "slurm_time": "1-00:00:00"}


def script_of(run_dir: str, python: str, processes: int = 1, **options: Any) -> str:
    entry = PlanEntry("login", run_dir=run_dir, data_dir=str(Path(run_dir).parents[1]), command=[python])
    return batch_script(entry, processes, make_options({"launcher": "slurm", **ASKED, **options}))


@settings(max_examples=12)
@given(NAMES, NAMES)
def test_the_script_starts_the_interpreter_with_these_paths(
    tmp_path_factory: pytest.TempPathFactory, folder: str, program: str
) -> None:
    """Stands in for srun, scontrol and the interpreter, which write down their arguments."""
    top = tmp_path_factory.mktemp("job")
    run_dir = top / folder / "runs/r"
    run_dir.mkdir(parents=True)
    (run_dir / "env").write_text(f"NOTE=it's {folder.strip()}\n")
    (run_dir / "trainer.zip").touch()
    python = top / "bin" / program
    python.parent.mkdir()
    listed = 'case $2 in hostnames) echo n0; echo n1;; node) echo " NodeAddr=127.0.0.1 X=1";; esac'
    on_node = "SLURM_NODEID=1 SLURM_NNODES=2 SLURMD_NODENAME=n1"
    step = f'while [ "${{1#--}}" != "$1" ]; do shift; done; {on_node} exec "$@"'
    record = f'printf \'%s\\0\' "$NOTE" "threads=$OMP_NUM_THREADS" "$@" >> \'{top}/calls\''
    tools = {"scontrol": listed, "srun": step, "nproc": "echo 12"}
    for path, text in ((python, record), *((top / "tools" / name, text) for name, text in tools.items())):
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    env = {"PATH": f"{top}/tools:/usr/sbin:/usr/bin:/sbin:/bin", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_ID": "7"}
    env["SLURM_CPUS_PER_TASK"] = "6"  # of the 12 cores of the node, which this cluster does not enforce
    text = script_of(str(run_dir), str(python), 3, master_port=1234)
    done = subprocess.run(["bash"], input=text, env=env, cwd=run_dir, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    words = (top / "calls").read_bytes().decode().split("\0")
    assert ["begin", str(run_dir)] == words[words.index("begin") :][:2]
    assert ["end", str(run_dir), "0"] == words[words.index("end") :][:3]
    rank = words[words.index("trainer.launch.torchrun") :]
    assert rank[1:4] == ["--nnodes=2", "--node-rank=1", "--nproc-per-node=3"] and "--master-port=1234" in rank
    assert f"{run_dir}/spec.yml" in rank and f"--run-dir={run_dir}/nodes/1" in rank
    assert f"--data-dir={run_dir}/nodes/1" in rank and f"it's {folder.strip()}" in words
    assert "threads=2" in words
    assert (run_dir / "nodes/1/state").readlink() == run_dir / "state"


def test_the_header_asks_for_what_was_asked() -> None:
    prologue = "module load cuda; source activate x"
    asked = {"slurm_gres": "gpu:a100:4,nvme:1", "slurm_mem": "64G", "slurm_prologue": prologue}
    text = script_of("/shared/runs/r", "/usr/bin/python3", **asked)
    assert text.index(f"\n{prologue}\n") < text.index("\nset -euo pipefail\n")
    header = [line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert set(header) == {
        "--job-name=trainyard-r", "--nodes=2", "--ntasks-per-node=1", "--gres=gpu:a100:4,nvme:1", "--mem=64G",
        "--partition=gpu", "--account=lab7", "--time=1-00:00:00", "--signal=TERM@120", "--requeue",
    }  # fmt: skip
    assert "--exclusive" in script_of("/shared/runs/r", "/usr/bin/python3")
    assert [gpus_of(word) for word in ("gpu:a100:4,nvme:1", "gpu:2", "gpu", "gpu:a100", "vram:16", "")] == [
        4,
        2,
        1,
        1,
        0,
        0,
    ]
    with pytest.raises(PlanError, match="has a line break"):
        script_of("/shared\n/runs/r", "/usr/bin/python3")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("slurm_partition", "gpu\n#SBATCH --uid=0"),
        ("slurm_account", "a b"),
        ("slurm_time", "1h"),
        ("slurm_gres", "gpu:1 --uid=0"),
        ("slurm_mem", "64 G"),
        ("slurm_nodes", 0),
        ("launcher", "pbs"),
    ],
)
def test_values_that_slurm_could_misread_are_refused(name: str, value: Any) -> None:
    with pytest.raises(UserError, match=f"{name}: expected"):
        make_options({name: value})


@settings(max_examples=30)
@given(st.text(max_size=300))
def test_an_answer_of_slurm_is_understood_or_ignored(text: str) -> None:
    found = slurm_state.parse_job(text)
    assert not found or (set(found) == {"state", "reason", "start", "folder"} and found["state"].isascii())
    assert "\n" not in waiting_line({"job": found, "node": {"job": 7}})


@pytest.mark.parametrize(
    ("state", "reason", "start", "line"),
    [
        ("PENDING", "Priority", "N/A", "job 7 waits for jobs of a higher priority"),
        (
            "PENDING",
            "Resources",
            "2026-11-23T14:20:00",
            "job 7 waits for free nodes, until about 2026-11-23 14:20 by its clock",
        ),
        ("PENDING", "QOSGrpNodeLimit", "", "job 7 waits (QOSGrpNodeLimit)"),
        ("PENDING", "ReqNodeNotAvail, Reserved", "", "job 7 waits for nodes that are down or reserved"),
        ("PENDING", "Slurm does not answer: x", "", "job 7 Slurm does not answer: x"),
        ("RUNNING", "None", "", "job 7 runs on n0"),
    ],
)
def test_a_reason_is_said_in_words(state: str, reason: str, start: str, line: str) -> None:
    job = {"state": state, "reason": reason, "start": start}
    assert waiting_line({"job": job, "node": {"job": 7, "nodes": ["n0"]}, "ranks": {}}) == line


class Job:
    """The folder of a run with two ranks that is job 7."""

    def __init__(self, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run_dir, self.answer, self.asked = run_dir, "PENDING|Resources|N/A|", 0
        (run_dir / "state").mkdir(parents=True)
        node = {
            "run": "r",
            "node_rank": 0,
            "ranks": [0, 1],
            "hosts": ["login"],
            "attempt": 1,
            "backend": "slurm",
            "job": 7,
        }
        self.write("node", node | {"started": 1.0, "status": "starting", "failures": []})
        for module in (slurm, slurm_state):
            monkeypatch.setattr(module, "command", self.command)
        monkeypatch.setattr(slurm_state, "ASK_INTERVAL", 0.0)

    def command(self, words: list[str], stdin: str = "", limit: float = 0.0) -> str:
        self.asked += 1
        if words[0] == "squeue" and self.answer and "|" not in self.answer:
            raise SupervisorError(self.answer)
        if words[0] != "squeue":
            raise SupervisorError(f"{words[0]}: accounting is not enabled")
        return f"{self.answer}|{self.run_dir}" if words[0] == "squeue" else self.answer

    def write(self, name: str, value: dict[str, Any]) -> None:
        (self.run_dir / f"state/{name}.json").write_text(json.dumps(value))

    def ranks(self, *statuses: str, step: int = 5) -> None:
        for rank, status in enumerate(statuses):
            self.write(f"rank{rank}", {"rank": rank, "status": status, "step": step})

    def state(self) -> dict[str, Any]:
        return checked_reply("run_status", read_state(link_free(self.run_dir)))


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    return Job(tmp_path / "r", monkeypatch)


def test_a_job_waits_runs_and_finishes(job: Job) -> None:
    assert (job.state()["status"], job.state()["alive"], job.state()["job"]["reason"]) == (
        "starting",
        True,
        "Resources",
    )
    job.answer = "RUNNING|None|2026-11-23T14:20:00|n[0-1]"
    job.write("job", {"restart": 0, "nodes": ["n0", "n1", "../x"]})
    assert job.state()["status"] == "starting" and job.state()["node"]["nodes"] == ["n0", "n1"]
    job.ranks("training", "failed")  # the job may have lost a node, and return to the queue
    state = job.state()
    assert state["status"] == "running" and list(state["ranks"]) == ["0"] and is_active(link_free(job.run_dir))
    job.answer = "Slurm is down"
    assert job.state()["status"] == "running", "the last answer holds"
    job.ranks("finished", "finished")
    job.write("job", {"restart": 0, "nodes": ["n0"], "code": 0, "again": False})
    assert (job.state()["status"], job.state()["alive"]) == ("finished", False)
    asked = job.asked
    assert job.state()["status"] == "finished" and job.asked == asked, "a job that has ended is not asked about"
    assert not is_active(link_free(job.run_dir)) and (read_job(link_free(job.run_dir)) or {})["status"] == "finished"


@pytest.mark.parametrize(
    ("answer", "statuses", "status", "error"),
    [
        ("CANCELLED|None||", ("training", "training"), "stopped", ""),
        ("TIMEOUT|TimeLimit||", ("training", "training"), "failed", "job 7 of Slurm ended (timeout)"),
        ("OUT_OF_MEMORY|OutOfMemory||", ("training", "failed"), "failed", "job 7 of Slurm ended (out of memory)"),
        ("FAILED|NonZeroExitCode||", ("failed", "training"), "failed", ""),
        ("TIMEOUT|TimeLimit||", ("stopped", "stopped"), "stopped", ""),
        (
            "slurm_load_jobs error: Invalid job id specified",
            ("training", "training"),
            "failed",
            "Slurm has forgotten it",
        ),
    ],
)
def test_how_a_job_ended(job: Job, answer: str, statuses: tuple[str, str], status: str, error: str) -> None:
    job.write("job", {"restart": 0, "nodes": ["n0", "n1"]})
    job.ranks(*statuses)
    job.answer = answer
    state = job.state()
    assert (state["status"], state["alive"]) == (status, False)
    assert error in state["node"].get("error", "") and bool(error) == bool(state["node"].get("error"))


def test_a_job_whose_first_node_lacks_the_folder_says_so(job: Job) -> None:
    job.answer = "FAILED|NonZeroExitCode||"
    assert "see whether all nodes have this folder" in job.state()["node"]["error"]


@pytest.mark.parametrize(
    ("statuses", "step", "wanted", "code"),
    [
        (("stopped", "stopped"), 5, False, 75),
        (("stopped", "stopped"), 4, False, 0),
        (("stopped", "stopped"), 5, True, 0),
        (("finished", "finished"), 5, False, 0),
        (("failed", "stopped"), 5, False, 1),
        ((), 0, False, 1),
    ],
)
def test_a_job_returns_to_the_queue_if_it_was_told_to_stop_and_made_progress(
    job: Job, statuses: tuple[str, ...], step: int, wanted: bool, code: int
) -> None:
    job.write("job", {"restart": 1, "nodes": ["n0"], "step": 4})
    job.ranks(*statuses, step=step)
    if wanted:
        (job.run_dir / "state/stop-wanted").touch()
    assert slurm.end(link_free(job.run_dir), 1 if code == 1 else 0) == code
    mark = json.loads((job.run_dir / "state/job.json").read_text())
    assert mark["again"] == (code == 75) and mark["restart"] == 1


def test_a_start_on_the_nodes_removes_what_an_earlier_one_left(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.ranks("stopped", "stopped")
    job.write("job", {"restart": 0, "nodes": ["n0"], "code": 0, "again": True, "step": 5})
    (job.run_dir / "stop").touch()
    names: Callable[..., str] = lambda words: "n1\nn2\n"  # noqa: E731
    monkeypatch.setattr(slurm, "command", names)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert slurm.begin(link_free(job.run_dir)) == 0
    assert json.loads((job.run_dir / "state/job.json").read_text()) == {"restart": 1, "nodes": ["n1", "n2"], "step": 5}
    assert not (job.run_dir / "stop").exists() and not list((job.run_dir / "state").glob("rank*.json"))
