"""Replies are kept whole or not at all, and a damaged one counts as absent."""

from __future__ import annotations

import json

import pytest

from data_contracts.replies import Replies

KEY = "ab" * 32


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_what_is_kept_comes_back(scheme, tmp_path):
    replies = Replies(f"{scheme}{tmp_path}")
    assert replies.get(KEY) is None
    replies.put(KEY, 'say "ä"\n')
    assert Replies(f"{scheme}{tmp_path}").get(KEY) == 'say "ä"\n'
    assert replies.get("cd" * 32) is None
    replies.put(KEY, "another")
    assert replies.get(KEY) == "another"


@pytest.mark.parametrize("damage", ["", "{", "[]", "{}", '{"text": "5", "sha256": "0"}', '{"text": 5, "sha256": "0"}'])
def test_a_damaged_reply_is_absent(damage, tmp_path):
    replies = Replies(str(tmp_path))
    replies.put(KEY, "text")
    (path,) = tmp_path.rglob("*.json")
    assert path.relative_to(tmp_path).as_posix() == f"replies/ab/{KEY}.json"
    assert json.loads(path.read_text())["text"] == "text"
    path.write_text(damage)
    assert replies.get(KEY) is None
