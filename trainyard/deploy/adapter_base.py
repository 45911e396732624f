"""Find out which models of a node may be the base of a run's adapter.

An equal vocabulary and an equal shape are necessary, not sufficient: models of equal shape may have other weights. Whether the
adapter belongs to a base is decided by the answers of the model that is created.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.common.formats import printable, quoted
from trainyard.deploy.trained_run import TrainedRun


def run_misfit(run: TrainedRun) -> str:
    """Return why no base can take the adapter of a run; empty if one may."""
    from trainer.gguf.gguf_adapter import ARCHITECTURES  # imports numpy, which a merged model does not need

    if run.kind != "adapter":
        return "the run has no adapter"
    if not run.base:
        return f"{run.host.name} has no readable config.json of the run's base model"
    name = _architecture(run)
    return "" if name in ARCHITECTURES else f"adapters of {quoted(name)} cannot be written as GGUF"


def tokens_digest(tokens: Sequence[str]) -> str:
    """Return the SHA-256 of a vocabulary, in the form of the verb `ollama`."""
    return hashlib.sha256(json.dumps(list(tokens)).encode()).hexdigest()


def wanted_base(run: TrainedRun, tokens: Sequence[str]) -> dict[str, Any]:
    """Return the search criteria of a node: `architecture` in GGUF, `shape`, `tokens` and `name` of the run's base
    model."""
    return {
        "architecture": _gguf_architecture(run),
        "shape": model_shape(run.base),
        "tokens": tokens_digest(tokens),
        "name": run.base_name,
    }


def base_misfit(run: TrainedRun, state: Mapping[str, Any], tokens: Sequence[str], named: str = "") -> str:
    """Return why a node has no base for the adapter; empty if each of `bases` in its state is one.

    `state`: reply of the node to the step `state`, with at most the base that the user named, or with those that the
    node has found. `tokens`: the vocabulary of the run, by id. `named`: the name that the user gave; empty if the node
    has searched.
    """
    if not named and not tokens:
        return "tokenizer.json of the run does not list its vocabulary, so that no base can be searched for"
    if not state["adapters"]:
        return f"Ollama {'.'.join(map(str, state['version']))} takes no adapters"
    if not state["bases"]:
        return f"it has no model {named}" if named else _none_found(run, state)
    like = wanted_base(run, tokens)
    for base in state["bases"]:
        if base["architecture"] != like["architecture"]:
            return f"the architecture of {base['name']} differs from that of the run's base model"
        if base["tokens"] != like["tokens"]:
            return f"the vocabulary of {base['name']} differs from that of the run"
        if base["shape"] != like["shape"]:
            return f"the shape of {base['name']} differs from that of the run's base model"
    return ""


def model_shape(config: Mapping[str, Any]) -> list[Any]:
    """Return the shape of a model from its config.json, in the order of the verb `ollama`."""
    heads = config.get("num_attention_heads")
    names = ("num_hidden_layers", "hidden_size", "intermediate_size")
    return [*(config.get(name) for name in names), heads, config.get("num_key_value_heads") or heads]


def _none_found(run: TrainedRun, state: Mapping[str, Any]) -> str:
    models, read = state["models"], state["read"]
    if not models:
        return "its server has no model that could be the base of the adapter"
    whose = f"its {models} models" if read >= models else f"the {read} models that were read of its {models}"
    base = f", {printable(run.base_name, 80)}" if run.base_name else ""
    return f"none of {whose} has the architecture, vocabulary and shape of the run's base model{base}"


def _architecture(run: TrainedRun) -> str:
    names = run.base.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def _gguf_architecture(run: TrainedRun) -> str:
    """Return the name that GGUF has for the architecture of a run that `run_misfit` accepts."""
    import gguf

    from trainer.gguf.gguf_adapter import ARCHITECTURES

    return gguf.MODEL_ARCH_NAMES[ARCHITECTURES[_architecture(run)][0]]
