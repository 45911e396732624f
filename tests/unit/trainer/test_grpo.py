"""Group relative policy optimization: its loss, gradients and advantages are those of TRL's GRPOTrainer, and its completions do not depend on ranks."""

import contextlib
import copy
import functools
import json
import math
import re
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tables import table
from trainer_runs import write_jsonl

from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainer.data.corpus import Corpus, joined, load_corpus, preferred, save_corpus, select
from trainer.data.encode import Encoder, encode_all
from trainer.data.prompt_records import to_prompt
from trainer.data.samples import read_source, source_of
from trainer.method.grpo import GRPO, Rated, Shared, completed
from trainer.method.method_base import RunContext, Work
from trainer.method.module_with_loss import ModelWithLoss
from trainer.models.policy_loss import group_advantages
from trainer.models.sampling import TokenSampler
from trainer.rewards.reward_process import total
from trainer.spec import check_given, make_spec

FIELDS = table("grpo")["fields"]
FIELDS |= {"total_batch_size": 8, "batch_size": 3, "lora_targets": "q_proj,v_proj,down_proj"}


def make(**fields: Any) -> RunSpec:
    return make_spec(FIELDS | fields, "test")


# The loss ----------------------------------------------------------------------------------------------------------------

LENGTHS = [(5, 7), (3, 1), (9, 12), (4, 3), (5, 12), (3, 5), (9, 2), (4, 9)]  # of prompts and completions


@pytest.fixture(scope="module")
def adapted(model_folder: Path) -> Any:
    """A model with an adapter whose weights are not 0."""
    from transformers import AutoModelForCausalLM

    from trainer.models.model import add_lora

    model = add_lora(make(), AutoModelForCausalLM.from_pretrained(model_folder))
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model


