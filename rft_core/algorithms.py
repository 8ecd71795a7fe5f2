"""ALGORITHMS: one row per algorithm, composed of parts named in `advantages`, `losses`, `surrogates` and `gates`.

The update calls `Algorithm.loss` and knows no names. A new algorithm is a row here; a new part is a function and its
name in one of those tables. What a recipe overrides is applied in `resolve`. Imports no torch.
"""

from __future__ import annotations

from rft_core.mixed_algorithms import MIXED_ALGORITHMS
from rft_core.offline_algorithms import OFFLINE_ALGORITHMS
from rft_core.terms import NO_CORRECTION, TEACHER_GAP, Algorithm, Distillation, Kl, Term

POLICY_GRADIENT_ALGORITHMS = {
    row.name: row
    for row in (
        Algorithm(
            name="grpo",
            source="DeepSeekMath, arXiv 2402.03300, eq. 3 and 4; the paper's KL coefficient is 0.04, ours 0",
            advantage="group_zscore",
            terms=(Term(surrogate="clipped", clip_low=0.2, clip_high=0.2, aggregation="sequence_mean"),),
        ),
        Algorithm(
            name="dr_grpo",
            source="Dr. GRPO, arXiv 2503.20783, section 3.2: neither standard deviation nor row length divides",
            advantage="group_mean",
            terms=(Term(surrogate="clipped", clip_low=0.2, clip_high=0.2, aggregation="constant_length"),),
        ),
        Algorithm(
            name="dapo",
            source="DAPO, arXiv 2503.14476, eq. 8 and 11: a wider upper clip, token mean, fresh prompts for groups "
            "without signal; its soft penalty of long completions is overlong_buffer_tokens",
            advantage="group_zscore",
            terms=(Term(surrogate="clipped", clip_low=0.2, clip_high=0.28, aggregation="token_mean"),),
            dynamic_sampling=True,
        ),
        # One ratio for a whole completion
        Algorithm(
            name="gspo",
            source="GSPO, arXiv 2507.18071, eq. 5 and 7; clip widths of section 5.1",
            advantage="group_zscore",
            terms=(Term(level="sequence_geometric", clip_low=3e-4, clip_high=4e-4, aggregation="sequence_mean"),),
        ),
        Algorithm(
            name="luspo",
            source="LUSPO, arXiv 2602.05261: GSPO with each completion's loss multiplied by its length",
            advantage="group_zscore",
            terms=(Term(level="sequence_geometric", clip_low=2e-3, clip_high=2.5e-3, aggregation="sequence_sum"),),
        ),
        Algorithm(
            name="gmpo",
            source="GMPO, arXiv 2507.20673: tokens are clipped before the geometric mean, at e^-0.4 and e^0.4",
            advantage="group_zscore",
            terms=(
                Term(
                    level="sequence_geometric_clipped",
                    log_ratio_bound=0.4,
                    surrogate="unclipped",
                    aggregation="sequence_mean",
                ),
            ),
        ),
        # Every token keeps a gradient
        Algorithm(
            name="cispo",
            source="CISPO, MiniMax-M1, arXiv 2506.13585, section 3.1; no lower bound, and 5 as the upper one as in "
            "ScaleRL, arXiv 2510.13786",
            advantage="group_zscore",
            terms=(Term(surrogate="capped", weight_floor=0.0, weight_cap=5.0, aggregation="token_mean"),),
        ),
        Algorithm(
            name="scale_rl",
            source="ScaleRL, arXiv 2510.13786: CISPO with rewards divided by the batch's standard deviation",
            advantage="group_zscore",
            advantage_settings=(("std_scope", "batch"),),
            terms=(Term(surrogate="capped", weight_floor=0.0, weight_cap=5.0, aggregation="token_mean"),),
        ),
        Algorithm(
            name="sapo",
            source="SAPO, arXiv 2511.20347: a smooth gate around ratio 1, steeper where A < 0",
            advantage="group_zscore",
            terms=(
                Term(
                    surrogate="soft_gate",
                    soft_gate_positive=1.0,
                    soft_gate_negative=1.05,
                    aggregation="sequence_mean",
                ),
            ),
        ),
        # The likelihood alone: exactly on-policy, one optimizer step
        Algorithm(
            name="reinforce",
            source="REINFORCE with the whole completion as one action, as in arXiv 2402.14740; no baseline",
            advantage="none",
            terms=(Term(surrogate="logprob", aggregation="sequence_sum"),),
        ),
        Algorithm(
            name="rloo",
            source="RLOO, arXiv 2402.14740: leave-one-out baseline of rewards that hold the KL of the whole completion",
            advantage="leave_one_out",
            terms=(Term(surrogate="logprob", aggregation="sequence_sum"),),
            reward_kl=0.03,
        ),
        Algorithm(
            name="remax",
            source="ReMax, arXiv 2310.10505, section 4: the baseline is the reward of the prompt's greedy completion",
            advantage="greedy_baseline",
            terms=(Term(surrogate="logprob", aggregation="sequence_sum"),),
        ),
        Algorithm(
            name="maxrl",
            source="MaxRL, arXiv 2602.02710: the gradient of the likelihood of success, for rewards of at least 0",
            advantage="reward_over_mean",
            terms=(Term(surrogate="logprob", aggregation="sequence_sum"),),
        ),
        Algorithm(
            name="opo",
            source="OPO, arXiv 2505.23585: the baseline weighs rewards by length; exactly on-policy",
            advantage="length_weighted_mean",
            terms=(Term(surrogate="logprob", aggregation="sequence_sum"),),
        ),
        Algorithm(
            name="gpg",
            source="GPG, arXiv 2504.02546, eq. 6 to 8, with F_norm 1; without its resampling below a share of signal",
            advantage="group_mean_rescaled",
            terms=(Term(surrogate="logprob", aggregation="token_mean"),),
        ),
        # Other advantages under the clipped ratio
        Algorithm(
            name="reinforce_plus_plus",
            source="REINFORCE++, arXiv 2501.03262: returns of tokens, whitened over the step; KL in the reward",
            advantage="batch_whiten",
            terms=(Term(aggregation="token_mean"),),
            reward_kl=0.01,
        ),
        Algorithm(
            name="ppo",
            source="PPO, arXiv 1707.06347, eq. 7, under the advantages of arXiv 1506.02438, eq. 16, by a critic's "
            "values; a KL in the reward, as in arXiv 2203.02155, is reward_kl_coefficient",
            advantage="gae",
            terms=(Term(surrogate="clipped", clip_low=0.2, clip_high=0.2, aggregation="token_mean"),),
        ),
        Algorithm(
            name="reinforce_plus_plus_baseline",
            source="REINFORCE++-baseline, arXiv 2501.03262: the group's mean goes, the step's deviation divides",
            advantage="group_mean_batch_whiten",
            terms=(Term(aggregation="token_mean"),),
            kl=Kl(coefficient=1e-5, estimator="k2"),
        ),
        Algorithm(
            name="pass_at_k",
            source="arXiv 2503.19595 with k = n: only the best of a group is rewarded, by its lead",
            advantage="pass_at_k",
            terms=(Term(aggregation="token_mean"),),
        ),
        Algorithm(
            name="gdpo",
            source="GDPO, arXiv 2601.05242: components are standardised before they are summed",
            advantage="per_component",
            terms=(Term(aggregation="sequence_mean"),),
        ),
        # Objectives for data of any policy: what they are off-policy is in the formula, so nothing corrects them
        Algorithm(
            name="opmd",
            source="OPMD, arXiv 2509.24203: the likelihood under a mirror-descent baseline, divided by 1 + tau; "
            "off-policy by derivation, so no correction",
            advantage="log_mean_exp",
            terms=(Term(surrogate="logprob", aggregation="token_mean", tau=1.0),),
            correction=NO_CORRECTION,
        ),
        Algorithm(
            name="asymre",
            source="AsymRE, arXiv 2506.20520: a lowered baseline keeps plain REINFORCE stable off-policy, so no "
            "correction",
            advantage="shifted_mean",
            terms=(Term(surrogate="logprob", aggregation="token_mean"),),
            correction=NO_CORRECTION,
        ),
        Algorithm(
            name="topr",
            source="TOPR, arXiv 2503.14286: successes by likelihood, failures weighed by their tapered sequence ratio "
            "to the behaviour policy, which is its correction; takes rewards of either sign, or a baseline",
            advantage="none",
            terms=(
                Term(
                    anchor="behaviour",
                    level="sequence_product",
                    surrogate="tapered",
                    taper_threshold=0.0,
                    aggregation="sequence_sum",
                ),
            ),
            correction=NO_CORRECTION,
        ),
        Algorithm(
            name="rec",
            source="REC, arXiv 2509.24203: the likelihood within a one-sided clip; weights, regularizer, two_side or "
            "ring, and drop are options; off-policy by derivation, so no correction",
            advantage="group_mean",
            terms=(Term(gate="one_side", surrogate="logprob", aggregation="token_mean"),),
            correction=NO_CORRECTION,
        ),
        # Ratios to the behaviour policy, which correct what is off-policy themselves
        Algorithm(
            name="m2po",
            source="M2PO, arXiv 2510.01161: no clip; the second moment of log ratios over the step is bounded at .04",
            advantage="group_zscore",
            terms=(
                Term(
                    anchor="behaviour",
                    gate="second_moment",
                    second_moment_limit=0.04,
                    surrogate="unclipped",
                    aggregation="token_mean",
                ),
            ),
            correction=NO_CORRECTION,
        ),
        Algorithm(
            name="vespo",
            source="VESPO, arXiv 2602.10693: the sequence ratio reshaped by rho^k exp(lambda (1 - rho)), k and lambda "
            "2 and 3 where A >= 0, 3 and 2 where A < 0",
            advantage="group_zscore",
            terms=(Term(anchor="behaviour", level="sequence_product", surrogate="gamma", aggregation="sequence_sum"),),
            correction=NO_CORRECTION,
        ),
        Algorithm(
            name="dppo_tv",
            source="DPPO-Binary-TV, arXiv 2602.04879: probabilities bound a token, not their ratio",
            advantage="group_zscore",
            terms=(
                Term(
                    anchor="behaviour",
                    gate="binary_tv",
                    divergence_limit=0.2,
                    surrogate="unclipped",
                    aggregation="token_mean",
                ),
            ),
            correction=NO_CORRECTION,
        ),
        Algorithm(
            name="dppo_kl",
            source="DPPO-Binary-KL, arXiv 2602.04879",
            advantage="group_zscore",
            terms=(
                Term(
                    anchor="behaviour",
                    gate="binary_kl",
                    divergence_limit=0.05,
                    surrogate="unclipped",
                    aggregation="token_mean",
                ),
            ),
            correction=NO_CORRECTION,
        ),
        # Other gates
        Algorithm(
            name="s_ppo",
            source="sPPO, arXiv 2108.05828: log ratios within ratios of 1 / (1 + eps) .. 1 + eps, eps .3",
            advantage="group_mean",
            terms=(
                Term(
                    gate="two_side",
                    gate_low=1 - 1 / 1.3,
                    gate_high=0.3,
                    surrogate="log_ratio",
                    aggregation="token_mean",
                ),
            ),
        ),
        Algorithm(
            name="clip_cov",
            source="Clip-Cov, arXiv 2505.22617: a few tokens of high covariance between credit and logprob sit out",
            advantage="group_zscore",
            terms=(Term(gate="covariance_band", surrogate="clipped", aggregation="token_mean"),),
        ),
        Algorithm(
            name="kl_cov",
            source="KL-Cov, arXiv 2505.22617: tokens of the highest covariance between credit and logprob are held to "
            "the old policy, as in its authors' code (coefficient 1, share 2e-4; 2e-3 for small models)",
            advantage="group_zscore",
            terms=(
                Term(
                    surrogate="unclipped",
                    aggregation="token_mean",
                    regularizer="absolute_log_ratio",
                    regularizer_coefficient=1.0,
                    regularizer_gate="covariance_top",
                    covariance_top_share=2e-4,
                ),
            ),
        ),
        # A teacher's word for each token
        Algorithm(
            name="on_policy_distillation",
            source="on-policy distillation by policy gradient: the reverse KL to a teacher as credit of each token "
            "(MiniLLM, arXiv 2306.08543, eq. 2, with one token's term for its return); rewards are optional",
            advantage=TEACHER_GAP,
            terms=(Term(aggregation="token_mean"),),
            distillation=Distillation(teacher_gap=1.0),
        ),
    )
}

ALGORITHMS = POLICY_GRADIENT_ALGORITHMS | MIXED_ALGORITHMS | OFFLINE_ALGORITHMS
