"""Rows of ALGORITHMS that learn from experts beside own completions, or from the best of the latter. No torch."""

from __future__ import annotations

from rft_core.mixtures import ExpertShare
from rft_core.terms import Algorithm, Term

_GRPO = Term(surrogate="clipped", clip_low=0.2, clip_high=0.2, aggregation="sequence_mean")

MIXED_ALGORITHMS = {
    row.name: row
    for row in (
        Algorithm(
            name="mix",
            source="(1 - mu) grpo on own rows + mu sft on expert rows, each with denominators of its own; the mixture "
            "of arXiv 2508.11408 with a constant mu",
            advantage="group_zscore",
            terms=(_GRPO, Term(rows="expert", surrogate="logprob", aggregation="token_mean")),
            expert_share=ExpertShare(),
        ),
        Algorithm(
            name="chord",
            source="CHORD, arXiv 2508.11408: mu goes down from a peak, and the loss of an expert token is weighed by "
            "p (1 - p): neither what is known nor what is out of reach is drilled",
            advantage="group_zscore",
            terms=(_GRPO, Term(rows="expert", surrogate="uncertainty_weighted", aggregation="token_mean")),
            expert_share=ExpertShare(),
        ),
        Algorithm(
            name="raft",
            source="RAFT, arXiv 2304.06767, algorithm 1: the likelihood of the best completion of each group; here it "
            "must pass as well",
            advantage="selected",
            terms=(Term(rows="selected", surrogate="logprob", aggregation="token_mean"),),
        ),
    )
}
