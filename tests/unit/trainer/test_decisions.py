"""The fields that the hosts decide: a table of clusters, ranks that decide together, and a resumed run."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tables import table
from trainer_runs import Here

from trainer.__main__ import main
from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainer.config.automatic import AUTOMATIC, DECIDED
from trainer.model_files.model_shape import read_shape
from trainer.planner.agreement import agree
from trainer.planner.decisions import as_before, common, decide
from trainer.spec import make_spec, read_spec
from trainer.supervise.cpu import multiplies_bfloat16
from trainer.supervise.link_free import link_free
from trainyard.remote.host_facts import run_state

EIGHT = table("decisions")["eight"]
EIGHT |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": False}
SEVEN = EIGHT | {"model_type": "llama", "intermediate_size": 11008, "num_hidden_layers": 32, "vocab_size": 32000}
SEVEN |= {"num_key_value_heads": 32}
ONE = {"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}
ONE |= {"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": True}
SMALL = {"model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
SMALL |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True}
MODELS = {"EIGHT": EIGHT, "SEVEN": SEVEN, "ONE": ONE, "SMALL": SMALL}


def card(gib: int, capability: float, count: int = 1, host_gib: int = 32, four_bits: bool = True) -> dict[str, Any]:
    return {"processes": count, "threads": 8, "gpu_mib": gib * 1024, "capability": capability} | {
        "four_bits": four_bits, "memory_mib": host_gib * 1024, "link_mbit": 1000
    }  # fmt: skip


def cpu(gib: int, bfloat16: bool = False) -> dict[str, Any]:
    return card(0, 0.0, 1, gib, four_bits=False) | {"bfloat16": bfloat16}


CLUSTERS: dict[str, dict[str, Any]] = table("decisions")["clusters"]


def decided(spec: RunSpec) -> tuple[Any, ...]:
    return spec.precision, spec.batch_size, spec.gradient_checkpointing, spec.quantize, spec.strategy


def test_a_pair_needs_the_memory_of_two_rows() -> None:
    hosts = [card(12, 8.6)]
    single, _ = decide(make_spec({"model": "x"}, "here"), hosts, read_shape(ONE))
    dpo = make_spec({"model": "x", "method": "dpo", "dataset": "pairs.jsonl"}, "here")
    pairs, _ = decide(dpo, hosts, read_shape(ONE))
    assert not single.gradient_checkpointing and pairs.batch_size == single.batch_size // 2


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_decisions_for_a_cluster(cluster: str) -> None:
    case = CLUSTERS[cluster]
    hosts = [card(*host["card"]) if "card" in host else cpu(*host["cpu"]) for host in case["hosts"]]
    model = MODELS[case["model"]] | case.get("shape", {})
    spec, lines = decide(make_spec({"model": "x"} | case.get("fields", {}), "here"), hosts, read_shape(model))
    assert decided(spec) == tuple(case["decided"])
    gpus = all(host["gpu_mib"] for host in hosts)
    assert spec.automatic in ((), ("torch_compile",)) if gpus else spec.automatic == (), "ranks know the steps"
    assert not any(line.startswith("warning") for line in lines)
    for value in (f"batch_size={spec.batch_size}", f"precision={spec.precision}"):
        assert any(line.startswith(f"auto: {value}") for line in lines)
    if spec.quantize == "nf4":
        assert any("auto: quantize=nf4: the weights do not fit" in line for line in lines)


def test_what_a_user_sets_is_kept() -> None:
    given = table("decisions")["given"]
    spec = make_spec({"model": "x"} | given, "here")
    assert spec.automatic == ()
    found, lines = decide(spec, [card(8, 8.6)] * 3, read_shape(EIGHT))
    assert decided(found) == ("32-true", 3, False, "none", "ddp")
    assert len(lines) == 1 and lines[0].startswith("warning: the plan does not fit")
    # A strategy that the plan does not know on these hosts is not a reason to save memory.
    alone, lines = decide(make_spec({"model": "x", "strategy": "pipeline"}, "here"), [card(80, 9.0)], read_shape(ONE))
    assert decided(alone) == ("bf16-mixed", 16, False, "none", "pipeline")
    assert not any("warning" in line for line in lines)
    # Without bitsandbytes on every host there are no weights in 4 bits.
    hosts = [card(8, 8.6, four_bits=False), card(8, 8.6)]
    found, lines = decide(make_spec({"model": "x", "strategy": "ddp"}, "here"), hosts, read_shape(EIGHT))
    assert found.quantize == "none" and lines[-1].startswith("warning")


def test_automatic_fields_of_a_spec(tmp_path: Path) -> None:
    assert make_spec({}, "here").automatic == AUTOMATIC
    assert "batch_size" not in make_spec({"gradient_accumulation": 2}, "here").automatic, "rows depend on it"
    assert "precision" in make_spec({"precision": "auto"}, "here").automatic
    file = tmp_path / "spec.yml"
    file.write_text(make_spec({}, "here").to_yaml())
    assert read_spec(file, {}, "flags").automatic == AUTOMATIC
    one = read_spec(file, {"precision": "bf16-mixed"}, "flags")
    assert one.precision == "bf16-mixed" and "precision" not in one.automatic
    file.write_text(one.model_copy(update={"automatic": ()}).to_yaml())
    assert read_spec(file, {"precision": "auto"}, "flags").automatic == ("precision",)
    # The same default names as before there were automatic fields, methods and rewards.
    assert make_spec({"dataset": "a.jsonl"}, "here").named().run == "tiny-69d332"
    assert make_spec({"dataset": "ansible-docs", "max_steps": 4}, "here").named().run == "tiny-c1b2f4"
    assert make_spec({"script": "a.py"}, "here").named().run == "a-5ce8fd"
    assert make_spec({"fake_data": True}, "here").named().run == "tiny-d626b1"
    assert make_spec({"model": "smollm2"}, "here").named().run == "smollm2-3ab613"
    with pytest.raises(UserError, match=r"batch_size: auto cannot be combined with gradient_accumulation"):
        make_spec({"batch_size": "auto", "gradient_accumulation": 2}, "here")


def test_ranks_with_different_decisions_take_what_needs_least() -> None:
    mine = table("decisions")["mine"]
    other = mine | {"batch_size": 2, "gradient_checkpointing": True}
    assert common([mine, mine]) == mine
    assert common([mine, other]) == other
    fewer = mine | {"torch_compile": False}
    assert common([mine, fewer]) == fewer
    assert common([mine, other | {"precision": "fp16-mixed", "quantize": "nf4"}]) == other | {
        "precision": "32-true", "quantize": "nf4"
    }  # fmt: skip


class Ranks:
    """The world of the first rank: the others answer in a row what they have for each gather."""

    def __init__(self, *others: list[Any]) -> None:
        self.rank, self._others = 0, list(others)

    def gather(self, value: Any) -> list[Any]:
        return [value, *self._others.pop(0)]


def answer(spec: RunSpec, started: bool) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in DECIDED} | {"started": started}


def test_a_rank_that_joins_takes_what_the_run_has() -> None:
    """Even where ranks that decide together would take less, or another precision."""
    new, _ = decide(make_spec({"model": "x"}, "here"), [cpu(8)] * 2, read_shape(ONE))
    assert new.gradient_checkpointing and new.automatic == ()
    given = {"precision": "bf16-mixed", "batch_size": 8, "gradient_checkpointing": False, "quantize": "none"}
    has = make_spec(given | {"strategy": "ddp"}, "here")
    ranks: Any = Ranks([answer(has, True)])
    assert decided(agree(new, False, ranks)) == decided(has)
    ranks = Ranks([answer(new, False)])
    assert agree(has, True, ranks) == has, "and the others keep it"


def test_ranks_decide_together() -> None:
    mine, _ = decide(make_spec({"model": "x"}, "here"), [cpu(64, True)] * 2, read_shape(ONE))
    theirs, _ = decide(make_spec({"model": "x"}, "here"), [cpu(8, True)] * 2, read_shape(ONE))
    assert mine != theirs and mine.precision == theirs.precision == "bf16-mixed"
    ranks: Any = Ranks([answer(theirs, False)])
    assert decided(agree(mine, False, ranks)) == decided(theirs)
    slow, _ = decide(make_spec({"model": "x"}, "here"), [cpu(16)] * 2, read_shape(ONE))
    ranks = Ranks([answer(slow, False)])
    assert decided(agree(mine, False, ranks)) == decided(slow)
    other: Any = Ranks([answer(theirs.model_copy(update={"strategy": "fsdp"}), False)])
    with pytest.raises(UserError, match="strategy: auto chooses differently"):
        agree(mine, False, other)
    # A file of the user excludes bfloat16.
    given = {"model": "x", "strategy": "deepspeed", "deepspeed_config": {"bf16": {"enabled": False}}}
    fixed, _ = decide(make_spec(given, "here"), [cpu(64, True)] * 2, read_shape(ONE))
    assert fixed.precision == "32-true"


def test_a_started_run_keeps_its_decisions() -> None:
    began = make_spec({"batch_size": 2, "precision": "bf16-mixed", "strategy": "fsdp"}, "here")
    spec, lines = as_before(make_spec({"quantize": "none"}, "here"), began)
    assert decided(spec) == ("bf16-mixed", 2, False, "none", "fsdp")
    assert spec.automatic == ("gradient_checkpointing", "torch_compile"), "the rank that writes the spec decides them"
    assert lines == [
        "auto: this run started with precision=bf16-mixed, batch_size=2, gradient_checkpointing=false, torch_compile=false, strategy=fsdp"
    ]


def decisions_of_plan(capsys: Any, *flags: str) -> list[str]:
    assert main(["plan", "--json", *flags]) == 0
    decisions: list[str] = json.loads(capsys.readouterr().out)["decisions"]
    return decisions


def test_the_plan_shows_what_a_start_here_decides(here: Here, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("trainer.planner.decisions.multiplies_bfloat16", lambda: True)
    monkeypatch.setattr("trainer.planner.decisions.SMALL_LAYER", 0)
    flags = [f"--data-dir={here.folder}", "--run-name=r", f"--model={here.model}", f"--dataset={here.dataset}"]
    flags += ["--batch-size=auto", "--seq-length=64", "--total-batch-size=4", "--max-steps=2"]
    planned = decisions_of_plan(capsys, *flags)
    assert here(max_steps=2, batch_size="auto") == 0
    assert planned == [line for line in here.out.splitlines() if line.startswith("auto: ")]
    assert planned[0].startswith("auto: precision=bf16-mixed: every CPU has a matrix unit for bfloat16 (amx_bf16); ")
    # A run that has started keeps what it has.
    [line] = decisions_of_plan(capsys, *flags, "--no-measure")
    assert line.startswith("auto: this run started with precision=bf16-mixed, batch_size=4, ")


def test_the_plan_decides_for_the_hosts_of_a_file(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr("trainer.planner.plan_report.multiplies_bfloat16", lambda: False)
    (tmp_path / "config.json").write_text(json.dumps(ONE))
    flags = [f"--model={tmp_path}", "--no-measure", "--seq-length=4096", "--link-mbit=1000"]

    def decisions(*hosts: dict[str, Any]) -> list[str]:
        (tmp_path / "hosts.json").write_text(json.dumps(hosts))
        return decisions_of_plan(capsys, *flags, f"--hosts={tmp_path}/hosts.json")

    two = {"gpu_mib": 24576, "capability": 8.9}, {"gpu_mib": 12288, "capability": 8.6}
    [precision, size, compiling] = decisions(*two)
    assert precision.startswith("auto: precision=bf16-mixed: every GPU computes in bfloat16")
    assert size.startswith("auto: batch_size=1: micro-batches of 4096 tokens")
    assert compiling.startswith("auto: torch_compile: true on GPUs if the run has 2,000 steps or more")
    assert decisions({"gpu_mib": 24576})[0].startswith("auto: precision=32-true: the compute capability of a GPU")
    assert decisions({"memory_mib": 24000})[0].startswith("auto: precision=32-true: a CPU has no")
    # No strategy fits.
    flags = [f"--model={tmp_path}", "--no-measure", "--strategy=auto", "--lora-r=0", "--quantize=none"]
    flags += ["--gradient-checkpointing=false", "--batch-size=16"]
    [line] = decisions(*[{"memory_mib": 24000}] * 2)
    assert line.startswith("auto: plan: ") and "do not fit" in line


@pytest.mark.parametrize(("fast", "precision"), [(True, "bf16-mixed"), (False, "32-true")])
def test_a_resumed_run_keeps_the_precision_of_a_cpu(fast: bool, precision: str, here: Here, monkeypatch: Any) -> None:
    monkeypatch.setattr("trainer.planner.decisions.SMALL_LAYER", 0)
    monkeypatch.setattr("trainer.planner.decisions.multiplies_bfloat16", lambda: fast)
    assert here(max_steps=2, batch_size="auto") == 0
    assert f"auto: precision={precision}: " in here.out
    written = read_spec(here.run_dir() / "spec.yml", {}, "here")
    assert (written.precision, written.batch_size, written.automatic) == (precision, 4, ())
    # Another machine would decide otherwise.
    monkeypatch.setattr("trainer.planner.decisions.multiplies_bfloat16", lambda: not fast)
    assert here(max_steps=2, batch_size="auto") == 0
    assert f"auto: this run started with precision={precision}" in here.out and "is finished" in here.out


def test_the_spec_stays_undecided_until_all_ranks_have_decided(here: Here, monkeypatch: Any) -> None:
    """In a job of Slurm all ranks read this file: one that starts later must not take what the first rank decided alone."""
    file = here.run_dir() / "spec.yml"
    here.run_dir().mkdir(parents=True)
    file.write_text(make_spec({"run": "r", "model": str(here.model), "dataset": str(here.dataset)}, "here").to_yaml())
    before = file.read_text()

    def join(*_: Any) -> Any:
        raise UserError("a rank did not join")

    monkeypatch.setattr("trainer.distributed.world.World.join", join)
    assert main(["train", str(file), f"--data-dir={here.folder}"]) != 0
    assert file.read_text() == before


def test_a_finished_run_without_checkpoints_keeps_its_spec(here: Here) -> None:
    assert here(max_steps=2, precision="32-true", batch_size="auto") == 0
    shutil.rmtree(here.run_dir() / "checkpoints")
    facts = run_state(link_free(here.run_dir()))
    assert facts["spec"] == (here.run_dir() / "spec.yml").read_text()
    assert here(max_steps=2, precision="32-true", batch_size="auto") == 0
    assert "auto: this run started with" in here.out and "is finished" in here.out
    assert here(max_steps=2, precision="32-true", batch_size="auto", lr=0.5) != 0
    assert "run r exists with another spec (lr: was 0.01, now 0.5)" in here.err


@pytest.mark.parametrize(("flags", "fast"), [("avx512_bf16", False), ("avx512_bf16 amx_bf16 amx_tile", True)])
def test_amx_alone_multiplies_bfloat16_fast(flags: str, fast: bool, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "cpuinfo").write_text(f"flags\t: fpu {flags}\n")
    monkeypatch.setattr("trainer.supervise.cpu.Path", lambda _: tmp_path / "cpuinfo")
    assert multiplies_bfloat16() is fast
