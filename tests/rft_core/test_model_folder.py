"""What identifies a model folder."""

import os
import shutil

import pytest

from rft_core.errors import ModelUnreadable
from rft_core.model_folder import model_digest
from tests.tiny import make_tiny_model


def test_model_digest_is_of_content(tmp_path):
    folder, copy = make_tiny_model(tmp_path / "model"), tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "README.md").write_text("not part of the model")
    assert model_digest(copy) == model_digest(folder)
    (copy / "chat_template.jinja").write_text("other")
    assert model_digest(copy) != model_digest(folder)
    with pytest.raises(ModelUnreadable):
        model_digest(tmp_path)


def test_a_file_that_changed_within_the_process_is_read_again(tmp_path):
    folder = make_tiny_model(tmp_path / "model")
    before, config = model_digest(folder), folder / "config.json"
    state, text = config.stat(), config.read_text()
    config.write_text(text[:-1] + " ")  # the same size, and below the same times
    os.utime(config, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert model_digest(folder) != before
