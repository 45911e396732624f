"""The key-value store of a run. torch's own server listens on all addresses and accepts everybody."""

import datetime
import errno
import os
from typing import Any

from torch.distributed import TCPStore

from trainer.common.errors import UserError
from trainer.distributed.listeners import listen


class RunStore(TCPStore):
    """A TCPStore whose server listens at `host_name` only."""

    def __init__(
        self, host_name: str, port: int, world_size: int | None = None, is_master: bool = False, *rest: Any, **more: Any
    ) -> None:
        """Start the server if `is_master`, and connect to it. The arguments are those of TCPStore.

        Raises UserError: another process has the port; OSError: the server cannot listen; torch.distributed.DistError:
        the server does not answer.
        """
        if is_master:
            try:
                server = listen(host_name, port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                raise UserError(
                    f"port {port} of {host_name} is in use by another process: start the run again, which chooses a free port "
                    "unless master_port is set"
                ) from None
            port = server.getsockname()[1]
            more["master_listen_fd"] = server.detach()
        super().__init__(host_name, port, world_size, is_master, *rest, **more)


def launcher_store(rank: int, size: int, timeout: datetime.timedelta) -> RunStore:
    """Connect to the store that torchrun serves. Where torchrun serves none, such as for elastic runs, rank 0 does."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return RunStore(address, port, size, False, timeout)
    return RunStore(address, port, size, rank == 0, timeout, multi_tenant=True)
