"""A small Llama whose tokens are the printable characters of ASCII: what it writes at random is a text, whose tokens are those it drew.

A model with tokens of single bytes, such as `tiny`, mostly draws bytes that are no text, and Ollama loses the answer behind them.
"""

from pathlib import Path


def write_ascii_model(folder: Path) -> Path:
    """Write the model; return its folder."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

    letters = [("Ġ" if code == 32 else chr(code)) for code in range(32, 127)]
    tokens = {letter: place for place, letter in enumerate([*letters, "qz"])}
    core = Tokenizer(models.BPE(tokens, [("q", "z")]))  # llama.cpp refuses a tokenizer without a merge
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    core.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", pad_token="</s>")
    tokenizer.save_pretrained(folder)
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    set_seed(1)
    ends = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=256, **size, **ends))
    model.save_pretrained(folder)
    return folder
