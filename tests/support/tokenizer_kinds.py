"""Small tokenizers of the kinds that models have, for chats in the style of ChatML; the letters of byte-level ones, and tokens of a teacher."""

from typing import Any

LINES = ["user assistant system model tool name arguments word value \n\n \n the answer is a1word u1word"] * 50
MARKERS = ["<|im_start|>", "<|im_end|>", "<s>", "</s>"]


def byte_level(prefix_space: bool = False, rstrip: bool = False, template_bos: bool = False) -> Any:
    """Return a byte-level tokenizer (as GPT-2). `rstrip`: markers take the white space behind them (as Phi-3)."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space), decoders.ByteLevel()
    how = trainers.BpeTrainer(vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    core.train_from_iterator(LINES, how)
    core.add_special_tokens([AddedToken(marker, special=True, rstrip=rstrip) for marker in MARKERS])
    if template_bos:
        pair = [("<s>", core.token_to_id("<s>"))]
        core.post_processor = processors.TemplateProcessing("<s> $A", "<s> $A $B", pair)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", bos_token="<s>" if template_bos else None)  # fmt: skip


def sentence_piece(prepend: bool = True) -> Any:
    """Return a tokenizer of pieces with bytes for other characters (as Llama 2). `prepend`: by a normalizer, else Metaspace."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    core.decoder = decoders.Sequence(steps)
    if prepend:
        core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    special = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    how = trainers.BpeTrainer(vocab_size=600, special_tokens=special, show_progress=False)
    core.train_from_iterator(LINES, how)
    core.add_special_tokens([AddedToken(marker, special=True, normalized=False) for marker in MARKERS])
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", bos_token="<s>", unk_token="<unk>")


def normalizing() -> Any:
    """Return a tokenizer that changes the text before it is split (NFKC, lower case)."""
    from tokenizers import normalizers

    made = byte_level()
    made.backend_tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    return made


def python_tokenizer() -> Any:
    """Return a tokenizer of characters that is written in Python: it has no offsets."""
    from transformers import PreTrainedTokenizer

    class Characters(PreTrainedTokenizer):
        def __init__(self, **more: Any) -> None:
            self.letters = {chr(code): code - 9 for code in range(9, 0x1FB00)}
            super().__init__(**more)

        @property
        def vocab_size(self) -> int:
            return len(self.letters)

        def get_vocab(self) -> dict[str, int]:
            return {**self.letters, **self.added_tokens_encoder}

        def _tokenize(self, text: str, **_: Any) -> list[str]:
            return list(text)

        def _convert_token_to_id(self, token: str) -> int:
            return self.letters.get(token, 0)

        def _convert_id_to_token(self, index: int) -> str:
            return chr(index + 9)

        def convert_tokens_to_string(self, tokens: list[str]) -> str:
            return "".join(tokens)

    return Characters(eos_token="<|im_end|>", bos_token="<s>", additional_special_tokens=["<|im_start|>"])


KINDS = {
    "byte_level": byte_level,
    "prefix_space": lambda: byte_level(prefix_space=True),
    "markers_take_space": lambda: byte_level(rstrip=True),
    "adds_bos": lambda: byte_level(template_bos=True),
    "prepends": sentence_piece,
    "metaspace": lambda: sentence_piece(prepend=False),
    "normalizing": normalizing,
    "python": python_tokenizer,
}


def byte_letters() -> list[str]:
    """Return the letter of every byte in a byte-level vocabulary, by the definition of GPT-2's."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    more = iter(range(256, 512))
    return [chr(byte) if byte in kept else chr(next(more)) for byte in range(256)]
