"""A real all-reduce over all hosts, with gloo. Runs on the host, piped to the cluster's Python: needs torch, nothing of ours.

    python - '{"rank": 0, "world": 3, "master": "10.0.0.1", "port": 29600, "device": "eth0", "limit": 60}'

Prints one JSON object on one line: mbit (sent and received by each host, as a ring does it), latency_ms, torch.
"""

import datetime
import json
import os
import sys
import time

a = json.loads(sys.argv[1])
os.environ["GLOO_SOCKET_IFNAME"] = a["device"]

import torch  # noqa: E402  the environment above comes first
import torch.distributed as dist  # noqa: E402

BIG = 4 << 20  # bytes
TIMES = 10

limit = datetime.timedelta(seconds=a["limit"])
address = f"[{a['master']}]" if ":" in a["master"] else a["master"]
dist.init_process_group(
    "gloo", init_method=f"tcp://{address}:{a['port']}", rank=a["rank"], world_size=a["world"], timeout=limit
)
one, big = torch.ones(1), torch.ones(BIG // 4)
dist.all_reduce(big)
if big[-1].item() != a["world"]:
    print(json.dumps({"error": f"the sum over {a['world']} ranks came out as {big[-1].item():g}"}))
    sys.exit(1)
begun = time.perf_counter()
for _ in range(TIMES):
    dist.all_reduce(one)
latency = (time.perf_counter() - begun) / TIMES
begun = time.perf_counter()
dist.all_reduce(big)
seconds = time.perf_counter() - begun
dist.barrier()
# A ring sends and receives 2 (n-1)/n of the whole.
bits = 2 * (a["world"] - 1) / a["world"] * BIG * 8
answer = {"mbit": round(bits / seconds / 1e6, 1), "latency_ms": round(latency * 1e3, 3), "torch": torch.__version__}
print(json.dumps(answer), flush=True)
dist.destroy_process_group()
os._exit(0)
