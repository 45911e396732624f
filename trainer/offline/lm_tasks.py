"""Tasks of the package lm_eval (EleutherAI's lm-evaluation-harness), where a host has it. Tested with 0.4.13."""

from collections.abc import Sequence
from typing import Any

from trainer.common.errors import UserError, first_line


def task_scores(
    model: Any, tokenizer: Any, tasks: Sequence[str], batch_size: int, limit: int
) -> dict[str, dict[str, float]]:
    """Return the metrics of each task and of its parts, such as `acc` and `acc_stderr`.

    Args:
        tasks: names that `lm-eval ls tasks` lists.
        limit: number of the first samples of each task that are used; 0 for all.

    Raises:
        UserError: the package is missing, it does not know a task, or the data of a task is unavailable.
    """
    try:
        import lm_eval
        from lm_eval.models.huggingface import HFLM
    except ImportError as error:
        raise UserError(
            f"evaluate: tasks: lm_eval cannot be imported ({first_line(error)}): install lm_eval in the environment of this host"
        ) from None
    try:
        found = lm_eval.simple_evaluate(
            model=HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size),
            tasks=list(tasks),
            limit=limit or None,
            log_samples=False,
        )
    except Exception as error:  # each task has code of its own
        raise UserError(f"evaluate: tasks: {type(error).__name__}: {first_line(error)}") from None
    return {task: _metrics(values) for task, values in found["results"].items()}


def _metrics(values: dict[str, Any]) -> dict[str, float]:
    """Return numbers by metric. lm_eval names them `metric,filter`; the filter `none` is left out."""
    numbers = {name: value for name, value in values.items() if isinstance(value, int | float) and "," in name}
    return {name.removesuffix(",none"): float(value) for name, value in numbers.items()}
