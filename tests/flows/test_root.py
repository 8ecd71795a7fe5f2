"""Where artifacts lie: a command line starts at its folder, a flow at none."""

import pytest

from data_contracts.errors import SettingsError
from flows.root import artifact_root, flow_root


def test_a_command_takes_its_option_then_the_environment_then_its_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RFT_HOME", "home")
    assert artifact_root("given") == tmp_path / "given"
    assert artifact_root() == tmp_path / "home"
    monkeypatch.delenv("RFT_HOME")
    assert artifact_root() == tmp_path / ".rft"


def test_a_file_is_no_root_nor_holds_one(tmp_path):
    (tmp_path / "file").write_text("")
    for given in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(SettingsError, match=rf"must be a folder, found a file at {tmp_path}/file$"):
            artifact_root(str(given))


def test_a_flow_takes_absolute_paths_only(tmp_path, monkeypatch):
    monkeypatch.setenv("RFT_HOME", str(tmp_path / "home"))
    assert flow_root(str(tmp_path / "given")) == tmp_path / "given"
    assert flow_root() == tmp_path / "home"
    with pytest.raises(SettingsError, match="found given: give the parameter root, or set RFT_HOME"):
        flow_root("given")
    monkeypatch.delenv("RFT_HOME")
    with pytest.raises(SettingsError, match="a flow's root must be an absolute path, found none"):
        flow_root()
