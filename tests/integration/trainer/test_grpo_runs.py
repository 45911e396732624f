"""Runs that learn from rewards."""

from __future__ import annotations

import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from tables import table
from trainer_runs import WORDS, Cluster, Here, lines, losses, metrics, undo_end, write_jsonl

FIELDS = table("grpo_runs")["fields"]
REWARD = """
def reward_letter(prompts, completions, wish, **_):
    return [text.count(letter) / (1 + len(text)) for text, letter in zip(completions, wish)]
"""
# The rewards of a step, in another order.
SHUFFLED = """
import random
from mine import reward_letter as real

def reward_shuffled(trainer_state, **given):
    found = real(**given)
    random.Random(trainer_state.global_step).shuffle(found)
    return found
""".replace("from mine import reward_letter as real", REWARD.replace("reward_letter", "real"))


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    draw = random.Random(5)
    rows = [{"prompt": " ".join(draw.choices(WORDS, k=draw.randint(1, 8))), "wish": "e"} for _ in range(40)]
    return write_jsonl(tmp_path_factory.mktemp("prompts") / "prompts.jsonl", rows)


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(REWARD, encoding="utf-8")
    return path


@pytest.mark.slow
def test_a_run_writes_its_rewards(here: Here, prompts: Path, reward: Path) -> None:
    assert here(dataset=prompts, reward=f"{reward},length:0.5", **FIELDS) == 2
    assert "reward: length needs limit" in here.err
    rewards = f"[{{use: {reward}}}, {{use: length, limit: 20, weight: 0.5}}]"
    assert here(dataset=prompts, reward=rewards, grpo_beta=0.1, grpo_iterations=2, **FIELDS) == 0, here.err
    assert "40 samples: prompts alone" in here.out and "  reward 0." in here.out and "step 1 wrote " in here.out
    for found in metrics(here.run_dir()):
        assert found["reward"] == pytest.approx(found["reward/reward_letter"] + 0.5 * found["reward/length"])
        assert (
            found["kl"] > 0 and 0 < found["clip_low"] + found["clip_high"] < 1 and found["completions_per_second"] > 0
        )
        assert 1 <= found["completion_length"] <= 12 and 0 <= found["truncated"] <= 1 and found["flat_groups"] == 0
    (evaluation,) = lines(here.run_dir() / "evals.jsonl")
    assert evaluation["eval_loss"] == pytest.approx(-evaluation["metrics"]["reward"])
    shown = lines(here.run_dir() / "completions.jsonl")
    assert [each["step"] for each in shown] == [step for step in (1, 2, 3, 4) for _ in range(4)]
    assert shown[0]["prompt"] == shown[3]["prompt"]
    assert shown[0].keys() >= {"completion", "reward", "rewards", "advantage"}
    assert len(here.result()["adapter_sha256"]) == 64 and "no greedy answers" not in here.out


def test_a_reward_that_cannot_rate_is_refused_before_the_model_is_loaded(
    here: Here, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("the model is loaded")

    monkeypatch.setattr("trainer.strategy.plan.StrategyPlan.load_module", load)
    (tmp_path / "none.py").write_text("def rate(): pass")
    for reward, why in (
        (tmp_path / "none.py", "has no function whose name begins"),
        ("exact", "has no column 'answer'"),
    ):
        assert here(dataset=prompts, reward=reward, **FIELDS) == 1
        assert why in here.err and "the model is loaded" not in here.err, here.err


def test_a_reward_that_fails_ends_the_run_with_one_line(here: Here, prompts: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.py").write_text("def reward_bad(completions, **_):\n return [1 / 0]\n", encoding="utf-8")
    assert here(dataset=prompts, reward=tmp_path / "bad.py", **FIELDS) == 1
    (error,) = [line for line in here.err.splitlines() if line.startswith("error: ")]
    assert error == "error: reward: bad.py: reward_bad line 2: ZeroDivisionError: division by zero"
    assert "Traceback" not in here.err


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"grpo_iterations": 2, "grpo_beta": 0.1, "lora_dropout": 0.1}], ids=str)
def test_a_resumed_run_repeats_its_steps(fields: dict[str, Any], here: Here, prompts: Path, reward: Path) -> None:
    """The run that resumes has lost everything after its checkpoint at step 2."""
    fields = FIELDS | {"dataset": prompts, "reward": reward, "checkpoint_interval": 2} | fields
    assert here("straight", **fields) == 0, here.err
    straight, shown = here.losses("straight"), lines(here.run_dir("straight") / "completions.jsonl")
    weights = here.result("straight")["adapter_sha256"]
    undo_end(here.run_dir("straight"))
    assert here("straight", **fields) == 0, here.err
    assert "resuming from step 2" in here.out and here.losses("straight") == straight
    assert here.result("straight")["adapter_sha256"] == weights
    again = lines(here.run_dir("straight") / "completions.jsonl")
    assert [each | {"start": ""} for each in again] == [each | {"start": ""} for each in shown]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("diloco", marks=pytest.mark.long)])
