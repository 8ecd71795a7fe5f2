"""Run as a child process: a Prefect server on loopback that ends when its parent does.

The parent holds the other end of standard input. When that pipe closes, by a normal end or by SIGKILL, nothing of ours
stays alive.
"""

from __future__ import annotations

import os
import sys
import threading


def main() -> None:
    port = int(sys.argv[1])
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import uvicorn
    from prefect.server.api.server import create_app

    uvicorn.run(create_app(ephemeral=True), host="127.0.0.1", port=port, log_level="error", lifespan="on")


def _end_with_parent() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
