"""What the planner recommends, for hardware and models with a known answer."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tables import table
from trainer_runs import TOP

from trainer.__main__ import main
from trainer.config import RunSpec
from trainer.costs.cost import RowStats
from trainer.costs.host_memory import layout_of
from trainer.costs.packing_forecast import packing_text, step_lines, steps_about
from trainer.data.data_report import DataReport
from trainer.model_files.model_shape import Shape, read_shape
from trainer.planner.recommend import Option, Setting, Speed, options, recommend
from trainer.spec import make_spec
from trainer.strategy import plan_named
from trainer.strategy.pipeline import PipelinePlan

LLAMA = {"model_type": "llama", "max_position_embeddings": 8192}


def llama(hidden: int, ff: int, layers: int, heads: int, kv_heads: int, vocabulary: int = 32000, **other: Any) -> Shape:
    sizes = {"hidden_size": hidden, "intermediate_size": ff, "num_hidden_layers": layers, "num_attention_heads": heads}
    return read_shape(LLAMA | sizes | {"num_key_value_heads": kv_heads, "vocab_size": vocabulary} | other)


MODELS = {
    "1B": llama(2048, 8192, 16, 32, 8, 128256, tie_word_embeddings=True),
    "7B": llama(4096, 11008, 32, 32, 32),
    "13B": llama(5120, 13824, 40, 40, 40),
    "70B": llama(8192, 28672, 80, 64, 8),
}
GIB = 1024  # MiB


def gpus(*sizes: float, host: float = 32) -> list[dict[str, Any]]:
    """Return hosts with one GPU each. `sizes`: GiB of the GPUs; `host`: GiB of host memory."""
    return [{"processes": 1, "gpu_mib": size * GIB, "memory_mib": host * GIB, "threads": 8} for size in sizes]


def laptops(count: int, memory: float) -> list[dict[str, Any]]:
    return [{"processes": 1, "gpu_mib": 0, "memory_mib": memory * GIB, "threads": 8}] * count


def setting_of(spec: RunSpec, shape: Shape, hosts: list[dict[str, Any]], link: float) -> Setting:
    device = "cuda" if hosts[0]["gpu_mib"] else "cpu"
    rows = RowStats.full(spec)
    speed = Speed.nominal(spec, shape, rows, device, 8)
    return Setting(shape, layout_of(hosts, device), rows, speed, link, gloo=device == "cpu")


def option_of(spec: RunSpec, setting: Setting) -> Option:
    """Return the cost of the spec as it is."""
    return next(option for option in options(spec, setting) if option.strategy == spec.strategy)


def best(model: str, hosts: list[dict[str, Any]], link: float, fields: dict[str, Any]) -> tuple[str, dict[str, Option]]:
    """Return the strategy for a model on hosts with a link of `link` Mbit/s, and the cost of every one."""
    spec = make_spec({"model": model, "strategy": "auto"} | fields, "here")
    setting = setting_of(spec, MODELS[model], hosts, link)
    found = options(spec, setting)
    return recommend(spec, found, setting)[0], {option.strategy: option for option in found}


HALF = {"precision": "bf16-mixed"}
NF4 = HALF | {"quantize": "nf4"}


def test_7b_lora_on_three_16_gb_gpus_at_1_gbit() -> None:
    """A pipeline of small micro-batches.

    12.6 GiB of weights leave ddp 2 of 14.7 GiB, so that it must compute every activation twice. FSDP sends 2 x 13.5 GB x 2/3 for
    every micro-batch. A pipeline holds 4.2 GiB of weights on a host, and loses 2 of 34 slots while it fills and drains.
    """
    strategy, found = best("7B", gpus(16, 16, 16), 1000, HALF | {"batch_size": 1})
    assert strategy == "pipeline" and found["ddp"].fits is False
    assert found["fsdp"].share > 0.7
    # 32 micro-batches of 1024 tokens x 4096 numbers of 2 bytes, in both directions.
    assert found["pipeline"].comm_bytes == 2 * 32 * 1024 * 4096 * 2
    _, again = best("7B", gpus(16, 16, 16), 1000, HALF | {"batch_size": 1, "gradient_checkpointing": True})
    assert again["ddp"].fits and 1.2 < found["pipeline"].tokens_per_second / again["ddp"].tokens_per_second < 1.6


def test_13b_lora_on_unlike_gpus() -> None:
    """All ranks share the time, so the layers are divided evenly as far as memory permits."""
    fields = HALF | {"gradient_checkpointing": True, "batch_size": 1}
    spec = make_spec({"model": "x", "strategy": "pipeline"} | fields, "here")
    plan, shape = PipelinePlan(), MODELS["13B"]
    for last, expected in ((12, [14, 13, 13]), (8, [15, 15, 10])):
        setting = setting_of(spec, shape, gpus(24, 16, last), 1000)
        assert plan.layers(spec, shape, setting.layout, setting.rows, cuda=True) == expected
        assert option_of(spec, setting).fits
    assert best("13B", gpus(24, 16, 12), 1000, fields)[0] == "pipeline"


def test_70b_lora_on_four_22_gb_gpus() -> None:
    """A pipeline with nf4: 20 layers of 0.41 GiB on every host, where 131 GiB in bfloat16 exceed all GPUs together."""
    fields = NF4 | {"batch_size": 1, "gradient_checkpointing": True}
    strategy, found = best("70B", gpus(22, 22, 22, 22), 1000, fields)
    assert strategy == "pipeline" and found["pipeline"].fits and found["pipeline"].share < 0.1
    spec = make_spec({"model": "x", "strategy": "pipeline"} | fields, "here")
    setting = setting_of(spec, MODELS["70B"], gpus(22, 22, 22, 22), 1000)
    assert PipelinePlan().layers(spec, MODELS["70B"], setting.layout, setting.rows, cuda=True) == [20, 20, 20, 20]


def test_unlike_hosts_get_unlike_shares() -> None:
    """Two hosts, the second of half the speed: twice the layers on the first make a step 1.4 times as fast as halves."""
    spec, shape, plan = make_spec({"model": "x", "strategy": "pipeline"} | NF4, "here"), MODELS["7B"], PipelinePlan()
    hosts = gpus(80, 80)
    hosts[1]["speed"] = 0.5
    setting = setting_of(spec, shape, hosts, 1000)
    assert setting.layout.speeds == (1.0, 0.5)
    layers = plan.layers(spec, shape, setting.layout, setting.rows, cuda=True)
    assert sum(layers) == 32 and layers[0] == pytest.approx(2 * layers[1], abs=3)

    def seconds(**fields: Any) -> float:
        changed = spec.model_copy(update=fields)
        return plan.step_seconds(changed, shape, setting.layout, setting.rows, 1.0, 0.0, 0.0)[0]

    assert 1.35 < seconds(pipeline_layers="16,16") / seconds() < 1.5
    # ddp and diloco share the rows by speed, unless they are even.
    few = make_spec({"model": "x", "batch_size": 1, "total_batch_size": 12}, "here")
    shared = (("ddp", "auto", 8), ("ddp", "even", 12), ("diloco", "auto", 8), ("fsdp", "auto", 12))
    for strategy, balance, expected in shared:
        each = few.model_copy(update={"strategy": strategy, "balance": balance})
        found = plan_named(strategy).step_seconds(each, shape, setting.layout, setting.rows, 1.0, 0.0, 0.0)
        assert found[0] == expected, strategy


def test_1b_full_weights_on_laptops_over_wi_fi() -> None:
    """A pipeline with 16 GB: weights, gradients and moments need 18.4 GiB, which only sharding divides, and FSDP sends 27 GB a step.

    With 64 GB, diloco at 5 Mbit/s, where the transfer of hidden states takes too long, too.
    """
    few = {"lora_r": 0, "batch_size": 1, "gradient_checkpointing": True}
    strategy, found = best("1B", laptops(3, 16), 50, few)
    assert strategy == "pipeline" and found["diloco"].fits is False and found["ddp"].fits is False
    strategy, found = best("1B", laptops(3, 64), 50, few)
    assert found["diloco"].tokens_per_second > 2.5 * found["ddp"].tokens_per_second
    assert best("1B", laptops(3, 64), 2, few | {"local_steps": 100})[0] == "diloco"


@pytest.mark.parametrize(
    ("model", "hosts", "link", "fields", "strategy"),
    [
        # "the model fits on every device, and the network is fast"
        ("1B", gpus(24, 24), 1000, HALF, "ddp"),
        # "the model does not fit on one device": two GPUs of one host, where no network limits
        ("7B", [gpus(16)[0] | {"processes": 2}], 1000, HALF | {"batch_size": 4, "gradient_checkpointing": True}, "fsdp"),
        # "the model fits on no single host, and the network is slow"
        ("13B", gpus(16, 16, 16), 1000, HALF | {"batch_size": 1, "gradient_checkpointing": True}, "pipeline"),
        # "the model fits on every host, and the network is slow"
        ("1B", gpus(24, 24), 20, HALF | {"lora_r": 0, "optimizer": "adamw8bit", "batch_size": 2}, "diloco"),
    ],
    ids=["ddp", "fsdp", "pipeline", "diloco"],
)  # fmt: skip
def test_the_table_of_the_documentation(
    model: str, hosts: list[dict[str, Any]], link: float, fields: dict[str, Any], strategy: str
) -> None:
    """Compare with the first four rows of "Choose a strategy" in docs/strategies.md."""
    assert best(model, hosts, link, fields)[0] == strategy


def test_offload_needs_the_memory_of_the_host() -> None:
    """Full weights of 1B on GPUs of 8 GB: with ZeRO, moments travel to host memory only if it is large enough."""
    fields = {"model": "x", "strategy": "deepspeed", "lora_r": 0, "deepspeed_offload": "optimizer"}
    spec = make_spec(fields | HALF, "here")
    shape, plan = MODELS["1B"], plan_named("deepspeed")
    for size, fits in ((4, False), (64, True), (0, None)):
        setting = setting_of(spec, shape, gpus(80, 80, host=size), 1000)
        assert option_of(spec, setting).fits is fits
    # Two moments and DeepSpeed's copy of half of the weights.
    assert plan.host_memory(spec, shape, setting.layout) == pytest.approx(shape.parameters * 12 / 2, rel=0.01)
    assert plan.offload_seconds(spec, shape, setting.layout) > 0


def test_layers_that_stay_gathered_trade_memory_for_traffic() -> None:
    """SHARD_GRAD_OP gathers every layer once instead of twice. 7B in bfloat16: 12.4 GiB of layers stay."""
    spec = make_spec({"model": "x", "strategy": "fsdp", "batch_size": 1} | HALF, "here")
    keeps = spec.model_copy(update={"fsdp_shard": "gradients"})
    shape, layout, plan = MODELS["7B"], layout_of(gpus(16, 16), "cuda"), plan_named("fsdp")
    memory = [plan.memory(each, shape, layout, RowStats.full(each), cuda=True).total for each in (spec, keeps)]
    assert memory[1] - memory[0] == shape.layers * shape.layer_parameters * 2
    sent = [plan.comm_bytes(each, shape, layout, gloo=False) for each in (spec, keeps)]
    assert 0.5 < sent[1] / sent[0] < 0.55


def test_the_plan_prints_the_strategy_that_auto_takes(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {
        "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000,
    }))  # fmt: skip
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([{"host": name, "gpu_mib": 16384} for name in "abc"]))
    flags = [f"--model={tmp_path}", "--precision=bf16-mixed", "--batch-size=1", "--gradient-checkpointing=false"]
    flags += ["--strategy=auto", f"--hosts={hosts}", "--link-mbit=1000", "--no-measure"]
    assert main(["plan", *flags]) == 0
    out = capsys.readouterr().out
    why = "the full model does not fit in one process; divided, it fits, and "
    assert f"recommended: strategy=pipeline: {why}" in out and f"auto selected pipeline: {why}" in out
    assert main(["plan", *flags, "--json"]) == 0
    made = json.loads(capsys.readouterr().out)["recommended"]
    assert made["strategy"] == "pipeline" and made["why"].startswith(why)


def test_plans_need_no_torch(tmp_path: Path) -> None:
    code = "import sys; sys.modules['torch'] = None; from trainer.__main__ import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", code, "plan", "--no-measure", "--hosts=3"]
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "recommended: strategy=ddp: " in done.stdout, done.stderr


# Packing, told from the architecture ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "packing", "text"), table("packing_text")["text_of_an_architecture"])
def test_text_of_an_architecture(kind: str, packing: str, text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert packing_text(make_spec({"model": str(tmp_path), "packing": packing}, "")) == text


def test_models_without_a_config() -> None:
    assert packing_text(make_spec({}, "")) == "packed (several samples share a row of 256 tokens)"  # tiny
    unknown = packing_text(make_spec({"model": "/no/such/folder"}, ""))
    assert unknown == "packed if the model keeps the samples of a row apart, which the ranks test"


def test_the_plan_says_how_many_steps_there_are() -> None:
    """57 short samples in 9 packed rows: 20 epochs are 6 steps. A number that was asked for has no warning."""

    def spec(**fields: object) -> RunSpec:
        return make_spec({"model": "/no/such/folder", **fields}, "")

    few = step_lines(spec(epochs=20), 57, 9)
    assert few[0] == "steps: 6 of 32 rows (190 samples a step); epochs: 20 of 57 samples" and "WARNING: 6 opt" in few[1]
    [line, note] = step_lines(spec(epochs=3, max_steps=100, total_batch_size=5), 10, 10)
    assert line == "steps: 100 of 5 rows (5 samples a step); epochs: 50 of 10 samples"
    assert note == "note: max_steps=100 decides, and repeats the data: epochs=3 has no effect"
    assert len(step_lines(spec(epochs=99), 57, 9)) == 1
    data = DataReport(100, kept_tokens=64_000, dropped={"empty": 20})
    [about] = steps_about(spec(packing=False, eval_split=0.5, total_batch_size=2), data)
    assert about == "steps: about 20 of 2 rows (2 samples a step); epochs: 1 of 40 samples"
