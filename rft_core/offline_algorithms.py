"""Rows of ALGORITHMS that imitate, compare or classify completions, most of them given by the data set. No torch."""

from __future__ import annotations

from typing import Any

from rft_core.preference_options import Preference
from rft_core.terms import Algorithm, Distillation, Term


def _preference(
    name: str, source: str, losses: tuple[tuple[str, float], ...] = (), unit: str = "pairs", **settings: Any
) -> Algorithm:
    """A row for given pairs or labelled completions. Without `losses` it is the loss of that name alone."""
    preference = Preference(losses or ((name, 1.0),), unit, **settings)
    record = "preferences" if unit == "pairs" else "labelled"
    return Algorithm(name, source, "none", (), records=(record,), preference=preference)


OFFLINE_ALGORITHMS = {
    row.name: row
    for row in (
        Algorithm(
            name="sft",
            source="maximum likelihood of given completions (arXiv 2203.02155, section 3.5); a trajectory's reward "
            "weighs its tokens",
            advantage="none",
            terms=(Term(rows="expert", surrogate="logprob", aggregation="token_mean"),),
            records=("demonstrations", "trajectories"),
        ),
        Algorithm(
            name="dft",
            source="Dynamic fine-tuning, arXiv 2508.05629: each token's gradient times its probability",
            advantage="none",
            terms=(Term(rows="expert", surrogate="probability_weighted", aggregation="token_mean"),),
            records=("demonstrations", "trajectories"),
        ),
        Algorithm(
            name="jsd",
            source="supervised distillation: generalised JSD to a teacher on given completions (arXiv 2306.13649, "
            "eq. 1; lambda 0)",
            advantage="none",
            terms=(),
            records=("demonstrations", "trajectories"),
            distillation=Distillation(coefficient=1.0),
        ),
        Algorithm(
            name="gkd",
            source="GKD, arXiv 2306.13649, algorithm 1: generalised JSD to a teacher on completions that the policy "
            "samples (lambda 1); rewards are optional",
            advantage="none",
            terms=(),
            distillation=Distillation(coefficient=1.0),
        ),
        _preference("dpo", "arXiv 2305.18290, eq. 7"),
        _preference("dpo_norm", "dpo on averages over tokens (Tulu 3, arXiv 2411.15124)"),
        _preference("rpo", "arXiv 2404.19733: dpo and the NLL of chosen", (("dpo", 1.0), ("nll", 1.0))),
        _preference("ipo", "arXiv 2310.12036, eq. 17, on averages over tokens"),
        _preference("hinge", "SLiC, arXiv 2305.10425, on log-ratios"),
        _preference("robust", "arXiv 2403.00409", label_smoothing=0.1),
        _preference("exo", "arXiv 2402.00856", label_smoothing=1e-3),
        _preference("nca", "arXiv 2402.05369"),
        _preference("sppo", "arXiv 2405.00675"),
        _preference("apo_zero", "arXiv 2408.06266"),
        _preference("apo_down", "arXiv 2408.06266"),
        _preference("aot", "arXiv 2406.05882"),
        _preference("aot_unpaired", "arXiv 2406.05882"),
        _preference("discopop", "arXiv 2406.08414"),
        _preference("orpo", "arXiv 2403.07691"),
        _preference("cpo", "arXiv 2401.08417"),
        _preference("simpo", "arXiv 2405.14734, eq. 6", beta=2.5, gamma=1.375),
        _preference(
            "mpo",
            "arXiv 2411.10442: dpo, bco without shift and the NLL of chosen",
            (("dpo", 0.8), ("bco_pair", 0.2), ("nll", 1.0)),
            running_shift=False,
        ),
        _preference("kto", "arXiv 2402.01306, eq. 8", unit="labels"),
        _preference("bco", "arXiv 2404.04656", unit="labels"),
        _preference("apo_zero_unpaired", "arXiv 2408.06266", unit="labels"),
        Algorithm(
            name="reward_model",
            source="Bradley-Terry, arXiv 2203.02155, eq. 1; margins arXiv 2307.09288; centring arXiv 2312.09244",
            advantage="none",
            terms=(),
            records=("preferences",),
            preference=Preference((("bradley_terry", 1.0),), beta=1.0),
            head="sequence_labels",
            positions="last",
        ),
        Algorithm(
            name="process_reward_model",
            source="cross-entropy of each step's label at the step's end (arXiv 2305.20050)",
            advantage="none",
            terms=(Term(rows="expert", surrogate="logistic", aggregation="token_mean"),),
            records=("stepwise",),
            head="token_labels",
            positions="steps",
        ),
        Algorithm(
            name="online_dpo",
            source="arXiv 2402.04792: the best of a scored group against its worst; ties make no pair",
            advantage="none",
            terms=(),
            preference=Preference((("dpo", 1.0),)),
        ),
    )
}
