"""Rewards: built-in ones, files of the user, and what stops a file that does not behave."""

import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import TypeAdapter
from tables import table

from trainer.common.errors import UserError
from trainer.config.json_schema import matches, schema_error
from trainer.config.reward_source import Rewards, RewardSource, check_columns, rewards_error, with_reward_paths
from trainer.rewards import reward_process
from trainer.rewards.built_in import answer_of, built_in, text_of
from trainer.rewards.reward_file import check_reward_file
from trainer.rewards.reward_process import RewardBatch, RewardProcess, total
from trainer.spec import changed_fields, make_spec
from trainer.supervise.processes import is_running

ENTRIES: TypeAdapter[tuple[RewardSource, ...]] = TypeAdapter(Rewards)


def sources(value: Any) -> tuple[RewardSource, ...]:
    return ENTRIES.validate_python(value)


def rate(entry: Any, completions: list[Any], **columns: list[Any]) -> list[float | None]:
    (source,) = sources([entry])
    assert not rewards_error([source])
    reward = built_in(source.model_dump(mode="json"))
    return reward(completions=completions, prompts=["?"] * len(completions), **columns)


# The field of the spec ---------------------------------------------------------------------------------------------------


def test_rewards_as_words_and_as_mappings() -> None:
    assert sources("exact,length:0.1") == sources([{"use": "exact"}, {"use": "length", "weight": 0.1}])
    assert sources("my_reward.py") == sources({"use": "my_reward.py"}) == sources("[my_reward.py]")
    assert sources("a.py:-2")[0].weight == -2 and sources("a.py:-2")[0].is_file
    assert sources("[{use: regex, pattern: 'a,b:1'}]")[0].pattern == "a,b:1"
    assert [one.use for one in with_reward_paths(sources("exact,a.py,b.py"), ["x.py", "y.py"])] == [
        "exact",
        "x.py",
        "y.py",
    ]


@pytest.mark.parametrize(("value", "reason"), table("rewards")["rewards_that_are_refused"])
def test_rewards_that_are_refused(value: Any, reason: str) -> None:
    assert reason in rewards_error(sources(value))


def test_a_reward_that_is_unknown() -> None:
    with pytest.raises(UserError, match=r"reward: expected Python files \(NAME.py\) and built-in .*, got 'exakt'"):
        make_spec({"method": "grpo", "reward": "exakt"}, "test")


# The built-in rewards ----------------------------------------------------------------------------------------------------


def test_exact_answers() -> None:
    texts = ["4", " 4.0 ", "five", "<think>2+2=5?</think>4", "<answer>3</answer> no <answer>4</answer>", "4 apples"]
    assert rate("exact", texts, answer=[4, "4", "four", "4", "4", "4"]) == [1, 1, 0, 1, 1, 0]
    assert rate({"use": "exact", "column": "solution"}, ["1,000", "yes"], solution=["1000", None]) == [1, None]
    assert rate("exact", ["nan", "Infinity"], answer=["NaN", "inf"]) == [0, 0]
    same = [("1,5", "15"), ("1,000", "1000"), ("-5", "5"), ("\u22125", "-5"), ("\uff15", "5"), ("1\u202f000", "1000")]
    same += [("10\u00b2", "102"), ("1_0", "10"), ("1.50", "1.5"), ("0,500", "500"), ("1,000.5", "1000.5")]
    said, right = zip(*same, strict=True)
    assert rate("exact", list(said), answer=list(right)) == [0, 1, 0, 1, 1, 1, 0, 0, 1, 0, 1]
    chat = [[{"role": "assistant", "content": "<answer>7</answer>"}]]
    assert rate("exact", chat, answer=["7"]) == [1] and text_of(chat[0]) == "<answer>7</answer>"
    assert answer_of("x") == "x"


def test_patterns_and_lengths() -> None:
    assert rate({"use": "regex", "pattern": "^[A-Z]"}, ["Yes", "no"]) == [1, 0]
    assert rate({"use": "length", "limit": 10}, ["x" * n for n in (0, 10, 15, 20, 99)]) == [1, 1, 0.5, 0, 0]


def test_the_format_is_that_of_trl() -> None:
    from trl.rewards import think_format_reward

    texts = table("rewards")["thoughts"]
    wanted = think_format_reward([[{"role": "assistant", "content": text}] for text in texts])
    assert rate("format", texts) == wanted and {*wanted} == {0, 1}


