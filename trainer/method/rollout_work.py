"""Completions of a step by all workers of a run: its ranks, and servers that get the newest adapter before each request.

The first rank talks to the servers. Every rank keeps the adapters that may have written completions of this step, and computes the
log-probabilities of a server's completions with the adapter that wrote them: a server tells none, and its quantised weights differ.
"""

import copy
import hashlib
import math
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from trainer.common.errors import UserError, first_line
from trainer.common.files import atomic_folder, sha256_file, write_atomic
from trainer.config import RunSpec
from trainer.config.rollout_fields import is_vllm, require_addresses, server_name
from trainer.data.text_tokenizer import TextTokenizer
from trainer.generation.journal import Completion, Journal
from trainer.generation.ollama_client import OllamaError
from trainer.generation.rollout_servers import (
    Adapter,
    Base,
    OllamaServer,
    RolloutRequest,
    RolloutServer,
    Sampling,
    VLLMServer,
    model_prefix,
)
from trainer.generation.rollouts import Rollouts
from trainer.gguf.gguf_adapter import write_adapter
from trainer.gguf.llama import UnsupportedModelError, write_llama
from trainer.gguf.plain_adapter import AdapterError
from trainer.method.method_base import Rank, RunContext, Work
from trainer.method.server_scores import Scores, ServerScores
from trainer.method.server_tokens import ServerTokens

FOLDER = "rollouts"
_TURN = "rollouts/turn"  # the counter of the first rank's turns
_POLL = 0.01  # s between two looks at it
_WAITING = 1.0  # s between two reports that this rank waits for servers

Write = Callable[[Sequence[int]], list[list[int]]]
State = dict[str, torch.Tensor]


