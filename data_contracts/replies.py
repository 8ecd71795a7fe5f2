"""Replies of models that were asked something, kept below the artifact root by the digest of all that was asked.

replies/<first two digits>/<key>.json    the text and its SHA-256
"""

from __future__ import annotations

import hashlib
import json

from data_contracts.files import open_files

FOLDER = "replies"


class Replies:
    """Texts by key, shared by all runs below a root (a local folder, or an fsspec URL). Written whole or not at all."""

    def __init__(self, root: str) -> None:
        self.files = open_files(root)

    def get(self, key: str) -> str | None:
        """None also for a file that is damaged: asking again mends it."""
        name = _name(key)
        if self.files.size(name) is None:
            return None
        try:
            kept = json.loads(self.files.read(name))
        except ValueError:
            return None
        text = kept.get("text") if isinstance(kept, dict) else None
        return text if isinstance(text, str) and kept.get("sha256") == _digest(text) else None

    def put(self, key: str, text: str) -> None:
        """Text must be valid Unicode. Raises StorageUnavailable."""
        self.files.write(_name(key), json.dumps({"sha256": _digest(text), "text": text}, indent=1).encode())


def _name(key: str) -> str:
    return f"{FOLDER}/{key[:2]}/{key}.json"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