def test_reasoning_whose_opening_is_in_the_prompt() -> None:
    """A template such as DeepSeek-R1's begins the answer with it. Other templates have other marks."""
    well_formed, twice = "2+2.\n</think>\n4", "<think>2+2</think>4"
    assert built_in({"use": "format"})([well_formed, twice]) == [1, 1], "the prompts are not known"
    for end, wanted in (("<think>\n", [1, 0]), ("assistant\n", [0, 1])):
        found = built_in({"use": "format"})([well_formed, twice], prompts=[end, end])
        assert found == wanted, end
    assert built_in({"use": "format"})(["a[/THINK]b", "a</think>b"], prompts=["[THINK]"] * 2) == [1, 0]
    texts, ends = ["4", "2+2</think>4", "[THINK]5[/THINK]4", "<think>4"], ["<think>", "<think>", "x", "x"]
    assert built_in({"use": "exact", "column": ""})(texts, prompts=ends, answer=[4] * 4) == [0, 1, 1, 0]


def test_json_and_its_schema() -> None:
    schema = table("rewards")["schema"]
    texts = [*table("rewards")["json_texts"], "[" * 100_000]
    assert rate({"use": "json", "json_schema": schema}, texts) == [1, 1, 0, 0, 0, 0, 0, 0]
    assert rate("json", ["[1]", "no"]) == [1, 0]


def test_schemas_by_hand() -> None:
    cases: list[tuple[Any, Any, bool]] = table("rewards")["cases"]
    for value, schema, wanted in cases:
        assert not schema_error(schema) and matches(value, schema) is wanted, (value, schema)
    deep: dict[str, Any] = {}
    for _ in range(40):
        deep = {"items": deep}
    assert "at most 32 levels" in schema_error(deep)


# Files -------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., RewardProcess]]:
    processes: list[RewardProcess] = []

    def start(text: str, columns: tuple[str, ...] = ("answer",), seconds: float = 20, more: str = "") -> RewardProcess:
        path = tmp_path / "mine.py"
        path.write_text(text, encoding="utf-8")
        processes.append(RewardProcess(sources(f"{path}{more}"), columns, seconds))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


ROLLOUTS = RewardBatch(["2+2=", "3+3="], ["4", "seven"], [[5], [6, 7]], {"answer": ["4", "6"]}, 3, 10)

GOOD = table("rewards")["good"]


def test_a_file_and_built_in_rewards(make: Callable[..., RewardProcess]) -> None:
    process = make(GOOD, more=":0.5,exact")
    assert [[each.name, each.file, each.weight] for each in process.functions] == table("rewards")["a_file_and_built"]
    parts = process(ROLLOUTS)
    np.testing.assert_array_equal(parts, [[2, math.nan, 3, 1], [0, 2, 10, 0]])
    assert total(parts, [each.weight for each in process.functions]).tolist() == [1 + 1.5 + 1, 2 * 0.5 + 10 * 0.5]
    assert np.isnan(total(np.full((1, 2), math.nan), [1, 1])).all()
    np.testing.assert_array_equal(process(ROLLOUTS), parts)


REFUSED = table("bad_rewards")


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_reward_that_does_not_behave_is_stopped_with_one_line(name: str, make: Callable[..., RewardProcess]) -> None:
    body, reason = REFUSED[name]
    process = make(f"def reward_bad(prompts, completions, **_):\n '''Bad.'''\n {body}\n", seconds=3)
    started = time.monotonic()
    with pytest.raises(UserError) as caught:
        process(ROLLOUTS)
    assert time.monotonic() - started < 12
    assert reason in str(caught.value) and str(caught.value).startswith("reward: ") and str(caught.value).isprintable()


@pytest.mark.parametrize(("text", "reason"), table("rewards")["a_file_that_cannot_be_used"])
def test_a_file_that_cannot_be_used(text: str, reason: str, make: Callable[..., RewardProcess]) -> None:
    with pytest.raises(UserError, match=re.escape(reason)):
        make(text, seconds=3)


def test_a_damaged_answer_is_one_line(make: Callable[..., RewardProcess]) -> None:
    process = make("def reward(completions): return [1, 2]")
    for damaged in [*table("rewards")["damaged_answers"], ["", [1, 10**400]]]:
        process._process.ask = lambda request, answer=damaged: ["", None] if isinstance(request, dict) else answer  # type: ignore[misc]
        with pytest.raises(UserError, match=r"^reward: mine.py: reward:? sent a damaged answer"):
            process(ROLLOUTS)


