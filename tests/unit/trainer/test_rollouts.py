"""Rollout servers: what is written is kept, no completion is too old, and probabilities are those of the adapter that wrote it."""

import contextlib
import copy
import itertools
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from run_hosts import until
from tables import table
from trainer_runs import write_jsonl

from trainer.common.errors import UserError
from trainer.config import RunSpec
from trainer.data.corpus import Corpus
from trainer.data.encode import Encoder, encode_all
from trainer.data.samples import read_source, source_of
from trainer.generation import rollouts
from trainer.generation.journal import Completion, Journal
from trainer.generation.ollama_client import Answer, Cancel, OllamaError
from trainer.generation.rollout_servers import Adapter, Base, RolloutRequest, RolloutServer, Sampling
from trainer.generation.rollouts import Rollouts
from trainer.method import rollout_work, server_scores
from trainer.method.grpo import GRPO
from trainer.method.method_base import AheadContext, RunContext, Work, label_logps, label_statistics
from trainer.method.module_with_loss import ModelWithLoss
from trainer.spec import make_spec

SAMPLING = Sampling("m-v", 1.0, 12, 64, 60.0)


def completion(step: int, place: int, version: int = 0, worker: str = "s") -> Completion:
    return Completion(step, place, version, worker, [step, place])


# The journal ---------------------------------------------------------------------------------------------------------------


def test_a_journal_survives_a_cut_line_and_keeps_what_is_valid(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    journal = Journal(path, lambda each: True, 0)
    journal.add([completion(0, 0), completion(1, 0), completion(1, 1), completion(2, 0)])
    text = path.read_text()
    path.write_text(
        text[:-9]
        + '\n{"step": 1, "place": null, "version": 0, "worker": "", "ids": []}\n[1]\n{"step": 1}\n'
        + "[" * 100_000
        + "\n\x00"
    )
    again = Journal(path, lambda each: each.place < 1, 1)
    assert again.found == [completion(1, 0)]
    again.add([completion(3, 0)])
    assert Journal(path, lambda each: True, 0).found == [completion(1, 0), completion(3, 0)]
    again.prune(2)
    assert Journal(path, lambda each: True, 0).found == [completion(3, 0)]


def test_a_journal_keeps_nothing_of_its_file_in_memory(tmp_path: Path) -> None:
    """A step may have MB of tokens, and a run thousands of steps before its first checkpoint."""
    journal = Journal(tmp_path / "j.jsonl", lambda each: True, 0)
    for step in range(20):
        journal.add([Completion(step, 0, step, "s", list(range(1000)))])
    assert len(pickle.dumps(journal)) < 1000
    journal.prune(18)
    assert [each.step for each in Journal(tmp_path / "j.jsonl", lambda each: True, 0).found] == [18, 19]


# Handing out prompts -------------------------------------------------------------------------------------------------------


class Simulated(RolloutServer):
    """A server whose completions name their place and the adapter; it takes `seconds` for each, and fails while `down`."""

    def __init__(self, name: str, seconds: float = 0.0, newest: Callable[[], Adapter] | None = None) -> None:
        super().__init__(name, SAMPLING, newest or (lambda: Adapter(0, Path(), Path(), "")))
        self.seconds, self.down, self.loaded, self.unloaded = seconds, "", list[int](), list[int]()
        self.asked: list[tuple[int, int, int]] = []

    def prepare(self, base: Base, prompt: RolloutRequest) -> None:
        pass

    def probe(self) -> None:
        if self.down:
            raise OllamaError(self.down)

    def ask(self, prompt: RolloutRequest, cancel: Cancel) -> Answer:
        prompt.version, _ = self.current()
        self.asked.append((prompt.step, prompt.place, prompt.version))
        end = time.monotonic() + self.seconds
        while time.monotonic() < end and not cancel.cancelled and not self.down:
            time.sleep(0.002)
        if self.down or cancel.cancelled:
            raise OllamaError(self.down or "cancelled", int(self.down[-3:]) if self.down.startswith("HTTP") else 0)
        prompt.ids = [prompt.step, prompt.place]
        return Answer("x", "", "stop", 2, 0.0, self.seconds)

    def load(self, adapter: Adapter) -> None:
        self.loaded.append(adapter.version)

    def unload(self, version: int) -> None:
        self.unloaded.append(version)


class Counters:
    """The counters that all ranks share."""

    def __init__(self) -> None:
        self._lock, self._counts = threading.Lock(), dict[Any, int]()

    def __call__(self, step: Any, count: int) -> int:
        with self._lock:
            self._counts[step] = self._counts.get(step, 0) + count
            return self._counts[step]


@contextlib.contextmanager
def handing_out(folder: Path, servers: Sequence[RolloutServer], claim: Callable[[int, int], int], **more: Any) -> Any:
    hub = Rollouts(
        servers,
        Journal(folder / "j.jsonl", lambda each: True, 0),
        claim=claim,
        tokens_of=more.pop("tokens_of", lambda request, answer: list(request.ids)),
        text_of=str,
        seed_of=lambda step, place, tries: 10_000 * step + 100 * place + tries,
        ranks=more.pop("ranks", True),
        patience=more.pop("patience", 60.0),
        **more,
    )
    try:
        yield hub
    finally:
        hub.close()


def test_servers_and_ranks_share_the_places_of_a_step(tmp_path: Path) -> None:
    claim, servers = Counters(), [Simulated("fast", 0.002), Simulated("slow", 0.02)]
    with handing_out(tmp_path, servers, claim) as hub:
        places = hub.open(0, [[1]] * 60)
        hub.open(1, [[1]] * 10)
        own = []
        while (end := claim(0, 7)) - 7 < len(places):
            own += places[end - 7 : end]
            time.sleep(0.01)
        assert hub.wait(0, 30) == []
        found = {each.place: each for each in hub.written(0)}
        assert sorted([*found, *own]) == list(range(60)) and own
        assert all(each.ids == [0, p] for p, each in found.items())
        hub.add(completion(0, place, worker="") for place in own)
        hub.close_step(0)
        assert hub.wait(1, 30) == [] and len(hub.written(1)) == 10
    assert [step for server in servers for step, _, _ in server.asked].count(0) == len(found)
    kept = Journal(tmp_path / "j.jsonl", lambda each: True, 0).found
    assert sorted((each.step, each.place) for each in kept) == [(0, n) for n in range(60)] + [(1, n) for n in range(10)]
    assert all(server.loaded == server.unloaded == [0] for server in servers)


def test_a_server_that_hangs_does_not_hold_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "_CLOSING", 0.1)
    hangs, server = threading.Event(), Simulated("s")
    monkeypatch.setattr(server, "load", lambda adapter: hangs.wait(60))
    with handing_out(tmp_path, [server], Counters()) as hub:
        hub.open(0, [[1]])
        until(lambda: hub.wait(0, 0.01))
        began = time.monotonic()
        hub.close()
        assert time.monotonic() - began < 5
        hangs.set()


