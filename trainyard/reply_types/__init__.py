"""The types of the replies to each remote verb. `trainyard.replies` checks what a host sends against them.

A reply may have more keys than its type names.
"""

from __future__ import annotations

from typing import Any

from trainyard.dashboard.reply_types import DASHBOARD_REPLY_TYPES
from trainyard.ollama.reply_types import OLLAMA_REPLY_TYPES
from trainyard.reply_types.files import FILE_REPLY_TYPES
from trainyard.reply_types.hosts import HOST_REPLY_TYPES
from trainyard.reply_types.queue import QUEUE_REPLY_TYPES
from trainyard.reply_types.runs import RUN_REPLY_TYPES

REPLY_TYPES: dict[str, Any] = {
    **HOST_REPLY_TYPES,
    **FILE_REPLY_TYPES,
    **QUEUE_REPLY_TYPES,
    **RUN_REPLY_TYPES,
    **OLLAMA_REPLY_TYPES,
    **DASHBOARD_REPLY_TYPES,
}
