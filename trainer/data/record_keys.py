"""Keys of records and messages that change what is learned, as the formats of other tools define them.

A key is used, or refused by its name: a run never ignores one that has a meaning, unless `keep_going` names it. Formats:
OpenAI (weight, functions, function_call, refusal), TRL (chosen, rejected, label, chat_template_kwargs), LLaMA-Factory
(history, kto_tag, images), axolotl (train, train_detail), ms-swift (loss, rejected_response).
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from trainer.common.formats import quoted

_PREFERENCE = "is preference data, and this run learns from answers alone: set method=dpo, or keep the preferred answer as the completion"
_UNLABELLED = "marks an answer that is not to be learned: set method=kto, or remove the record"
_SECOND = "says something of a pair beside chosen and rejected, and all pairs count equally: map it with columns, or remove the key"
_MEDIA = "is not text, and only text can be trained: remove the record"
_SCORE = "ranks the record, and all records count equally: filter the dataset by it, then remove the key"


def _is_set(value: Any) -> bool:
    """Return whether a value says anything: formats of columns hold null, or nothing, for a key that a record does not have."""
    return value is not None and value != "" and value != [] and value != {}


def _is_false(value: Any) -> bool:
    return (not isinstance(value, str) and value is not None and not value) or str(value).lower() in (
        "false",
        "0",
        "no",
    )


def _is_not_one(value: Any) -> bool:
    return _is_set(value) and value is not True and str(value) not in ("1", "1.0")


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(type(each) is int for each in value)


def _is_true(value: Any) -> bool:
    return _is_set(value) and not _is_false(value)


Test = Callable[[Any], bool]


def _keys(names: str, changes: Test, reason: str) -> dict[str, tuple[Test, str]]:
    return dict.fromkeys(names.split(), (changes, reason))


_CHOICES = "chosen rejected rejected_response"
_MEDIA_KEYS = "images image videos video audios audio"
# {key: (when it changes what is learned, why it is refused)}
RECORD_KEYS: Mapping[str, tuple[Test, str]] = {
    **_keys(f"{_CHOICES} rejected_messages rejected_output chosen_response rejected_answer", _is_set, _PREFERENCE),
    **_keys("score_chosen score_rejected chosen_score rejected_score margin", _is_set, _PREFERENCE),
    **_keys("kto_tag is_desirable desirable", _is_false, _UNLABELLED),
    **_keys(_MEDIA_KEYS, _is_set, _MEDIA),
    **_keys("score reward", _is_set, _SCORE),
    **_keys("weight sample_weight", _is_not_one, "weights the record, and all records count equally: remove the key"),
    **_keys("train loss", _is_false, "says that the record is not trained: remove the record"),
    **_keys(
        "reasoning_content thinking reasoning",
        _is_set,
        "is reasoning beside the answer: write the record as messages, with reasoning_content in the answer",
    ),
    **_keys("function_call tool_calls", _is_set, "is a call beside the messages: write it into an assistant message"),
    **_keys("train_detail loss_mask completion_mask assistant_masks", _is_set, "masks parts of the record: remove it"),
    **_keys("labels input_ids", _is_ids, "holds token ids, which belong to one tokenizer: give the text"),
    **_keys("documents", _is_set, "holds documents, which chat templates here do not get: write them into a message"),
}
# Those of a record with a chosen and a rejected answer.
PAIR_KEYS: Mapping[str, tuple[Test, str]] = {
    name: (test, _SECOND if why is _PREFERENCE else why)
    for name, (test, why) in RECORD_KEYS.items()
    if name not in ("chosen", "rejected")
}
# A key with this name is a class in many datasets of texts, and an answer's label only beside an answer.
LABEL = ("label", (_is_false, _UNLABELLED))
MESSAGE_KEYS_REFUSED: Mapping[str, tuple[Test, str]] = {
    **_keys("train_detail loss_scale loss_mask", _is_set, "masks parts of the message: remove it"),
    **_keys("label kto_tag", _is_false, _UNLABELLED),
    **_keys("score reward", _is_set, _SCORE),
    **_keys(_CHOICES, _is_set, _PREFERENCE),
    **_keys(_MEDIA_KEYS, _is_set, _MEDIA),
    **_keys("channel recipient", _is_set, "is a channel, which chat templates here do not get: use reasoning_content"),
    **_keys("refusal", _is_set, "is a refusal beside the content: write it as the content"),
    **_keys("prefix", _is_true, "marks the beginning of an answer that the model continues: write the whole answer"),
    **_keys("functions tools", _is_set, "describes tools: give them as tools of the record"),
    **_keys(
        "thinking_blocks reasoning_details reasoning_text thought thoughts",
        _is_set,
        "is reasoning under another name: write it as reasoning_content",
    ),
    **_keys("masked mask", _is_true, "says that the message is not trained: write weight=0 in its place"),
    **_keys("loss_weight", _is_not_one, "weights the message: write weight, which is 0 or 1"),
}
# Keys that say something of an answer, which a dataset of prompts alone does not need.
ABOUT_ANSWERS = frozenset(
    {name for keys in (RECORD_KEYS, MESSAGE_KEYS_REFUSED) for name, (_, why) in keys.items() if why != _MEDIA}
    | {LABEL[0]}
)
# A message with one of these that is false, or 0, carries no loss.
LOSS_KEYS = ("weight", "train", "loss", "training")
MEANINGFUL = frozenset(
    {*RECORD_KEYS, LABEL[0], "history", "functions", "chat_template_kwargs", "system_prompt", "system_message"}
)


def check_keys(
    record: Mapping[Any, Any], keys: Mapping[str, tuple[Test, str]], ignored: Collection[str], where: str = ""
) -> None:
    """Raise ValueError if a record or a message has a key whose meaning a run would ignore.

    `keys`: `RECORD_KEYS` or `MESSAGE_KEYS_REFUSED`. `ignored`: keys that are a part of the record's shape, or that the
    user ignores. `where`: the message within its record; empty for a record.
    """
    for name in [name for name in keys if name in record]:
        changes, reason = keys[name]
        if name not in ignored and changes(record[name]):
            raise ValueError(
                f"{where}{' ' if where else ''}has {quoted(name)}, which {reason} (or set keep_going={name})"
            )


def has_loss(message: Mapping[Any, Any], where: str, ignored: Collection[str]) -> bool:
    """Return whether a message carries loss by its own keys. Raises ValueError for a weight between 0 and 1."""
    trained = True
    for name in LOSS_KEYS:
        value = message.get(name)
        if value is None or name in ignored:
            continue
        if not isinstance(value, bool | int | float) or value not in (0, 1):
            raise ValueError(
                f"{where} has {name} {quoted(value)}: expected 0, 1, true or false: a message is trained or not"
            )
        trained = trained and bool(value)
    return trained
