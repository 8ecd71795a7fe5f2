"""Cases of numeric_cases.jsonl on losses: inputs -> what is compared with `expected`, or with the parts it names."""

from __future__ import annotations

import math

import pytest
import torch

from rft_core.entropy_options import adapted_entropy_coefficient
from rft_core.kernels.token_logprob import token_logprob
from rft_core.losses import KL_ESTIMATORS, MAX_LOG_RATIO
from rft_core.terms import AdaptiveEntropy, Correction, Kl
from tests.rft_core.padded_rows import aggregated, algorithm, difference, repeat, run, surrogate, tensor, weights


def agg_all_modes(inputs):
    def mode(name, budget=16):
        return aggregated(name, inputs["loss"], inputs["mask"], budget=budget)

    return {
        "token-sum (dp 1)": mode("token_sum"),
        "token-mean": mode("token_mean"),
        "seq-mean-token-sum": mode("sequence_sum"),
        "seq-mean-token-mean": mode("sequence_mean"),
        "seq-mean-token-sum-norm (factor 3)": mode("constant_length", budget=3),
    }


def agg_fully_masked_sequence(inputs):
    names = {"token-mean": "token_mean", "seq-mean-token-sum": "sequence_sum", "seq-mean-token-mean": "sequence_mean"}
    return {case: aggregated(name, inputs["loss"], inputs["mask"]) for case, name in names.items()}


def reductions(inputs):
    losses, mask = inputs["per_token_loss"], inputs["mask"]
    return {
        "grpo_sapo": aggregated("sequence_mean", losses, mask),
        "bnpo": aggregated("token_mean", losses, mask),
        "dr_grpo": aggregated("constant_length", losses, mask, budget=inputs["max_completion_length"]),
        # a loss per row, the same for its tokens, summed: 1 x 3 + 2 x 1 + .5 x 4 over 3 rows
        "luspo": aggregated("sequence_sum", repeat(inputs["seq_loss_for_luspo"], losses), mask),
    }


def grpo_losses(inputs):
    logprobs, old, mask = inputs["logp"], inputs["old_logp"], inputs["mask"]
    advantages = repeat(inputs["advantages"], logprobs)
    given = {"logprobs": logprobs, "old_logprobs_T": old, "reference_logprobs_T": inputs["ref_logp"]}
    kl = Kl(inputs["beta"], "k3")
    low, high = inputs["gspo_eps"]
    ratios = [tensor(difference(a, b)).exp() for a, b in zip(logprobs, old, strict=True)]
    gspo = algorithm(level="sequence_geometric", aggregation="sequence_sum", clip_low=low, clip_high=high)
    return {
        "ratio": [row.tolist() for row in ratios],
        "k3": [
            KL_ESTIMATORS["k3"](tensor(difference(a, b))).tolist()
            for a, b in zip(logprobs, inputs["ref_logp"], strict=True)
        ],
        "clipped_loss": [surrogate("clipped", r.tolist(), a) for r, a in zip(ratios, advantages, strict=True)],
        "grpo_loss_with_kl": run(algorithm(kl=kl, aggregation="sequence_mean"), advantages, mask, **given)[0],
        "gspo_loss_per_seq": [
            [
                run(
                    gspo,
                    advantages[i : i + 1],
                    mask[i : i + 1],
                    logprobs=logprobs[i : i + 1],
                    old_logprobs_T=old[i : i + 1],
                )[0]
                / 2
            ]
            for i in (0, 1)
        ],
    }


def ppo_split(inputs):
    rest = {"logprobs": inputs["log_probs"], "old_logprobs_T": inputs["old_log_probs"]}
    chosen = algorithm(aggregation="token_mean")
    whole = run(chosen, inputs["advantages"], inputs["mask"], **rest)[0]
    split = run(chosen, inputs["advantages"], inputs["mask"], micro=inputs["rank_rows"], **rest)[0]
    assert split == pytest.approx(whole, abs=1e-9)
    return {"full": split}


def kl_case(logprobs, reference, names=("k1", "k2", "k3")):
    gaps = tensor(difference(logprobs, reference))
    return {name: KL_ESTIMATORS[name](gaps).tolist() for name in names}


def kl_nan_masked(inputs):
    metrics = run(
        algorithm(kl=Kl(inputs["coef"])),
        [[0, 0]],
        [inputs["mask"]],
        logprobs=[inputs["logprobs"]],
        reference_logprobs_T=[inputs["ref"]],
    )[1]
    return {"kl_metric": metrics["kl"]}