def test_what_a_killed_server_had_goes_to_another(tmp_path: Path) -> None:
    lines: list[str] = []
    first, second = Simulated("first", 0.05), Simulated("second", 0.01)
    with handing_out(tmp_path, [first, second], Counters(), ranks=False, log=lines.append) as hub:
        hub.open(0, [[1]] * 40)
        until(lambda: first.asked)
        first.down = "connection refused"
        while hub.wait(0, 10):
            pass
        assert sorted(each.place for each in hub.written(0)) == list(range(40))
        assert {each.worker for each in hub.written(0)} >= {"second"}
    assert lines == ["rollouts: first does not write: down (connection refused)"]


def test_the_log_says_when_a_server_is_lost_and_is_back(tmp_path: Path) -> None:
    lines: list[str] = []
    with handing_out(tmp_path, [], Counters(), log=lines.append) as hub:
        until(lambda: hub.error)
        assert hub.error == "no server is ready" and lines == []
        for down in ("", "down (refused)", "down (reset)", "", ""):
            hub._watch({"nodes": [{"name": "one", "down": down}]})
    assert lines == ["rollouts: one does not write: down (refused)", "rollouts: one writes again"]


def test_ranks_get_back_what_no_server_can_write(tmp_path: Path) -> None:
    broken, lines = Simulated("broken"), list[str]()
    broken.down = "HTTP status 404"
    claim = Counters()
    with handing_out(tmp_path, [broken], claim, log=lines.append) as hub:
        hub.open(0, [[1]] * 2)
        until(lambda: hub.error)
        assert hub.wait(0, 60) == [0] and claim(0, 1) == 2  # nobody had claimed the other place
        assert hub.error == "no server is left: broken: HTTP status 404"
    assert any("no server writes any more" in line for line in lines)


