"""Programs that an outsider runs against a run: a port scan, and a client of its store without credentials."""

# Arguments: an address, and a JSON list of ports. Prints the ports that accept a connection.
SCAN = """
import json, socket, sys
found = []
for port in json.loads(sys.argv[2]):
    try:
        socket.create_connection((sys.argv[1], port), 1).close()
        found.append(port)
    except OSError:
        pass
print(json.dumps(found))
"""

# Arguments: an address and a port. Writes to the store of a run that lets it.
CLIENT = """
import sys
from datetime import timedelta
from torch.distributed import DistError, TCPStore
limit = timedelta(seconds=3)
try:
    store = TCPStore(sys.argv[1], int(sys.argv[2]), is_master=False, timeout=limit, wait_for_workers=False)
    store.set("key", "value")
    print("connected")
except DistError:
    print("rejected")
"""