def tis_trl(inputs):
    def each(kind, level):
        pairs = zip(inputs["old_minus_sampling"], inputs["mask"], strict=True)
        rows = [
            weights(gaps, kind, level, mask, cap=inputs["clip_max"], low=0.0, high=inputs["clip_max"])
            for gaps, mask in pairs
        ]
        return rows if level == "token" else [row[:1] for row in rows]

    return {
        "token_truncate": each("truncate", "token"),
        "token_mask": each("mask", "token"),
        "sequence_truncate": each("truncate", "sequence_product"),
        "sequence_mask": each("mask", "sequence_product"),
    }


def tis_orlhf(inputs):
    pairs = list(zip(inputs["old_minus_rollout"], inputs["mask"], strict=True))
    low, high = inputs["low"], inputs["high"]
    return {
        "tis": [weights(gaps, "truncate", mask=mask, cap=high) for gaps, mask in pairs],
        "icepop": [weights(gaps, "mask", mask=mask, low=low, high=high) for gaps, mask in pairs],
        "seq_geo_mean": [geometric(gaps, mask) for gaps, mask in pairs],
    }


def geometric(gaps, mask):
    return weights(gaps, "truncate", "sequence_geometric", mask, cap=1e9)[0]


def icepop_weights(inputs):
    # A = -1, ratio 1: the loss is the mean weight; the denominator stays 3
    gaps = [math.log(value) for value in inputs["raw"]]
    mask_kind = Correction("mask", low=0.5, high=5.0)
    loss, metrics, _ = run(
        algorithm(correction=mask_kind),
        [[-1.0] * 3],
        [[1] * 3],
        off_policy=True,
        behaviour_logprobs_T=[[-1.0 - gap for gap in gaps]],
    )
    assert loss == pytest.approx(0.8 / 3)
    return {
        "weights": weights(gaps, "mask", low=0.5, high=5.0),
        "out_of_bounds": 1 - metrics["correction_kept"],
        "ess": metrics["effective_sample_size"],
    }


def overflow_rejected_token(inputs):
    low, high = inputs["bounds"]
    behaviour = [[-1.0 - gap for gap in inputs["log_ratios"]]]
    loss, _, gradient = run(
        algorithm(correction=Correction("mask", low=low, high=high)),
        [inputs["advantages"]],
        [[1, 1]],
        off_policy=True,
        behaviour_logprobs_T=behaviour,
    )
    return {"loss": loss, "gradient": gradient}


def none_logprob_neutral(inputs):
    loss, _, _ = run(
        algorithm(),
        [[-1.0, -1.0]],
        [[1, 1]],
        logprobs=[inputs["trainer_logprobs"]],
        off_policy=True,
        behaviour_logprobs_T=[inputs["sampler_logprobs"]],
    )
    assert loss == 1.0  # the mean of the two weights
    return {"ratios": [1, 1]}


def masked_mean_nan_safe(inputs):
    losses = [[-(math.nan if value == "NaN" else value) for value in inputs["values"]]]
    results = [run(algorithm(), losses, [mask])[0] for mask in inputs["masks"]]
    return {"results": [results[0], "NaN" if math.isnan(results[1]) else results[1]]}


def gspo_single(inputs):
    # The three tokens are one row, each with its own advantage; the ratio is one number: exp(mean log ratio).
    ratio = geometric(difference(inputs["logprobs"], inputs["old_logprobs"]), [1, 1, 1])
    chosen = algorithm(level="sequence_geometric", aggregation="sequence_mean", clip_low=0.2, clip_high=0.2)
    loss = run(
        chosen,
        [inputs["advantages"]],
        [[1] * 3],
        logprobs=[inputs["logprobs"]],
        old_logprobs_T=[inputs["old_logprobs"]],
    )[0]
    return {"sequence_ratio": ratio, "mean_loss": loss}


def areal_seq_ratio(inputs):
    gaps = difference(inputs["logprobs_rows"], inputs["proximal_rows"])
    advantages = [[1, 2, 3, 4], [0.5, 0.5, 0.5, 0.5]]
    loss = run(algorithm(level="sequence_geometric", aggregation="sequence_mean"), advantages, [[1] * 4] * 2)[0]
    return {
        "ratios": [geometric([gap] * 3, [1] * 3) for gap in gaps],
        "loss_ratio1_adv_rows": {"advantages": advantages, "loss": loss},
    }


