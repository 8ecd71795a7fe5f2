"""Cases of area training in tests/cases/pipeline_cases.jsonl that take whole runs: tr-05, tr-07 (its third), tr-09,
tr-11 and tr-13. The others are where their part is: tr-01 in rft_core/data, tr-03 and the rest of tr-07 in
rft_core/test_objective.py."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
import torch
import yaml
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data_contracts.errors import ContractError
from data_contracts.ledger import Ledger
from data_contracts.schemas import RECORDS
from data_contracts.validation import check_table
from flows.export import export_run
from flows.train import train
from rft_core.errors import ContentChanged
from rft_core.recipes import load_recipe
from tests.faults.harness import all_digests, finish, rft, write_recipe
from tests.flows.small_runs import Row, logprobs, table
from tests.tiny import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("on_server")]
STEPS = 1  # of recipe_file


def run(root: Path, recipe: Path, *overrides: str) -> None:
    train(recipe=load_recipe(recipe, list(overrides)), run="x", root=str(root))


def imitation(folder: Path, examples: list[dict[str, Any]], **more: Any) -> Path:
    """A recipe that trains on given conversations, four a step."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(json.dumps(example) + "\n" for example in examples))
    recipe = {
        "steps": 3,
        "model": {"path": str(make_tiny_model(folder / "model")), "dtype": "float32", "device": "cpu"},
        "data": {"record": "demonstrations", "source": "rows.jsonl", "heldout_fraction": 0},
        "rollout": {"prompts_per_step": 4},
        "algorithm": {"name": "sft"},
        "training": {"learning_rate": 0.01, "checkpoint_every": 3},
        "evaluation": {"every": 0},
        "execution": {"threads": 1, "retries": 0},
    } | more
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder / "recipe.yaml"


def test_a_run_goes_on_from_the_end_of_an_epoch(tmp_path, prefect_api):  # tr-05
    examples = [{"prompt": f"word {number}", "completion": str(number)} for number in range(12)]
    recipe, root = imitation(tmp_path, examples), tmp_path / "root"
    run(root, recipe)  # one epoch of twelve rows, and its checkpoint
    run(root, recipe, "steps=9")
    updates = Ledger(root / "runs/x").entries("update")
    assert [entry.step for entry in updates] == list(range(1, 10))
    for epoch in range(3):
        seen = [
            row["group_id"] for step in range(3 * epoch + 1, 3 * epoch + 4) for row in table(root, step, "rollouts")
        ]
        assert set(Counter(name.rpartition("/")[2] for name in seen).values()) == {1} and len(seen) == 12
    # Nothing is left to do, and the run says so.
    said = finish(rft("run", recipe, "--name", "x", "--set", "steps=9", root=root, environment=prefect_api))
    assert [line.endswith("reused") for line in said.splitlines() if line.startswith("step ")] == [True] * 9
    with open(tmp_path / "rows.jsonl", "a") as file:
        file.write(json.dumps({"prompt": "one more", "completion": "1"}) + "\n")
    with pytest.raises(ContentChanged, match="content of the source"):
        run(root, recipe, "steps=12")


def test_a_file_without_a_turn_to_train_stops_before_training(tmp_path):  # tr-07, case 3
    """Turns are found by the template, not by a marker that a text may lack; a file without any is no training at 0."""
    examples = [{"messages": [{"role": "user", "content": f"[INST] {number} [/INST] hello"}]} for number in range(4)]
    recipe = imitation(tmp_path, examples)
    with pytest.raises(ContractError, match="no_assistant_turn"):
        run(tmp_path / "root", recipe)
    assert Ledger(tmp_path / "root/runs/x").entries("update") == []


def logprobs_of(folder: Path, made: list[Row]) -> list[list[float]]:
    """Of each completion's tokens, by a plain forward pass of a model folder."""
    module = AutoModelForCausalLM.from_pretrained(folder)
    return [logprobs(module, row).tolist() for row in made]


