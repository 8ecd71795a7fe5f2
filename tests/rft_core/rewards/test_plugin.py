"""Users' files: loading, identity, and everything that can be wrong with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rft_core.errors import RewardFunctionError, SettingsError
from rft_core.rewards.plugin import load_plugin


@pytest.fixture(autouse=True)
def clean_imports():
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(folder: Path, **files: str) -> None:
    for name, text in files.items():
        file = folder / (name.replace("__in__", "/") + ".py")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def test_file_with_what_it_imports(tmp_path):
    write(
        tmp_path,
        mine="import json\nfrom plug_rules import RIGHT\n\ndef reward(rows):\n    return [RIGHT for _ in rows]\n",
        plug_rules="from plug_pack import deep\nRIGHT = deep.VALUE\n",
        plug_pack__in____init__="",
        plug_pack__in__deep="from . import base\nVALUE = base.VALUE\n",
        plug_pack__in__base="VALUE = 0.5\n",
        json="raise RuntimeError('the standard library comes first')\n",
        other="not even Python (",
    )
    plugin = load_plugin("mine.py:reward", tmp_path, [])
    assert plugin.function([1, 2]) == [0.5, 0.5]
    assert list(plugin.identity["sources"]) == [
        "mine.py",
        "plug_pack/__init__.py",
        "plug_pack/base.py",
        "plug_pack/deep.py",
        "plug_rules.py",
    ]
    assert str(tmp_path) in sys.path[1:] and sys.path[-1] == str(tmp_path)


def test_identity_follows_content_not_place(tmp_path):
    for name in ("a", "b"):
        write(tmp_path / name, mine="def reward(rows): return []\n")
    first = load_plugin("a/mine.py:reward", tmp_path, []).identity
    assert load_plugin("b/mine.py:reward", tmp_path, []).identity == first
    write(tmp_path / "b", mine="def reward(rows): return [ ]\n")
    assert load_plugin("b/mine.py:reward", tmp_path, []).identity != first
    write(tmp_path / "b", mine="def reward(rows): return []\nother = reward\n")
    reward, other = (load_plugin(f"b/mine.py:{name}", tmp_path, []).identity for name in ("reward", "other"))
    assert reward != other


def test_edit_is_seen_in_the_same_process(tmp_path):
    write(tmp_path, mine="from plug_edit import V\ndef reward(rows): return V\n", plug_edit="V = 1\n")
    before = load_plugin("mine.py:reward", tmp_path, [])
    write(tmp_path, plug_edit="V = 2\n")  # same size, same second
    after = load_plugin("mine.py:reward", tmp_path, [])
    assert (before.function([]), after.function([])) == (1, 2)
    assert before.identity != after.identity
    assert not list(tmp_path.rglob("__pycache__"))


def test_depends_on(tmp_path):
    write(tmp_path, mine="def reward(rows): return []\n")
    (tmp_path / "words.txt").write_text("a\n")
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists" / "x.txt").write_text("x")
    given = ["words.txt", "lists"]
    first = load_plugin("mine.py:reward", tmp_path, given).identity
    assert load_plugin("mine.py:reward", tmp_path, given).identity == first
    (tmp_path / "lists" / "x.txt").write_text("y")
    assert load_plugin("mine.py:reward", tmp_path, given).identity != first
    with pytest.raises(SettingsError, match=r"depends_on .* gone.txt: No such file"):
        load_plugin("mine.py:reward", tmp_path, ["gone.txt"])


def test_dotted_path(tmp_path):
    write(
        tmp_path,
        plug_dotted__in____init__="",
        plug_dotted__in__scores="from plug_dotted.base import V\ndef reward(rows): return V\n",
        plug_dotted__in__base="V = 3\n",
    )
    plugin = load_plugin("plug_dotted.scores.reward", tmp_path, [])
    assert plugin.function([]) == 3
    assert list(plugin.identity["sources"]) == [
        "plug_dotted/__init__.py",
        "plug_dotted/base.py",
        "plug_dotted/scores.py",
    ]


def test_a_package_that_raises_when_its_module_is_looked_for(tmp_path):
    write(tmp_path / "plug_broken", __init__="raise OSError('no disk')\n", scores="def reward(rows): return []\n")
    with pytest.raises(RewardFunctionError, match=r"plug_broken.scores.reward must be importable, it raised OSError"):
        load_plugin("plug_broken.scores.reward", tmp_path, [])


def test_a_module_in_the_working_directory_is_not_meant(tmp_path, monkeypatch):
    write(tmp_path, plug_here="def reward(rows): return []\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SettingsError, match="'plug_here' can't"):
        load_plugin("plug_here.reward", None, [])
    assert load_plugin("plug_here.reward", tmp_path, []).function([]) == []


def test_a_module_that_python_finds_elsewhere_is_refused(tmp_path):
    write(tmp_path, mine="import tasks\ndef reward(rows): return []\n", tasks="V = 1\n")
    with pytest.raises(SettingsError, match=r"imports 'tasks' from beside it, but Python finds .* rename"):
        load_plugin("mine.py:reward", tmp_path, [])


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("gone.py:reward", "gone.py does not exist"),
        ("mine.py:other", r"has no function 'other'; it has \['reward'\]"),
        ("mine.py:V", "no function 'V'"),
        ("broken.py:reward", "broken.py must be Python"),
        ("no_such_module.reward", "'no_such_module' can't"),
        ("no_such.module.reward", "'no_such.module' can't"),
        ("math.sqrt", "'math' can't"),
        ("reward", "must be module.function or FILE.py:function"),
    ],
)
def test_what_is_missing(tmp_path, path, message):
    write(tmp_path, mine="V = 1\ndef reward(rows): return []\n", broken="def reward(:\n")
    with pytest.raises(SettingsError, match=message):
        load_plugin(path, tmp_path, [])


@pytest.mark.parametrize("line", ["raise OSError('no disk')", "import no_such_package_here", "raise SystemExit(0)"])
def test_a_file_that_raises(tmp_path, line):
    write(tmp_path, mine=f"{line}\ndef reward(rows): return []\n")
    with pytest.raises(RewardFunctionError, match=r"mine.py:reward must be importable, it raised"):
        load_plugin("mine.py:reward", tmp_path, [])
