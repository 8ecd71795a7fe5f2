"""The page of `rft validate --docs`: one file, no network, no script."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from data_contracts.files import LocalFiles
from data_contracts.reasons import REASONS
from flows.report.look import STYLE
from flows.report.markup import Markup, tag
from flows.report.sections import table


def build_validation_page(result: dict[str, Any], title: str, out: Path) -> Path:
    """Write what `flows.validate.validate_data` found. Gives the file's path."""
    out.parent.mkdir(parents=True, exist_ok=True)
    LocalFiles(out.parent).write(out.name, validation_page(result, title).encode("utf-8"))
    return out


def validation_page(result: dict[str, Any], title: str) -> str:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content="default-src 'none'; style-src 'unsafe-inline'"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{title} - data report"),
        tag("style", Markup(STYLE)),
    )
    state = "completed" if result["ok"] else "failed"
    header = tag(
        "header",
        tag("h1", title, " ", tag("span", "ok" if result["ok"] else "would not pass", class_=f"badge {state}")),
        tag("p", f"read as {result['record']}", class_="facts"),
        tag("pre", result["problem"], class_="error") if result["problem"] else None,
    )
    sections = [tag("section", tag("h2", name), body) for name, body in _sections(result) if body]
    return f"<!doctype html>\n{tag('html', head, tag('body', header, tag('main', *sections)), lang='en')}\n"


def _sections(result: dict[str, Any]) -> list[tuple[str, Markup]]:
    totals = [(name.replace("_", " "), f"{count:,}") for name, count in result["counts"].items() if name not in REASONS]
    reasons = [
        (row["reason"], row["action"], f"{row['rows']:,}", row["meaning"], ", ".join(row["lines"]))
        for row in result["reasons"]
    ]
    rows = [
        (f"{row['source']}:{row['source_row']}", row["reason"], row["detail"], tag("code", row["raw"]))
        for row in result["first_rows"]
    ]
    checks = [
        (
            check["name"],
            check["column"],
            "ok" if check["ok"] else f"{check['unexpected_count']:,} rows",
            check["detail"],
        )
        for check in result["checks"]
    ]
    return [
        ("Rows", table(["rows", "count"], totals, numbers=(1,))),
        ("What was recognised and noted", table(["note"], [(note,) for note in result["notes"]])),
        ("Reasons", table(["reason", "action", "rows", "what it means", "first lines"], reasons, numbers=(2,))),
        ("First rows", table(["where", "reason", "detail", "raw"], rows)),
        ("Great Expectations", table(["expectation", "column", "result", "must"], checks)),
    ]
