"""The tokens of completions that servers wrote. Their replies are hostile."""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from trainer.data.text_tokenizer import TextTokenizer
from trainer.generation.ollama_client import Answer
from trainer.generation.rollout_servers import RolloutRequest

_BEFORE = ("", "\n", ".")  # texts before a completion that is encoded: some tokenizers begin a text with a space


@dataclass(frozen=True)
class ServerTokens:
    """What the tokens of a completion may be."""

    text: TextTokenizer  # the tokenizer
    count: int  # number of tokens of the vocabulary
    ends: AbstractSet[int]  # the tokens that end a completion
    limit: int  # tokens of a completion at most

    def of(self, request: RolloutRequest, answer: Answer) -> list[int] | None:
        """Return the tokens of a completion up to the one that ends it; None if there are none.

        Tokens are those that encoding the text gives, as for any text of a dataset: a server tells its own ones only with vLLM's API.
        """
        ids = self._encoded(request, answer) if request.ids is None else request.ids[: self.limit]
        if not ids or not all(type(token) is int and 0 <= token < self.count for token in ids):
            return None
        ids = ids[: self.limit]
        return list(ids[: next((place for place, token in enumerate(ids, 1) if token in self.ends), len(ids))])

    def _encoded(self, request: RolloutRequest, answer: Answer) -> list[int] | None:
        text = answer.text.rstrip("\ufffd") if answer.finished == "length" else answer.text
        if answer.thinking or "\ufffd" in text:  # a part of the answer is missing
            return None
        prompt = list(request.tokens)
        whole = self.text.decode(prompt) + text
        for before in _BEFORE:
            start, every = self.text.tokenize(before)[0] if before else [], self.text.tokenize(before + text)[0]
            ids = every[len(start) :]
            if every == [*start, *ids] and self.text.decode([*prompt, *ids]) == whole:
                ids = [*ids, *self._end(prompt)] if answer.finished == "stop" else ids
                # Ollama drops bytes that are no text, with what follows. A text encoded anew has hardly fewer tokens than were drawn.
                return ids if answer.tokens - len(ids) <= 2 + answer.tokens // 8 else None
        return None

    def _end(self, prompt: Sequence[int]) -> list[int]:
        """Return the token that ends an answer to this prompt, if any does: that of its turns, else the tokenizer's."""
        found = [token for token in prompt if token in self.ends][-1:]
        return found or sorted(self.ends, key=lambda token: (token != self.text.eos, token))[:1]