def test_a_text_without_tokens_is_written_again(tmp_path: Path) -> None:
    """By a rank, or by a server with other random numbers."""
    with handing_out(tmp_path, [Simulated("s")], Counters(), tokens_of=lambda request, answer: None) as hub:
        hub.open(0, [[1]] * 3)
        while len(owed := hub.wait(0, 5)) < 3:
            pass
        assert sorted(owed) == [0, 1, 2] and hub.undecodable == 3 and hub.written(0) == []
    seeds = list[int]()

    def second(request: RolloutRequest, answer: Answer) -> list[int] | None:
        seeds.append(request.seed)
        return [1] if request.seed % 100 else None

    with handing_out(tmp_path, [Simulated("s")], Counters(), ranks=False, tokens_of=second) as hub:
        hub.open(0, [[1]] * 3)
        while hub.wait(0, 5):
            pass
        assert sorted(seeds) == [0, 1, 100, 101, 200, 201] and len(hub.written(0)) == 3


def test_a_run_whose_servers_write_only_texts_without_tokens_fails(tmp_path: Path) -> None:
    """Servers alone write: the run would wait for ever."""
    lines, more = list[str](), {"ranks": False, "tokens_of": lambda request, answer: None}
    with handing_out(tmp_path, [Simulated("s")], Counters(), log=lines.append, **more) as hub:
        hub.open(0, [[1]] * 2)
        until(lambda: hub.error)
        assert hub.wait(0, 1) == [0, 1]
        assert hub.error == "s has written 20 texts for a prompt, but no tokens of the run give them"
    said = "of servers so far for which the run has no tokens, the last one of s"
    assert lines[:2] == [f"rollouts: {count} {said}" for count in ("1 text", "10 texts")]


def test_the_first_completion_of_a_place_counts(tmp_path: Path) -> None:
    """A rank and a server may both write a place. It is trained on, and kept on the disk, once."""
    with handing_out(tmp_path, [], Counters()) as hub:
        hub.open(0, [[1]] * 2)
        rank, server = completion(0, 0, worker=""), completion(0, 0)
        for _ in range(2):
            hub.add([rank, server, completion(0, 1)])
        assert sorted(hub.written(0), key=lambda each: each.place) == [rank, completion(0, 1)]
    assert Journal(tmp_path / "j.jsonl", lambda each: True, 0).found == [rank, completion(0, 1)]


def test_completions_of_a_stopped_run_are_not_written_again(tmp_path: Path) -> None:
    Journal(tmp_path / "j.jsonl", lambda each: True, 0).add([completion(0, 1), completion(0, 2), completion(1, 0)])
    server = Simulated("s")
    with handing_out(tmp_path, [server], Counters(), ranks=False) as hub:
        assert hub.open(0, [[1]] * 4) == [0, 3] and hub.open(1, [[1]]) == []
        while hub.wait(0, 5):
            pass
        assert sorted(each.place for each in hub.written(0)) == [0, 1, 2, 3]
    assert sorted(place for _, place, _ in server.asked) == [0, 3]


def test_a_server_gets_each_adapter_once_and_keeps_two(tmp_path: Path) -> None:
    versions = itertools.count()
    newest = [Adapter(next(versions), tmp_path, tmp_path, "")]
    server = Simulated("s", newest=lambda: newest[0])
    for _ in range(4):
        assert server.current() == server.current() == (newest[0].version, f"m-v{newest[0].version}")
        newest[0] = Adapter(next(versions), tmp_path, tmp_path, "")
    assert server.loaded == [0, 1, 2, 3] and server.unloaded == [0, 1]
    server.close()
    assert sorted(server.unloaded) == [0, 1, 2, 3]


# With a model --------------------------------------------------------------------------------------------------------------

FIELDS = table("rollouts")["fields"]


def make(**fields: Any) -> RunSpec:
    return make_spec(FIELDS | fields, "test")


