"""The options of the dashboard."""

from __future__ import annotations

from trainer.config.fields import declare
from trainyard.playbook_options import PlaybookOptions

PORT = 5000


class DashboardOptions(PlaybookOptions):
    """Where the dashboard listens."""

    dashboard_port: int = declare(
        PORT, "port of the dashboard on 127.0.0.1; 0 for any free port", suggested_names=["port"], ge=0, le=65_535
    )
