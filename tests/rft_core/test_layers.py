"""Layers compiled and computed again, held against layers as they are."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from rft_core.hardware import has_compiler
from rft_core.policy import Policy
from tests.rft_core.families import make_family
from tests.rft_core.test_policy import load, ragged_rows, relative_error
from tests.tiny import make_tiny_model

REPOSITORY = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(not has_compiler("cpu"), reason="torch.compile needs a C++ compiler")


def results(policy: Policy, is_compiled: bool, is_checkpointed: bool, budget: int = 80):
    """Logprobs in the order of rows, the flat gradient, and how many compiled calls the backward pass went through."""
    rows, found, compiled = ragged_rows(), {}, 0
    for master in policy.master:
        master.grad = None
    with policy.training(is_compiled, is_checkpointed):
        for batch in policy.micro_batches(rows, budget):
            logprobs_T, _ = policy.token_logprobs(batch, 0.8)
            with torch.no_grad():
                scored_T, _ = policy.token_logprobs(batch, 0.8)
            assert torch.equal(scored_T, logprobs_T) and not scored_T.requires_grad  # ratios are exactly 1 at first
            found |= dict(zip(batch.row_indices, logprobs_T.detach().split(batch.lengths), strict=True))
            compiled += sum("CompiledFunction" in type(node).__name__ for node in _nodes(logprobs_T.grad_fn))
            (logprobs_T * torch.linspace(-1, 2, len(logprobs_T))).sum().backward()
    gradients = [master.grad.clone() for master in policy.master]
    return torch.cat([found[index] for index in range(len(rows))]), gradients, compiled


def _nodes(root):
    seen, waiting = set(), [root]
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            waiting += [following for following, _ in node.next_functions]
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_computed_again_give_the_same_bits(tmp_path, dtype):
    policy = load(make_tiny_model(tmp_path), dtype=dtype)
    plain, again = results(policy, False, False), results(policy, False, True)
    assert torch.equal(plain[0], again[0])
    assert all(torch.equal(a, b) for a, b in zip(plain[1], again[1], strict=True))


def test_layers_computed_again_keep_less(tmp_path):
    """Of what the forward pass keeps for the backward pass, by the bytes that autograd saves."""
    policy = load(make_tiny_model(tmp_path))
    (batch,) = policy.micro_batches(ragged_rows(), 10_000)
    kept = {}
    for is_checkpointed in (False, True):
        sizes = {}

        def keep(tensor, sizes=sizes):
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with (
            policy.training(False, is_checkpointed),
            torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        ):
            logprobs_T, _ = policy.token_logprobs(batch, 1.0)
        kept[is_checkpointed] = sum(sizes.values())
        del logprobs_T
    assert kept[True] < 0.5 * kept[False]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_compiled_layers_are_equal(tmp_path, family):
    policy = load(make_family(tmp_path, family))
    plain = results(policy, False, False)
    for is_checkpointed in (False, True):
        compiled = results(policy, True, is_checkpointed)
        assert policy.notes == []
        assert (compiled[0] - plain[0]).abs().max() <= 1e-5
        assert relative_error(compiled[1], plain[1]) <= 1e-5
    # Each micro-batch goes through the code of both layers, whatever its lengths.
    batches = policy.micro_batches(ragged_rows(), 80)
    assert len(batches) > 3 and results(policy, True, False)[2] == 2 * len(batches)
    assert results(policy, False, False)[2] == 0


@pytest.mark.slow
@needs_compiler
def test_a_layer_that_cannot_be_compiled_runs_as_it_is(tmp_path, monkeypatch):
    policy = load(make_tiny_model(tmp_path))
    plain = results(policy, False, False)

    def breaks(*args, **kwargs):
        torch._dynamo.graph_break()
        return forward(*args, **kwargs)

    forward = policy.layers.layers[0].forward
    monkeypatch.setattr(policy.layers.layers[0], "forward", breaks)
    found = results(policy, True, False)
    assert any("cannot be compiled" in note for note in policy.notes)
    assert torch.equal(plain[0], found[0])


UPDATES = """
import json, sys
from pathlib import Path
from rft_core.checkpoint import load_checkpoint, save_checkpoint, weights_digest
from tests.rft_core.trainer import Trainer
from tests.rft_core.update_tables import tables

folder, checkpoint, first = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
trainer = Trainer(folder, {"name": "grpo"}, {"dtype": "bfloat16"}, compile=True, mini_batches=2, micro_batch_tokens=40)
if first:
    load_checkpoint(trainer.state, checkpoint)
made = []
for number in range(first, 3):
    rollouts, advantages = tables(behaviour=-5.0 + number)
    made.append([[row["loss"], row["grad_norm"]] for row in trainer.update(rollouts, advantages)])
    if number == 0:
        save_checkpoint(trainer.state, checkpoint)
print(json.dumps({"made": made, "digest": weights_digest(trainer.state), "notes": trainer.state.policy.notes}))
"""


@pytest.mark.slow
@needs_compiler
def test_a_replay_in_another_process_gives_the_same_bits_compiled(tmp_path):
    """Loss, gradient norm and weights: the whole in one process, then from the checkpoint of its first update."""
    folder = make_tiny_model(tmp_path / "model")
    (tmp_path / "checkpoint").mkdir()
    runs = []
    for first in (0, 1):
        command = [sys.executable, "-c", UPDATES, str(folder), str(tmp_path / "checkpoint"), str(first)]
        # A cache of its own: what the second finds is what it makes.
        environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / f"cache-{first}")}
        ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False, env=environment)
        assert ended.returncode == 0, ended.stderr
        runs.append(json.loads(ended.stdout.splitlines()[-1]))
    whole, replayed = runs
    assert whole["notes"] == replayed["notes"] == []
    assert whole["made"][1:] == replayed["made"]
    assert whole["digest"] == replayed["digest"]
