"""A user's code may set what it likes: it finds that again at its next call, and nothing else sees it."""

from __future__ import annotations

import os
import random
import warnings

import numpy as np
import pytest
import torch

from rft_core.rewards.plugin import load_plugin
from rft_core.rewards.user_state import UserState


def chosen() -> dict:
    """What is set now, asked for in the plain way."""
    return {
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "threads": torch.get_num_threads(),
        "gradients": torch.is_grad_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "numpy": np.geterr(),
        "filters": list(warnings.filters),
        "set": os.environ.get("OF_THE_USER"),
        "changed": os.environ.get("OF_BOTH"),
        "removed": os.environ.get("OF_OURS"),
        "folder": os.getcwd(),
    }


def choose(folder) -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch.set_num_threads(torch.get_num_threads() + 1)
    torch.set_grad_enabled(False)
    torch.set_float32_matmul_precision("medium")
    torch.use_deterministic_algorithms(True)
    torch.set_autocast_enabled("cpu", True)
    np.seterr(all="raise")
    warnings.simplefilter("ignore")
    os.environ["OF_THE_USER"] = "1"
    os.environ["OF_BOTH"] = "theirs"
    os.environ.pop("OF_OURS", None)
    os.chdir(folder)


@pytest.fixture(autouse=True)
def variables(monkeypatch):
    monkeypatch.setenv("OF_BOTH", "ours")
    monkeypatch.setenv("OF_OURS", "1")


def test_what_their_code_sets_holds_for_it_alone(tmp_path):
    state, ours = UserState(), chosen()
    with state.entered():
        choose(tmp_path)
        theirs = chosen()
    assert chosen() == ours
    assert {name for name in ours if ours[name] == theirs[name]} == set()
    with state.entered():
        assert chosen() == theirs
    assert chosen() == ours


def test_ours_is_put_back_when_their_code_raises(tmp_path):
    ours = chosen()
    with pytest.raises(ZeroDivisionError), UserState().entered():
        choose(tmp_path)
        raise ZeroDivisionError
    assert chosen() == ours


def test_what_we_change_between_their_calls_is_not_undone(monkeypatch):
    state = UserState()
    with state.entered():
        os.environ["OF_BOTH"] = "theirs"
    monkeypatch.setenv("OF_OURS", "2")
    with state.entered():
        assert (os.environ["OF_BOTH"], os.environ["OF_OURS"]) == ("theirs", "2")
        del os.environ["OF_BOTH"]
    assert (os.environ["OF_BOTH"], os.environ["OF_OURS"]) == ("ours", "2")


def test_precision_set_in_the_newer_way_is_put_back():
    """Asked for in the older way torch then raises; float32 products are whole again in any case."""
    kept = torch.backends.mkldnn.matmul.fp32_precision
    with UserState().entered():
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    assert torch.get_float32_matmul_precision() == "highest"
    torch.backends.mkldnn.matmul.fp32_precision = kept


def test_a_folder_that_is_gone_stops_nothing(tmp_path):
    state, ours = UserState(), chosen()
    with state.entered():
        (tmp_path / "gone").mkdir()
        os.chdir(tmp_path / "gone")
        (tmp_path / "gone").rmdir()
    with state.entered():
        pass
    assert chosen() == ours


def test_random_streams_are_theirs_throughout():
    with UserState().entered():
        random.seed(7)
        first = random.random()
    random.seed(7)
    assert random.random() == first


@pytest.mark.parametrize("path", ["mine.py:reward", "package_of_mine.mine.reward"])
def test_importing_is_such_a_call_too(tmp_path, monkeypatch, path):
    """Also of the packages around a module, which are imported to find it."""
    monkeypatch.setattr("rft_core.rewards.plugin.USER_STATE", UserState())
    sets = "import torch\ntorch.set_default_dtype(torch.float64)\n"
    (tmp_path / "package_of_mine").mkdir()
    (tmp_path / "package_of_mine" / "__init__.py").write_text(sets)
    (tmp_path / "package_of_mine" / "mine.py").write_text("def reward(rows): return []\n")
    (tmp_path / "mine.py").write_text(sets + "def reward(rows): return []\n")
    load_plugin(path, tmp_path, [])
    assert torch.get_default_dtype() == torch.float32
