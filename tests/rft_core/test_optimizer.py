import math

import pytest
import torch

from rft_core.config import ModelSettings, TrainingSettings
from rft_core.optimizer import Optimizer, learning_rate
from rft_core.policy import Policy
from tests.tiny import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def load(folder, dtype="float32"):
    return Policy.load(ModelSettings(path=str(folder), device="cpu", dtype=dtype), folder, seed=0)


def fill_gradients(policy: Policy, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for master in policy.master:
        master.grad = torch.randn(master.shape, generator=generator)


# Warm-up of 2 to a peak of 1, then 4 steps down to 0.2: linear 0.2 + 0.8 x (3, 2, 1, 0)/4;
# cosine 0.2 + 0.8 x (1 + cos(pi k/4))/2.
@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ("cosine", [0.5, 1.0, 0.2 + 0.4 * (1 + math.sqrt(0.5)), 0.6, 0.2 + 0.4 * (1 - math.sqrt(0.5)), 0.2, 0.2]),
    ],
)
def test_schedules_by_hand(schedule, expected):
    training = TrainingSettings(learning_rate=1.0, schedule=schedule, warmup_steps=2, min_learning_rate_ratio=0.2)
    assert [learning_rate(training, step, 6) for step in range(1, 8)] == pytest.approx(expected)


def test_two_steps_equal_the_papers_formula(folder):
    """AdamW as in arXiv 1711.05101, algorithm 2, in float64; decay on matrices only; gradients scaled to norm 1."""
    policy = load(folder)
    training = TrainingSettings(learning_rate=1e-2, weight_decay=0.1, beta1=0.8, beta2=0.95, adam_epsilon=1e-6)
    optimizer = Optimizer.over(policy)
    expected = [master.detach().double().clone() for master in policy.master]
    first = [torch.zeros_like(weight) for weight in expected]
    second = [torch.zeros_like(weight) for weight in expected]
    for step in (1, 2):
        fill_gradients(policy, step)
        gradients = [master.grad.double() for master in policy.master]
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        for i, gradient in enumerate(gradients):
            scaled = gradient / norm
            first[i] = 0.8 * first[i] + 0.2 * scaled
            second[i] = 0.95 * second[i] + 0.05 * scaled**2
            decay = 0.1 if expected[i].ndim >= 2 else 0.0
            change = (first[i] / (1 - 0.8**step)) / ((second[i] / (1 - 0.95**step)).sqrt() + 1e-6)
            expected[i] = expected[i] * (1 - 1e-2 * decay) - 1e-2 * change
        assert optimizer.grad_norm() == pytest.approx(norm, rel=1e-6)
        optimizer.step(training, 1e-2, optimizer.grad_norm())
    for found, wanted in zip(policy.master, expected, strict=True):
        assert (found - wanted).abs().max() <= 1e-6


def test_each_step_takes_the_settings_that_it_is_given(folder):
    """A branch replays old updates under their own settings, then goes on under others."""
    old = TrainingSettings(weight_decay=0.5, beta1=0.5, beta2=0.6, adam_epsilon=1e-3)
    weights = []
    for others in ([], [TrainingSettings()]):
        policy = load(folder)
        optimizer = Optimizer.over(policy)
        for seed, training in enumerate([old, *others]):
            fill_gradients(policy, seed)
            optimizer.step(training, 1e-2, optimizer.grad_norm())
        weights.append([master.clone() for master in policy.master])
    # The same as AdamW itself, whose groups are edited between two steps.
    policy = load(folder)
    matrices = [weight for weight in policy.master if weight.ndim >= 2]
    vectors = [weight for weight in policy.master if weight.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.5}, {"params": vectors, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=1e-2, betas=(0.5, 0.6), eps=1e-3)
    for seed, expected in enumerate(weights):
        fill_gradients(policy, seed)
        torch.nn.utils.clip_grad_norm_(policy.master, 1.0)
        adamw.step()
        for found, wanted in zip(policy.master, expected, strict=True):
            assert (found - wanted).abs().max() <= 1e-6
        for group in adamw.param_groups:
            group.update(betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0)


def test_gradients_below_the_bound_are_not_scaled(folder):
    policy, other = load(folder), load(folder)
    for each, bound in ((policy, 1e9), (other, 1e12)):
        optimizer = Optimizer.over(each)
        fill_gradients(each, 0)
        optimizer.step(TrainingSettings(max_grad_norm=bound), 1e-2, optimizer.grad_norm())
    assert all(torch.equal(a, b) for a, b in zip(policy.master, other.master, strict=True))


def test_a_weight_without_gradient_counts_as_zero(folder):
    policy, other = load(folder), load(folder)
    for each in (policy, other):
        optimizer = Optimizer.over(each)
        fill_gradients(each, 0)
        each.master[0].grad = None if each is policy else torch.zeros_like(each.master[0])
        optimizer.step(TrainingSettings(weight_decay=0.1), 1e-2, optimizer.grad_norm())
    assert all(torch.equal(a, b) for a, b in zip(policy.master, other.master, strict=True))


def test_bfloat16_weights_are_the_rounded_masters(folder):
    policy = load(folder, "bfloat16")
    optimizer = Optimizer.over(policy)
    before = [master.clone() for master in policy.master]
    fill_gradients(policy, 0)
    # 1e-4: below what bfloat16 resolves next to 0.1, so that only float32 masters can add it up.
    optimizer.step(TrainingSettings(), 1e-4, optimizer.grad_norm())
    for old, master, weight in zip(before, policy.master, policy.compute, strict=True):
        assert not torch.equal(old, master)
        assert torch.equal(weight.detach(), master.bfloat16())


def test_non_finite_gradients_show_in_the_norm(folder):
    policy = load(folder)
    optimizer = Optimizer.over(policy)
    fill_gradients(policy, 0)
    policy.master[3].grad.view(-1)[5] = math.nan
    assert math.isnan(optimizer.grad_norm())
