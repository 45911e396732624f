"""Work on the results of runs without training: merging and evaluation."""

import json
import sys
from collections.abc import Callable
from typing import Any

from trainer.common.errors import UserError
from trainer.common.files import to_json
from trainer.common.lost_connection import end_with_connection


def answer_request(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> int:
    """Answer the JSON request on standard input; print the reply, or `{"error": ...}`. Return the exit code."""
    end_with_connection()
    try:
        print(to_json(answer(json.load(sys.stdin))))
    except UserError as error:
        print(json.dumps({"error": str(error)}))
        return 1
    return 0
