"""Settings of preference objectives. Importable without torch."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from rft_core.settings import Settings


class PreferenceSettings(Settings):
    """Null takes the value of the algorithm's row."""

    losses: dict[str, Annotated[float, Field(ge=0)]] | None = Field(
        None, min_length=1, description="Losses and their weights, e.g. {dpo: 0.8, nll: 0.2}."
    )
    beta: float | None = Field(None, gt=0, description="Scale of the margin.")
    label_smoothing: float | None = Field(None, ge=0, lt=1, description="Chance that a label is wrong.")
    length_normalised: bool | None = Field(None, description="ipo: averages over tokens instead of sums.")
    divergence: Literal["reverse_kl", "forward_kl", "js", "alpha"] | None = Field(
        None, description="dpo: what holds the policy to the reference."
    )
    divergence_alpha: float | None = Field(None, gt=0, description="divergence alpha: its parameter.")
    tail_weight: float | None = Field(
        None, ge=0, le=1, description="Weight of tokens beyond the shorter completion of the pair (LD-DPO); 1 is off."
    )
    gamma: float | None = Field(None, ge=0, description="simpo: margin that chosen must win by.")
    alpha: float | None = Field(None, ge=0, description="cpo: weight of the NLL of chosen.")
    alpha_reward: float | None = Field(None, ge=0, description="simpo: AlphaPO's alpha; 0 is log p.")
    desirable_weight: float | None = Field(None, ge=0, description="Weight of completions labelled true.")
    undesirable_weight: float | None = Field(None, ge=0, description="Weight of completions labelled false.")
    centring: float | None = Field(None, ge=0, description="reward_model: pulls the two scores of a pair around 0.")
    likelihood_weights: bool | None = Field(
        None,
        description="dpo: a pair counts by how likely the policy is to write both completions (WPO), at most 1.",
    )
    running_shift: bool | None = Field(None, description="bco: rewards minus their running mean.")