class RolloutWork:
    """The workers of a run on this rank. All ranks call the same methods."""

    def __init__(self, spec: RunSpec, run: RunContext, ends: set[int]) -> None:
        """`ends`: the tokens that end a completion."""
        require_addresses(spec)
        assert run.ahead
        self._spec, self._run, self._ahead, self._ends = spec, run, run.ahead, ends
        self.names = [server_name(url) for url in spec.rollout_servers]
        self._model: Any = run.module.model
        self._versions: dict[int, State] = {}
        self._hub: Rollouts | None = None  # on the first rank
        self._newest: Adapter | None = None
        self._prefix, self._claims, self._turn = "", "", 0
        self._folder = run.ahead.run_dir / FOLDER
        self._text = TextTokenizer.of(copy.deepcopy(run.tokenizer))  # threads may not share one
        self._seconds = 1.0  # of this rank's last batch of completions
        self.scores = ServerScores(spec, run, self.names)

    # A step --------------------------------------------------------------------------------------------------------------

    def write(self, work: Work, prompts: Sequence[int], group: int, rank: Rank, write: Write) -> list[Completion]:
        """Return the completions of a step by place, the same on all ranks.

        `prompts`: the samples of all ranks, in order; a step has `group` places for each. `write`: lets this rank write
        the completions of some places. Raises UserError: no worker can write them.
        """
        step, first = work.step, rank.group.rank == 0
        self._publish(step, rank)
        places = self._agreed(rank, lambda: self._open(work, prompts, group))
        own: dict[int, Completion] = {}

        def write_some(chosen: Sequence[int]) -> None:
            began = time.perf_counter()
            for place, ids in zip(chosen, write(chosen), strict=True):
                own[place] = Completion(step, place, step, "", ids)
            self._seconds = time.perf_counter() - began

        if self._spec.rollout_ranks:
            # As many at once as fit into memory, with padding.
            longest = max((int(work.corpus.lengths[sample]) for sample in prompts), default=0)
            room = self._spec.batch_size * self._spec.seq_length
            size = max(1, room // (longest + self._spec.completion_length))
            while chosen := places[(end := self._claim(rank.group.store, step, size)) - size : end]:
                write_some(chosen)
        parts = self._gathered(
            rank, lambda: [*map(asdict, self._finish(step, rank, own, write_some) if first else own.values())]
        )
        found = {each["place"]: Completion(**each) for part in parts for each in part}
        if self._hub:
            self._hub.add(each for each in found.values() if not each.worker)
            self._hub.close_step(step)
            self._prune()
        return [found[place] for place in range(len(prompts) * group)]

    def _open(self, work: Work, prompts: Sequence[int], group: int) -> Sequence[int]:
        """Let servers write this step and the next ones; return the places of this one that are claimed."""
        assert self._hub
        assert list(self._ahead.prompts(work.step)) == list(prompts), "the prompts of a step are not those of its order"
        places = self._hub.open(work.step, self._tokens(work, prompts, group))
        for step in range(work.step + 1, min(self._run.steps, work.step + self._spec.max_staleness + 1)):
            self._hub.open(step, self._tokens(work, self._ahead.prompts(step), group))
        return places

    def _tokens(self, work: Work, prompts: Sequence[int], group: int) -> list[list[int]]:
        starts, tokens = work.corpus.starts, work.corpus.tokens
        return [each for sample in prompts for each in [tokens[starts[sample] : starts[sample + 1]].tolist()] * group]

    def _claim(self, store: Any, step: int, count: int) -> int:
        """Add to the counter of a step, which all ranks share; return the sum. The store may have counters of an earlier start."""
        return int(store.add(f"rollouts/{self._claims}/{step}", count))

    def _finish(
        self, step: int, rank: Rank, own: dict[int, Completion], write_some: Callable[[Sequence[int]], None]
    ) -> list[Completion]:
        """Return the completions of servers and of this rank, when no server owes one.

        A rank that would wait for a server longer than it writes itself writes what the server owes.
        """
        assert self._hub
        self._hub.add(own.values())
        while owed := self._hub.wait(step, 2 * self._seconds if self._spec.rollout_ranks else _WAITING):
            if self._spec.rollout_ranks:
                write_some(owed[: self._spec.batch_size])
                self._hub.add(own.values())
            elif self._hub.error:
                raise UserError(f"rollout_servers: {self._hub.error}")
            rank.waiting("waiting for rollout servers")
        return self._hub.written(step)

    def _agreed(self, rank: Rank, work: Callable[[], Any]) -> Any:
        """Return what `work` returns on the first rank, on all ranks. Raises UserError on all ranks."""
        return self._gathered(rank, lambda: work() if rank.group.rank == 0 else None)[0]

    def _gathered(self, rank: Rank, work: Callable[[], Any]) -> list[Any]:
        """Return what `work` returns on every rank. Raises UserError on all ranks if it raises that on one."""
        try:
            found = ("", work())
        except (UserError, OSError) as error:
            found = (str(error) or type(error).__name__, None)
        self._wait_for_first(rank)
        parts = rank.group.gather(found)
        if why := next((why for why, _ in parts if why), ""):
            raise UserError(why)
        return [part for _, part in parts]

    def _wait_for_first(self, rank: Rank) -> None:
        """Wait until the first rank is here, too. It waits for servers: longer, maybe, than a collective may last."""
        self._turn += 1
        if rank.group.rank == 0:
            rank.group.store.add(_TURN, 1)
        while int(rank.group.store.add(_TURN, 0)) < self._turn:
            rank.waiting("waiting for rollout servers")
            time.sleep(_POLL)

    # Adapters ------------------------------------------------------------------------------------------------------------

    def _publish(self, step: int, rank: Rank) -> None:
        """Make the adapter of this step the newest one on all servers."""
        if not self._versions:
            self._restore(step, rank)
        self._versions[step] = {name: value.detach().clone() for name, value in _state(self._model).items()}
        for old in [version for version in self._versions if version < step - self._spec.max_staleness]:
            del self._versions[old]
        self._agreed(rank, lambda: self._write_adapter(step, rank))

    def _restore(self, step: int, rank: Rank) -> None:
        """Read the adapters that wrote completions which a stopped run had received."""
        self._prefix, self._claims = self._agreed(rank, lambda: (self._read_prefix(), secrets.token_hex(4)))
        for version in range(max(0, step - self._spec.max_staleness), step):
            if data := rank.group.gather_bytes(self._stored(version) if rank.group.rank == 0 else b"")[0]:
                self._versions[version] = load(data)

    def _stored(self, version: int) -> bytes:
        """Return the file of an adapter of an earlier start; nothing if there is none, or only a damaged one."""
        try:
            data = (self._version_folder(version) / "adapter_model.safetensors").read_bytes()
            load(data)
        except (OSError, SafetensorError):
            return b""
        return data

    def _read_prefix(self) -> str:
        """Return the beginning of the names that models of this run have on servers: other runs may have its name, too."""
        self._folder.mkdir(exist_ok=True)
        path = self._folder / "id"
        if not path.exists():
            write_atomic(path, secrets.token_hex(4))
        for lost in self._folder.glob(".*"):  # what a killed start was writing
            shutil.rmtree(lost, ignore_errors=True) if lost.is_dir() else lost.unlink(missing_ok=True)
        return model_prefix(self._spec.run, path.read_text(encoding="utf-8"))

    def _version_folder(self, version: int) -> Path:
        return self._folder / f"{self._prefix}{version}"

    def _write_adapter(self, step: int, rank: Rank) -> None:
        folder = self._version_folder(step)
        if self._hub and (before := self._stored(step)) and self._differs(step, load(before)):
            self._hub.forget(step)
        shutil.rmtree(folder, ignore_errors=True)
        with atomic_folder(folder, "adapter") as aside:
            aside.mkdir()
            state = {name: value.cpu().contiguous() for name, value in self._versions[step].items()}
            save_file(state, aside / "adapter_model.safetensors", {"format": "pt"})
            self._model.peft_config["default"].save_pretrained(aside)
        if self._spec.rollout_folder:
            shared = Path(self._spec.rollout_folder) / folder.name
            shutil.rmtree(shared, ignore_errors=True)
            shutil.copytree(folder, shared)
        gguf = self._folder / f"{folder.name}.gguf"
        if any(not is_vllm(url) for url in self._spec.rollout_servers):
            try:
                write_adapter(folder, self._base_config(), gguf)
            except AdapterError as error:
                raise UserError(f"rollout_servers: Ollama cannot run this adapter: {error}") from None
        self._newest = Adapter(step, folder, gguf, sha256_file(gguf) if gguf.exists() else "")
        if self._hub is None:
            self._hub = self._start(step, rank)

    def _differs(self, step: int, before: State) -> bool:
        """Return whether this adapter is not the one of an earlier start, up to roundings: rewards, for one, may be random."""
        near = 0.1 * self._spec.lr  # Adam changes a weight by about the rate
        return any(
            not torch.allclose(before[name], value.cpu(), 0, near) for name, value in self._versions[step].items()
        )

    def _base_config(self) -> dict[str, Any]:
        base = self._model.get_base_model()
        return base.config.to_dict() | {"architectures": [type(base).__name__]}

    def _prune(self, *, served: bool = True) -> None:
        """Delete what no resume needs, and no server if they are `served`."""
        assert self._hub and self._newest
        resumes, newest, age = self._ahead.checkpoints(), self._newest.version, self._spec.max_staleness
        self._hub.prune(min(resumes, default=0))
        needed = {step - back for step in (*resumes, newest, newest + 1) for back in range(1, age + 1)}  # see _restore
        for path in self._folder.glob(f"{self._prefix}*"):
            version = path.name.removeprefix(self._prefix).removesuffix(".gguf")
            if not version.isdecimal() or (served and int(version) >= newest - 2):  # servers may still read it
                continue
            if path.suffix == ".gguf":
                path.unlink(missing_ok=True)
            elif int(version) not in needed:
                shutil.rmtree(path, ignore_errors=True)
                if self._spec.rollout_folder:
                    shutil.rmtree(Path(self._spec.rollout_folder) / path.name, ignore_errors=True)

    # Servers -------------------------------------------------------------------------------------------------------------

    def _start(self, step: int, rank: Rank) -> Rollouts:
        """Get the servers ready and return what hands out prompts. Raises UserError if none is, and ranks do not write."""
        spec, vocabulary = self._spec, len(self._run.tokenizer)
        limits = spec.completion_length, spec.seq_length, spec.collective_timeout
        sampling = Sampling(self._prefix, spec.grpo_temperature, *limits)
        corpus, sample = self._ahead.corpus, self._ahead.prompts(step)[0]
        prompt = list(corpus.tokens[corpus.starts[sample] : corpus.starts[sample + 1]].tolist())
        with self._base(rank) as base:
            ready = self._prepared(sampling, base, RolloutRequest(step, 0, prompt, self._text.decode(prompt), 0), rank)

        def is_valid(each: Completion) -> bool:
            known = each.version >= step or each.version in self._versions
            fits = 0 < len(each.ids) <= spec.completion_length and all(0 <= token < vocabulary for token in each.ids)
            return known and each.step - each.version <= spec.max_staleness and fits

        journal = Journal(self._folder / "completions.jsonl", is_valid, step)
        if journal.found:
            print(f"rollouts: {len(journal.found)} completions of the stopped run are used")
        return Rollouts(
            ready,
            journal,
            claim=partial(self._claim, rank.group.store),
            tokens_of=ServerTokens(self._text, vocabulary, self._ends, spec.completion_length).of,
            text_of=lambda tokens: self._text.decode(list(tokens)),
            seed_of=self._seed,
            ranks=spec.rollout_ranks,
            patience=math.inf if spec.rollout_ranks else spec.collective_timeout / 2,
            prefix=self._prefix,
        )

    def _prepared(self, sampling: Sampling, base: Base, prompt: RolloutRequest, rank: Rank) -> list[RolloutServer]:
        servers: list[RolloutServer] = [
            VLLMServer(name, url, sampling, self._adapter, self._spec.rollout_folder)
            if is_vllm(url)
            else OllamaServer(name, url, sampling, self._adapter)
            for name, url in zip(self.names, self._spec.rollout_servers, strict=True)
        ]

        def problem(server: RolloutServer) -> str:
            try:
                server.prepare(base, copy.copy(prompt))
            except OllamaError as error:
                return str(error)
            return ""

        with ThreadPoolExecutor(len(servers)) as executor:
            answers = [executor.submit(problem, server) for server in servers]
            while not all(answer.done() for answer in answers):
                rank.waiting("preparing rollout servers")
                time.sleep(0.05)
        problems = {server.name: answer.result() for server, answer in zip(servers, answers, strict=True)}
        for name, why in problems.items():
            print(f"rollouts: {name} {f'does not write: {why}' if why else 'writes completions'}")
        ready = [server for server in servers if not problems[server.name]]
        if not ready and (prompt.step == 0 or not self._spec.rollout_ranks):
            name, why = next(iter(problems.items()))
            raise UserError(
                f"rollout_servers: no server can write completions ({name}: {why}): fix one, or omit rollout_servers"
            )
        return ready

    def _adapter(self) -> Adapter:
        assert self._newest
        return self._newest

    @contextmanager
    def _base(self, rank: Rank) -> Iterator[Base]:
        """Yield the base model of the servers: the one that `rollout_model` names, or a GGUF file of the run's own."""
        tokenizer, name = self._run.tokenizer, self._spec.rollout_model
        tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
        bos = str(tokenizer.bos_token or "")
        if name or all(map(is_vllm, self._spec.rollout_servers)):
            yield Base(name, tokens, bos)
            return
        rank.waiting("writing the base model for rollout servers")
        gguf = self._folder / "base.gguf"
        try:
            write_llama(Path(self._spec.model), Path(self._spec.model), None, gguf, "f16")
            yield Base("", tokens, bos, gguf, sha256_file(gguf))
        except UnsupportedModelError as error:
            raise UserError(
                f"rollout_model: this run cannot give its base model to Ollama ({first_line(error)}): put the model on the servers, "
                "and set rollout_model to its name there"
            ) from None
        finally:
            gguf.unlink(missing_ok=True)

    def _seed(self, step: int, place: int, tries: int) -> int:
        text = f"{self._spec.seed} {step} {place} {tries}".encode()
        return int.from_bytes(hashlib.sha256(text).digest()[:4], "big") >> 1

    # Log-probabilities ---------------------------------------------------------------------------------------------------

    def score(self, work: Work, mine: Sequence[Completion], rank: Rank) -> dict[int, Scores]:
        """Return the scores of the micro-batches of `work` with completions of servers, by the first place of each.

        All ranks call it. A server whose completions are improbable is left out: it runs another model, or without the adapter.
        """
        found = self.scores.compute(work, mine, rank, self._adapter_of)
        for name, why in self.scores.unlike(rank).items():
            if self._hub:
                self._hub.leave_out(name, why)
        return found

    @contextmanager
    def _adapter_of(self, version: int) -> Iterator[None]:
        module = self._run.module
        own, was_training = {name: value.clone() for name, value in _state(self._model).items()}, module.training
        module.eval()
        set_peft_model_state_dict(self._model, self._versions[version])
        try:
            yield
        finally:
            set_peft_model_state_dict(self._model, own)
            module.train(was_training)

    def close(self) -> None:
        if self._hub:
            self._hub.close()
            self._prune(served=False)
            self._hub = None


def _state(model: Any) -> State:
    found: State = get_peft_model_state_dict(model, save_embedding_layers=False)
    return found
