"""Held-out accuracy of a model folder by plain `generate`, with nothing of ours.

rft export demo --to model
rft show demo prompts --where "split = 'heldout'" --limit 48 --format jsonl > rows.jsonl
python plain_generate.py model rows.jsonl
"""

import json
import re
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
rows = [json.loads(line) for line in Path(sys.argv[2]).read_text().splitlines()]


def accuracy(copies, **sampling):
    correct = []
    for start in range(0, len(rows), 16):
        batch = [row for row in rows[start : start + 16] for _ in range(copies)]
        texts = [row["prompt_text"] for row in batch]
        inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        output = model.generate(**inputs, max_new_tokens=16, top_k=0, top_p=1.0, **sampling)
        completions = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for row, completion in zip(batch, completions, strict=True):
            numbers = re.findall(r"-?\d+", completion)
            correct.append(bool(numbers) and int(numbers[-1]) == int(row["answer"]))
    return sum(correct) / len(correct)


torch.manual_seed(0)
sampled = accuracy(4, do_sample=True, temperature=1.0)
print(json.dumps({"sampled_accuracy": sampled, "greedy_accuracy": accuracy(1, do_sample=False)}))