class OneRank:
    """The only rank of an update. `store` counts claims."""

    def __init__(self, method: GRPO, model: Any) -> None:
        self.rank, self.size, self.store, self.method, self.model = 0, 1, self, method, model
        self.group, self._counters = self, Counters()

    def add(self, key: str, count: int) -> int:
        return self._counters(key, count)

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def gather_bytes(self, value: bytes) -> list[bytes]:
        return [value]

    def waiting(self, note: str) -> None:
        pass

    def batch(self, work: Work, rows: Any) -> Any:
        return self.method.batch(work, rows, 2, None, torch.from_numpy)


class Generating(Simulated):
    """A server that draws tokens with the adapter in the folder, loaded by peft into a model of its own."""

    def __init__(self, model_folder: Path, newest: Callable[[], Adapter]) -> None:
        super().__init__("127.0.0.9:1", 0.0, newest)
        self._folder, self.models = model_folder, dict[int, Any]()

    def load(self, adapter: Adapter) -> None:
        from peft import PeftModel
        from transformers import AutoModelForCausalLM

        base = AutoModelForCausalLM.from_pretrained(self._folder)
        self.models[adapter.version] = PeftModel.from_pretrained(base, str(adapter.folder)).eval()
        super().load(adapter)

    def ask(self, prompt: RolloutRequest, cancel: Cancel) -> Answer:
        answer = super().ask(prompt, cancel)
        generator = torch.Generator().manual_seed(prompt.seed)
        ids = list(prompt.tokens)
        with torch.no_grad():
            for _ in range(3 + prompt.place % 5):
                logits = self.models[prompt.version](torch.tensor([ids])).logits[0, -1]
                ids.append(int(torch.multinomial(logits.softmax(-1), 1, generator=generator)))
        prompt.ids = ids[len(prompt.tokens) :]
        return answer


@pytest.fixture
def prompts(tokenizer: Any, tmp_path: Path) -> Corpus:
    rows = [{"prompt": text, "answer": "x"} for text in ("the cat sits", "a dog", "one tree", "two")]
    return encode_all(
        read_source(source_of(write_jsonl(tmp_path / "p.jsonl", rows)), data="prompts"), Encoder.of(make(), tokenizer)
    )


class Started:
    """A method with one server in this process, as a rank uses it."""

    def __init__(
        self, spec: RunSpec, model: Any, model_folder: Path, tokenizer: Any, corpus: Corpus, run_dir: Path
    ) -> None:
        self.method, self.module = GRPO(spec), ModelWithLoss(model)
        self.module.method = self.method
        self.rank, self.corpus, self.server = OneRank(self.method, model), corpus, None
        self.checkpoints = list[int]()

        def prepared(work: Any, sampling: Any, base: Base, prompt: RolloutRequest, rank: Any) -> list[RolloutServer]:
            self.server = Generating(model_folder, work._adapter)
            return [self.server]

        self.prepared = prepared
        ahead = AheadContext(corpus, run_dir, self.samples, lambda: self.checkpoints)
        self.method.begin(RunContext(tokenizer, self.module, contextlib.nullcontext, 6, ["answer"], ahead))

    def samples(self, step: int) -> list[int]:
        return [step % 4, (step + 1) % 4]

    def step(self, step: int) -> Work:
        rows = [[sample] for sample in self.samples(step)]
        return self.method.prepare(Work(self.corpus, rows, [rows], 1, 1, step), self.rank)  # type: ignore[arg-type]

    def train(self, work: Work) -> dict[str, float]:
        """Change the adapter as an update would, only more."""
        for part in work.parts:
            (self.module(*self.rank.batch(work, part)) / work.total).backward()
        generator = torch.Generator().manual_seed(work.step)
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                parameter.grad = None
                parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
        sums = dict(zip(self.method.sums, self.method.take_metrics(self.method.sums), strict=True))
        return self.method.means(sums)


@pytest.fixture
def start(
    model_folder: Path, tokenizer: Any, prompts: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Started]:
    def begin(**fields: Any) -> Started:
        from transformers import AutoModelForCausalLM

        from trainer.models.model import add_lora

        spec = make(**fields)
        torch.manual_seed(0)
        model = add_lora(spec, AutoModelForCausalLM.from_pretrained(model_folder))
        started = Started(spec, model, model_folder, tokenizer, prompts, tmp_path)
        monkeypatch.setattr(rollout_work.RolloutWork, "_prepared", lambda *given: started.prepared(*given))
        return started

    return begin


