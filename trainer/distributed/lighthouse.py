"""The lighthouse of torchft, which tells the replicas of a run which of them are alive.

Usage: ``python -m trainer.distributed.lighthouse HOST:PORT``; see https://meta-pytorch.org/torchft/lighthouse.html.
It listens only on that address, and ends with its parent process. It has no authentication:
any process on these hosts can join or end the run.
"""

import os
import signal
import sys

JOIN_TIMEOUT = 30 * 24 * 3600 * 1000  # ms that replicas wait for a live one that has not joined yet
HEARTBEAT_TIMEOUT = 3000  # ms without a heartbeat after which a replica is lost; heartbeats are sent every 100 ms


def main(bind: str) -> None:
    """Serve at `bind` (HOST:PORT) until SIGTERM or SIGINT. Exits with an error if the address is unavailable."""
    from trainer.distributed.worker_process import die_with_launcher

    die_with_launcher()
    os.environ.setdefault("RUST_LOG", "warn")  # otherwise it logs every request
    from torchft.coordination import LighthouseServer

    try:
        server = LighthouseServer(
            bind=bind, min_replicas=1, join_timeout_ms=JOIN_TIMEOUT, heartbeat_timeout_ms=HEARTBEAT_TIMEOUT
        )
    except RuntimeError as error:
        sys.exit(f"cannot listen on {bind}: {error}")
    print(f"lighthouse listens on {bind}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
