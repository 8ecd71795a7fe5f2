"""rft_core/README.md names every part, and each of its links leads to the function that it is named after."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from rft_core.advantages import ADVANTAGES
from rft_core.algorithms import ALGORITHMS
from rft_core.gates import GATES, STEP_GATES
from rft_core.losses import AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS, LEVELS
from rft_core.preference import PREFERENCE_LOSSES
from rft_core.surrogates import REGULARIZERS, SURROGATES
from rft_core.token_credit import TOKEN_ADVANTAGES

FOLDER = Path(__file__).parents[2] / "rft_core"
README = (FOLDER / "README.md").read_text()
TABLES = {
    "algorithms": ALGORITHMS,
    "advantages": ADVANTAGES | TOKEN_ADVANTAGES,
    "levels": LEVELS,
    "gates": GATES | STEP_GATES,
    "surrogates": SURROGATES,
    "aggregations": AGGREGATIONS,
    "regularizers": REGULARIZERS,
    "corrections": CORRECTIONS,
    "KL estimators": KL_ESTIMATORS,
    "preference losses": PREFERENCE_LOSSES,
}


@pytest.mark.parametrize("table", TABLES)
def test_every_name_of_every_table_is_explained(table):
    assert [name for name in TABLES[table] if f"`{name}`" not in README] == []


def test_links_lead_to_what_they_name():
    links = re.findall(r"\[`([\w./]+)`\]\(([\w./]+)\)", README)
    assert len(links) > 60
    names = {}
    for text, target in links:
        file = FOLDER / target
        assert file.exists(), target
        if file.suffix != ".py" or text.endswith(".py"):
            continue
        tree = names.setdefault(target, ast.parse(file.read_text()))
        defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        assigned = [target for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
        defined |= {target.id for target in assigned if isinstance(target, ast.Name)}
        assert text in defined, f"{text} in {target}"


def test_every_function_of_every_table_is_linked():
    linked = {text for text, _ in re.findall(r"\[`(\w+)`\]\(([\w./]+)\)", README)}
    functions = {part.__name__ for table in TABLES.values() for part in table.values() if callable(part)}
    assert functions - linked == {"no_regularizer"}
