"""YAML as recipes use it: safe, without YAML 1.1's surprises, duplicate keys refused.

PyYAML follows YAML 1.1, where `1e-5` is a text, `no` is false, `010` is eight and `1:30` is ninety. Here numbers, true,
false and null are those of YAML 1.2's core schema; everything else is a text.
"""

from __future__ import annotations

import re
from typing import Any

import yaml

from rft_core.errors import SettingsError


class _RecipeLoader(yaml.SafeLoader):
    """SafeLoader (no Python objects) with the resolvers below."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML reads the class

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise yaml.constructor.ConstructorError(
                    None, None, f"keys must be texts, found {key!r}", key_node.start_mark
                )
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} occurs twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse_yaml(text: str, origin: str) -> Any:
    """Plain values of a YAML text. Raises SettingsError with origin and line."""
    try:
        return yaml.load(text, Loader=_RecipeLoader)  # a SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f" line {mark.line + 1}, column {mark.column + 1}" if mark and "\n" in text.strip() else ""
        raise SettingsError(f"{origin}{where}: {error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise SettingsError(f"{origin} is not YAML: {error}") from error
    except RecursionError as error:
        raise SettingsError(f"{origin} is not YAML: nested too deeply") from error


def _int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    return int(loader.construct_scalar(node))


def _float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    return float(loader.construct_scalar(node).replace(".inf", "inf").replace(".nan", "nan").lower())


# Tag, what matches, the characters it may begin with.
RESOLVERS = (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
    ("int", r"^[-+]?[0-9]+$", "-+0123456789"),
    ("float", r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan)$", "-+.0123456789"),
    ("merge", r"^<<$", "<"),
)
for _tag, _pattern, _first in RESOLVERS:
    _RecipeLoader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))
_RecipeLoader.add_constructor("tag:yaml.org,2002:int", _int)
_RecipeLoader.add_constructor("tag:yaml.org,2002:float", _float)
