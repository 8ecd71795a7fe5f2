"""What decides whether a stored result still means the same.

Raise a stage's integer when a change to its sources alters results: its keys change, old tables stay readable, and a
resume asks for `--accept-new-code`. A test holds a digest of each stage's sources and fails until the integer is
raised or the digest confirmed.
"""

from __future__ import annotations

SEMANTICS: dict[str, int] = {
    "data": 3,
    "prompts": 1,
    "rollouts": 1,
    "rewards": 1,
    "advantages": 1,
    "update": 1,
    "evaluation": 1,
    "given": 1,
}

STAGE_SOURCES: dict[str, tuple[str, ...]] = {
    "data": (
        "data_contracts/formats/*.py",
        "data_contracts/reasons.py",
        "rft_core/data/*.py",
        "rft_core/data/examples/*.py",
    ),
    "prompts": (
        "rft_core/evaluation.py",
        "rft_core/data/prompt_order.py",
        "rft_core/data/prompt_stats.py",
        "rft_core/seeds.py",
    ),
    "rollouts": (
        "rft_core/engines/*.py",
        "rft_core/environments/*.py",
        "rft_core/model_reading.py",
        "rft_core/policy.py",
        "rft_core/seeds.py",
    ),
    "rewards": (
        "rft_core/data/encoding.py",
        "rft_core/data/templates.py",
        "rft_core/model_folder.py",
        "rft_core/model_reading.py",
        "rft_core/rewards/*.py",
        "rft_core/rewards/judge/*.py",
        "rft_core/rewards/maths/*.py",
        "rft_core/rewards/sandbox/*.py",
        "rft_core/rewards/sandbox/inside/*.py",
        "rft_core/sql.py",
    ),
    "advantages": (
        "rft_core/advantages.py",
        "rft_core/algorithms.py",
        "rft_core/credit.py",
        "rft_core/joined.py",
        "rft_core/offline_algorithms.py",
        "rft_core/pairing.py",
        "rft_core/preference_options.py",
        "rft_core/resampling.py",
        "rft_core/resolve.py",
        "rft_core/seeds.py",
        "rft_core/terms.py",
        "rft_core/user_algorithm.py",
    ),
    "update": (
        "rft_core/algorithms.py",
        "rft_core/batching.py",
        "rft_core/gates.py",
        "rft_core/kernels/*.py",
        "rft_core/kl_controller.py",
        "rft_core/losses.py",
        "rft_core/mini_batches.py",
        "rft_core/model_reading.py",
        "rft_core/objective.py",
        "rft_core/offline_algorithms.py",
        "rft_core/optimizer.py",
        "rft_core/pairing.py",
        "rft_core/policy.py",
        "rft_core/preference.py",
        "rft_core/preference_options.py",
        "rft_core/preference_step.py",
        "rft_core/resolve.py",
        "rft_core/score_policy.py",
        "rft_core/seeds.py",
        "rft_core/surrogates.py",
        "rft_core/terms.py",
        "rft_core/train_rows.py",
        "rft_core/update.py",
        "rft_core/user_algorithm.py",
    ),
    "evaluation": ("rft_core/evaluation.py", "rft_core/seeds.py"),
    "given": (
        "rft_core/data/encoding.py",
        "rft_core/data/masks.py",
        "rft_core/data/templates.py",
        "rft_core/data/turns.py",
        "rft_core/environments/given.py",
        "rft_core/environments/plan.py",
        "rft_core/evaluation.py",
        "rft_core/given_evaluation.py",
        "rft_core/pairing.py",
        "rft_core/rewards/given.py",
        "rft_core/seeds.py",
        "rft_core/train_rows.py",
    ),
}
