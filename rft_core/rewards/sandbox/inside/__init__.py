"""What runs inside a sandbox. Standard library only and few imports of it: it is loaded for every program.

The folder is mounted alone, as the package `inside`, so modules here import one another relatively and nothing else of
ours. Two kinds of process run it:

program.py   holds the model's program. Nothing that it says is believed beyond being a value: it may forge all of it.
checker.py   holds the tests, in another sandbox. It calls the program over a socket (peer.py) and gets plain values
             back (values.py), or stand-ins for the program's own objects (mirrors.py). It alone says what passed.
"""

FOLDER_PREFIX = "rft-unsandboxed-"  # of the working folder of a process without a sandbox
KEPT, BARE = "kept", "bare"  # instead of a user to become: that of the sandbox, and for a process without one
