"""Read a model from a folder in Hugging Face layout: safetensors only, no code from the folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rft_core.errors import ModelUnreadable

if TYPE_CHECKING:
    import torch


def read_module(
    folder: Path,
    dtype: torch.dtype,
    attention: str | None,
    head: str = "causal",
    new_labels: int | None = None,
) -> Any:
    """The model with a head of HEADS, on the CPU, in `dtype`. Without `attention` it takes what it does best.

    With `new_labels` a folder without that head gets one of so many labels, whose weights are 0.

    Raises ModelUnreadable for a missing folder or config, an unknown architecture, missing, truncated or misshapen
    weights: transformers itself would fill missing ones with random numbers.
    """
    import transformers
    from safetensors import SafetensorError

    check_model_folder(folder)
    class_name, what = HEADS[head]
    try:
        with no_progress_bars():
            module, loading = getattr(transformers, class_name).from_pretrained(
                folder,
                dtype=dtype,
                attn_implementation=attention,
                local_files_only=True,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                **({} if new_labels is None else {"num_labels": new_labels}),
            )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ModelUnreadable(f"{folder} must hold {what}; reading it failed: {error}") from error
    missing = sorted(loading["missing_keys"])
    if new_labels is not None and missing and all(name.startswith(f"{NEW_HEAD}.") for name in missing):
        for weight in getattr(module, NEW_HEAD).parameters():
            weight.data.zero_()
        missing = []
    if missing:
        raise ModelUnreadable(
            f"{folder} must hold all weights that its config.json asks for, {len(missing)} are missing: {missing[0]}"
        )
    if head == "causal":
        _mend_generation_config(module)
    return module


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """transformers draws a bar for every load and save, and reports missing weights, which `read_module` judges."""
    from transformers import logging

    had_bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if had_bars:
            logging.enable_progress_bar()


def check_model_folder(folder: Path) -> dict[str, Any]:
    """The content of its config.json. Raises ModelUnreadable where one sees at once that it holds no model."""
    if not folder.is_dir():
        raise ModelUnreadable(f"a model must be a folder, found none at {folder}; `rft fetch-model` gets one")
    config = folder / "config.json"
    if not config.is_file():
        raise ModelUnreadable(f"a model folder must hold config.json, found none in {folder}")
    try:
        content = json.loads(config.read_text())
    except ValueError as error:
        raise ModelUnreadable(f"{config} must be JSON, found: {error}") from error
    if not isinstance(content, dict):
        raise ModelUnreadable(f"{config} must be a JSON object, found {type(content).__name__}")
    if "auto_map" in content and "model_type" not in content:
        raise ModelUnreadable(f"{config} asks for code of its own, which is never run: it must name a model_type")
    if not any(folder.glob("*.safetensors")):
        raise ModelUnreadable(f"{folder} must hold its weights as *.safetensors, found none")
    return content


def _mend_generation_config(module: Any) -> None:
    """Published configs that set a temperature without sampling load, but refuse to be saved."""
    settings = getattr(module, "generation_config", None)
    if settings is None:
        return
    try:
        settings.validate(strict=True)
    except ValueError:
        settings.do_sample = True


# In config.json of a reward model trained here: where its score is read, and so where it must be read again.
SCORE_AT, STOP_TOKEN = "rft_score_at", "stop_token"
NEW_HEAD = "score"  # the name that transformers gives the head of its decoders with labels
HEADS = {
    "causal": ("AutoModelForCausalLM", "a causal language model"),
    "sequence_labels": ("AutoModelForSequenceClassification", "a sequence classification model"),
    "token_labels": ("AutoModelForTokenClassification", "a token classification model"),
}
