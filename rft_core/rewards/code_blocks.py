r"""Which part of a completion is the program.

A block is what stands between fences: lines of three or more ` or ~, the opening one with the language's name. Blocks
of another language are passed over; blocks without a language count where none names ours. Among those left:

1. the last of the blocks that define the most of the names that the tests use,
2. so, where the tests use no names (stdin and stdout), the last one.

Text in <think>...</think> before the answer is passed over too. A block that is never closed is no program where the
completion was cut, or may have been (finish_reason length or given); where it ended by itself, the block runs to the
end. A closing fence without an opening one ends a program that began at the start: its opening fence is often part of
the prompt. Without any fence there is no program, unless raw code is allowed.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Collection
from dataclasses import dataclass

FENCE = re.compile(r"^[ \t]*(?P<mark>`{3,}|~{3,})[ \t]*(?P<info>[^`]*?)[ \t]*$")
DEFINITION = re.compile(r"^(?:(?:async[ \t]+)?def|class)[ \t]+(\w+)|^(\w+)[ \t]*=(?!=)", re.MULTILINE)
# Names of a language in fences; a language that is not listed goes by its own name.
FENCE_NAMES = {
    "python": ("python", "python3", "py"),
    "javascript": ("javascript", "js", "node"),
    "typescript": ("typescript", "ts"),
    "cpp": ("cpp", "c++", "cc"),
    "csharp": ("csharp", "cs", "c#"),
    "bash": ("bash", "sh", "shell"),
    "rust": ("rust", "rs"),
    "go": ("go", "golang"),
    "ruby": ("ruby", "rb"),
    "kotlin": ("kotlin", "kt"),
}
CUT_OR_UNKNOWN = ("length", "given")


@dataclass(frozen=True)
class NoProgram:
    """Why a completion holds no program."""

    reason: str


@dataclass(frozen=True)
class _Block:
    language: str
    text: str
    is_closed: bool


def find_program(
    completion: str, finish_reason: str, language: str, wanted: Collection[str], allows_raw: bool
) -> str | NoProgram:
    """The program's text. `wanted` are the names that the tests use.

    >>> find_program("Try:\\n```python\\nx = 1\\n```\\nDone.", "stop", "python", (), False)
    'x = 1'
    """
    text = completion.replace("\r\n", "\n")
    answer = text.rpartition("</think>")[2]
    for part in dict.fromkeys((answer, text)):  # a completion that has code in its thoughts only: better than none
        blocks = _blocks(part)
        if any(block.text.strip() for block in blocks):
            return _chosen(blocks, finish_reason, language, wanted)
    if blocks and not blocks[0].is_closed and not blocks[0].language:  # nothing but a closing fence
        before = answer.rstrip().rstrip("`~").strip()
        return textwrap.dedent(before) if before else NoProgram("no code block: it is empty")
    if blocks:
        return NoProgram("no code block: it is empty")
    if allows_raw and answer.strip():
        return textwrap.dedent(answer).strip("\n")
    return NoProgram("no code block")


def _chosen(blocks: list[_Block], finish_reason: str, language: str, wanted: Collection[str]) -> str | NoProgram:
    names = FENCE_NAMES.get(language, (language,))
    ours = [block for block in blocks if block.language in names and block.text.strip()]
    ours = ours or [block for block in blocks if not block.language and block.text.strip()]
    if not ours:
        found = sorted({block.language for block in blocks if block.language})
        return NoProgram(f"no code block of {language}, only of {', '.join(found)}"[:200])
    defined = [len(_defined(block.text) & set(wanted)) for block in ours]
    best = max(index for index, count in enumerate(defined) if count == max(defined))
    if not ours[best].is_closed and finish_reason in CUT_OR_UNKNOWN:
        return NoProgram(f"the code block is not closed (finish_reason {finish_reason})")
    return ours[best].text


def _blocks(text: str) -> list[_Block]:
    blocks: list[_Block] = []
    opening: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.split("\n"):
        fence = FENCE.match(line)
        if opening is None:
            if fence is not None:
                opening, lines = fence, []
            continue
        mark = opening["mark"]
        if fence is not None and not fence["info"] and fence["mark"].startswith(mark):
            blocks.append(_block(opening, lines, True))
            opening = None
        elif fence is None and line.rstrip().endswith(mark):  # code and closing fence on one line
            blocks.append(_block(opening, [*lines, line.rstrip().removesuffix(mark)], True))
            opening = None
        elif fence is not None and fence["info"] and fence["mark"] == mark and _is_language(fence["info"]):
            blocks.append(_block(opening, lines, True))  # the next block opens, so this one had ended
            opening, lines = fence, []
        else:
            lines.append(line)
    if opening is not None:
        blocks.append(_block(opening, lines, False))
    return blocks


def _block(opening: re.Match[str], lines: list[str], is_closed: bool) -> _Block:
    info = opening["info"].split()
    language = info[0].strip("{}.").lower() if info else ""
    return _Block(language, textwrap.dedent("\n".join(lines)).strip("\n"), is_closed)


def _is_language(info: str) -> bool:
    return any(info.lower() in names for names in FENCE_NAMES.values())


def _defined(text: str) -> set[str]:
    """Names that a program defines at its top level."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {name for pair in DEFINITION.findall(text) for name in pair if name}
    names: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign | ast.AnnAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names
