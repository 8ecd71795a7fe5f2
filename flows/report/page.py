"""Puts the page together: one file, no network, no script but ours."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from data_contracts.errors import SettingsError
from data_contracts.files import LocalFiles
from flows.report.collect import ReportData, collect
from flows.report.look import SCRIPT, STYLE
from flows.report.markup import Markup, tag
from flows.report.sections import SECTIONS, header


def build_report(root: str, run: str, out: Path | str | None = None) -> Path:
    """Write the report of a run; by default `report.html` in the run's folder. Gives its path.

    Raises SettingsError for an unknown run or a folder in the page's place, DamagedTable for a table that is not what
    was committed.
    """
    data = collect(root, run)
    path = Path(out) if out is not None else data.view.folder / "report.html"
    if path.is_dir():
        raise SettingsError(f"--out must be a file, found a folder at {path.resolve()}")
    path.parent.mkdir(parents=True, exist_ok=True)
    LocalFiles(path.parent).write(path.name, page(data).encode("utf-8"))
    return path


def page(data: ReportData) -> str:
    """The whole page. Its policy forbids all network access and any script but the one whose hash it names."""
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_digest(SCRIPT)}'"
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{data.view.name} - training report"),
        tag("style", Markup(STYLE)),
    )
    sections = [tag("section", tag("h2", title), draw(data), id=name) for name, (title, draw) in SECTIONS.items()]
    body = tag("body", header(data), tag("main", *sections), tag("script", Markup(SCRIPT)))
    return f"<!doctype html>\n{tag('html', head, body, lang='en')}\n"


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
