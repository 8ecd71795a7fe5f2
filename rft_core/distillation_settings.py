"""Settings of a teacher, and of what is learnt from it. Importable without torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rft_core.settings import NOT_BLANK, Settings


class TeacherSettings(Settings):
    """A second model, which says of each token how it would have gone on. It is never trained."""

    path: str | None = Field(
        None,
        pattern=NOT_BLANK,
        description="A model folder, a name fetched with `rft fetch-model`, or a hub id; its vocabulary must be the "
        "policy's. null is no teacher. Its content enters the keys.",
        json_schema_extra={"execution": True},
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Compute type of the teacher; auto takes the policy's.",
    )


class DistillationSettings(Settings):
    """Null takes the value of the algorithm's row. What is above 0 here needs `teacher.path`."""

    teacher_gap: float | None = Field(
        None,
        ge=0,
        description="Times log p of the teacher - old, added to each token's advantage; 0 asks the teacher nothing.",
    )
    coefficient: float | None = Field(
        None,
        ge=0,
        description="Weight of the divergence between the policy's and the teacher's whole distributions, in the loss.",
    )
    beta: float | None = Field(
        None,
        ge=0,
        le=1,
        description="Which divergence: 0 is KL(teacher | policy), 1 is KL(policy | teacher), between them that of "
        "both to their mixture.",
    )
    top_k: int | None = Field(
        None,
        ge=1,
        description="The divergence looks at the teacher's k likeliest tokens and at the rest as one; null at all.",
    )
