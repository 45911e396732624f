"""torchrun whose rendezvous only the hosts of the run can reach. Takes the arguments of torch.distributed.run."""

import sys
from collections.abc import Sequence

from trainer.common.imports import without_collector

with without_collector():
    import torch.distributed
    from torch.distributed import run
    from torch.distributed.elastic.rendezvous import c10d_rendezvous_backend, static_tcp_rendezvous

    from trainer.common.errors import UserError
    from trainer.distributed.store import RunStore


def main(arguments: Sequence[str]) -> None:
    """Run torchrun with the stores of this package."""
    for module in (torch.distributed, static_tcp_rendezvous, c10d_rendezvous_backend):
        vars(module)["TCPStore"] = RunStore
    try:
        run.main(list(arguments))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
