"""The student and the teacher of a run on the controller: what is staged, and which teachers are refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from trainer_fixtures import dataset, model_folder

from trainer.common.errors import UserError
from trainer.spec import make_spec
from trainyard.deploy.trained_run import read_tokens
from trainyard.run.plan.choose_fields import spec_here
from trainyard.run.prepare.data import show_data
from trainyard.run.prepare.model_files import fit_to_models
from trainyard.run.prepare.spec_files import prepare
from trainyard.run.types import PreparedRun, StagedFile

__all__ = ["dataset", "model_folder"]


def prepared(folder: Path, **fields: Any) -> PreparedRun:
    return prepare(make_spec({name: str(value) for name, value in fields.items()}, "-e"), folder, lambda line: None)


def copy_of(model: Path, folder: Path, **changes: str) -> Path:
    """Return a copy of a model whose tokenizer.json has these tokens in place of others."""
    shutil.copytree(model, folder)
    text = (folder / "tokenizer.json").read_text()
    for old, new in changes.items():
        text = text.replace(f'"<|{old}|>"', f'"<|{new}|>"')
    (folder / "tokenizer.json").write_text(text)
    return folder


def test_the_teacher_is_staged_like_the_model(model_folder: Path, dataset: Path, tmp_path: Path) -> None:
    teacher = copy_of(model_folder, tmp_path / "big")
    (teacher / "extra.json").write_text("{}")
    common = {"model": model_folder, "dataset": dataset, "distill_alpha": 0.5}
    made = prepared(tmp_path, teacher=teacher, **common)
    kinds = {file.kind: file for file in made.files}
    assert set(kinds) == {"dataset", "model", "teacher", "trainer"}
    assert kinds["teacher"].src == str(teacher) and "model.safetensors" in kinds["teacher"].sha256
    assert made.origin["teacher"] == str(teacher) and made.origin["teacher_sha256"] == kinds["teacher"].digest
    spec = made.spec_on("/data")
    assert spec.teacher == f"/data/{kinds['teacher'].dest}" != spec.model == f"/data/{kinds['model'].dest}"
    with spec_here(made.spec, made.files) as here:
        assert (here.model, here.teacher) == (str(model_folder), str(teacher))
    # The name of the run depends on the contents of the teacher.
    assert prepared(tmp_path, teacher=copy_of(teacher, tmp_path / "same"), **common).run == made.run
    (tmp_path / "same" / "extra.json").write_text("[]")
    assert prepared(tmp_path, teacher=tmp_path / "same", **common).run != made.run
    assert prepared(tmp_path, model=model_folder, dataset=dataset).spec.teacher == ""


def test_added_tokens_belong_to_the_vocabulary(model_folder: Path, dataset: Path, tmp_path: Path) -> None:
    teacher = copy_of(model_folder, tmp_path / "more")
    parsed = json.loads((teacher / "tokenizer.json").read_text())
    tokens = read_tokens(teacher)
    parsed["added_tokens"].append(parsed["added_tokens"][0] | {"id": len(tokens), "content": "<|more|>"})
    (teacher / "tokenizer.json").write_text(json.dumps(parsed))
    assert tokens and read_tokens(teacher) == [*tokens, "<|more|>"]
    with pytest.raises(UserError, match="has another vocabulary than"):
        prepared(tmp_path, model=model_folder, teacher=teacher, dataset=dataset, distill_alpha=1)


def test_a_model_that_teaches_itself_is_copied_once(model_folder: Path, dataset: Path, tmp_path: Path) -> None:
    made = prepared(tmp_path, model=model_folder, teacher=model_folder, dataset=dataset, distill_alpha=1)
    model, teacher = (file for file in made.files if file.kind in ("model", "teacher"))
    assert model.dest == teacher.dest and (model.bytes > 0) == (teacher.bytes == 0)


def described(kind: str, src: str = "", config: str = "") -> StagedFile:
    return StagedFile(kind, src, "store/models/m", {}, "", 0, config=config)


def test_a_teacher_on_the_hosts_is_described_by_its_config(model_folder: Path) -> None:
    config = (model_folder / "config.json").read_text()
    spec = make_spec({"model": str(model_folder), "teacher": "host:/t", "distill_alpha": 1}, "-e")
    files = [described("model", str(model_folder)), described("teacher", config=config)]
    with spec_here(spec, files) as here:
        assert json.loads((Path(here.teacher) / "config.json").read_text()) == json.loads(config)
        assert here.model == str(model_folder)


def test_an_unusable_teacher_is_refused_before_a_host_is_asked(
    model_folder: Path, dataset: Path, tmp_path: Path
) -> None:
    bare = copy_of(model_folder, tmp_path / "bare")
    (bare / "model.safetensors").write_bytes(b"damaged")
    empty = tmp_path / "empty"
    empty.mkdir()
    for teacher, why in (
        (copy_of(model_folder, tmp_path / "other", end="stop"), "has another vocabulary than"),
        (bare, "teacher: .* is damaged"),
        (empty, "teacher: .* has no config.json"),
        (tmp_path / "none", "teacher: no such folder: .*: set .*a local model folder"),
        ("host:/folder", "teacher: host:/path needs hosts"),
    ):
        with pytest.raises(UserError, match=why) as caught:
            prepared(tmp_path, model=model_folder, teacher=teacher, dataset=dataset, distill_alpha=0.5)
        assert "\n" not in str(caught.value)


def test_what_a_model_does_not_permit_is_found_before_a_rank_starts(
    model_folder: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((model_folder / "config.json").read_text())
    positions = config["max_position_embeddings"]
    common = {"model": model_folder, "dataset": dataset}
    for fields in ({}, {"seq_length": "auto"}):
        made = prepared(tmp_path, **common, **fields)
        assert made.spec.seq_length == min(1024, positions)
    message = rf"^seq_length: .* has {positions} positions, got {2 * positions}: set seq_length={positions}$"
    with pytest.raises(UserError, match=message):
        prepared(tmp_path, seq_length=2 * positions, **common)
    with pytest.raises(UserError, match=message):
        show_data(
            make_spec({name: str(value) for name, value in common.items()} | {"seq_length": 2 * positions}, "-e"),
            1,
            False,
            tmp_path,
            print,
        )
    stored = [described("model", config=json.dumps(config | {"quantization_config": {"quant_method": "gptq"}}))]
    for fields, word in (({"lora_r": 0}, "lora_r=0"), ({"merge": True}, "merge=true")):
        with pytest.raises(
            UserError, match=f"^model: the weights of .* are stored quantized, which {word} cannot write: "
        ):
            fit_to_models(make_spec(fields | {"seq_length": 8}, "-e"), stored)
    fit_to_models(make_spec({"seq_length": 8}, "-e"), stored)


@pytest.mark.parametrize("where", ["src", "config"])
def test_lora_targets_are_checked_before_a_start(where: str, model_folder: Path, dataset: Path, tmp_path: Path) -> None:
    common = {"model": model_folder, "dataset": dataset}
    config = (model_folder / "config.json").read_text()
    model = described("model", str(model_folder)) if where == "src" else described("model", config=config)
    for targets in ("all-linear", "q_proj,model.layers.0.mlp.up_proj,lm_head,embed_tokens"):
        prepared(tmp_path, lora_targets=targets, **common)
        fit_to_models(make_spec({"lora_targets": targets, "seq_length": 8}, "-e"), [model])
    refused = make_spec({"lora_targets": "q_proj,v_porj"}, "-e")
    with pytest.raises(UserError, match=r"^lora_targets: v_porj: no layer of .*: down_proj, embed_tokens, gate"):
        fit_to_models(refused, [model])
    with pytest.raises(UserError, match=r"^lora_targets: v_porj: no layer of "):
        prepared(tmp_path, lora_targets="q_proj,v_porj", **common)
    fit_to_models(refused, [described("model", config='{"model_type": "mamba"}')])
    prepared(tmp_path, lora_targets="q_proj,v_porj", lora_r=0, **common)
