"""The results of the GPU checks: bounds, missing runs, and the tables in benchmarks/gpu/results.md."""

import json
import math
import time
from pathlib import Path

import pytest

from benchmarks.gpu import report
from benchmarks.gpu.__main__ import listed, run_all
from benchmarks.gpu.bench import Bench, Outcome, figures
from benchmarks.gpu.cases import CASES, CPU, CUDA, CUDA_SMALL, scale_for
from benchmarks.gpu.checks import CHECKS, INPUT_SECONDS, LEG_SECONDS, LEGS, Figure, evaluate
from benchmarks.gpu.prepare import run_spec

MACHINE = {"device": "Some GPU", "memory_mib": 24576, "torch": "2.13.0", "cuda": "13.0", "python": "3.12.3"}


def outcome(losses: list[float | None], speed: float = 100.0, mib: float = 1000.0) -> Outcome:
    return Outcome("ok", 1.0, values={"losses": losses, "tokens_per_second": speed, "cuda_mib": mib})


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    bench = Bench(tmp_path, "cuda", time.monotonic() + 60, scale=CUDA, machine=MACHINE)
    bench.planned = {name: {"memory_mib": 1000.0, "tokens_per_second": 100.0} for name in CASES}
    return bench


def test_every_run_of_a_check_exists() -> None:
    others = {"trl", "collectives", "packing", "resume"}
    assert {run for _, runs, _ in CHECKS.values() for run in runs} == set(CASES) | others


def test_legs_have_every_check_once_and_end_within_nine_minutes() -> None:
    assert sorted(name for leg in LEGS for name in leg) == sorted(CHECKS)
    assert all(INPUT_SECONDS + sum(leg.values()) <= LEG_SECONDS <= 9 * 60 - 10 for leg in LEGS)
    never_run = {"fsdp", "deepspeed", "nf4", "adamw8bit", "packing", "resume", "unsloth"}
    assert {*LEGS[0], *LEGS[1]} == never_run
    for number, leg in enumerate(LEGS, 1):
        assert f"leg {number}: " in listed() and all(f"\n  {name} " in listed() for name in leg)


def test_every_case_is_a_run_spec(tmp_path: Path) -> None:
    for scale in (CPU, CUDA, CUDA_SMALL):
        for name, case in CASES.items():
            assert run_spec(name, case, scale, tmp_path).run == name


@pytest.mark.slow
def test_a_check_past_its_limit_is_cut_and_the_others_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.__main__.LIMITS", {"nf4": 5.5, "resume": 30, "packing": 30})
    monkeypatch.setattr(
        Bench,
        "train",
        lambda self, name, case, **fields: self.start(name, ["sleep", "60" if name == "nf4" else "0"], 40)[0],
    )
    done: list[str] = []
    began = time.monotonic()
    run_all(bench, ["nf4", "resume"], 2, done.append)
    assert time.monotonic() - began < 20
    assert (
        done[0] == "lora"
        and done[-1] == "resume"
        and {*done} == {"lora", "nf4", "fsdp-nf4", "fsdp-nf4-offload", "resume"}
    )
    assert bench.outcomes["nf4"].status == "failed" and "no result within 5 s" in bench.outcomes["nf4"].reason
    (result,) = evaluate(bench, ["nf4"])
    assert (result.status, result.reason) == ("failed", bench.outcomes["nf4"].reason.replace("no", "nf4: no", 1))
    assert bench.outcomes["lora"].status == "ok"


def test_scales() -> None:
    assert [scale_for("cpu", 1e6), scale_for("cuda", 8192), scale_for("cuda", 143771)] == [CPU, CUDA_SMALL, CUDA]


@pytest.mark.parametrize(
    ("value", "holds"), [(0.8, True), (1.25, True), (1.26, False), (0.79, False), (math.nan, False), (math.inf, False)]
)
def test_bounds(value: float, holds: bool) -> None:
    assert Figure("memory", value, "x", 0.8, 1.25).holds is holds


def test_checks_pass_and_fail(bench: Bench) -> None:
    falling = [8.0, 7.0, 6.0, 5.0]
    sharded = ("fsdp-nf4", "fsdp-nf4-offload")
    bench.outcomes = {name: outcome(falling) for name in ("lora", "full", "large", "checkpointing", "nf4", *sharded)}
    plan, nf4 = evaluate(bench, ["plan", "nf4"])
    assert (plan.status, nf4.status) == ("passed", "passed")
    bench.outcomes["nf4"] = outcome([8.0, 7.0, 6.0, 9.0])
    bench.outcomes["large"] = outcome(falling, mib=1300.0)
    plan, nf4 = evaluate(bench, ["plan", "nf4"])
    assert [figure.name for figure in plan.figures if not figure.holds] == ["large: memory, measured / planned"]
    assert (plan.status, nf4.status) == ("failed", "failed")


def test_a_loss_that_is_not_finite_fails(bench: Bench) -> None:
    bench.outcomes = {name: outcome([8.0, 7.0]) for name in CASES} | {"fsdp": outcome([8.0, None])}
    (result,) = evaluate(bench, ["fsdp"])
    assert result.status == "failed"
    assert json.loads(json.dumps(result.as_json(), allow_nan=False))["figures"][0]["value"] is None


