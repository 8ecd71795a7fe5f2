from data_contracts.pins import Pins, pin, read_pins, unpin


def test_pins_are_read_back_and_taken_off(tmp_path):
    assert read_pins(tmp_path) == Pins()
    pin(tmp_path)
    pin(tmp_path, 12)
    pin(tmp_path, 3)
    pin(tmp_path, 3)
    assert read_pins(tmp_path) == Pins(True, frozenset({3, 12}))
    assert read_pins(tmp_path).names() == ["the whole run", "step 3", "step 12"]
    assert unpin(tmp_path, 3)
    assert not unpin(tmp_path, 3)
    assert unpin(tmp_path)
    assert read_pins(tmp_path).names() == ["step 12"]


def test_files_of_others_are_no_pins(tmp_path):
    (tmp_path / "pins").mkdir()
    for name in ("step-x.json", "notes.json", ".step-00001.json.tmp"):
        (tmp_path / "pins" / name).write_text("{}")
    assert read_pins(tmp_path) == Pins()
