"""`rft report`: one self-contained HTML page about a run. It opens without network."""

from flows.report.page import build_report

__all__ = ["build_report"]
