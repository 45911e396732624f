"""Runs whose students learn from the token probabilities of a teacher."""

from __future__ import annotations

import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from tables import table
from trainer_runs import WORDS, Cluster, Here, undo_end, write_jsonl

from trainer.spec import make_spec

FEW = {"max_steps": 6, "eval_split": 0.1}


# A teacher model ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def teacher(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """Another model than the student, with its tokenizer and a vocabulary that is padded."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("teacher")
    known = LlamaConfig.from_pretrained(model_folder)
    torch.manual_seed(9)
    sizes = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": known.vocab_size + 8}
    LlamaForCausalLM(LlamaConfig(**(known.to_dict() | sizes | {"head_dim": 12}))).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, folder / name)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields", table("distillation_runs")["a_teacher_model_changes_the_loss_and_not_its_evaluation"], ids=str
)
def test_a_teacher_model_changes_the_loss_and_not_its_evaluation(
    fields: dict[str, Any], here: Here, teacher: Path
) -> None:
    common = {"eval_start": True, **FEW, **{name: fields[name] for name in ("lora_r", "packing") if name in fields}}
    assert here("text", **common) == 0, here.err
    assert here("kl", teacher=teacher, **(common | fields)) == 0, here.err
    assert here.losses("kl")[0] != here.losses("text")[0]
    assert here.result("kl")["eval_loss_first"] == pytest.approx(here.result("text")["eval_loss_first"], rel=1e-3)
    # Every token with loss of the dataset still counts once.
    assert here.result("kl")["trained_tokens"] == here.result("text")["trained_tokens"]


@pytest.mark.slow
def test_micro_batches_and_a_resume_do_not_change_the_losses(here: Here, teacher: Path) -> None:
    """The run that resumes has lost everything after its checkpoint at step 4."""
    fields = {"teacher": teacher, "gkd_beta": 0.3, "distill_alpha": 0.7, "checkpoint_interval": 2, **FEW}
    for size in (1, 4):
        assert here(f"b{size}", batch_size=size, **fields) == 0, here.err
    straight = here.losses("b1")
    assert here.losses("b4") == pytest.approx(straight, abs=1e-5)
    undo_end(here.run_dir("b1"))
    assert here("b1", batch_size=1, **fields) == 0, here.err
    assert "resuming from step 4" in here.out and here.losses("b1") == straight


def test_an_unusable_teacher_is_one_line(here: Here, teacher: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    changed = (other / "tokenizer.json").read_text().replace('"<|end|>"', '"<|stop|>"')
    (other / "tokenizer.json").write_text(changed)
    bare = tmp_path / "bare"
    shutil.copytree(teacher, bare)
    (bare / "model.safetensors").write_bytes(b"damaged")
    for folder, why in (
        (other, "has another vocabulary than"),
        (bare, "teacher: cannot load"),
        (tmp_path / "none", "teacher: no such folder"),
    ):
        assert here(teacher=folder, distill_alpha=0.5, **FEW) == 1
        assert why in here.error
    assert here(teacher=teacher, distill_alpha=0.5, seq_length=1024, **FEW) == 1
    assert "512 positions" in here.error


@pytest.mark.slow
@pytest.mark.parametrize(
    "strategy",
    ["ddp", *(pytest.param(one, marks=pytest.mark.long) for one in ("diloco", "averaging", "fsdp", "deepspeed"))],
)
def test_ranks_agree_with_a_teacher(strategy: str, cluster: Cluster, teacher: Path) -> None:
    if strategy == "deepspeed":
        pytest.importorskip("deepspeed")
    fields = {"teacher": teacher, "distill_alpha": 0.8, "gkd_beta": 0.5, "max_steps": 6, "balance": "even"}
    of_diloco = {"local_steps": 3} if strategy == "diloco" else {}
    found = cluster.run(2, run="two", strategy=strategy, **of_diloco, **fields)
    assert len(found) == 6 and all(map(math.isfinite, found))
    if strategy in ("ddp", "fsdp", "deepspeed"):
        assert cluster.run(1, run="one", **fields) == pytest.approx(found, abs=2e-5)


# What it is for ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def trained_teacher(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    """A model with the student's tokenizer, trained on the text: answers that follow from the instruction by a noisy
    rule."""
    import torch
    from transformers import AutoModelForCausalLM

    from trainer.data.encode import encoded_dataset
    from trainer.data.packing import collate
    from trainer.method.module_with_loss import ModelWithLoss
    from trainer.models.model import load_tokenizer

    folder = tmp_path_factory.mktemp("trained")
    spec = make_spec({"model": str(model_folder), "dataset": str(chain(folder, 600, seed=5)), "seq_length": 64}, "test")
    corpus = encoded_dataset(spec, load_tokenizer(str(model_folder)), folder)
    module = ModelWithLoss(AutoModelForCausalLM.from_pretrained(model_folder))
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    torch.manual_seed(1)
    for _ in range(300):
        rows = [[int(index)] for index in torch.randint(0, len(corpus), (16,))]
        batch = [torch.from_numpy(array) for array in collate(corpus, rows, pad=2, length=None)]
        (module(*batch) / 100).backward()
        optimizer.step()
        optimizer.zero_grad()
    module.model.save_pretrained(folder)  # type: ignore[operator]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model_folder / name, folder / name)
    return folder


def chain(folder: Path, count: int, seed: int) -> Path:
    """Write a dataset whose words follow a Markov chain with three successors of each word."""
    draw = random.Random(seed)

    def words() -> str:
        made = [draw.randrange(len(WORDS))]
        for _ in range(11):
            made.append((made[-1] * 7 + draw.choice((1, 4, 9))) % len(WORDS))
        return " ".join(WORDS[word] for word in made)

    return write_jsonl(folder / "chain.jsonl", [{"instruction": "go", "output": words()} for _ in range(count)])


@pytest.mark.slow
def test_a_student_of_a_teacher_beats_a_student_of_the_text_at_equal_steps(
    here: Here, trained_teacher: Path, tmp_path: Path
) -> None:
    """Both students see few samples often, and are evaluated by the cross entropy of samples that none has seen."""
    fields = {"dataset": chain(tmp_path, 60, seed=6), "eval_split": 0.5, "epochs": 1000, "max_steps": 120, "lora_r": 0}
    fields |= {"lr": 3e-3, "total_batch_size": 8, "batch_size": 8, "packing": False, "checkpoint_interval": 0}
    assert here("text", **fields) == 0, here.err
    text = here.result("text")["eval_loss"]
    taught = fields | {"teacher": trained_teacher, "distill_alpha": 1}
    for run, more in (("kl", {}), ("gkd", {"gkd_beta": 0.5})):
        assert here(run, **taught, **more) == 0, here.err
        loss = here.result(run)["eval_loss"]
        print(f"held-out loss: text {text:.4f}, {run} {loss:.4f}")
        assert loss < 0.95 * text
