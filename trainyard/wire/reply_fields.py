"""Bounded types of the fields of replies, of which `reply_types` consists.

Numbers have bounds, so that arithmetic and formats cannot fail; lists have lengths, so that tables stay short.
"""

from __future__ import annotations

import ipaddress
import math
import re
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, with_config
from typing_extensions import TypedDict  # pydantic needs it before Python 3.12

from trainer.common.formats import printable

RANKS_LIMIT = 4096  # ranks of one host, and hosts of one run
FILES_LIMIT = 20_000  # files of one reply
NUMBER_LIMIT = 1e15

Line = Annotated[str, AfterValidator(lambda text: printable(text, 500))]
Lines = Annotated[list[Line], Field(max_length=RANKS_LIMIT)]
Text = Annotated[str, Field(max_length=1 << 20)]
Flag = Annotated[bool, Field(strict=True)]
Count = Annotated[int, Field(strict=True, ge=0, lt=2**53)]
Integer = Annotated[int, Field(strict=True, gt=-(2**53), lt=2**53)]
Number = Annotated[float, Field(allow_inf_nan=False, ge=-NUMBER_LIMIT, le=NUMBER_LIMIT)]
Port = Annotated[int, Field(strict=True, ge=1, le=65_535)]
Interface = Annotated[str, Field(pattern=r"^[^\s/]{0,15}$")]
Address = Annotated[str, AfterValidator(lambda text: str(ipaddress.ip_address(text)))]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
RanksHere = Annotated[list[Annotated[int, Field(strict=True, ge=0, le=10**6)]], Field(max_length=RANKS_LIMIT)]
Counts = Annotated[list[Count], Field(max_length=RANKS_LIMIT)]


def _measured(value: Any) -> Any:
    """Return a list of numbers, or an empty one if a number is missing, as where a rank measured nothing."""
    if not isinstance(value, list) or len(value) > RANKS_LIMIT:
        return []
    numbers = [isinstance(item, (int, float)) and abs(item) <= NUMBER_LIMIT for item in value]
    return value if all(numbers) else []


def by_rank(value: Any) -> Any:
    """Return the entries of a mapping whose name is the number of a rank."""
    if not isinstance(value, dict):
        return value
    return {name: item for name, item in value.items() if re.fullmatch(r"\d{1,6}", name)}


def _loss(value: Any) -> Any:
    """Return a number, or None for one that cannot be formatted."""
    known = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= NUMBER_LIMIT
    return float(value) if known and math.isfinite(value) else None


Measured = Annotated[list[float], BeforeValidator(_measured)]
Optional = Annotated[float | None, BeforeValidator(_loss)]


@with_config(ConfigDict(extra="allow"))
class OpenReply(TypedDict):
    """A reply that may have more keys."""
