"""Runs of several ranks under real torchrun: the losses are the same for any number of ranks, also after stops and kills."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import Cluster, Here, lines, losses, records, until, write_jsonl

from trainer.common.files import sha256_file
from trainer.data.corpus import load_corpus, select
from trainer.data.order import Order, held_out, training_samples
from trainer.records.checkpoint import complete_checkpoints
from trainer.spec import read_spec

pytestmark = pytest.mark.slow

LONG = {"balance": "even", "epochs": 200, "max_steps": 50, "checkpoint_interval": 10}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def weights(run_dir: Path) -> str:
    """Return the digest of the adapter of a finished run; peft writes the other files in no fixed order."""
    return sha256_file(run_dir / "adapter" / "adapter_model.safetensors")


def assert_every_sample_once(cluster: Cluster, ranks: list[tuple[int, int]], run: str = "r") -> None:
    """Compare the samples of all ranks in every step with the order, which is independent of ranks. `ranks`: (host, rank)."""
    order = sample_order(cluster, run)
    recorded = [lines(cluster.run_dir(host, run) / "samples" / f"rank{rank}.jsonl") for host, rank in ranks]
    steps = read_spec(cluster.run_dir(0, run) / "spec.yml", {}, "").max_steps or order.steps
    for records_of_rank in recorded:
        assert [record["step"] for record in records_of_rank] == list(range(1, steps + 1))
    for step in range(steps):
        assert [row for rank in recorded for row in rank[step]["rows"]] == order.step(step)


def sample_order(cluster: Cluster, run: str = "r") -> Order:
    """Return the order of the samples of a run, derived only from its spec and data."""
    run_dir = cluster.run_dir(0, run)
    spec = read_spec(run_dir / "spec.yml", {}, "")
    (cache,) = (run_dir / "cache").glob("*.npz")
    corpus = load_corpus(cache)
    assert corpus is not None
    train_set = select(corpus, training_samples(spec, len(corpus), held_out(spec, len(corpus))))
    return Order.of(spec, train_set.lengths)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, model_folder: Path, dataset: Path) -> Iterator[Cluster]:
    """The same run without interruption on 1, 2 and 3 hosts."""
    spec = {"model": model_folder, "dataset": dataset, "seq_length": 64, "total_batch_size": 6, "batch_size": 2}
    made = Cluster(tmp_path_factory.mktemp("straight"), spec | {"lr": 1e-2, "loggers": "none"})
    for hosts in (1, 2, 3):
        made.run(hosts, run=f"on{hosts}", **LONG)
    yield made
    made.end()


def straight_losses(straight: Cluster, hosts: int) -> list[float]:
    return losses(straight.run_dir(0, f"on{hosts}"))


def test_1_2_and_3_ranks_have_the_same_losses(straight: Cluster) -> None:
    alone = straight_losses(straight, 1)
    assert len(alone) == 50 and alone[-1] < 0.8 * alone[0]
    for hosts in (2, 3):
        assert straight_losses(straight, hosts) == pytest.approx(alone, abs=1e-4)
        assert_every_sample_once(straight, [(host, host) for host in range(hosts)], f"on{hosts}")


def test_all_hosts_end_with_equal_adapters_results_and_checkpoints(straight: Cluster) -> None:
    for hosts in (2, 3):
        dirs = [straight.run_dir(host, f"on{hosts}") for host in range(hosts)]
        results = [json.loads((run_dir / "result.json").read_text()) for run_dir in dirs]
        assert len({weights(run_dir) for run_dir in dirs}) == 1
        assert len({result["adapter_sha256"] for result in results}) == 1
        assert len({result["eval_loss"] for result in results}) == 1
        assert all(result["world_size"] == hosts and result["status"] == "finished" for result in results)
        # The files are identical, so that none is copied when the run resumes.
        found = [complete_checkpoints(run_dir / "checkpoints") for run_dir in dirs]
        assert found[0] and all(other == found[0] for other in found)


def stopped(cluster: Cluster, how: str) -> int:
    """Start on two hosts, stop at a random step; return the step."""
    launchers = cluster.start(2, **LONG)
    cluster.at_step(random.Random(how).randint(2, 20))
    if how == "file":
        (cluster.run_dir(1) / "stop").touch()  # the request of any host stops all
        assert cluster.wait(launchers) == [0, 0], cluster.logs()
    else:
        for launcher in launchers:
            launcher.send_signal(signal.SIGTERM)
        cluster.wait(launchers)
    step = len(losses(cluster.run_dir()))
    assert 2 <= step < 50
    for host in (0, 1):
        assert cluster.state(host, host)["status"] == "stopped"
        assert max(complete_checkpoints(cluster.run_dir(host) / "checkpoints")) == step
    return step


def test_stop_and_resume_with_the_same_fewer_and_more_hosts(cluster: Cluster, straight: Cluster) -> None:
    step = stopped(cluster, "file")
    for name in ("fewer", "more"):
        for host in (0, 1):
            # The same run under another name, with its records, for another number of hosts.
            shutil.copytree(cluster.run_dir(host), cluster.run_dir(host, name))
            kept = cluster.run_dir(host, name) / "spec.yml"
            kept.write_text(kept.read_text().replace("run: r\n", f"run: {name}\n"))
    assert cluster.run(2, **LONG) == straight_losses(straight, 2), "bit-equal"
    assert_every_sample_once(cluster, [(0, 0), (1, 1)])
    assert "checkpoint: copying" not in cluster.logs()
    assert cluster.run(1, run="fewer", **LONG) == pytest.approx(straight_losses(straight, 1), abs=1e-4)
    assert cluster.run(3, run="more", **LONG) == pytest.approx(straight_losses(straight, 3), abs=1e-4)
    assert f"checkpoint: copying step {step} to the hosts that lack it" in cluster.logs("more")
    assert f"resuming from step {step} of" in (cluster.run_dir(2, "more") / "logs" / "rank2.log").read_text()
    assert len({weights(cluster.run_dir(host, "more")) for host in range(3)}) == 1


def test_sigterm_stops_with_a_checkpoint_and_a_damaged_copy_is_replaced_from_the_peer(
    cluster: Cluster, straight: Cluster
) -> None:
    step = stopped(cluster, "SIGTERM")
    # The newest checkpoint of the head is truncated, as by a power failure; the peer has a complete copy.
    os.truncate(cluster.run_dir(0) / "checkpoints" / f"step-{step:08d}" / "optimizer.pt", 100)
    assert cluster.run(2, **LONG) == straight_losses(straight, 2), "bit-equal"
    assert "is incomplete (optimizer.pt has 100 of" in cluster.logs()
    assert f"checkpoint: copying step {step} to the hosts that lack it" in cluster.logs()
    assert_every_sample_once(cluster, [(0, 0), (1, 1)])


@pytest.mark.long
def test_a_host_that_failed_before_its_result_receives_one(straight: Cluster) -> None:
    kept = weights(straight.run_dir(0, "on2"))
    (straight.run_dir(1, "on2") / "result.json").unlink()
    straight.run(2, run="on2", **LONG)
    assert json.loads((straight.run_dir(1, "on2") / "result.json").read_text())["status"] == "finished"
    assert weights(straight.run_dir(0, "on2")) == weights(straight.run_dir(1, "on2")) == kept


@pytest.mark.long
def test_more_ranks_than_rows(cluster: Cluster, here: Here) -> None:
    few = {"total_batch_size": 2, "max_steps": 4}
    assert here(**few) == 0
    assert cluster.run(1, 3, **few) == pytest.approx(here.losses(), abs=1e-4)


def errors_of(cluster: Cluster, run: str = "r", **fields: Any) -> list[dict[str, Any]]:
    """Start two hosts that fail; return the errors of their ranks."""
    statuses = cluster.wait(cluster.start(2, run=run, **fields))
    assert all(statuses), cluster.logs(run)
    return [cluster.state(host, host, run)["error"] for host in (0, 1)]


def test_an_error_on_one_host_ends_all_and_is_attributed(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run_dir(1).mkdir(parents=True)
    (cluster.run_dir(1) / "cache").write_text("a file where a folder should be")
    head, peer = errors_of(cluster, **LONG)
    assert peer["plain"] and peer["message"].startswith("cannot write: "), peer
    assert head["secondary"] and not head["plain"], head


def test_different_data_on_hosts_is_an_error_before_the_first_step(cluster: Cluster) -> None:
    for host in (0, 1):
        folder = cluster.run_dir(host).parents[1]
        folder.mkdir(parents=True)
        write_jsonl(folder / "train.jsonl", records(60, seed=host))
    head, peer = errors_of(cluster, dataset="train.jsonl", **LONG)
    why = (
        "dataset: the samples or the tokenizer of rank 1 differ from those of rank 0: "
        "use the same dataset and model on all hosts"
    )
    assert head["message"] == peer["message"] == why


@pytest.mark.parametrize(("kills", "steps"), [(3, 50), pytest.param(20, 300, marks=pytest.mark.long)])
def test_kills_lose_no_sample_and_repeat_none(cluster: Cluster, kills: int, steps: int) -> None:
    fields = {"balance": "even", "epochs": 200, "max_steps": steps, "checkpoint_interval": 4}
    wanted = cluster.run(1, 2, run="undisturbed", **fields)
    draw = random.Random(20)
    metrics = cluster.run_dir() / "metrics.jsonl"
    killed = []
    for _ in range(kills):
        (launcher,) = cluster.start(1, 2, **fields)
        until(lambda pid=launcher.pid: fresh(cluster, pid), what="both ranks to train")
        pids = [cluster.state(rank)["pid"] for rank in (0, 1)]
        seen = lines(metrics)
        cluster.at_step(seen[-1]["step"] + draw.randint(1, 6) if seen else 1)
        victim = draw.choice([*pids, launcher.pid])
        os.kill(victim, signal.SIGKILL)
        killed.append(lines(metrics)[-1]["step"])
        assert launcher.wait(120)
        until(lambda pids=pids: not any(alive(pid) for pid in pids), what="all ranks to end")
    assert max(killed) < steps and len(set(killed)) > kills / 2, killed
    assert cluster.run(1, 2, **fields) == wanted, "bit-equal"
    assert_every_sample_once(cluster, [(0, 0), (0, 1)])


def fresh(cluster: Cluster, launcher: int) -> bool:
    """Return whether both ranks of this start are training."""
    for rank in (0, 1):
        state = cluster.state(rank)
        if not state or state["status"] not in ("training", "saving", "evaluating") or not alive(state["pid"]):
            return False
        if int(Path(f"/proc/{state['pid']}/stat").read_text().rpartition(")")[2].split()[1]) != launcher:
            return False
    return True


def listeners(pid: int) -> set[int]:
    """Return the ports at which a process listens."""
    inodes = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        target = str(entry.readlink())
        if target.startswith("socket:["):
            inodes.add(target[8:-1])
    rows = [row.split() for row in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and row[9] in inodes}


def test_ranks_end_with_torchrun(cluster: Cluster) -> None:
    made = Cluster(cluster.folder, cluster.spec, cold=True)
    try:
        (launcher,) = made.start(1, 2, max_steps=500)
        made.at_step(2)
        pids = [made.state(rank)["pid"] for rank in (0, 1)]
        for pid in pids:
            assert int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]) == launcher.pid
            assert os.getsid(pid) == pid, "a signal to torchrun's group must not reach the ranks"
        (port,) = listeners(launcher.pid)
        assert not any(port in listeners(pid) for pid in pids), "the port must be free once torchrun has ended"

        os.kill(launcher.pid, signal.SIGKILL)
        launcher.wait(30)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), what="the end of the ranks")
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            again.bind(("127.0.0.1", port))
    finally:
        made.end()


def test_the_signal_that_killed_a_rank_and_the_code_of_a_mistake_are_reported(cluster: Cluster) -> None:
    (launcher,) = cluster.start(1, 2, max_steps=500)
    cluster.at_step(2)
    pid = cluster.state(1)["pid"]
    os.kill(pid, signal.SIGSEGV)
    assert cluster.wait([launcher]) == [1]
    log = (cluster.run_dir() / "torchrun.log").read_text()
    # In the table: the line above it names either rank, if torchrun finds that both have ended.
    assert f"Signal 11 (SIGSEGV) received by PID {pid}" in log

    (launcher,) = cluster.start(1, 1, run="wrong", dataset="/nowhere.jsonl")
    assert cluster.wait([launcher]) == [1]
    assert "failed (exitcode: 1) local_rank: 0" in (cluster.run_dir(run="wrong") / "torchrun.log").read_text()
    assert cluster.state(0, run="wrong")["error"]["plain"]