@pytest.fixture(scope="module")
def trl(adapted: Any, tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[float], Any]:
    """Returns TRL's trainer of the model, at a temperature."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    @functools.cache
    def make_trainer(temperature: float) -> Any:
        args = GRPOConfig(
            output_dir=str(tmp_path_factory.mktemp("trl")),
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            per_device_train_batch_size=8,
            num_generations=4,
            temperature=temperature,
            report_to=[],
        )
        rows = Dataset.from_list([{"prompt": "a cat", "answer": "x"}] * 8)
        model = copy.deepcopy(adapted)
        trainer = GRPOTrainer(model, lambda completions, **_: [0.0] * len(completions), args, rows, None, tokenizer)
        trainer.current_gradient_accumulation_steps = 1
        trainer.model.train()
        return trainer

    return make_trainer


@pytest.fixture(scope="module")
def batch_of_prompts() -> tuple[list[list[int]], list[list[int]], np.ndarray]:
    draw = np.random.default_rng(5)
    prompts = [draw.integers(3, 250, size).tolist() for size, _ in LENGTHS]
    completions = [draw.integers(3, 250, size).tolist() for _, size in LENGTHS]
    return prompts, completions, draw.normal(size=len(LENGTHS))


def corpus_of(prompts: list[list[int]]) -> Corpus:
    starts = np.cumsum([0, *map(len, prompts)]).astype(np.int64)
    tokens = np.concatenate([np.array(each, np.int32) for each in prompts])
    return Corpus(tokens, np.zeros(len(tokens), np.bool_), starts)


def padded(lists: list[list[int]], left: bool) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, lists))
    pad = [[0] * (width - len(each)) for each in lists]
    ids = [fill + each if left else each + fill for fill, each in zip(pad, lists, strict=True)]
    ones = [
        [0] * len(fill) + [1] * len(each) if left else [1] * len(each) + [0] * len(fill)
        for fill, each in zip(pad, lists, strict=True)
    ]
    return torch.tensor(ids), torch.tensor(ones)


def gradients(model: Any) -> dict[str, torch.Tensor]:
    found = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.requires_grad}
    for parameter in model.parameters():
        parameter.grad = None
    return found


@pytest.mark.parametrize("fields", table("grpo")["loss_and_gradients_are_those_of_trl"], ids=str)
@pytest.mark.parametrize("is_stale", [False, True], ids=["on-policy", "old probabilities"])
def test_loss_and_gradients_are_those_of_trl(
    fields: dict[str, Any], is_stale: bool, adapted: Any, trl: Callable[[float], Any], batch_of_prompts: Any
) -> None:
    spec = make(**fields)
    prompts, completions, advantages = batch_of_prompts
    made = completed(corpus_of(prompts), range(len(prompts)), completions)
    rated = Rated(completions, advantages, advantages, advantages[:, None])
    shared = Shared(rated, False)
    method = GRPO(spec)
    module = ModelWithLoss(copy.deepcopy(adapted), method=method)
    module.train()

    # TRL, with all completions in one micro-batch.
    trainer = trl(spec.grpo_temperature)
    theirs: Any = trainer.model
    trainer.beta, trainer.loss_type, trainer.epsilon_low = spec.grpo_beta, spec.grpo_loss, spec.grpo_epsilon
    trainer.epsilon_high = spec.grpo_epsilon_high or spec.grpo_epsilon
    trainer.max_completion_length = spec.completion_length
    prompt_ids, prompt_mask = padded(prompts, True)
    ids, mask = padded(completions, False)
    whole, whole_mask = torch.cat([prompt_ids, ids], 1), torch.cat([prompt_mask, mask], 1)

    def logps() -> torch.Tensor:
        with torch.no_grad():
            return trainer._get_per_token_logps_and_entropies(theirs, whole, whole_mask, ids.shape[1])[0]

    noise = 0.3 * torch.randn(ids.shape, generator=torch.Generator().manual_seed(1))
    old = logps() + noise if is_stale else None
    with theirs.disable_adapter():
        reference = logps()
    wanted = trainer._compute_loss(
        theirs,
        {
            "prompt_ids": prompt_ids,
            "prompt_mask": prompt_mask,
            "completion_ids": ids,
            "completion_mask": mask,
            "advantages": torch.tensor(advantages, dtype=torch.float32),
            "old_per_token_logps": old,
            "ref_per_token_logps": reference,
            "num_items_in_batch": mask.sum(),
        },
    )
    wanted.backward()
    wanted_gradients = gradients(theirs)

    # Ours, in micro-batches of three.
    total = method._count(rated, False)
    loss = torch.zeros(())
    method.iterations = 2 if is_stale else method.iterations  # so that given old probabilities are used
    for start in range(0, len(prompts), 3):
        rows = [[place] for place in range(start, min(start + 3, len(prompts)))]
        work = Work(made, rows, [rows], total, total, 0, shared)
        batch = method.batch(work, rows, 2, None, torch.from_numpy)
        if old is not None:
            given = torch.zeros(batch.ids.shape)
            for index, (place,) in enumerate(rows):
                first = len(prompts[place]) - 1
                given[index, first : first + len(completions[place])] = old[place, : len(completions[place])]
            shared.old[start] = given
        part = module(*batch)
        (part / total).backward()
        loss += part.detach() / total
    assert float(loss) == pytest.approx(float(wanted), abs=1e-5)
    assert abs(float(wanted)) > 1e-3
    found = gradients(module.model)
    assert found.keys() == {name.removeprefix("module.") for name in wanted_gradients}
    for name, gradient in wanted_gradients.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4)
    assert max(float(gradient.abs().max()) for gradient in found.values()) > 1e-3
    sums = dict(zip(method.sums, method.take_metrics(method.sums), strict=True))
    metrics = trainer._metrics["train"]
    tokens = float(mask.sum())
    if spec.grpo_beta:
        assert sums["kl"] / tokens == pytest.approx(metrics["kl"][-1], abs=1e-5)
    assert sums["low"] / tokens == pytest.approx(metrics["clip_ratio/low_mean"][-1], abs=1e-6)
    assert sums["high"] / tokens == pytest.approx(metrics["clip_ratio/high_mean"][-1], abs=1e-6)
    assert (sums["low"] + sums["high"] > 0) == is_stale


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_advantages_are_those_of_trl(
    scale: str, trl: Callable[[float], Any], batch_of_prompts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = trl(1.0)
    prompts, completions, _ = batch_of_prompts
    nan = math.nan
    parts = np.array([[1, 0.5], [0, nan], [nan, nan], [0.25, 2], [1, 1], [1, 1], [1, nan], [1, 1]])
    texts = ["a"] * 8
    made = (prompts, completions, None, texts, None, {}, None, None)
    monkeypatch.setattr(trainer, "_generate", lambda _: made)
    given = torch.tensor(parts, dtype=torch.float32)
    monkeypatch.setattr(trainer, "_calculate_rewards", lambda *_: given)
    monkeypatch.setattr(trainer, "reward_weights", torch.tensor([1.0, 0.5]))
    monkeypatch.setattr(trainer, "reward_funcs", [len, len])
    monkeypatch.setattr(trainer, "reward_func_names", ["a", "b"])
    monkeypatch.setattr(trainer, "scale_rewards", scale)
    monkeypatch.setattr(trainer, "beta", 0.0)
    wanted = trainer._generate_and_score_completions([{"prompt": "a"}] * 8)["advantages"].numpy()
    found = group_advantages(total(parts, [1.0, 0.5]), 4, scale)
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert found[2] == 0 and np.abs(found).max() > 0.1


def test_groups_without_two_rewards_have_no_advantage() -> None:
    nan = math.nan
    assert group_advantages(np.array([nan, nan, 1, nan]), 2, "group").tolist() == [0, 0, 0, 0]
    assert group_advantages(np.array([nan, 3.0]), 2, "batch").tolist() == [0, 0]


# Prompts -----------------------------------------------------------------------------------------------------------------


def test_records_of_prompts() -> None:
    text = to_prompt({"prompt": "2+2=", "answer": 4, "score": 1, "completion": "x"})
    assert text.pieces == (("2+2=", False),) and text.record == {"prompt": "2+2=", "columns": {"answer": 4, "score": 1}}
    chat = to_prompt({"q": [{"from": "human", "value": "hi"}], "system": "be brief"}, {"prompt": "q"})
    assert [message["role"] for message in chat.messages] == ["system", "user"]
    assert chat.record == {
        "prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}],
        "columns": {"system": "be brief"},
    }


def test_columns_that_a_prompt_does_not_have() -> None:
    with pytest.raises(ValueError, match="columns maps completion: rewards get columns by their names"):
        to_prompt({"q": "x", "a": "y"}, {"prompt": "q", "completion": "a"})


@pytest.mark.parametrize(("row", "reason"), table("grpo")["records_that_are_refused"])
def test_records_that_are_refused(row: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        to_prompt(row)


def test_prompts_are_encoded_with_the_header_of_an_answer(tokenizer: Any, tmp_path: Path) -> None:
    rows: list[Any] = table("grpo")["rows"]
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    encoder = Encoder.of(make(), tokenizer)
    corpus = encode_all(read_source(source_of(path), data="prompts"), encoder)
    assert len(corpus) == 2 and not corpus.trained.any()
    first, second = (corpus.tokens[corpus.starts[i] : corpus.starts[i + 1]].tolist() for i in range(2))
    assert first == tokenizer("the cat", add_special_tokens=False)["input_ids"]
    shown = encoder.template.render([{"role": "user", "content": "the dog"}], True)
    assert second == tokenizer(shown, add_special_tokens=False)["input_ids"]
    assert shown != encoder.template.render([{"role": "user", "content": "the dog"}], False)
    assert corpus.report.dropped == {"with a prompt that leaves no space for a completion": 1}
    assert [record["columns"] for record in corpus.records or []] == [{"answer": "a"}, {}]
    save_corpus(corpus, tmp_path / "c.npz")
    again = load_corpus(tmp_path / "c.npz")
    assert again and again.records == corpus.records and again.digest() == corpus.digest()
    both = joined([corpus, again])
    assert [record["prompt"] for record in select(both, [3, 0]).records or []] == [rows[1]["prompt"], "the cat"]
    assert len(preferred(corpus)) == 0  # a merge has no answers to evaluate
    changed = replace(corpus, records=[{"prompt": "x", "columns": {}}] * 2)
    assert changed.digest() != corpus.digest()
    assert encoder.fingerprint() != Encoder.of(make(grpo_max_tokens=13), tokenizer).fingerprint()


def test_prompts_that_do_not_fit(tokenizer: Any, tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "night " * 99}])
    with pytest.raises(UserError, match="none of 1 prompts has at most 52 tokens"):
        encode_all(read_source(source_of(path), data="prompts"), Encoder.of(make(), tokenizer))


# The spec ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "reason"), table("grpo")["specs_that_are_refused"])
def test_specs_that_are_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=re.escape(reason)):
        make(**fields)


def test_steps_have_prompts_and_rows_have_completions() -> None:
    spec = make(total_batch_size=12)
    assert spec.learns_from_prompts and spec.rows_per_step == 12 and spec.samples_per_step == 3
    assert spec.prompt_length == 52 and make(grpo_max_tokens=None).completion_length == 32
    assert make_spec({"total_batch_size": 12}, "test").samples_per_step == 12
    with pytest.raises(UserError, match="grpo_beta has no effect with method=sft: set method=grpo"):
        check_given(make_spec({"grpo_beta": 0.1}, "test"), ["grpo_beta"], "test")


# Completions -------------------------------------------------------------------------------------------------------------


class Group:
    """The ranks of an update, each in a thread."""

    def __init__(self, size: int) -> None:
        self.size, self._barrier, self._values = size, threading.Barrier(size), [""] * size
        self.local = threading.local()

    @property
    def rank(self) -> int:
        return self.local.rank

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = json.dumps(value)
        self._barrier.wait(60)
        found = [json.loads(each) for each in self._values]
        self._barrier.wait(60)
        return found


class Rank:
    def __init__(self, group: Group) -> None:
        self.group = group

    def waiting(self, note: str) -> None:
        pass


REWARD = "def reward_e(completions, completion_ids, **_): return [text.count('e') - 0.1 * len(ids) for text, ids in zip(completions, completion_ids)]"


def update(
    ranks: int, adapted: Any, tokenizer: Any, corpus: Corpus, spec: RunSpec
) -> tuple[list[Any], dict[str, float], list[Any]]:
    """Return the completions of a step with advantages, the summed gradients, the metrics, and the examples."""
    group = Group(ranks)
    prompts = [2, 0, 1, 2]
    share = -(-len(prompts) // ranks)
    found: list[Any] = [None] * ranks

    def run(rank: int) -> None:
        group.local.rank = rank
        method = GRPO(spec)
        module = ModelWithLoss(copy.deepcopy(adapted), method=method)
        method.begin(RunContext(tokenizer, module, contextlib.nullcontext, 5))
        rows = [[sample] for sample in prompts[rank * share : (rank + 1) * share]]
        work = method.prepare(Work(corpus, [[sample] for sample in prompts], [rows], 1, 1, 7), Rank(group))  # type: ignore[arg-type]
        for part in work.parts:
            (module(*method.batch(work, part, 2, None, torch.from_numpy)) / work.total).backward()
        rated = work.shared.rated
        sums = dict(zip(method.sums, method.take_metrics(method.sums), strict=True))
        sums["weight"] = work.weight / work.total
        found[rank] = (rated.ids, rated.advantages.tolist(), gradients(module.model), sums, method.take_examples())
        method.end()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(found)
    ids = [each for part in found for each in part[0]]
    advantages = [each for part in found for each in part[1]]
    summed = {name: sum(part[2][name] for part in found) for name in found[0][2]}
    sums = {name: sum(part[3][name] for part in found) for name in found[0][3] if name != "write_seconds"}
    return [ids, advantages, summed], sums, [each for part in found for each in part[4]]


def test_any_number_of_ranks_computes_the_same(adapted: Any, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(REWARD, encoding="utf-8")
    rows = [{"prompt": "the cat sits"}, {"prompt": "a dog"}, {"prompt": [{"role": "user", "content": "tree"}]}]
    spec = make(reward=str(tmp_path / "mine.py"), grpo_beta=0.1)
    corpus = encode_all(
        read_source(source_of(write_jsonl(tmp_path / "p.jsonl", rows)), data="prompts"), Encoder.of(spec, tokenizer)
    )
    one, sums, examples = update(1, adapted, tokenizer, corpus, spec)
    for ranks in (2, 3):  # the third has no prompt
        more, more_sums, more_examples = update(ranks, adapted, tokenizer, corpus, spec)
        assert more[0] == one[0] and more_examples == examples
        np.testing.assert_allclose(more[1], one[1])
        for name, gradient in one[2].items():
            torch.testing.assert_close(more[2][name], gradient, atol=1e-6, rtol=1e-4)
        assert more_sums == pytest.approx(sums, rel=1e-4)
    assert sums["weight"] == pytest.approx(1) and sums["completions"] == 16
    # The same prompt twice in a step has other completions, and every group has advantages around 0.
    assert one[0][:4] != one[0][12:] and len({*map(tuple, one[0])}) > 12
    assert np.abs(np.reshape(one[1], (4, 4)).sum(1)).max() < 1e-9 and max(one[1]) > 0.1
    assert [example["prompt"] for example in examples] == [rows[2]["prompt"]] * 4
    assert examples[0]["rewards"] == {"reward_e": examples[0]["reward"]}


def test_an_error_of_a_reward_reaches_every_rank(adapted: Any, tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def reward_e(completions): return [1]", encoding="utf-8")
    spec = make(reward=str(tmp_path / "mine.py"))
    corpus = replace(corpus_of([[5, 6], [7]]), records=[{"prompt": "a", "columns": {}}] * 2)
    group, said = Group(2), ["", ""]

    def run(rank: int) -> None:
        group.local.rank = rank
        method = GRPO(spec)
        module = ModelWithLoss(copy.deepcopy(adapted), method=method)
        method.begin(RunContext(tokenizer, module, contextlib.nullcontext, 5))
        try:
            method.prepare(Work(corpus, [[0], [1]], [[[rank]]], 1, 1, 7), Rank(group))  # type: ignore[arg-type]
        except UserError as error:
            said[rank] = str(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    wanted = "reward: mine.py: reward_e returned 1 rewards for 8 completions: return one per completion"
    assert said == [wanted, wanted]


def test_written_tokens_have_the_probabilities_of_the_student(tokenizer: Any) -> None:
    from transformers import LogitsProcessorList

    logits = torch.randn(1, len(tokenizer) + 3, generator=torch.Generator().manual_seed(1)) * 3
    count = 4000
    uniform = torch.from_numpy(np.random.default_rng(1).random((count, 1)))
    for temperature in (1.0, 2.0):
        sampler = LogitsProcessorList([TokenSampler(uniform, 5, len(tokenizer), temperature)])
        drawn = sampler(torch.zeros(count, 5), logits.expand(count, -1)).argmax(-1)
        wanted = (logits[0, : len(tokenizer)] / temperature).softmax(-1)
        found = torch.bincount(drawn, minlength=len(tokenizer)) / count
        likely = wanted > 0.02
        assert likely.sum() > 3 and len(found) == len(tokenizer)
        assert float((found - wanted)[likely].abs().max()) < 0.025
