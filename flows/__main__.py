"""The `rft` command, also as `python -m flows`: ready for Ctrl-C before anything that takes time is imported."""

from __future__ import annotations

from flows.interrupts import end_at_once


def main() -> None:
    end_at_once()
    from flows.cli import main as run_command

    run_command()


if __name__ == "__main__":
    main()
