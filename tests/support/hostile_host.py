"""A host whose Python belongs to an attacker: a stand-in for the sampler that sends hostile lines and answers.

    hostile_host.py [ARGUMENTS OF PYTHON]

It sends hostile text wherever a line may have text.
"""

import json
import sys
import threading
import time

SCRIPT = "<script>window.executed=1</script><img src=x onerror=window.executed=1>"
TEXT = f"{SCRIPT}'\"`${{1}}{{{{7*7}}}}]]>--><!--\u202e\u2066\u200b\x1b[31m&#60;&lt; " + "W" * 300
_OUTPUT = threading.Lock()


def send(line):
    """Send a line."""
    with _OUTPUT:
        sys.stdout.write((line if isinstance(line, str) else json.dumps(line)) + "\n")
        sys.stdout.flush()


def host_line():
    """Return a sample with hostile text."""
    names = ("uptime", "load", "memory_total", "memory_available", "disk_total", "disk_free", "disk_read")
    gpu = {"uuid": TEXT, "name": TEXT, "utilisation_percent": 1e15, "memory_used_mib": -5, "memory_total_mib": 0}
    gpu |= {"temperature_c": float("nan"), "power_w": 1e300, "power_limit_w": "x"}
    models = [TEXT, "<svg/onload=window.executed=1>", "javascript:window.executed=1"]
    return {
        **dict.fromkeys((*names, "disk_written", "received", "sent"), 1e18),
        "kind": "host",
        "now": time.time() - 1e9,
        "cpu_percent": 100,
        "cores": 3,
        "interface": TEXT,
        "link_mbit": 2**52,
        "gpus": [gpu, gpu],
        "ollama": {"version": TEXT, "installed": models, "loaded": models, "deployed": models},
    }


def run_line():
    """Return a run with hostile text that has failed."""
    node = {"run": TEXT, "node_rank": 0, "ranks": [0, 1], "hosts": ["evil", TEXT], "attempt": 2**50, "devices": [TEXT]}
    node |= {"started": time.time() - 60, "ended": time.time(), "status": "failed", "failures": [], "unit": TEXT}
    error = {"type": TEXT, "message": TEXT, "traceback": TEXT}
    rank = {"status": TEXT, "note": TEXT, "step": 2**52, "steps": 1, "loss": 1e14, "eta": 1e14, "error": error}
    rank |= {"tokens_per_second": 1e15, "step_seconds": [1e15] * 64, "comm_share": [-1e15] * 64, "time": 1e14}
    state = {"status": "failed", "alive": False, "now": 0, "run_dir": "/etc", "node": node}
    state["ranks"] = {"0": {"rank": 0, **rank}, "1": {"rank": 1, **rank}, TEXT: rank}
    kept = [{"step": 2**52, "bytes": 1e18, "time": 1e14}] * 50
    result = {"status": TEXT, "strategy": TEXT, "eval_loss": -1e14, "loss_last": 1e14}
    return {"kind": "run", "name": "evil", "state": state, "checkpoints": kept, "result": result}


def answer(request):
    """Return a hostile answer to a query."""
    query = request["query"]
    if query == "describe":
        spec = f'model: "{SCRIPT}"\n? "{SCRIPT}"\n: x\n'
        return {"spec": spec, "origin": {"model": TEXT, TEXT: TEXT}, "logs": {"rank0.log": 5, f"{SCRIPT}.log": 7}}
    if query == "records":
        steps = [{"step": 2**40 + n, "loss": 10.0 ** (n % 300 - 150), "step_seconds": [1e14] * 64} for n in range(500)]
        lines = [*map(json.dumps, steps), SCRIPT, "[" * 9000]
        again = {"lines": lines, "offset": request["offset"] + 1, "inode": 1, "more": False, "reset": False}
        return again if request["file"] == "metrics.jsonl" else again | {"lines": []}
    if query == "log":
        return {"offset": 5, "lines": [TEXT, SCRIPT, "x" * 100_000]}
    if query == "search":
        return {"lines": [TEXT], "found": 2**52, "skipped": 1}
    return {"files": {"../../evil": 2**40, SCRIPT: 5}, "data": "!"}


def hear():
    """Answer queries."""
    for line in sys.stdin.buffer:
        start = line.find(b'{"id"')
        if start >= 0:
            request = json.loads(line[start:])
            send({"kind": "reply", "id": request["id"], "answer": answer(request)})


def main():
    """Send until the connection ends."""
    threading.Thread(target=hear, daemon=True).start()
    send("Welcome\x1b]0;title\x07 to the machine")
    send({"kind": "reply", "id": 999_999, "answer": {}})
    send({"kind": "unreadable", "name": SCRIPT})
    send({"kind": "run", "name": SCRIPT, "state": {}, "checkpoints": [], "result": None})
    send(run_line())
    while True:
        send(host_line())
        send({"kind": "beat", "now": SCRIPT})
        time.sleep(1)


if __name__ == "__main__":
    main()
