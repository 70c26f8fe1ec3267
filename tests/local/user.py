"""A user of the local stack in a process of its own, for tests that kill it: `python user.py HOME`.

Prints the process id of PostgreSQL and the address of Temporal once both run, then waits for its standard input to end.
"""

import json
import sys
from pathlib import Path

from fencepost.local import LocalStack
from fencepost.local.postgres import PostgresServer

if __name__ == "__main__":
    home = Path(sys.argv[1])
    with LocalStack(home, fast=True, temporal_port=0, ui_port=0) as stack:
        sys.stdout.write(json.dumps([PostgresServer(home).pid(), stack.temporal_address]) + "\n")
        sys.stdout.flush()
        sys.stdin.read()
