"""The types of the replies to each remote verb. `trainyard.wire.replies` checks what a host sends against them.

A reply may have more keys than its type names.
"""

from __future__ import annotations

from typing import Any

from trainyard.wire.reply_types.deploy_replies import OLLAMA_REPLY_TYPES
from trainyard.wire.reply_types.file_replies import FILE_REPLY_TYPES
from trainyard.wire.reply_types.host_replies import HOST_REPLY_TYPES
from trainyard.wire.reply_types.queue_replies import QUEUE_REPLY_TYPES
from trainyard.wire.reply_types.run_replies import RUN_REPLY_TYPES
from trainyard.wire.reply_types.sample_replies import DASHBOARD_REPLY_TYPES

REPLY_TYPES: dict[str, Any] = {
    **HOST_REPLY_TYPES,
    **FILE_REPLY_TYPES,
    **QUEUE_REPLY_TYPES,
    **RUN_REPLY_TYPES,
    **OLLAMA_REPLY_TYPES,
    **DASHBOARD_REPLY_TYPES,
}