def test_missing_runs(bench: Bench) -> None:
    bench.outcomes = {
        "lora": outcome([8.0, 7.0]),
        "unsloth": Outcome("skipped", reason="unsloth is not installed"),
        "nf4": Outcome("failed", reason="error: quantize: nf4 needs bitsandbytes"),
    }
    found = {result.name: (result.status, result.reason) for result in evaluate(bench, ["unsloth", "nf4", "resume"])}
    assert found == {
        "unsloth": ("skipped", "unsloth: unsloth is not installed"),
        "nf4": ("failed", "nf4: error: quantize: nf4 needs bitsandbytes"),
        "resume": ("skipped", "resume: it did not run"),
    }


def test_a_plan_that_failed_fails_its_check(bench: Bench) -> None:
    bench.outcomes = {"full": outcome([8.0, 7.0]), "fsdp": outcome([8.0, 7.0])}
    bench.planned["fsdp"] = {"error": "UserError: no"}
    (result,) = evaluate(bench, ["fsdp"])
    assert (result.status, result.reason) == ("failed", "the plan of fsdp: UserError: no")


def test_figures_of_records() -> None:
    records = [
        {"loss": 2.0, "tokens_per_second": speed, "gpus": [{"memory_peak_gb": 1.048576}, {}]}
        for speed in (1, 1, 1, 8, 9)
    ]
    assert figures(records) == {"losses": [2.0] * 5, "tokens_per_second": 8.5, "cuda_mib": pytest.approx(1000)}
    assert figures([{"loss": 2.0, "tokens_per_second": 5.0}])["cuda_mib"] is None


@pytest.mark.slow
def test_a_run_past_its_limit_is_ended(bench: Bench) -> None:
    began = time.monotonic()
    bench.deadline = began + 6
    ended, _ = bench.start("slow", ["sleep", "60"], 5.5)
    assert (ended.status, ended.reason) == ("failed", "no result within 6 s")
    assert time.monotonic() - began < 20
    late, _ = bench.start("late", ["true"], 60)
    assert (late.status, late.reason) == ("skipped", "no time was left")


def test_an_error_is_its_line(bench: Bench) -> None:
    failed, _ = bench.start("bad", ["sh", "-c", "echo 'error: model: no such folder' >&2; echo more >&2; exit 2"], 60)
    assert (failed.status, failed.reason) == ("failed", "error: model: no such folder")


def test_the_page_takes_results(bench: Bench, tmp_path: Path) -> None:
    bench.outcomes = {name: outcome([8.0, 7.0]) for name in CASES}
    report.write(bench, evaluate(bench, list(CHECKS)), tmp_path, 12.0)
    found = json.loads((tmp_path / "results.json").read_text())
    page = report.PAGE.read_text()
    filled = report.fill(page, found)
    assert "| lora: memory, measured / planned | 1 x | >= 0.8 and <= 1.25 |" in filled
    assert "Some GPU, 24 GiB, torch 2.13.0, CUDA 13.0, Python 3.12.3" in filled
    assert report.fill(filled, found) == filled
    assert filled.partition(report.BEGIN)[0] == page.partition(report.BEGIN)[0]
    assert filled.partition(report.END)[2] == page.partition(report.END)[2]
    with pytest.raises(ValueError, match="stand-in without CUDA"):
        report.fill(page, found | {"scale": "cpu"})
    with pytest.raises(ValueError, match="no place for results"):
        report.fill("text", found)


def test_results_of_legs_are_joined(bench: Bench, tmp_path: Path) -> None:
    parts = []
    for names, cut in ((["plan", "nf4"], "nf4"), (["nf4", "fsdp"], "none"), (["fsdp", "plan"], "full")):
        bench.outcomes = {name: outcome([8.0, 7.0, 6.0, 5.0]) for name in CASES if name != cut}
        report.write(bench, evaluate(bench, names), tmp_path, 12.0)
        parts.append(json.loads((tmp_path / "results.json").read_text()))
    assert [check["status"] for part in parts for check in part["checks"]] == [
        "passed", "skipped", "passed", "passed", "skipped", "skipped",
    ]  # fmt: skip
    whole = report.joined(parts)
    found = {check["name"]: check["status"] for check in whole["checks"]}
    assert found == {"plan": "passed", "nf4": "passed", "fsdp": "passed"} and whole["seconds"] == 36
    parts[2]["checks"][0]["status"] = "failed"
    assert report.joined(parts)["checks"][2]["status"] == "failed", "the last result counts"
    pages = tmp_path / "page.md"
    pages.write_text(f"{report.BEGIN}\n{report.END}\n")
    files = [tmp_path / f"{number}.json" for number in range(2)]
    for file, part in zip(files, parts, strict=False):
        file.write_text(json.dumps(part))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "PAGE", pages)
        patch.setattr(report, "TOP", tmp_path)
        assert report.main(files) == 0
        assert pages.read_text().count("| passed |") == 3 and "24 s." in pages.read_text()
    with pytest.raises(ValueError, match=r"results of different machines cannot be joined: .*Other"):
        report.joined([*parts, parts[0] | {"machine": MACHINE | {"device": "Other GPU"}}])
