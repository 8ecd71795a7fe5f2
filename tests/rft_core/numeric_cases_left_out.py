"""Ids of tests/cases/numeric_cases.jsonl that test_numeric_cases.py does not assert, by reason."""

from __future__ import annotations

OTHER_CONVENTION = {
    "a gap has no value and no decay: the last token before it is followed by the first one behind it": "gae_3",
    "no statistic of nothing: a group without scored members has no deviation, its rows are unscored": "nanstd_3",
    "a singleton has credit 0, not its raw score over 1": "group_mean_std",
    "alpha counts rows without signal, as the paper does, not rewards that are not 0; a singleton has credit 0": (
        "gpg_scaling"
    ),
    "the penalty stops at -1 at the limit and has no factor; scale it by a reward's weight": "overlong_shaping",
    "the average follows every optimizer step with one decay: no schedule of updates, no bias correction": (
        "bema_steps_0 bema_steps_2 bema_coef"
    ),
    "old logprobs are computed by the policy itself, never interpolated between behaviour and current": (
        "areal_prox_loglinear areal_prox_linear"
    ),
    "rows are rejected by their ratios (reject, veto), not by a mean of squared log ratios": "areal_kl_k2_filter",
    "a group is kept when its component spreads at all, not while it adds to a share of all spread": (
        "reward_variance_filter_top_p"
    ),
    "games against the reference: they sample from it, or from a mixture with it, which no stage does": "nash_md xpo",
    "we report |old - behaviour| and the largest ratio, unclamped, not signed means of log ratios": (
        "ppo_kl_metrics ppo_kl_unclamped"
    ),
    "we count capped weights, not rows with a capped token": "seq_fraction_high",
    "rows are never padded: completions are flat, with a row number for each token": (
        "pad_0 pad_2 pad_3 pad_5 pad_6 pad_8 flush_left_1 flush_left_3 async_collate_1 collate_lm_4 collate_lm_5 "
        "teacher_req_1 teacher_req_2"
    ),
    "groups come from ids and blocks, not from a repeating sampler that drops what is left over": (
        "repeat_sampler_1 repeat_sampler_3 repeat_sampler_4a repeat_sampler_4b repeat_sampler_4d split_tensor_dict_1 "
        "bal_exp tail_rollout"
    ),
    "completions end where the engine said they stopped; no mask is guessed from token ids": (
        "eos_mask_1 eos_mask_2 eos_mask_3"
    ),
    "rows are data in tables: no replay buffer": "replay_1 replay_2 replay_3",
    "a tie between two scores counts as wrong, it is not left out": "rm_acc",
    "a report of another tool": "mfu_1 table_1 dp_sum_metric",
}

LATER = {
    "accuracy and labels of reward models": ("prm_acc_1 prm_acc_2 prm_tok_1 prm_tok_2 prm_tok_3 prm_tok_4 prm_tok_5"),
    "offline data: formats, masks, collation": (
        "unpair_1 extract_prompt_1 extract_prompt_2 chatml_1 is_conv truncate_1 collate_lm_1 collate_lm_2 "
        "collate_lm_3 collate_lm_6 sft_mask_1 sft_mask_2 sft_mask_3 collate_dpo_1 collate_dpo_2 "
        "collate_kto_1 collate_rm_1 "
        "collate_tpo_1 open_instruct_pack_masks"
    ),
    "packing and balance over ranks": (
        "posids_1 pack_wrapped pack_bfd_1 pack_bfd_2 pack_bfd_split_1 pack_bfd_split_2 pack_bfd_split_3 "
        "pack_bfd_split_4 async_bal_1 async_budget_1 async_collate_2 firstfit kk_partition groups_divisor "
        "pack_two_workers "
        "micro_batches_per_worker group_kept_together split_uneven"
    ),
    "images": "split_pixels_1 split_pixels_2 split_pixels_3",
    "several turns": "reconcile_prefix reconcile_1 reconcile_2 reconcile_3 reconcile_4 reconcile_5",
    "asynchronous rollouts": "staleness_capacity",
    "rewards and their shaping": (
        "think_valid repetition_0 repetition_2 repetition_3 repetition_5 repetition_6 repetition_8 repetition_9 "
        "cosine_0 cosine_2 cosine_3 cosine_5 cosine_6 cosine_8 cosine_9 cosine_11 cosine_12 cosine_13 "
        "accuracy_1 accuracy_2 "
        "reward_weights stop_properly reward_scaling boxed_extract strip_string mathd_equal dapo_tail_window "
        "deepscaler_think_gate gsm8k_values to_float open_instruct_strip verifiers_math prime_math f1_score "
        "king_moves_code hanging_reward"
    ),
    "evaluation": "passk majority_value",
}