def empty_sample_loss_zero(inputs):
    loss, _, gradient = run(algorithm(), [[1.0] * 3], [inputs["mask"]])
    assert gradient == [0.0] * 3
    return {"loss": loss}


def assign_advantages_mask(inputs):
    # On-policy, token_sum: the gradient is -A on trained tokens, 0 elsewhere.
    _, _, gradient = run(algorithm(aggregation="token_sum"), [[inputs["advantage"]] * 3] * 2, inputs["masks"])
    return {"per_token": [[-value for value in gradient[:3]], [-value for value in gradient[3:]]]}


def skyrl_prompt_mean(inputs):
    groups = [prompt for prompt, (first, end) in enumerate(inputs["prompts"]) for _ in range(first, end)]
    value = aggregated("prompt_mean", inputs["values"], inputs["mask"], groups=groups)
    split = aggregated("prompt_mean", inputs["values"], inputs["mask"], groups=groups, micro=[[3, 0], [1], [2]])
    assert split == pytest.approx(value)
    return {"prompt_mean": value}


def token_logprobs(inputs):
    logits, index = torch.tensor(inputs["logits"]), torch.tensor(inputs["index"])
    logp, entropy = token_logprob(logits, index, inputs.get("temperature", 1.0))
    return {"logp": logp.tolist(), "entropy": entropy.tolist()}


def ppo_grid(inputs):
    ratios = inputs["ratio"]

    def losses(advantage, **term):
        return surrogate("clipped", ratios, [advantage] * len(ratios), **{"clip_low": 0.2, "clip_high": 0.2, **term})

    return {
        "A=+1": losses(1),
        "A=-1": losses(-1),
        "A=-1,dual_clip=3": losses(-1, dual_clip=3.0),
        "A=-1,delta=2 (TRL two-sided)": losses(-1, dual_clip=2.0),
        "A=+1,eps_high=0.28": losses(1, clip_high=0.28),
    }


def ga_global(inputs):
    losses, mask = [*inputs["mb0"], *inputs["mb1"]], [*inputs["mask0"], *inputs["mask1"]]
    return {"correct": aggregated("token_mean", losses, mask, micro=[[0], [1, 2]])}


def dapo_denominator_bug(inputs):
    tokens = inputs["tokens_per_micro_batch"]
    value = aggregated("token_mean", [[1.0] * tokens] * 2, [[1] * tokens] * 2, micro=[[0], [1]])
    return {"correct_accumulated_loss": value}


def areal_rs_token(inputs):
    first, second = inputs["cases"]
    return {
        "masks": [
            [
                float(w > 0)
                for w in weights(difference(first["prox"], first["old"]), "mask", low=0.0, high=first["ratio_upper"])
            ],
            [
                float(w > 0)
                for w in weights(difference(second["prox"], second["old"]), "mask", low=second["ratio_lower"], high=1e9)
            ],
        ]
    }


def product_mask(inputs):
    limits = {"low": inputs["low"], "high": inputs["high"]}
    return {
        "values": [weights(row, "truncate", "sequence_product", cap=1e9)[0] for row in inputs["rows"]],
        "keep": [float(weights(row, "mask", "sequence_product", **limits)[0] > 0) for row in inputs["rows"]],
    }


def token_mask_bounds(inputs):
    kept = weights(inputs["log_ratios"], "mask", low=inputs["low"], high=inputs["high"])
    return {"mask": [float(weight > 0) for weight in kept]}


def tis_token(inputs):
    gaps = difference(inputs["old"], inputs["rollout"])
    _, metrics, _ = run(
        algorithm(correction=Correction("truncate", cap=inputs["cap"])),
        [[1.0] * 3],
        [[1] * 3],
        off_policy=True,
        logprobs=[inputs["old"]],
        behaviour_logprobs_T=[inputs["rollout"]],
    )
    return {"weights": weights(gaps, cap=inputs["cap"]), "capped_fraction": 1 - metrics["correction_kept"]}


def sequence_sum_weight(inputs):
    gaps = difference(inputs["old"], inputs["rollout"])
    return {"weight": weights(gaps, "truncate", "sequence_product", inputs.get("mask"), cap=inputs["cap"])[0]}


def kl_clamp(inputs):
    """verl's and OpenRLHF's bound, which the setting kl_value_clamp gives the loss; as clamped estimates."""
    bound = float(inputs.get("output_clamp", 10))
    gaps = torch.tensor(
        inputs["log_ratio"] if "log_ratio" in inputs else [inputs["logprob"] - r for r in inputs["ref"]]
    )
    gaps = gaps.double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    clamped = {name: clamped_kl(gaps, name, bound) for name in ("k1", "k2", "k3")}
    return clamped | ({"k3_unclamped": clamped_kl(gaps, "k3", None)} if "log_ratio" in inputs else {})


