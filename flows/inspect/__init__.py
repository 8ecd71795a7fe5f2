"""Looking at runs without changing them: status, lineage, rows of tables, per-step metrics, what was learned."""

from flows.inspect.learned import learned, learned_lines
from flows.inspect.lineage import lineage_of, lineage_tree
from flows.inspect.metrics import metrics_of
from flows.inspect.run import RunView, list_run_names, open_run
from flows.inspect.show import jsonl_lines, print_rows, show
from flows.inspect.status import list_runs, print_runs, print_status, status_of

__all__ = [
    "RunView",
    "jsonl_lines",
    "learned",
    "learned_lines",
    "lineage_of",
    "lineage_tree",
    "list_run_names",
    "list_runs",
    "metrics_of",
    "open_run",
    "print_rows",
    "print_runs",
    "print_status",
    "show",
    "status_of",
]
