"""Whether a teacher's token ids mean what the policy's do. No torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rft_core.data.prompts import load_tokenizer
from rft_core.errors import SettingsError
from rft_core.model_reading import check_model_folder


def refuse_other_vocabulary(policy: Path, teacher: Path) -> None:
    """Raises SettingsError unless both tokenizers give every token the same id, and the teacher has a logit for each of
    the policy's. It may have more: models of one family are padded to different widths."""
    known, taught = (load_tokenizer(folder, None).get_vocab() for folder in (policy, teacher))
    if known != taught:
        token = min(known.items() ^ taught.items(), key=lambda item: (item[1], item[0]))[0]
        raise SettingsError(
            f"the teacher's vocabulary must be the policy's: {teacher} has {len(taught)} tokens, {policy} has "
            f"{len(known)}; the first that differs is {token!r}, id {taught.get(token)} against {known.get(token)}; "
            "take a teacher of the policy's family"
        )
    widths = [_num_logits(folder) for folder in (policy, teacher)]
    if widths[0] is not None and widths[1] is not None and widths[1] < widths[0]:
        raise SettingsError(
            f"the teacher must have a logit for each of the policy's: vocab_size in config.json of {teacher} is "
            f"{widths[1]}, of {policy} {widths[0]}"
        )


def _num_logits(folder: Path) -> int | None:
    config: dict[str, Any] = check_model_folder(folder)
    return config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size")
