"""Python files of a model never run, not even after a yes to a question of transformers."""

from __future__ import annotations

import ast
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainer_runs import Here

from trainer.__main__ import main
from trainer.common.errors import UserError
from trainer.model_files.base_weights import load_causal_model
from trainer.models.model import load_tokenizer
from trainyard.remote.digests import Digests
from trainyard.run.types import StagedFile

pytestmark = pytest.mark.slow

TOP = Path(__file__).resolve().parents[3]
LOADERS = {
    f"{name}.{loader}"
    for name in ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM")
    for loader in ("from_pretrained", "from_config")
}
CODE = "import pathlib\npathlib.Path({canary!r}).write_text('ran')\n"
CONFIG = {"AutoConfig": "evil.Evil", "AutoModelForCausalLM": "evil.Evil", "AutoTokenizer": ["evil.Evil", "evil.Evil"]}
# File -> what it gets, in addition to its contents.
EVIL: dict[str, dict[str, dict[str, Any]]] = {
    "config of another type": {"config.json": {"auto_map": CONFIG, "model_type": "evil"}},
    "config of a known type": {"config.json": {"auto_map": CONFIG}},
    "tokenizer": {"tokenizer_config.json": {"auto_map": CONFIG, "tokenizer_class": "Evil"}},
    "generation": {"generation_config.json": {"custom_generate": "evil", "auto_map": CONFIG}},
    "processor": {"processor_config.json": {"auto_map": {"AutoProcessor": "evil.Evil"}, "processor_class": "Evil"}},
}


@pytest.fixture(params=EVIL)
def evil(request: pytest.FixtureRequest, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a model whose Python files leave a canary, with a terminal at which every answer is yes."""
    folder = shutil.copytree(model_folder, tmp_path / "model")
    (folder / "custom_generate").mkdir()
    for name in ("evil.py", "custom_generate/generate.py", "modeling_evil.py"):
        (folder / name).write_text(CODE.format(canary=str(tmp_path / "canary")))
    for name, more in EVIL[request.param].items():
        path = folder / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | more))
    monkeypatch.setattr("builtins.input", lambda *_prompt: "y")
    return folder


def test_no_code_of_a_model_runs(evil: Path, here: Here, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Callable[[], Any]] = [lambda: load_causal_model(str(evil)), lambda: load_tokenizer(str(evil))]
    for call in calls:
        try:
            call()
        except UserError as error:
            assert "\n" not in str(error) and ("never runs here" in str(error) or "cannot load" in str(error))
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text(json.dumps({"text": "one two three"}) + "\n")
    for command in ("data", "plan"):
        main([command, "--model", str(evil), "--dataset", "data.jsonl", "--seq_length", "32"])
    here(model=str(evil), dataset="data.jsonl", seq_length=32, max_steps=1)
    assert not (tmp_path / "canary").exists()
    staged = StagedFile.of_folder(evil, "store/models/m", Digests(tmp_path / "digests"), "model").sha256
    assert "config.json" in staged and not [name for name in staged if name.endswith(".py")]


def test_every_loader_refuses_code() -> None:
    """`from_pretrained` and `from_config` of transformers ask at a terminal, unless they are told."""
    found = 0
    for path in [path for folder in ("trainer", "trainyard") for path in (TOP / folder).rglob("*.py")]:
        for call in [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]:
            if ast.unparse(call.func) in LOADERS:
                found += 1
                given = {word.arg: ast.unparse(word.value) for word in call.keywords}
                assert given.get("trust_remote_code") == "False", f"{path}:{call.lineno}"
    assert found >= 10
