"""The process that users' reward functions run in: `python user_worker.py REQUESTS REPLIES SYS_PATH`.

It divides in two before it imports anything of a user's. One half answers requests, and whatever a user's code may do
to a process it does to that one. The other, its guard (rft_core/guard.py), does nothing but watch: when the first half
ends, when we say so (SIGTERM) or are gone (the pipe of requests closes), it kills all that is left of it, also what
left its process group, collects it, and ends in the same way as the first half did.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

GRACE_SECONDS = 1.5  # for exit handlers, once no more requests come
OOM_SCORE = "500"  # where memory runs out this process goes before the one that trains


def main() -> None:
    requests, replies, path = int(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3])
    sys.path[:] = path
    from rft_core.guard import fork_guarded

    fork_guarded(requests, GRACE_SECONDS, not_for_guard=(replies,))
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(OOM_SCORE)
    for descriptor in (requests, replies):
        os.set_inheritable(descriptor, False)
    os.dup2(2, 1)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    from rft_core.rewards.user_calls import answer_requests

    answer_requests(requests, replies)


if __name__ == "__main__":
    main()