def test_ratios_are_those_of_the_adapter_that_wrote_a_completion(start: Callable[..., Started]) -> None:
    """Servers write steps in advance. Their log-probabilities are computed here by a model that peft loads from the folder."""
    run = start(rollout_ranks=False, max_staleness=2, lora_dropout=0.3)
    ages = []
    for step in range(4):
        work = run.step(step)
        shared = work.shared
        asked = {(s, place): version for s, place, version in run.server.asked}  # type: ignore[union-attr]
        for rows in work.parts:
            batch = run.rank.batch(work, rows)
            scores = batch.extra.scores
            assert scores.by_server.all()
            for index, (place,) in enumerate(rows):
                version = asked[step, place]
                ages.append(step - version)
                before, own = work.corpus.starts[place], work.corpus.starts[place + 1]
                ids = torch.from_numpy(work.corpus.tokens[before:own].astype(np.int64))[None]
                with torch.no_grad():
                    every = run.server.models[version](ids).logits.log_softmax(-1)[0]  # type: ignore[union-attr]
                expected = every[:-1].gather(1, ids[0, 1:, None])[:, 0]
                count = len(shared.rated.ids[place])
                got = scores.logps[index, : len(expected)]
                torch.testing.assert_close(got[-count:], expected[-count:], atol=1e-5, rtol=1e-5)
                assert not got[:-count].any()
        metrics = run.train(work)
        assert metrics["staleness"] == pytest.approx(np.mean(ages[-8:]))
        assert abs(metrics["drift/127.0.0.9:1"]) < 1.5 and metrics["completions_per_second/127.0.0.9:1"] > 0
    assert set(ages) == {0, 1, 2} or max(ages) in (1, 2)
    assert max(ages) <= 2
    run.method.end()


def test_the_loss_uses_those_ratios(start: Callable[..., Started]) -> None:
    run = start(rollout_ranks=False, max_staleness=1, grpo_loss="grpo", batch_size=8)
    run.train(run.step(0))
    work = run.step(1)
    batch = run.rank.batch(work, work.parts[0])
    extra = batch.extra
    extra.advantages[:] = torch.linspace(-1, 1, 8)
    old = extra.scores.logps
    logps = label_logps(run.module, batch)
    mask = old != 0
    ratio = torch.exp(logps - old)
    each = extra.advantages[:, None]
    expected = -torch.minimum(ratio * each, ratio.clamp(0.8, 1.2) * each)
    counts = mask.sum(1)
    loss = run.method.loss(run.module, batch)
    torch.testing.assert_close(loss, (expected * mask / counts[:, None]).sum())
    assert (ratio[mask] - 1).abs().max() > 0.01  # the completions are of the adapter before
    run.method.end()


def test_without_staleness_every_completion_is_of_the_newest_adapter(start: Callable[..., Started]) -> None:
    run = start(max_staleness=0)
    for step in range(3):
        metrics = run.train(run.step(step))
        assert metrics["staleness"] == 0
    assert all(version == step for step, _, version in run.server.asked)  # type: ignore[union-attr]
    run.method.end()


def test_a_resumed_run_trains_on_the_same_completions(start: Callable[..., Started], tmp_path: Path) -> None:
    run = start(rollout_ranks=False, max_staleness=2)
    run.train(run.step(0))
    before = copy.deepcopy(run.module.model.state_dict())
    run.checkpoints = [1]
    expected = run.step(1)
    scores = [run.rank.batch(expected, part).extra.scores.logps for part in expected.parts]
    hub = run.method._workers._hub  # type: ignore[union-attr]
    until(lambda: len(hub.written(2)) == 8)  # type: ignore[union-attr]
    kept = {each.place: each.ids for each in hub.written(2)}  # type: ignore[union-attr]
    run.method.end()

    again = start(rollout_ranks=False, max_staleness=2)
    again.module.model.load_state_dict(before)
    again.checkpoints = [1]
    work = again.step(1)
    assert work.shared.rated.ids == expected.shared.rated.ids
    for part, known in zip(work.parts, scores, strict=True):
        torch.testing.assert_close(again.rank.batch(work, part).extra.scores.logps, known, rtol=0, atol=0)
    again.train(work)
    assert dict(enumerate(again.step(2).shared.rated.ids)) == kept
    assert not [place for step, place, _ in again.server.asked if step in (1, 2)]  # type: ignore[union-attr]
    again.method.end()
    folder = tmp_path / "rollouts"
    assert sorted(path.name for path in folder.glob("trainyard-rollouts-r-*-v*")) != []


