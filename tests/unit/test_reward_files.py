"""Files with rewards on the controller: their check, their place on hosts, and what a start remembers of them."""

from pathlib import Path
from typing import Any

import pytest
from trainer_runs import write_jsonl

from trainer.common.errors import UserError
from trainer.spec import make_spec
from trainyard.queue.new_runs import NewRun
from trainyard.queue.request import QueueOptions
from trainyard.queue.requests import time_limit
from trainyard.run.launch.start_record import _in_folder
from trainyard.run.launch_options import LaunchOptions
from trainyard.run.prepare.spec_files import PreparedRun, prepare


def prepared(folder: Path, reward: str, **fields: Any) -> PreparedRun:
    rows = [{"prompt": f"{number} + 1 =", "answer": str(number + 1)} for number in range(20)]
    dataset = write_jsonl(folder / "sums.jsonl", rows)
    spec = make_spec({"method": "grpo", "dataset": str(dataset), "reward": reward, "seq_length": 64} | fields, "here")
    return prepare(spec, folder / "work", lambda line: None)


def reward_file(folder: Path, name: str = "my reward.py", text: str = "def reward(completions): return []\n") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_files_with_rewards_are_staged_and_named_by_their_content(tmp_path: Path) -> None:
    first, second = reward_file(tmp_path), reward_file(tmp_path, "other.py", "reward_b = print\n")
    run = prepared(tmp_path, f"[{{use: '{first}', weight: 2}}, exact, {{use: '{second}'}}]")
    files = [file for file in run.files if file.kind == "reward"]
    assert [file.dest for file in files] == [
        f"store/rewards/my-reward-{files[0].digest[:12]}.py",
        f"store/rewards/other-{files[1].digest[:12]}.py",
    ]
    there = run.spec_on("/srv/trainyard")
    assert there.reward_files == [f"/srv/trainyard/{file.dest}" for file in files]
    assert [reward.weight for reward in there.reward] == [2, 1, 1] and there.reward[1].use == "exact"
    assert run.data and run.data.samples == 20 and run.data.tokens == 0
    moved = reward_file(tmp_path / "elsewhere")
    again = prepared(tmp_path, f"[{{use: '{moved}', weight: 2}}, exact, {{use: '{second}'}}]")
    assert again.run == run.run  # the same content has the same name
    moved.write_text("def reward(completions): return [1]\n", encoding="utf-8")
    assert prepared(tmp_path, f"[{{use: '{moved}', weight: 2}}, exact, {{use: '{second}'}}]").run != run.run


def test_a_file_without_rewards_is_refused_before_hosts_are_asked(tmp_path: Path) -> None:
    path = reward_file(tmp_path, text="raise SystemExit('this runs')\n")
    with pytest.raises(UserError, match="has no function whose name begins with 'reward'"):
        prepared(tmp_path, str(path))


def test_a_dataset_without_prompts_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "qa.jsonl"
    write_jsonl(path, [{"question": "1 + 1", "answer": "2"}])
    with pytest.raises(UserError, match=r"qa\.jsonl:1: has the keys question, answer; .*: use columns=prompt=question"):
        prepared(tmp_path, "exact", dataset=str(path))
    assert prepared(tmp_path, "exact", dataset=str(path), columns="prompt=question").data


def test_a_start_remembers_where_the_files_were(tmp_path: Path) -> None:
    path = reward_file(tmp_path, "mine.py")
    spec = make_spec({"method": "grpo", "reward": "mine.py:2,exact"}, "the test")
    assert _in_folder(spec, tmp_path).reward_files == [str(path)]
    assert _in_folder(spec, tmp_path / "other").reward_files == ["mine.py"]


def test_completions_have_no_estimate(tmp_path: Path) -> None:
    run = prepared(tmp_path, "exact")
    new = NewRun(QueueOptions(), run.spec, LaunchOptions())
    limit, why = time_limit(new, run, None)  # type: ignore[arg-type]
    assert limit == 0 and "cannot estimate completions and rewards" in why