def test_two_hosts_train_as_one(strategy: str, cluster: Cluster, prompts: Path, reward: Path) -> None:
    fields: dict[str, Any] = FIELDS | {"dataset": prompts, "reward": reward, "strategy": strategy, "grpo_beta": 0.05}
    if strategy == "diloco":
        fields |= {"replica_hosts": 2}  # one replica of both hosts, which share every update
    one = cluster.run(run="one", **fields | ({"replica_hosts": 1} if strategy == "diloco" else {}))
    two = cluster.run(hosts=2, run="two", **fields)
    assert two == pytest.approx(one, abs=1e-4)
    first, other = (lines(cluster.run_dir(run=name) / "completions.jsonl") for name in ("one", "two"))
    assert [each["completion"] for each in other] == [each["completion"] for each in first]
    names = ("reward", "completion_length", "kl", "reward/reward_letter", "flat_groups")
    for mine, theirs in zip(*(metrics(cluster.run_dir(run=name)) for name in ("one", "two")), strict=True):
        assert [theirs[name] for name in names] == pytest.approx([mine[name] for name in names], abs=1e-4)
    assert losses(cluster.run_dir(host=1, run="two")) == two


@pytest.mark.slow
def test_replicas_learn_from_their_own_completions(cluster: Cluster, prompts: Path, reward: Path) -> None:
    fields = FIELDS | {"dataset": prompts, "reward": reward, "strategy": "diloco", "local_steps": 2}
    cluster.run(hosts=2, **fields)
    found = metrics(cluster.run_dir())
    assert len(found) == 4 and all(each["completion_length"] > 0 for each in found)


def rewards_of(here: Here, run: str, name: str) -> tuple[float, float]:
    """Return the mean of a reward in the first two steps of a run, and in the last five."""
    found = [each[f"reward/{name}"] for each in metrics(here.run_dir(run))]
    return statistics.mean(found[:2]), statistics.mean(found[-5:])


@pytest.mark.long
def test_the_mean_reward_at_least_doubles_and_stays_with_shuffled_rewards(
    here: Here, prompts: Path, reward: Path, tmp_path: Path
) -> None:
    """The reward is the part of a letter in the completion of a model with random weights.

    With shuffled rewards each seed is a random walk, so that their mean stays, and not the value of each.
    """
    (tmp_path / "shuffled.py").write_text(SHUFFLED, encoding="utf-8")
    fields = FIELDS | {"dataset": prompts, "epochs": 9, "max_steps": 60, "total_batch_size": 48, "grpo_group_size": 8}
    fields |= {"batch_size": 48, "lr": 2e-2, "schedule": "constant", "eval_split": 0, "checkpoint_interval": 0}
    walks = []
    for seed in (1, 2, 3):
        assert here(f"real{seed}", reward=reward, seed=seed, **fields) == 0, here.err
        shuffled = f"{tmp_path / 'shuffled.py'},{reward}:0"
        assert here(f"shuffled{seed}", reward=shuffled, seed=seed, **fields) == 0, here.err
        before, after = rewards_of(here, f"real{seed}", "reward_letter")
        walks.append(rewards_of(here, f"shuffled{seed}", "reward_letter"))
        print(f"seed {seed}: reward {before:.4f} -> {after:.4f}; shuffled: {walks[-1][0]:.4f} -> {walks[-1][1]:.4f}")
        assert after >= 2 * before and after >= 2 * walks[-1][1]
    flat_before, flat_after = map(statistics.mean, zip(*walks, strict=True))
    assert 0.67 * flat_before < flat_after < 1.5 * flat_before