def test_a_resumed_run_may_have_other_servers(start: Callable[..., Started]) -> None:
    """The completions of a server that is no longer named are trained on, with their probabilities."""
    run = start(rollout_ranks=False, max_staleness=0)
    expected = run.step(0).shared.rated.ids
    run.method.end()
    again = start(rollout_servers="http://127.0.0.8:1", max_staleness=0)
    work = again.step(0)
    assert work.shared.rated.ids == expected
    assert again.rank.batch(work, work.parts[0]).extra.scores.by_server.all()
    assert not any(name.startswith("drift") for name in again.train(work))
    again.method.end()


@pytest.mark.slow
@pytest.mark.parametrize("other", [True, False])
def test_completions_of_other_adapters_are_written_again(start: Callable[..., Started], other: bool) -> None:
    """A resumed run may get other rewards than the stopped one, and so another adapter of the same version."""
    run = start(rollout_ranks=False, max_staleness=1)
    run.train(run.step(0))
    before = copy.deepcopy(run.module.model.state_dict())
    run.checkpoints = [1]
    run.train(run.step(1))
    hub: Any = run.method._workers._hub  # type: ignore[union-attr]
    run.step(2)
    until(lambda: len(hub.written(3)) == 8)
    run.method.end()

    again = start(rollout_ranks=False, max_staleness=1)
    again.module.model.load_state_dict(before)
    work = again.step(1)
    again.train(replace(work, step=7) if other else work)
    again.step(2)
    again.step(3)
    asked = [step for step, _, _ in again.server.asked]  # type: ignore[union-attr]
    assert asked.count(1) == 0 and asked.count(3) == (8 if other else 0)
    again.method.end()


def test_a_restart_by_torchrun_does_not_count_claims(start: Callable[..., Started], tmp_path: Path) -> None:
    """The store of torchrun outlives the ranks that it starts again."""
    run = start(max_staleness=0)
    run.step(0)
    run.method.end()
    journal = tmp_path / "rollouts" / "completions.jsonl"
    journal.write_text("".join(journal.read_text().splitlines(keepends=True)[:3]))
    again = start(max_staleness=0)
    again.rank._counters = run.rank._counters
    assert len(again.step(0).shared.rated.ids) == 8
    again.method.end()


@pytest.mark.slow
@pytest.mark.parametrize("damage", [lambda path: path.unlink(), lambda path: path.write_bytes(path.read_bytes()[:99])])
def test_a_run_resumes_without_a_damaged_adapter(start: Callable[..., Started], tmp_path: Path, damage: Any) -> None:
    """It does not train on the completions that the adapter had written: their probabilities are unknown."""
    run = start(rollout_ranks=False, max_staleness=1)
    run.train(run.step(0))
    run.step(1)
    run.method.end()
    damage(next((tmp_path / "rollouts").glob("*-v0/adapter_model.safetensors")))
    again = start(rollout_ranks=False, max_staleness=1)
    again.step(1)
    hub: Any = again.method._workers
    assert set(hub._versions) == {1} and all(version == 1 for _, _, version in again.server.asked)  # type: ignore[union-attr]
    again.method.end()


def test_adapters_that_no_resume_needs_are_deleted(start: Callable[..., Started], tmp_path: Path) -> None:
    """Also between two checkpoints: a run may write none for thousands of steps."""
    run = start(rollout_ranks=False, max_staleness=1)
    for step in range(6):
        run.checkpoints = [2] if step >= 2 else []
        run.train(run.step(step))
    kept = {path.name.rpartition("-v")[2] for path in (tmp_path / "rollouts").glob("trainyard-rollouts-r-*")}
    assert kept == {"1", "3", "4", "5", "3.gguf", "4.gguf", "5.gguf"}  # 1: a resume at step 2 needs it
    run.method.end()


