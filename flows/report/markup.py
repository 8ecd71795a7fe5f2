"""HTML that is safe by construction: every text is escaped unless it was built by `tag`.

Completions, prompts and answers come from models and strangers' data; none of them may become markup.

>>> tag("p", "1 < 2", class_="note")
'<p class="note">1 &lt; 2</p>'
>>> tag("p", tag("b", "<script>"))
'<p><b>&lt;script&gt;</b></p>'
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable

EMPTY_TAGS = frozenset({"br", "circle", "line", "meta", "path", "rect"})

# Control characters that HTML forbids, and those that reorder text on screen so that it reads as something else.
_INVISIBLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class Markup(str):
    """A text that is markup already. Only `tag`, `join` and our own constants make one."""

    __slots__ = ()


def escape(text: object) -> Markup:
    """Text as markup: escaped, forbidden and direction-changing characters shown as their code points."""
    if isinstance(text, Markup):
        return text
    visible = _INVISIBLE.sub(lambda found: f"\\u{ord(found.group()):04x}", str(text))
    return Markup(html.escape(visible, quote=True))


def tag(name: str, /, *children: object, **attributes: object) -> Markup:
    """An element. `None` children and attributes are left out; `class_` and `data_x` become class and data-x."""
    texts = []
    for key, value in attributes.items():
        if value is not None:
            texts.append(f' {key.rstrip("_").replace("_", "-")}="{escape(str(value))}"')
    start = f"<{name}{''.join(texts)}"
    return Markup(f"{start}/>" if name in EMPTY_TAGS else f"{start}>{join(children)}</{name}>")


def join(children: Iterable[object]) -> Markup:
    return Markup("".join(escape(child) for child in children if child is not None))
