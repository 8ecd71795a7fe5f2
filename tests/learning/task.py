"""What the cases learn: say the last two of four digits. And the small model that they begin with.

A prompt is four digits, its answer the third and the fourth. Both are uniform over all prompts, so an answer that does
not look at the prompt gets one digit in ten right, whatever it is. The model begins above that chance, by a few hundred
steps of supervised pretraining on answers that are mostly random: it knows the form, and has an inkling of the task.
Wrong completions are right answers of other prompts: nothing but the prompt tells them from right ones.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

RECIPES = Path(__file__).parent / "recipes"
NUM_TRAIN, NUM_HELDOUT = 480, 240
# Shares of the digits in pretraining; the others are random.
RIGHT = 0.15
DECOY = 0.35  # the first and the second instead: what the model would rather say, so that sharpening it is no gain
PRETRAINING_STEPS = 400
SPECIAL_TOKENS = ("<|unknown|>", "<|start|>", "<|end|>")
END_TOKEN_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}{{ '=' if message['role'] == 'user' else '<|end|>' }}"
    "{% endfor %}"
)

Pair = tuple[str, str]  # a prompt and its answer


def write_task(folder: Path, seed: int = 0) -> Path:
    """The files that cases name: for each kind of data the true one, a control whose labels are dealt out, held-out."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(seed)
    pairs = [(f"{number:04d}", f"{number:04d}"[2:]) for number in draw.sample(range(10_000), NUM_TRAIN + NUM_HELDOUT)]
    for part, chosen in (("train", pairs[:NUM_TRAIN]), ("heldout", pairs[NUM_TRAIN:])):
        wrong = _dealt_out(chosen, draw)
        _write(folder / f"prompts-{part}.jsonl", [{"prompt": p, "answer": a} for p, a in chosen])
        _write(folder / f"answers-{part}.jsonl", [{"prompt": p, "completion": a} for p, a in chosen])
        compared = [{"prompt": p, "chosen": a, "rejected": w} for (p, a), w in zip(chosen, wrong, strict=True)]
        _write(folder / f"pairs-{part}.jsonl", compared)
        if part == "train":  # the controls, whose completions are all of other prompts; held-out rows stay true
            rows = [{"prompt": p, "completion": w} for (p, _), w in zip(chosen, wrong, strict=True)]
            _write(folder / "answers-control.jsonl", rows)
            others = _dealt_out(chosen, draw, wrong)
            rows = [
                {"prompt": p, "chosen": w, "rejected": o} for (p, _), w, o in zip(chosen, wrong, others, strict=True)
            ]
            _write(folder / "pairs-control.jsonl", rows)
    for beside in (*RECIPES.glob("*.yaml"), RECIPES.parent / "rewards.py", RECIPES.parent / "shuffled.py"):
        shutil.copy(beside, folder)
    make_model(folder / "model", seed, [prompt for prompt, _ in pairs[NUM_TRAIN:]])
    return folder


def make_model(folder: Path, seed: int, heldout: list[str]) -> Path:
    """A two-layer model that has seen the form of answers, never behind a held-out prompt."""
    tokenizer = _tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = LlamaForCausalLM(_config(len(tokenizer)))
        _pretrain(module, {int(prompt) for prompt in heldout})
    module.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=END_TOKEN_ID, pad_token_id=END_TOKEN_ID)
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def _pretrain(module: LlamaForCausalLM, heldout: set[int]) -> None:
    allowed = torch.tensor([number for number in range(10_000) if number not in heldout])
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.0)
    first = len(SPECIAL_TOKENS)  # the token of digit 0
    for _ in range(PRETRAINING_STEPS):
        numbers = allowed[torch.randint(len(allowed), (64,))]
        digits = torch.stack([numbers // 10**place % 10 for place in (3, 2, 1, 0)], 1)
        kind = torch.rand(64, 2)
        answers = torch.randint(10, (64, 2))
        answers = torch.where(kind < RIGHT + DECOY, digits[:, :2], answers)
        answers = torch.where(kind < RIGHT, digits[:, 2:], answers)
        tail = torch.full((64, 1), END_TOKEN_ID)
        ids = torch.cat([digits + first, torch.full((64, 1), first + 10), answers + first, tail], 1)
        logits = module(ids[:, :-1]).logits[:, 4:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 5:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def _tokenizer() -> PreTrainedTokenizerFast:
    """14 tokens: the special ones, the digits, and the sign that ends a prompt."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *"0123456789="])}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=SPECIAL_TOKENS[0]))
    inner.decoder = decoders.Fuse()
    inner.add_special_tokens(list(SPECIAL_TOKENS))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        unk_token=SPECIAL_TOKENS[0],
        bos_token=SPECIAL_TOKENS[1],
        eos_token=SPECIAL_TOKENS[2],
        pad_token=SPECIAL_TOKENS[2],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def _config(vocabulary: int) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=END_TOKEN_ID,
        pad_token_id=END_TOKEN_ID,
    )


def _dealt_out(pairs: list[Pair], draw: random.Random, taken: list[str] | None = None) -> list[str]:
    """For each pair the answer of another: the same answers, no information. It differs from the pair's own, and from
    that which is taken already."""
    own = [answer for _, answer in pairs]
    refused = [{answer} for answer in own]
    if taken is not None:
        refused = [{answer, other} for answer, other in zip(own, taken, strict=True)]
    dealt = draw.sample(own, len(own))
    for index in range(len(own)):
        while dealt[index] in refused[index]:
            other = draw.randrange(len(own))
            if dealt[other] not in refused[index] and dealt[index] not in refused[other]:
                dealt[index], dealt[other] = dealt[other], dealt[index]
    return dealt


def _write(path: Path, rows: list[dict[str, str]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
