"""The speeds that runs leave for later plans: the file, which figure fits, and what a plan makes of it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import Here

from trainer.__main__ import main
from trainer.costs.cost import RowStats, row_flops
from trainer.costs.speeds import FIGURES, DeviceSpeed, add_speeds, checked_speed, nearest, read_speeds, speeds_file
from trainer.model_files.model_shape import read_shape, shape_of
from trainer.planner.decisions import decide
from trainer.planner.recommend import NOMINAL, Speed, choose, known_flops
from trainer.spec import make_spec
from trainyard.preflight.host_state import HostState
from trainyard.run.launch_options import make_options
from trainyard.run.plan.choose_fields import choose_fields
from trainyard.run.session import RunSession
from trainyard.run.types import PlanEntry, SessionState
from trainyard.wire.connection import Host
from trainyard.wire.replies import ReplyError, checked_reply

ONE = DeviceSpeed("NVIDIA H200", 0, "bf16-mixed", "none", False, False, True, 2**30, 2**14, 1e14)
SHAPE = read_shape({
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True,
})  # fmt: skip


def nothing(line: str) -> None:
    raise AssertionError(line)


def test_figures_are_kept_and_the_newest_of_a_kind_replaces_the_others() -> None:
    assert read_speeds(nothing) == ()
    other = replace(ONE, device="NVIDIA L4", flops=2e13)
    add_speeds([ONE, other], nothing)
    assert read_speeds(nothing) == (ONE, other)
    near = replace(ONE, parameters=2**30 + 2**20, flops=2e14)
    add_speeds([near], nothing)
    assert read_speeds(nothing) == (other, near), "the newest one is the last"
    add_speeds([], nothing)
    many = [replace(ONE, device=f"card {number}") for number in range(FIGURES + 5)]
    add_speeds(many, nothing)
    assert read_speeds(nothing) == tuple(many[5:])
    assert speeds_file().stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "content",
    [
        "", "{", "{}", '"x"', "[1]", "[" * 10_000, json.dumps([asdict(ONE) | {"flops": "1e14"}]),
        json.dumps([asdict(ONE) | {"more": 1}]), json.dumps([asdict(ONE) | {"parameters": 0}]),
        json.dumps([asdict(ONE) | {"device": "\x1b[31m"}]), json.dumps([asdict(ONE)] * (FIGURES + 1)), " " * (1 << 19),
        '[{"flops": NaN}]', b"\xff\xfe",
    ],
    ids=lambda content: str(content)[:20],
)  # fmt: skip
def test_a_damaged_file_is_reported_in_one_line_and_replaced(content: str | bytes) -> None:
    speeds_file().parent.mkdir()
    speeds_file().write_bytes(content if isinstance(content, bytes) else content.encode())
    lines: list[str] = []
    assert read_speeds(lines.append) == ()
    [line] = lines
    assert line.startswith(f"warning: {speeds_file()} is ignored: ") and "\n" not in line and len(line) < 400
    add_speeds([ONE], lines.append)
    assert read_speeds(nothing) == (ONE,)


def test_a_file_that_cannot_be_written_is_reported() -> None:
    speeds_file().parent.write_text("a file")
    lines: list[str] = []
    add_speeds([ONE], lines.append)
    assert lines[-1].startswith(f"warning: cannot write {speeds_file()}: ")


def test_the_figure_with_the_nearest_sizes_fits() -> None:
    small, large = replace(ONE, parameters=2**28, flops=1e13), replace(ONE, parameters=2**33, flops=3e14)
    figures = [small, large, replace(ONE, precision="32-true")]
    assert nearest(figures, replace(ONE, parameters=2**29)) == small
    assert nearest(figures, replace(ONE, parameters=2**32)) == large
    assert nearest(figures, replace(ONE, parameters=2**24)) is None, "too far"
    assert nearest(figures, replace(ONE, tokens=2**9)) is None
    changes: list[dict[str, Any]] = [
        {"device": "NVIDIA L4"}, {"threads": 2}, {"precision": "fp16-mixed"}, {"quantize": "nf4"}, {"lora": False},
        {"gradient_checkpointing": True}, {"torch_compile": True},
    ]  # fmt: skip
    for change in changes:
        assert nearest([small, large], replace(small, **change)) is None, change
    assert nearest([], ONE) is None and math.isinf(ONE.distance(replace(ONE, threads=1)))


def test_what_a_host_replies_is_checked() -> None:
    result = {"status": "finished", "step": 1, "steps": 1, "world_size": 1, "tokens": 1, "samples": 1} | {
        "tokens_per_second": 1.0, "loss_first": 1.0, "loss_last": 1.0, "speeds": [asdict(ONE)]
    }  # fmt: skip
    assert [checked_speed(each) for each in checked_reply("result.json", result)["speeds"]] == [ONE]
    for wrong in ({"flops": 1e30}, {"flops": -1.0}, {"device": "a" * 101}, {"precision": "x\n"}, {"threads": True}):
        with pytest.raises(ReplyError, match="speeds"):
            checked_reply("result.json", result | {"speeds": [asdict(ONE) | wrong]})
    with pytest.raises(ReplyError, match="speeds"):
        checked_reply("result.json", result | {"speeds": [asdict(ONE)] * 101})


@pytest.mark.parametrize(("phase", "kept"), [("running", (ONE,)), ("finished", ())])
def test_the_controller_keeps_the_figures_of_a_run_that_it_follows(
    phase: str, kept: tuple[DeviceSpeed, ...], monkeypatch: Any
) -> None:
    collected = {"result": {"speeds": [asdict(ONE)]}, "lines": [], "changed": False}
    monkeypatch.setattr("trainyard.run.session.collect_artifacts", lambda *given: collected)
    state = SessionState(plan=[PlanEntry("node1", run_dir="/d/runs/r")], phase=phase, status="finished")  # type: ignore[arg-type]
    session = RunSession([], lambda host: None, make_options({}), report=nothing, state=state)  # type: ignore[arg-type,return-value]
    session.collect()
    assert read_speeds(nothing) == kept, "one that had finished before leaves nothing"


def host(**facts: Any) -> dict[str, Any]:
    return {"processes": 1, "threads": 8, "gpu_mib": 80 << 10, "memory_mib": 2**17, "capability": 9.0} | facts


def test_decisions_use_the_figures_of_the_hosts_devices() -> None:
    spec = make_spec({"model": "x", "strategy": "auto", "precision": "bf16-mixed", "batch_size": 16}, "here")
    slow = replace(ONE, device="slow", flops=1e13, parameters=SHAPE.parameters)
    fast = replace(slow, device="fast", flops=5e13)
    hosts = [host(device=name, figures=(slow, fast), link_mbit=1000) for name in ("slow", "fast")]
    assert known_flops(spec, SHAPE, hosts) == [1e13, 5e13]
    assert known_flops(spec, SHAPE, [*hosts, host(device="other", figures=(slow, fast))]) == []
    _, why = choose(spec, hosts, SHAPE)
    assert why.endswith("(speed measured by earlier runs)")
    _, [line, *_] = decide(spec, [host(link_mbit=1000)] * 2, SHAPE)
    assert "earlier runs" not in line
    # Recomputed and unpacked weights do not count as work: the figure of such a run has them in its time.
    rows = RowStats.full(spec)
    plain = spec.batch_size * row_flops(spec, SHAPE, rows) / 1e13
    costly = spec.model_copy(update={"gradient_checkpointing": True, "quantize": "nf4"})
    assert Speed.known(costly, SHAPE, rows, 1e13).part == pytest.approx(plain)


def test_the_controller_knows_the_devices_of_its_hosts() -> None:
    facts = {"spec": None, "gpus": [], "cpu": "A CPU", "cpus": 4, "memory_mib": 8000, "link_mbit": 1000} | {
        "versions": {},
        "compiler": True,
    }
    hosts = [HostState(Host(name, "", "/d", "/p"), facts=facts | {"boot_id": name}) for name in "ab"]
    spec = make_spec({"model": "tiny", "strategy": "auto"}, "here")
    assert "earlier runs" not in choose_fields(hosts, spec, [])[1][0]
    add_speeds([DeviceSpeed.of(spec, shape_of(spec), "A CPU", 4, 1e10)], nothing)
    assert choose_fields(hosts, spec, [])[1][0].endswith("at 1000 Mbit/s (speed measured by earlier runs)")
    speeds_file().write_text("{}")
    assert choose_fields(hosts, spec, [])[1][-1].startswith(f"warning: {speeds_file()} is ignored: ")


def test_a_run_leaves_the_speed_from_which_a_plan_predicts_its_steps(here: Here, capsys: Any) -> None:
    """In the same process, as the controller keeps it; the machine's nominal speed is off by a factor."""
    flags = {"max_steps": 8, "batch_size": 4, "total_batch_size": 8, "precision": "32-true", "eval_split": 0}
    assert here(**flags) == 0, here.err
    result = here.result()
    [values] = result["speeds"]
    figure = checked_speed(values)
    spec = make_spec({"model": str(here.model), "seq_length": 64} | flags, "here")
    assert figure == replace(DeviceSpeed.of(spec, shape_of(spec), figure.device, figure.threads), flops=figure.flops)
    assert not 0.5 < figure.flops / (NOMINAL["cpu"] * figure.threads) < 2, "the guess would do"
    hosts = [{"device": figure.device, "threads": figure.threads, "memory_mib": 8000}]
    file = Path(here.folder) / "hosts.json"
    file.write_text(json.dumps(hosts))
    arguments = ["plan", "--json", f"--hosts={file}", f"--model={here.model}", f"--dataset={here.dataset}"]
    arguments += [
        "--seq-length=64",
        *(f"--{name}={value}" for name, value in flags.items()),
        f"--data-dir={here.folder}",
    ]

    def planned(*more: str) -> tuple[float, list[str]]:
        assert main([*arguments, *more]) == 0
        made = json.loads(capsys.readouterr().out)
        return made["options"][0]["compute_seconds"], made["lines"]

    _, lines = planned("--no-measure")
    assert "; speed guessed, because no run measured it: nominal speed of " in lines[1]
    add_speeds([figure], nothing)
    seconds, lines = planned()
    assert "; speed measured by earlier runs: " in lines[1]
    steps = [
        json.loads(line)["step_seconds"][0] for line in (here.run_dir() / "metrics.jsonl").read_text().splitlines()
    ]
    assert seconds == pytest.approx(sum(steps[1:]) / len(steps[1:]), rel=0.3)
    speeds_file().write_text("x")
    _, lines = planned("--no-measure")
    assert any(line.startswith(f"warning: {speeds_file()} is ignored") for line in lines)
