"""Settings of a critic: the model of values that PPO trains beside its policy. Importable without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from rft_core.errors import SettingsError
from rft_core.settings import NOT_BLANK, Settings
from rft_core.terms import ValueTerm

if TYPE_CHECKING:
    from rft_core.terms import Algorithm

VALUE_COEFFICIENT = 0.5  # of a shared trunk


class CriticSettings(Settings):
    path: str | None = Field(
        None,
        pattern=NOT_BLANK,
        description="A model folder, a fetched name or a hub id that the critic starts from, of the policy's "
        "vocabulary; a reward model's score is the first value. null: the policy's own model, all values 0.",
        json_schema_extra={"execution": True},
    )
    shared_trunk: bool = Field(
        False,
        description="Values from the policy's own hidden states, by one loss and one optimizer: half the memory, but "
        "the two pull at the same weights.",
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        description="Peak of the critic's own AdamW, whose other settings are those of training; null is 1e-5. Higher "
        "follows the returns faster.",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="Training steps, from the first, in which the critic alone is trained: the policy's weights and "
        "moments stay. The learning rate's schedule counts them.",
    )
    value_clip: float | None = Field(
        0.2,
        gt=0,
        description="How far an update pulls a value from what it was before the update, in units of the reward; null "
        "does not bound it.",
    )
    value_coefficient: float | None = Field(
        None, gt=0, description="shared_trunk: weight of the value loss beside the policy's; null is 0.5."
    )
    value_lambda: float | None = Field(
        None, ge=0, le=1, description="lambda of the returns that the critic learns; null takes algorithm.gae_lambda."
    )

    def term(self) -> ValueTerm:
        if not self.shared_trunk:
            return ValueTerm(self.value_clip)
        return ValueTerm(self.value_clip, self.value_coefficient or VALUE_COEFFICIENT)

    @property
    def peak_learning_rate(self) -> float:
        """Of a critic with weights of its own."""
        return 1e-5 if self.learning_rate is None else self.learning_rate


def check_critic(critic: CriticSettings, algorithm: Algorithm, steps: int) -> None:
    """SettingsError for what nothing would read."""
    changed = [name for name, field in type(critic).model_fields.items() if getattr(critic, name) != field.default]
    if changed and not algorithm.needs_critic:
        raise SettingsError(
            f"critic.{changed[0]} has no effect: {algorithm.name} with advantage {algorithm.advantage} has no critic; "
            "advantage gae has one"
        )
    unread = ("path", "learning_rate") if critic.shared_trunk else ("value_coefficient",)
    reason = (
        "the trunk is the policy's, and so is its optimizer"
        if critic.shared_trunk
        else "a critic with weights of its own has a loss of its own"
    )
    for name in unread:
        if name in changed:
            raise SettingsError(
                f"critic.{name} has no effect with shared_trunk {str(critic.shared_trunk).lower()}: {reason}"
            )
    if critic.warmup_steps >= steps > 0 and algorithm.needs_critic:
        raise SettingsError(
            f"critic.warmup_steps ({critic.warmup_steps}) must be below steps ({steps}): the policy would never train"
        )
