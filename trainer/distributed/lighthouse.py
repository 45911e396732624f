"""torchft's lighthouse, which tells the replicas of a run who of them is there: ``python -m trainer.distributed.lighthouse HOST:PORT``.

https://meta-pytorch.org/torchft/lighthouse.html. It listens at that address alone, and ends with whoever started it.
Nobody is asked who they are: whoever reaches the port can join the run or end it.
"""

import os
import signal
import sys

PATIENCE = 30 * 24 * 3600 * 1000  # ms that replicas wait for one that lives and is not there yet
SILENCE = 3000  # ms without a heartbeat (they come ten times a second) after which a replica is gone


def main(bind: str) -> None:
    """Serve until a signal comes."""
    from trainer.worker_process import die_with_launcher

    die_with_launcher()
    os.environ.setdefault("RUST_LOG", "warn")  # it tells of every question otherwise
    from torchft.coordination import LighthouseServer

    try:
        server = LighthouseServer(bind=bind, min_replicas=1, join_timeout_ms=PATIENCE, heartbeat_timeout_ms=SILENCE)
    except RuntimeError as error:
        sys.exit(f"cannot listen at {bind}: {error}")
    print(f"lighthouse at {bind}", flush=True)
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
