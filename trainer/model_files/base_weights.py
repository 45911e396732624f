"""The weights of a base model, held against what the model needs: nothing of it may be drawn at random or left out in silence.

transformers fills a missing tensor, or one of another shape, with random numbers, ignores one that it does not know, and only logs it.
"""

import contextlib
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoModelForCausalLM

from trainer.common.errors import UserError, first_line
from trainer.common.formats import printable
from trainer.model_files.adapter_folder import refuse_adapter

_SHOWN = 3  # names of each kind in a message
# Tensors that models compute: other versions of transformers stored them.
_DERIVED = re.compile(
    r"(^|\.)(rotary_emb\.inv_freq|position_ids|masked_bias|(attn|attention)\.bias|_extra_state)$"
)  # `attn` is a module: no weight has that name
# Parts of a model for images or sound as well, of which a run may train the language model alone.
_OTHER_PARTS = re.compile(r"^(model\.)?(vision|visual|audio|multi_modal)")


@dataclass(frozen=True)
class WeightDifferences:
    """How the files of a model differ from the model.

    Attributes:
        reshaped: {tensor: (shape in the files, shape in the model)}.
    """

    missing: Collection[str] = ()  # tensors that the files lack
    reshaped: Mapping[str, tuple[Sequence[int], Sequence[int]]] | None = None
    unexpected: Collection[str] = ()  # tensors that the model does not have
    untied: Collection[str] = ()  # tensors that config.json ties to another one, which the files hold with other values

    def describe(self) -> str:
        """Return the differences as a part of a sentence; empty if there are none."""
        parts = [f"the files lack {_few(self.missing)}"] if self.missing else []
        shapes = [
            f"{printable(name, 120)} has the shape {list(here)}, expected {list(there)}"
            for name, (here, there) in sorted((self.reshaped or {}).items())
        ]
        more = [f"so have {len(shapes) - _SHOWN} more tensors"] if len(shapes) > _SHOWN else []
        parts += [*shapes[:_SHOWN], *more]
        if self.unexpected:
            parts.append(f"the model has no {_few(self.unexpected)}")
        if self.untied:
            parts.append(f"config.json ties {_few(self.untied)}, and the files hold other values for it")
        return "; ".join(parts)

    def error(self, setting: str, shown: object) -> UserError:
        """Return the error for these differences. `shown`: what the user named as `setting`."""
        return UserError(
            f"{setting}: the weights of {shown} do not match its config.json: {self.describe()}: copy or download the model again, "
            "or correct config.json"
        )


def _few(names: Iterable[str]) -> str:
    listed = sorted(names)
    shown = ", ".join(printable(name, 120) for name in listed[:_SHOWN])
    return f"{shown} and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else shown


def unexpected_names(model: Any, names: Iterable[str]) -> list[str]:
    """Return which names of tensors in files belong to no part of the model, without what it computes itself or knows to ignore."""
    ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
    return [name for name in names if not _DERIVED.search(name) and not any(each.search(name) for each in ignored)]


def load_causal_model(name: str, setting: str = "model", shown: str = "", **options: Any) -> Any:
    """Return a model whose weights all come from its files.

    Args:
        name: its folder or its name on the hub.
        setting: the field of the run spec that names the model.
        shown: the name in messages; `name` by default.
        options: options of `from_pretrained`.

    Raises UserError: it cannot be loaded, is an adapter, or its files do not match its config.json.
    """
    shown = shown or name
    refuse_adapter(name, setting)
    try:
        with _without_report():
            model, info = AutoModelForCausalLM.from_pretrained(
                name, output_loading_info=True, ignore_mismatched_sizes=True, **options, trust_remote_code=False
            )
    except Exception as error:
        raise UserError(f"{setting}: cannot load {shown}: {first_line(error)}") from None
    refuse_adapter(name, setting)  # the hub may have had one, which is in the cache only now
    tied, part = model.get_expanded_tied_weights_keys(all_submodels=True), model.get_parameter_or_buffer
    found = WeightDifferences(
        info["missing_keys"],
        {key: (stored, expected) for key, stored, expected in info["mismatched_keys"]},
        _without_other_parts(name, unexpected_names(model, info["unexpected_keys"])),
        [each for each, source in tied.items() if part(each) is not part(source)],  # the files have two different ones
    )
    if found.describe():
        raise found.error(setting, shown)
    return model


def _without_other_parts(name: str, unexpected: list[str]) -> list[str]:
    """Return the names without those of other parts that the model's configuration describes."""
    if not unexpected:
        return []
    whole = AutoConfig.from_pretrained(name, trust_remote_code=False)
    return (
        unexpected
        if whole.get_text_config() is whole
        else [each for each in unexpected if not _OTHER_PARTS.match(each)]
    )


@contextlib.contextmanager
def _without_report() -> Iterator[None]:
    """Suppress the table in which transformers reports differences: they become an error."""
    logger = logging.getLogger("transformers.modeling_utils")

    def wanted(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in str(record.msg) and "The tied weights mapping" not in str(record.msg)

    logger.addFilter(wanted)
    try:
        yield
    finally:
        logger.removeFilter(wanted)


def embedding_rows(name: str) -> int | None:
    """Return how many token ids the embedding of a model has; None if it has no readable configuration."""
    try:
        rows = getattr(AutoConfig.from_pretrained(name, trust_remote_code=False).get_text_config(), "vocab_size", None)
    except Exception:  # of many kinds; the load of the model reports it
        return None
    return rows if isinstance(rows, int) and rows > 0 else None
