"""What a row learns from a teacher once a recipe's overrides are in, and what makes no sense. Imports no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from rft_core.errors import SettingsError
from rft_core.terms import TEACHER_GAP, Algorithm, Distillation

if TYPE_CHECKING:
    from rft_core.algorithm_settings import AlgorithmSettings
    from rft_core.distillation_settings import DistillationSettings, TeacherSettings

# They shape or compare rewards, and where none decides anything have no effect.
REWARD_SETTINGS = (
    "std_scope",
    "std_ddof",
    "std_epsilon",
    "spread_floor",
    "min_group_size",
    "reward_clip_low",
    "reward_clip_high",
    "overlong_buffer_tokens",
    "reward_kl_coefficient",
    "dynamic_sampling",
)
_DIVERGENCE_SETTINGS = ("beta", "top_k")


def resolve_distillation(row: Distillation, settings: DistillationSettings) -> Distillation:
    given = {name: value for name, value in settings.model_dump().items() if value is not None}
    return replace(row, **given)


def refuse_distillation(algorithm: Algorithm, settings: AlgorithmSettings) -> None:
    """Raises SettingsError, with the reason, for what a row cannot learn or would not read."""
    distillation = algorithm.distillation
    for name in _DIVERGENCE_SETTINGS:
        if getattr(settings.distillation, name) is not None and not distillation.coefficient:
            raise SettingsError(f"algorithm.distillation.{name} has no effect: its coefficient is 0")
    if distillation.needs_teacher and (algorithm.preference is not None or algorithm.head != "causal"):
        raise SettingsError(
            f"algorithm.distillation must be null for {algorithm.name}, which compares completions or scores them"
        )
    if distillation.teacher_gap and not (algorithm.samples and any(term.rows == "own" for term in algorithm.terms)):
        raise SettingsError(
            f"algorithm.distillation.teacher_gap has no effect: {algorithm.name} gives no credit to completions of its "
            "own; use coefficient"
        )
    if algorithm.advantage == TEACHER_GAP and not distillation.teacher_gap:
        raise SettingsError(
            f"algorithm.distillation.teacher_gap must be above 0 with advantage {TEACHER_GAP}: there is no other credit"
        )
    if not (algorithm.terms or algorithm.preference or distillation.coefficient):
        raise SettingsError(
            f"algorithm.distillation.coefficient must be above 0 for {algorithm.name}: it is all it has"
        )
    if algorithm.kl.coefficient > 0 and not algorithm.terms and algorithm.preference is None:
        raise SettingsError(
            f"algorithm.kl_coefficient must be 0 for {algorithm.name}, got {algorithm.kl.coefficient:g}: it has no "
            "policy loss that the KL term could be averaged like"
        )
    _refuse_without_rewards(algorithm, settings)


def _refuse_without_rewards(algorithm: Algorithm, settings: AlgorithmSettings) -> None:
    if algorithm.reads_rewards:
        return
    names = REWARD_SETTINGS if algorithm.terms else ("advantage", *REWARD_SETTINGS)
    for name in names:
        if getattr(settings, name) != type(settings).model_fields[name].default:
            raise SettingsError(f"algorithm.{name} has no effect: {algorithm.name} learns from a teacher, not rewards")


def refuse_teacher(algorithm: Algorithm, teacher: TeacherSettings) -> None:
    """Raises SettingsError for a teacher that nobody asks, or one that is missing."""
    if algorithm.distillation.needs_teacher and teacher.path is None:
        raise SettingsError(
            f"teacher.path must name a model for algorithm {algorithm.name}, which learns from it: a folder, a fetched "
            "name or a hub id with the policy's vocabulary"
        )
    if teacher.path is not None and not algorithm.distillation.needs_teacher:
        raise SettingsError(
            f"teacher.path has no effect: algorithm {algorithm.name} asks no teacher; set "
            "algorithm.distillation.coefficient or teacher_gap above 0, or use on_policy_distillation, gkd or jsd"
        )
    if teacher.path is None and teacher.dtype != "auto":
        raise SettingsError("teacher.dtype has no effect: teacher.path is null")