def clamped_kl(gaps, name, bound):
    """Per token, by the loss itself: one row of one token each."""
    values = []
    for gap in gaps.tolist():
        row = algorithm(kl=Kl(1.0, name, value_clamp=bound), surrogate="logprob")
        values.append(run(row, [[0.0]], [[1.0]], logprobs=[[gap]], reference_logprobs_T=[[0.0]])[0])
    return values


def entropy_ctl(inputs):
    adaptive, found = AdaptiveEntropy(target=0.2, delta=0.005, largest=1.0), []
    coefficient = inputs["start"]
    for entropy in inputs["entropies"]:
        coefficient = adapted_entropy_coefficient(coefficient, entropy, adaptive)
        found.append(coefficient)
    return found


MET = {
    "kl_clamp": kl_clamp,
    "kl_clamped": kl_clamp,
    "entropy_ctl": entropy_ctl,
    "masked_mean": lambda i: aggregated("token_mean", [i["x"]], [i["mask"]]),
    "agg_token": lambda i: {"global_": aggregated("token_mean", i["loss"], i["mask"], micro=i["rank_rows"])},
    "agg_seq": lambda i: {"global_": aggregated("sequence_mean", i["loss"], i["mask"], micro=i["rank_rows"])},
    "agg_fullmask": lambda i: {"loss": aggregated("sequence_mean", i["loss"], i["mask"])},
    "ppo_split": ppo_split,
    "ga_global": ga_global,
    "kl_estimators": lambda i: kl_case(i["logp"], i["ref_logp"]),
    "ppo_grid": ppo_grid,
    "reductions": reductions,
    "grpo_losses": grpo_losses,
    "tis_trl": tis_trl,
    "tis_orlhf": tis_orlhf,
    "dapo_denominator_bug": dapo_denominator_bug,
    "selective_logsoftmax": token_logprobs,
    "temp_logp": token_logprobs,
    "assign_advantages_mask": assign_advantages_mask,
    "agg_all_modes": agg_all_modes,
    "agg_fully_masked_sequence": agg_fully_masked_sequence,
    "skyrl_token_mean": lambda i: {
        "token_mean": aggregated("token_mean", i["values"], i["mask"]),
        "all_masked": aggregated("token_mean", i["values"], [[0] * 3] * 2),
    },
    "skyrl_sum_norm": lambda i: {
        "seq_mean_token_sum_norm": aggregated("constant_length", i["values"], i["mask"], budget=i["max_len"])
    },
    "skyrl_prompt_mean": skyrl_prompt_mean,
    "masked_mean_nan_safe": masked_mean_nan_safe,
    "ppo_dual_clip": lambda i: {
        "per_token": surrogate(
            "clipped",
            [math.exp(gap) for gap in difference(i["logprobs"], i["old_logprobs"])],
            i["advantages"],
            dual_clip=float(i["dual_c"]),
        )
    },
    "slime_dual_clip": lambda i: {
        "per_token": surrogate("clipped", i["ratios"], i["advantages"], dual_clip=i["dual_c"])
    },
    "gspo_single": gspo_single,
    "areal_seq_ratio": areal_seq_ratio,
    "ce_weighted": lambda i: {
        "loss": run(algorithm(surrogate="logprob"), [[1.0] * 3], [i["weights"]], logprobs=[i["logprobs"]])[0]
    },
    "empty_sample_loss_zero": empty_sample_loss_zero,
    "overflow_rejected_token": overflow_rejected_token,
    "none_logprob_neutral": none_logprob_neutral,
    "kl_small": lambda i: {
        name: values[0] for name, values in kl_case(i["logprobs"], i["ref"], ("k1", "k2", "k3", "abs")).items()
    },
    "kl_nan_masked": kl_nan_masked,
    "tis_token": tis_token,
    "tis_sequence_capped": sequence_sum_weight,
    "tis_sequence_masked": sequence_sum_weight,
    "token_mask_bounds": token_mask_bounds,
    "product_mask": product_mask,
    "icepop_weights": icepop_weights,
    "areal_rs_token": areal_rs_token,
    "areal_rs_sequence": lambda i: {"geometric_weight": geometric(i["log_ratio"], [1, 1, 1])},
}