@pytest.mark.slow
def test_models_on_a_server_have_names_that_no_other_run_uses(start: Callable[..., Started], tmp_path: Path) -> None:
    """Run r removes what begins with its prefix: not the models of r-v2, nor those of another r."""
    names = []
    for number, run in enumerate(("r", "r-v2", "r", "x" * 64)):
        started = start(run=run)
        work: Any = started.method._workers
        work._folder = tmp_path / f"{number}"
        started.train(started.step(0))
        prefix = work._prefix
        assert len(f"{prefix}999999") <= 80
        assert not any(prefix.startswith(other) or other.startswith(prefix) for other in names)
        assert prefix == work._read_prefix(), "a restart removes what the run left"
        names.append(prefix)
        started.method.end()


def test_a_server_with_another_model_is_left_out(
    start: Callable[..., Started], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(server_scores, "_DRIFT_TOKENS", 20)
    run = start(rollout_ranks=False, max_staleness=0)

    def improbable(server: Generating, prompt: RolloutRequest, cancel: Cancel) -> Answer:
        answer = Simulated.ask(server, prompt, cancel)
        with torch.no_grad():
            worst = server.models[prompt.version](torch.tensor([list(prompt.tokens)])).logits[0, -1].argmin()
        prompt.ids = [int(worst)] * 5
        return answer

    monkeypatch.setattr(Generating, "ask", improbable)
    run.train(run.step(0))
    with pytest.raises(UserError, match=r"rollout_servers: no server is left: .*: its tokens are .* nats less prob"):
        run.train(run.step(1))
    assert "127.0.0.9:1 is left out: its tokens are" in capsys.readouterr().out
    run.method.end()


def test_statistics_of_labels_are_those_of_the_whole_logits(start: Callable[..., Started]) -> None:
    run = start()
    work = run.step(0)
    batch = run.rank.batch(work, work.parts[0])
    with torch.no_grad():
        logps, entropies = label_statistics(run.module, batch, 0.7)
        every = (run.module.model(batch.ids, position_ids=batch.positions.clamp(min=0)).logits / 0.7).log_softmax(-1)
        torch.testing.assert_close(logps, label_logps(run.module, batch, 0.7))
    wanted = -(every.exp() * every).sum(-1) * (torch.nn.functional.pad(batch.labels[:, 1:], (0, 1), value=-100) != -100)
    torch.testing.assert_close(entropies, wanted, atol=1e-5, rtol=1e-4)
    run.method.end()


@pytest.mark.parametrize("error", ["", "rollout_servers: no server is left"])
def test_no_rank_waits_in_a_collective_for_servers(start: Callable[..., Started], error: str) -> None:
    """A collective ends after `collective_timeout`; a server may take hours to get the base model."""
    meeting, counters, parts, notes = threading.Barrier(2), Counters(), ["", ""], list[str]()

    class Group(OneRank):
        def __init__(self, number: int) -> None:
            self.group, self.store, self.rank, self.size, self._counters = self, self, number, 2, counters

        def gather(self, value: Any) -> list[Any]:
            parts[self.rank] = value
            meeting.wait(0.2)
            return list(parts)

        def waiting(self, note: str) -> None:
            notes.append(note)

    def slow() -> str:
        time.sleep(0.5)
        if error:
            raise UserError(error)
        return "servers"

    def run(number: int) -> str:
        try:
            work = copy.copy(made)
            return str([work._agreed(Group(number), slow), work._agreed(Group(number), lambda: "more")])  # type: ignore[arg-type]
        except UserError as found:
            return str(found)

    made: Any = start().method._workers
    with ThreadPoolExecutor(2) as executor:
        assert list(executor.map(run, range(2))) == [error or "['servers', 'more']"] * 2
    assert set(notes) == {"waiting for rollout servers"}


# The spec ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fields", "message"), table("rollouts")["what_cannot_be_is_refused"])
def test_what_cannot_be_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check = make(**fields)
        from trainer.spec import check_given

        check_given(check, ["rollout_servers", "rollout_model"], "test")