def test_the_engine_samples_from_the_adapter_as_trained(tmp_path, recipe_file):  # tr-09
    """Each step's rollouts have the logprobs of the model with the adapter as it was then, and its name."""
    policies, folders = [], [recipe_file.parent / "model"]
    for step in (1, 2, 3):
        run(tmp_path, recipe_file, "model.lora_rank=4", f"steps={step}", "evaluation.every=0")
        made = table(tmp_path, step, "rollouts")
        policies.append({row["policy_id"] for row in made})
        sampled = [row["behaviour_logprobs"] for row in made]
        assert sampled == [pytest.approx(each, abs=1e-3) for each in logprobs_of(folders[-1], made)]
        if step > 1:  # the adapter matters
            base = logprobs_of(folders[0], made)
            gaps = [abs(a - b) for one, two in zip(sampled, base, strict=True) for a, b in zip(one, two, strict=True)]
            assert max(gaps) > 0.02
        folders.append(export_run(tmp_path, "x", tmp_path / f"merged-{step}"))
    assert len(set.union(*policies)) == 3 and all(len(names) == 1 for names in policies)


def make_merging_model(folder: Path) -> Path:
    """Its tokenizer joins any two of four digits, so that what a random model samples is seldom what its text encodes
    to."""
    digits = "0123"
    pairs = [(a, b) for a in digits for b in digits]
    names = ["<|unknown|>", "<|start|>", "<|end|>", "=", *digits, *(a + b for a, b in pairs)]
    inner = Tokenizer(models.BPE({name: index for index, name in enumerate(names)}, pairs, unk_token=names[0]))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(names[:3])
    template = "{% for m in messages %}{{ m['content'] }}{{ '=' if m['role'] == 'user' else '<|end|>' }}{% endfor %}"
    tokens = {"unk_token": names[0], "bos_token": names[1], "eos_token": names[2], "pad_token": names[2]}
    PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=template, **tokens).save_pretrained(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = LlamaConfig(vocab_size=len(names), bos_token_id=1, eos_token_id=2, pad_token_id=2, **sizes)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def test_what_was_sampled_is_trained_not_what_its_text_encodes_to(tmp_path):  # tr-11
    recipe = write_recipe(tmp_path, make_merging_model(tmp_path / "model"), steps=1, model__dtype="float32")
    prompts = [{"prompt": f"{n // 16 % 4}{n // 4 % 4}{n % 4}", "answer": "0"} for n in range(64)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (tmp_path / "rewards.py").write_text(
        "def low_letters(rows):\n    return [row.completion_text.count('1') / 9 for row in rows]\n"
    )
    root = tmp_path / "root"
    run(root, recipe, "evaluation.every=0")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    made = table(root, 1, "rollouts")
    others = [row for row in made if tokenizer.encode(row["completion_text"]) != row["completion_token_ids"][:-1]]
    assert len(others) > len(made) / 2
    for row in made:
        lengths = {len(row[name]) for name in ("completion_token_ids", "behaviour_logprobs", "completion_mask")}
        assert len(lengths) == 1
    trained = {row["rollout_id"] for row in table(root, 1, "advantages") if row["is_trained"]}
    (update,) = table(root, 1, "update", "updates")
    assert update["trained_tokens"] == sum(
        len(row["completion_token_ids"]) for row in made if row["rollout_id"] in trained
    )
    assert update["sampling_logp_difference_max"] < 1e-4  # the trainer saw the engine's own tokens
    shorter = [{**row, "behaviour_logprobs": row["behaviour_logprobs"][:-1]} for row in made]
    with pytest.raises(ContractError, match="behaviour_logprobs"):
        check_table(pa.Table.from_pylist(shorter, schema=RECORDS["rollouts"].schema), "rollouts")


def test_a_checkpoint_that_was_never_finished_is_passed_by(tmp_path, recipe_file):  # tr-13
    """State is saved whole, by one process; what a kill leaves has no manifest, and is not taken for the latest."""
    root = tmp_path / "root"
    often = ("training.checkpoint_every=1", "evaluation.every=0")
    run(root, recipe_file, *often, "steps=2")
    last = root / "checkpoints" / Ledger(root / "runs/x").entries("checkpoint")[-1].policy.policy_id
    shutil.copytree(last, root / "checkpoints" / f".{'f' * 32}.x.tmp")
    unfinished = shutil.copytree(last, root / "checkpoints" / ("e" * 32))
    (unfinished / "manifest.json").unlink()
    run(root, recipe_file, *often, "steps=3")
    run(tmp_path / "straight", recipe_file, *often, "steps=3")
    assert all_digests(root, "x") == all_digests(tmp_path / "straight", "x")
