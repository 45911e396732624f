"""The planner: model shapes, predicted memory against measured peaks, recommendations, and strategy=auto."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import get_peft_model
from tables import table
from trainer_runs import TOP, Here, llama
from transformers import AutoConfig, AutoModelForCausalLM

from trainer.__main__ import main
from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainer.costs.cost import Layout, Memory, RowStats
from trainer.costs.host_memory import BASE, available_bytes, own_memory_mib, read_hosts
from trainer.costs.teacher_cost import teacher_weights
from trainer.distributed.world import World
from trainer.method import method_of
from trainer.method.method_base import loss_positions
from trainer.method.module_with_loss import ModelWithLoss
from trainer.method.orpo import AnswerMask
from trainer.model_files.model_shape import Shape, read_shape, shape_of
from trainer.models.model import add_lora, lora_config
from trainer.planner import plan_report as report
from trainer.planner.plan_report import plan
from trainer.planner.recommend import Setting, Speed, choose, options, recommend
from trainer.spec import make_spec, read_spec
from trainer.strategy import plan_named, plan_of
from trainer.strategy.base import Batch
from trainer.strategy.ddp import DDP
from trainer.strategy.deepspeed_config import engine_config
from trainer.strategy.replicas import CHUNK
from trainyard.remote.host_facts import allocator

SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 300, "head_dim": 16, "pad_token_id": 0}
KINDS: dict[str, dict[str, Any]] = dict.fromkeys(
    ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3", "granite"),
    SIZES,
)
KINDS["gpt2"] = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 300}
BIG = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
BIG |= {"num_key_value_heads": 8, "vocab_size": 128256, "model_type": "llama", "max_position_embeddings": 8192}


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_config_determines_the_shape(kind: str) -> None:
    config = AutoConfig.for_model(kind, **KINDS[kind])
    shape, spec = read_shape(config.to_diff_dict()), make_spec({"lora_r": 4, "model": "x"}, "here")
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(p.numel() for p in model.parameters())
    adapted = get_peft_model(model, lora_config(spec))
    assert shape.trained(spec) == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    untied = {name: value for name, value in config.to_diff_dict().items() if name != "tie_word_embeddings"}
    assert read_shape(untied).tied == config.tie_word_embeddings, "the default where config.json has no value"


def memory_of(spec: RunSpec, shape: Shape, layout: Layout, rows: RowStats, *, cuda: bool = False) -> Memory:
    return plan_of(spec).memory(spec, shape, layout, rows, cuda=cuda)


def live_peak(spec: RunSpec, config: Any, teacher: Any = None) -> tuple[int, Shape]:
    """Return the peak number of bytes of all live tensors during a step, as the torch profiler reports it.

    `teacher`: the configuration of a teacher model.
    """
    torch.manual_seed(1)
    half = spec.lora_r and spec.precision == "bf16-mixed"  # as load_model does
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if half else torch.float32)
    if spec.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model = add_lora(spec, model) if spec.lora_r else model
    module = ModelWithLoss(model.train(), method=method_of(spec).create(spec))
    strategy = DDP(spec, World(0, 1, 0, 0, torch.device("cpu")), module)
    judge = AutoModelForCausalLM.from_config(teacher).requires_grad_(False).eval() if teacher else None
    teaching = ModelWithLoss(judge) if judge else None
    count = method_of(spec).as_rows(spec).batch_size
    ids = torch.randint(0, config.vocab_size, (count, spec.seq_length))
    positions = (torch.arange(spec.seq_length) % (spec.seq_length // 4)).repeat(count, 1)
    extra = AnswerMask(torch.ones_like(ids, dtype=torch.bool), 0.1) if spec.method == "orpo" else None

    def step() -> None:
        batch = Batch(ids, positions, ids, extra)
        if teaching:
            with torch.no_grad():
                batch = batch._replace(extra=teaching.logits(ids, positions, loss_positions(ids)))
        strategy.backward(batch, ids.numel(), True)
        strategy.step(1e-3)

    step()  # creates gradients and moments, which stay allocated
    kept = sum(p.nbytes for p in model.parameters())
    kept += sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    kept += sum(p.nbytes for p in teaching.parameters()) if teaching else 0
    kept += sum(v.nbytes for state in strategy.optimizer.state.values() for v in state.values() if torch.is_tensor(v))
    with torch.profiler.profile(profile_memory=True) as profile:
        step()
    now = peak = 0
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return kept + peak, read_shape(config.to_diff_dict())


@pytest.mark.slow
@pytest.mark.parametrize("fields", table("plan")["memory_is_within_10_percent_of_the_measured_peak"], ids=str)
@pytest.mark.parametrize("layers", [2, 6])
def test_memory_is_within_10_percent_of_the_measured_peak(fields: dict[str, Any], layers: int) -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 2048}
    config = AutoConfig.for_model("llama", hidden_size=192, intermediate_size=512, num_hidden_layers=layers, **sizes)
    spec = make_spec({"model": "x", "seq_length": 128} | fields, "here")
    measured, shape = live_peak(spec, config)
    planned = memory_of(spec, shape, Layout((1,)), RowStats.full(spec)).total
    assert planned == pytest.approx(measured, rel=0.10)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"lora_r": 0}], ids=str)
def test_logits_of_a_large_vocabulary_do_not_exist_in_full(fields: dict[str, Any]) -> None:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 65_536}
    config = AutoConfig.for_model("llama", hidden_size=64, intermediate_size=128, num_hidden_layers=1, **sizes)
    spec = make_spec({"model": "x", "seq_length": 512, "batch_size": 2} | fields, "here")
    measured, shape = live_peak(spec, config)
    memory = memory_of(spec, shape, Layout((1,)), RowStats.full(spec))
    assert memory.total == pytest.approx(measured, rel=0.10)
    assert measured < 2 * 512 * 65_536 * 4 * 2, "less than two copies of all logits"


@pytest.mark.parametrize("fields", [{"gkd_beta": 0.5}, {"gkd_beta": 0, "lora_r": 0}], ids=str)
def test_the_memory_of_a_teacher_is_within_10_percent_of_the_peak(fields: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 2048}
    config = AutoConfig.for_model("llama", hidden_size=192, intermediate_size=512, num_hidden_layers=2, **sizes)
    teacher = AutoConfig.for_model("llama", hidden_size=384, intermediate_size=1024, num_hidden_layers=4, **sizes)
    teacher.save_pretrained(tmp_path)
    common = {"model": "x", "teacher": str(tmp_path), "distill_alpha": 0.5, "seq_length": 128}
    spec = make_spec(common | fields, "here")
    measured, shape = live_peak(spec, config, teacher)
    memory = memory_of(spec, shape, Layout((1,)), RowStats.full(spec))
    assert memory.total == pytest.approx(measured, rel=0.10)
    untaught = spec.model_copy(update={"teacher": "", "distill_alpha": 0})
    alone = memory_of(untaught, shape, Layout((1,)), RowStats.full(spec))
    assert memory.total - alone.total == memory.teacher > teacher_weights(spec) > 4 * 10**6


@pytest.mark.parametrize("fields", table("plan")["the_memory_of_pairs_is_within"], ids=["dpo", "checkpoints", "orpo"])
def test_the_memory_of_pairs_is_within_10_percent_of_the_measured_peak(fields: dict[str, Any]) -> None:
    """The pass of the reference needs no more than the backward pass."""
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 2, "vocab_size": 2048}
    config = AutoConfig.for_model("llama", hidden_size=192, intermediate_size=512, num_hidden_layers=2, **sizes)
    common = {"model": "x", "method": "dpo", "dataset": "x.jsonl", "seq_length": 128, "batch_size": 2}
    spec = make_spec(common | fields, "here")
    measured, shape = live_peak(spec, config)
    planned = memory_of(method_of(spec).as_rows(spec), shape, Layout((1,)), RowStats.full(spec)).total
    assert planned == pytest.approx(measured, rel=0.10)


def test_a_teacher_takes_time_and_is_named_by_the_plan(model_folder: Path, tmp_path: Path) -> None:
    hosts: list[dict[str, Any]] = [{"host": "a", "processes": 1}]
    common = {"model": str(model_folder), "seq_length": 64, "fake_data": True}
    taught = {"teacher": str(model_folder), "distill_alpha": 0.5}
    plain, found = (
        plan(make_spec(common | fields, "here"), hosts, None, fast=True, data_dir=tmp_path) for fields in ({}, taught)
    )
    # The student computes two passes and those of its adapters, the teacher one.
    assert 1.2 < found["speed"]["part"] / plain["speed"]["part"] < 1.6
    assert any(line.startswith(f"teacher {model_folder}: 0.") for line in found["lines"])
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    spec = make_spec(common | taught | {"teacher": str(tmp_path)}, "here")
    with pytest.raises(UserError, match="teacher: the planner does not support mamba"):
        plan(spec, hosts, None, fast=True, data_dir=tmp_path)
    assert choose(spec, [{"processes": 1, "threads": 1, "gpu_mib": 0, "memory_mib": 0}])[0] == "ddp"


def process_peak(folder: Path, model_folder: Path, sizes: dict[str, int], fields: dict[str, Any]) -> tuple[int, int]:
    """Train three steps in a separate process with tcmalloc, as train.yml does. Return the peak resident set and the plan."""
    llama(folder, model_folder, **sizes)
    fields = {"fake_data": True} | fields
    about = {"model": str(folder), "dataset": "none", "steps": 3, "fields": fields}
    done = subprocess.run(
        [sys.executable, str(TOP / "benchmarks/speed_one.py"), "trainyard", json.dumps([about])],
        env=os.environ | {"PYTHONPATH": str(TOP), "LD_PRELOAD": allocator(), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    spec = make_spec({"model": about["model"]} | fields, "here")
    planned = memory_of(spec, shape_of(spec), Layout((1,)), RowStats.full(spec)).total
    return round(json.loads(done.stdout.strip().splitlines()[-1])[0]["peak_mib"] * 2**20), planned


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(
    not allocator(), reason="measuring the resident set needs tcmalloc (apt install libtcmalloc-minimal4)"
)
@pytest.mark.parametrize("fields", [{}, {"lora_r": 0}], ids=str)
def test_memory_is_within_10_percent_of_the_process(fields: dict[str, Any], model_folder: Path, tmp_path: Path) -> None:
    """Compare the peak resident set, less that of a process that trains a minimal model."""
    tiny = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
    least = {"seq_length": 16, "batch_size": 1, "total_batch_size": 1}
    peak, planned = process_peak(tmp_path / "tiny", model_folder, tiny, least | fields)
    base = peak - planned
    assert base == pytest.approx(BASE << 20, rel=0.15)
    sizes = {"hidden_size": 384, "intermediate_size": 1024, "num_attention_heads": 6, "num_hidden_layers": 4}
    rows = {"seq_length": 256, "batch_size": 8, "total_batch_size": 8}
    peak, planned = process_peak(tmp_path / "model", model_folder, sizes, rows | fields)
    assert planned == pytest.approx(peak - base, rel=0.10)


def advice_for(spec: RunSpec, hosts: int, link: float, room: float | None = None) -> tuple[Any, Any]:
    shape, layout = shape_of(spec), Layout((1,) * hosts, (room,) * hosts)
    setting = Setting(shape, layout, RowStats.full(spec), Speed(1.0, 0.0, True), link, gloo=True)
    found = options(spec, setting)
    return {option.strategy: option for option in found}, recommend(spec, found, setting)


def test_bytes_of_a_step() -> None:
    spec = make_spec({"model": "tiny"}, "here")
    shape = shape_of(spec)
    for ranks in (2, 3, 8):
        ring = 2 * (ranks - 1) / ranks
        assert plan_of(spec).comm_bytes(spec, shape, Layout((1,) * ranks), gloo=True) == ring * 4 * shape.trained(spec)
        half = spec.model_copy(update={"comm_dtype": "bf16"})
        assert plan_of(half).comm_bytes(half, shape, Layout((ranks,)), gloo=True) == ring * 2 * shape.trained(spec)
    assert plan_of(spec).comm_bytes(spec, shape, Layout((1,)), gloo=True) == 0


def test_recommendations() -> None:
    spec = make_spec({"model": "tiny"}, "here")
    found, advice = advice_for(spec, 2, 1000)
    assert advice[0] == "ddp" and "it fits" in advice[1] and "alone" not in advice[1]
    assert found["ddp"].tokens_per_second > 1.9 * found["alone"].tokens_per_second
    with pytest.raises(UserError, match=r"plan: .* GiB per process do not fit, .*: try gradient_checkpointing=true"):
        advice_for(spec, 1, 1000, room=10e6)


@pytest.mark.parametrize(
    ("fields", "bytes_per_weight", "fixed"),
    [
        # Weights, gradients, two moments, the copy and momentum of the outer optimizer, the pseudo-gradient; two chunks of it.
        ({"strategy": "diloco"}, 4 + 4 + 8 + 8 + 4, 2 * 4 * CHUNK),
        # Half of weights, gradients and moments; a copy of half of weights and moments.
        ({"strategy": "fsdp"}, 8 + 6, 0),
        # Half of weights, gradients, moments and DeepSpeed's copy; the gathered weights, a tenth of them twice (prefetched);
        # half of the gradients again; and what malloc retains.
        ({"strategy": "deepspeed", "deepspeed_stage": 3}, 10 + 4 + 0.8 + 2 + 0.7 * 4, 0),
    ],
    ids=lambda value: str(value),
)
def test_memory_outside_of_steps(fields: dict[str, Any], bytes_per_weight: float, fixed: int) -> None:
    sizes = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 8, "vocab_size": 32000}
    shape = read_shape(BIG | sizes)
    spec = make_spec({"model": "x", "lora_r": 0, "seq_length": 8, "batch_size": 1} | fields, "here")
    need = memory_of(spec, shape, Layout((1, 1)), RowStats.full(spec))
    # The embedding, the head and three layers.
    gathered = need.weights - shape.parameters * 2 if spec.strategy == "fsdp" else 0
    assert need.outside_step == pytest.approx(shape.parameters * bytes_per_weight + fixed + gathered, rel=0.05)
    assert need.total == max(need.outside_step, sum(need.step.values()))


@pytest.mark.parametrize("fields", [{}, {"lora_r": 0}, {"deepspeed_stage": 1}], ids=str)
def test_memory_of_deepspeed_itself_is_included(fields: dict[str, Any]) -> None:
    spec = make_spec({"model": "x", "strategy": "deepspeed"} | fields, "here")
    shape = read_shape(BIG)
    about = engine_config(spec, shape.trained(spec), shape.parameters)["zero_optimization"]
    need, on_gpu = (memory_of(spec, shape, Layout((1, 1)), RowStats.full(spec), cuda=cuda) for cuda in (False, True))
    assert need.buffers == on_gpu.buffers == 4 * about["reduce_bucket_size"] > 0
    assert need.library == 20 * 2**20 and not on_gpu.library, "GPU memory contains no code of the library"
    plain = spec.model_copy(update={"strategy": "ddp"})
    assert not memory_of(plain, shape, Layout((1, 1)), RowStats.full(spec)).library


# Stage 1: all gradients, and a flat copy of half of them; stage 2: half of them, and two flat copies of these.
@pytest.mark.parametrize("stage", [1, 2])
def test_flat_gradients_of_deepspeed_count_where_they_exceed_activations(stage: int) -> None:
    shape = read_shape(BIG)
    fields = {"model": "x", "strategy": "deepspeed", "deepspeed_stage": stage, "lora_r": 0, "batch_size": 1}
    short, long = (
        memory_of(
            make_spec(fields | {"seq_length": length}, "here"), shape, Layout((1, 1)), RowStats(length, length, 1.0)
        )
        for length in (8, 65536)
    )
    assert short.gradients == pytest.approx(6 * shape.parameters, rel=0.01)
    assert long.gradients == (4 if stage == 1 else 2) * shape.parameters


@given(st.floats(0, 10), st.floats(0.01, 10), st.sampled_from([0, 4, 64]))
def test_overlap_of_ddp(wire: float, part: float, rank: int) -> None:
    spec, shape = make_spec({"model": "x", "lora_r": rank}, "here"), read_shape(BIG)
    backward = part * (1 / 2 if rank else 2 / 3)
    left = plan_of(spec).exposed_seconds(spec, shape, wire, part)
    assert left >= 0 and wire - backward - 1e-9 <= left <= wire + 1e-9
    if shape.trained(spec) * 4 > 2**30:  # many buckets: all but the last overlap with the backward pass
        assert left <= max(wire - backward, 0.0) + 0.03 * (wire + backward)
    if shape.trained(spec) * 4 <= 2**20:
        assert left == pytest.approx(wire)
    assert plan_named("fsdp").exposed_seconds(spec, shape, wire, part) == wire


def test_auto_gives_a_reason() -> None:
    spec = make_spec({"model": "tiny", "strategy": "auto"}, "here")
    host = {"processes": 1, "threads": 2, "gpu_mib": 0, "memory_mib": 8000, "link_mbit": 1000}
    strategy, why = choose(spec, [host] * 3)
    assert strategy == "ddp" and why.startswith("auto selected ddp: it fits, and ")
    assert choose(spec, [host | {"link_mbit": 0}] * 2)[1].endswith("at 1000 Mbit/s (link assumed, not measured)")
    assert "assumed" not in choose(spec, [host])[1]
    of_others = spec.model_copy(update={"local_steps": 5, "fsdp_shard": "gradients"})
    assert choose(of_others, [host] * 3) == ("ddp", f"{why}; without effect then: fsdp_shard, local_steps")
    full = make_spec({"model": "tiny", "lora_r": 0, "strategy": "auto"}, "here")
    strategy, why = choose(full, [host | {"threads": 8, "link_mbit": 10}] * 2)
    assert strategy == "diloco" and "ddp would spend " in why
    with pytest.raises(UserError, match="do not fit"):
        choose(make_spec({"model": "x", "strategy": "auto"}, "here"), [host], read_shape(BIG))


def test_auto_without_a_controller(here: Here) -> None:
    few = {"strategy": "auto", "max_steps": 4, "checkpoint_interval": 2}
    assert here(**few) == 0, here.err
    assert "auto selected ddp: one process, so there is nothing to distribute" in here.out
    assert read_spec(here.run_dir() / "spec.yml", {}, "kept").strategy == "ddp"
    (here.run_dir() / "result.json").unlink()
    assert here(**few) == 0, here.err
    assert "auto: this run started with strategy=ddp" in here.out


def test_the_plan_as_json_and_as_a_table(model_folder: Path, dataset: Path, tmp_path: Path, capsys: Any) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([{"host": "a", "processes": 2, "memory_mib": 8000}, {"host": "b", "ranks": [2, 3]}]))
    flags = [f"--model={model_folder}", f"--dataset={dataset}", "--seq-length=64", f"--data-dir={tmp_path}"]
    assert main(["plan", *flags, f"--hosts={hosts}", "--link-mbit=100", "--json"]) == 0
    made = json.loads(capsys.readouterr().out)
    by = {option["strategy"]: option for option in made["options"]}
    assert {"alone", "ddp"} <= set(by) and by["ddp"]["processes"] == 4 and by["ddp"]["fits"] is True
    assert made["speed"]["measured"] and made["speed"]["part"] > 0
    assert 0 < made["rows"]["trained"] < 1 and made["rows"]["tokens"] <= made["rows"]["places"] <= 64
    assert made["recommended"]["strategy"] in by
    assert main(["plan", "--no-measure", "--hosts", "3"]) == 0
    table = capsys.readouterr().out
    assert "recommended: strategy=" in table and "nominal speed" in table


@pytest.mark.parametrize("others", [[0.0, 1e6], [5.0, 5.0]], ids=["busy", "idle"])
def test_a_measurement_on_a_busy_machine_reports_the_load(
    others: list[float], model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """`others`: CPU seconds of all other processes before and after the measurement."""
    assert report._other_cpu_seconds() > 0
    monkeypatch.setattr(report, "_other_cpu_seconds", iter(others).__next__)
    assert main(["plan", f"--model={model_folder}", "--fake-data=true", "--seq-length=64", "--hosts=2"]) == 0
    output = capsys.readouterr().out
    assert (f" of {os.cpu_count()} cores: it is faster on an idle machine" in output) is (others[1] > others[0])
    assert "?" not in output, "all hosts are taken to have the memory of this one, so it is known what fits"


@pytest.mark.parametrize(("flags", "why"), table("plan")["invalid_flags_of_the_plan"])
def test_invalid_flags_of_the_plan(flags: list[str], why: str, capsys: Any) -> None:
    assert main(["plan", "--no-measure", *flags]) == 2
    assert capsys.readouterr().err.startswith(f"error: {why}")


@pytest.mark.parametrize("wrong", [{"hidden_act": "no_such"}, {"rope_scaling": 5}, {"num_key_value_heads": 3}])
def test_a_model_that_cannot_be_created_is_a_one_line_error(
    wrong: dict[str, Any], model_folder: Path, tmp_path: Path, capsys: Any
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | wrong))
    assert main(["plan", f"--model={folder}", "--fake-data", "--seq-length=32"]) == 2
    [line] = capsys.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("error: model: "), line


def test_hosts_may_be_a_number_or_a_file(tmp_path: Path) -> None:
    assert [host["host"] for host in read_hosts("2")] == ["host1", "host2"]
    for wrong in ('{"a": 1}', "[]"):
        (tmp_path / "x.json").write_text(wrong)
        with pytest.raises(UserError, match="expected a JSON list"):
            read_hosts(str(tmp_path / "x.json"))
    (tmp_path / "x.json").write_text('[{"host": "a"}, {"host": "b", "speed": 0.5}]')
    assert [host["speed"] for host in read_hosts(str(tmp_path / "x.json"))] == [1.0, 0.5]
    for speed in ("0", "-1", "1e9", "NaN", '"fast"'):
        (tmp_path / "x.json").write_text(f'[{{"speed": {speed}}}]')
        with pytest.raises(UserError, match=r"expected a JSON list .*threads, speed\)"):
            read_hosts(str(tmp_path / "x.json"))


def test_processes_share_the_free_memory_of_their_host() -> None:
    assert 0 < available_bytes("cpu", 1000) < available_bytes("cpu", 1) / 500 < own_memory_mib("cpu") * 2**20 / 500


def test_auto_on_the_controller_keeps_the_strategy_of_a_started_run() -> None:
    from trainyard.preflight.host_state import HostState
    from trainyard.run.plan.choose_fields import choose_fields, link_speeds
    from trainyard.wire.connection import Host

    facts: dict[str, Any] = {"spec": None, "gpus": [], "cpus": 4, "memory_mib": 8000, "link_mbit": 1000}
    facts |= {"versions": {}, "compiler": True}
    hosts = [HostState(Host(f"node{n}", "", "/d", "/p"), facts=facts | {"boot_id": f"{n}"}) for n in range(3)]
    spec = make_spec({"model": "tiny", "strategy": "auto"}, "here")
    found, lines = choose_fields(hosts, spec, [])
    assert found.strategy == "ddp" and lines[0].startswith("auto selected ddp: it fits, and ")
    hosts[2].mesh = {"lines": {"node1": {"mbit": 0.5, "latency_ms": 0.3}, "node2": {"latency_ms": 0.1}}}
    found, lines = choose_fields(hosts, spec, [])
    assert found.strategy == "diloco" and " at 0.5 Mbit/s" in lines[0] and lines[0].endswith(" (link measured)")
    hosts[0].facts["link_mbit"] = 10  # ignored: the links to the head were measured
    hosts[2].mesh["lines"]["node1"]["mbit"] = 5000.0  # one TCP stream of a small program: the driver may state more
    hosts[1].facts["link_mbit"] = hosts[2].facts["link_mbit"] = 25000
    assert link_speeds(hosts) == [0.0, 25000.0, 25000.0]
    assert not choose_fields(hosts, spec, [])[1][0].endswith("(link measured)")
    hosts[1].facts["spec"] = make_spec({"model": "tiny", "strategy": "diloco"}, "here").to_yaml()
    found, lines = choose_fields(hosts, spec, [])
    assert found.strategy == "diloco" and lines[0].startswith("auto: this run started with strategy=diloco, ")


def test_auto_excludes_strategies_that_the_spec_does_not_allow() -> None:
    fields = {"model": "tiny", "strategy": "auto", "replica_strategy": "fsdp", "quantize": "nf4"}
    found, _ = advice_for(make_spec(fields, "here"), 2, 0.1)
    assert {"alone", "ddp", "fsdp", "diloco", "averaging", "pipeline"} <= set(found) and "deepspeed" not in found
    found, _ = advice_for(make_spec(fields | {"quantize": "none", "deepspeed_offload": "all"}, "here"), 2, 0.1)
    assert {"alone", "ddp", "fsdp", "diloco", "pipeline", "averaging"} <= set(found) and "deepspeed" not in found


def test_fsdp_gathers_layers_in_16_bits_without_further_copies() -> None:
    config = {"model_type": "llama", "vocab_size": 1000} | SIZES
    shape, layout = read_shape(config), Layout((1, 1))
    fields = {"model": "x", "strategy": "fsdp", "lora_r": 0}
    mixed, plain = (make_spec(fields | {"precision": name}, "here") for name in ("bf16-mixed", "32-true"))
    weights = [memory_of(spec, shape, layout, RowStats.full(mixed)).weights for spec in (mixed, plain)]
    assert weights[0] - weights[1] == 2 * shape.head_parameters


def test_a_last_replica_of_fewer_hosts_needs_the_memory_of_a_smaller_one() -> None:
    shape = read_shape({"model_type": "llama", "vocab_size": 1000} | SIZES)
    fields = {"model": "x", "strategy": "diloco", "replica_strategy": "fsdp", "lora_r": 0}
    pair, alone = (make_spec(fields | {"replica_hosts": hosts}, "here") for hosts in (2, 1))
    rows = RowStats.full(pair)
    for hosts, equal in ((3, True), (4, False)):
        whole, halves = (memory_of(spec, shape, Layout((1,) * hosts), rows).weights for spec in (alone, pair))
        assert halves <= whole and (halves == whole) is equal


def test_an_implausible_number_of_layers_is_refused() -> None:
    with pytest.raises(UserError, match=r"num_hidden_layers: 3000000, expected an integer from 1 to 10000"):
        read_shape({"model_type": "llama", "vocab_size": 1000} | SIZES | {"num_hidden_layers": 3_000_000})