@pytest.mark.parametrize(
    "takes", ["kept = mmap.mmap(-1, 500 << 20); kept.write(bytes(400 << 20))", "kept = b'x' * (250 << 20); os.fork()"]
)
def test_shared_memory_and_that_of_children_counts(
    takes: str, make: Callable[..., RewardProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reward_process, "MEMORY", 400 << 20)
    process = make(f"import mmap, os, time\ndef reward(completions): {takes}; time.sleep(60)")
    with pytest.raises(UserError, match="reward: it takes more than 400 MiB of memory"):
        process(ROLLOUTS)


HALTS = """
import os, signal, subprocess, sys, time

def reward_bad(completions):
    child = subprocess.Popen(["sleep", "4321"], start_new_session=True)
    print(child.pid, os.environ["TRAINYARD_RUN_DIR"], file=sys.stderr, flush=True)
    if sys.stdin.read() or completions == ["4"]:
        return [1]
    os.kill(int(os.environ["RANK_PID"]), signal.SIGSTOP)
    time.sleep(60)
"""
# A rank whose first argument is the file of a reward, and the second one its only completion.
RANK = """
import os, sys
os.environ["RANK_PID"] = str(os.getpid())
from test_rewards import sources
from trainer.rewards.reward_process import RewardProcess, RewardBatch
try:
    RewardProcess(sources(sys.argv[1]), (), 3)(RewardBatch(["2+2="], [sys.argv[2]], [[5]], {}))
except Exception as error:
    sys.exit(str(error))
os.kill(os.getpid(), 9)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("completion", "end"), [("4", ""), ("5", "reward: mine.py: reward_bad: it takes more than 3 s")]
)
def test_what_a_reward_has_started_ends_with_the_rank_or_its_limit(completion: str, end: str, tmp_path: Path) -> None:
    """The rank is killed, or the reward halts it. Its child has left its session, and has the mark of the run."""
    (tmp_path / "mine.py").write_text(HALTS, encoding="utf-8")
    rank = [sys.executable, "-c", RANK, str(tmp_path / "mine.py"), completion]
    env = os.environ | {"TRAINYARD_RUN_DIR": "/the/run", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run(rank, capture_output=True, text=True, timeout=60, env=env)
    pid, mark, *said = ended.stderr.strip().split(maxsplit=2)
    assert mark == "/the/run" and "".join(said).startswith(end) and ended.returncode == (1 if end else -9)
    deadline = time.monotonic() + 10
    while is_running(int(pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(int(pid))


def test_a_column_with_the_answers_is_required(make: Callable[..., RewardProcess]) -> None:
    with pytest.raises(UserError, match="exact: the dataset has no column 'answer'"):
        make("def reward(completions): return []", columns=("solution",), more=",exact")


def test_columns_are_checked_before_a_run() -> None:
    (exact, own) = RewardSource(use="exact"), RewardSource(use="mine.py")
    assert check_columns([exact, own], [{"answer": 0}, {"answer": ""}]) == []
    assert check_columns([own], [{}]) == check_columns([exact], []) == []
    with pytest.raises(UserError, match=r"^reward: exact: the dataset has no column 'answer': name the one with"):
        check_columns([own, exact], [{"solution": 1}, {"answer": None}])
    some = check_columns([RewardSource(use="exact", column="x")], [{"x": 1}, {"x": None}, {}])
    assert some == ["reward: exact: 2 of 3 prompts have no column 'x', and get no reward from it"]


def test_a_changed_reward_is_named() -> None:
    before, now = (
        {"method": "grpo", "dataset": "d.jsonl", "reward": value} for value in ("a-1.py,exact:0.5", "a-2.py,exact:0.5")
    )
    specs = [make_spec(each | {"model": "x"}, "here") for each in (before, now)]
    assert changed_fields(*specs) == ["reward: was 'a-1.py', now 'a-2.py'"]
    other = make_spec(before | {"model": "x", "reward": "a-1.py,exact:0.25"}, "here")
    assert changed_fields(specs[0], other) == ["reward: weight of exact: was 0.5, now 0.25"]
    with pytest.raises(UserError, match="reward: unknown name 'patern' in an entry; did you mean 'pattern'"):
        make_spec({"method": "grpo", "reward": [{"use": "regex", "patern": "x"}]}, "here")


@pytest.mark.parametrize(("text", "reason"), table("rewards")["the_controller_reads_a_file_and_does_not_run_it"])
def test_the_controller_reads_a_file_and_does_not_run_it(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(text, encoding="utf-8")
    if not reason:
        assert check_reward_file(str(path)) == path
        return
    with pytest.raises(UserError, match=re.escape(reason)):
        check_reward_file(str(path))


def test_a_missing_file() -> None:
    with pytest.raises(UserError, match=r"cannot read /nowhere/mine\.py: No such file"):
        check_reward_file("/nowhere/mine.py")
