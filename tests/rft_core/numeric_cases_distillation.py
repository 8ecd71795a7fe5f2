"""Cases of numeric_cases.jsonl on distillation and averages of weights: inputs -> what `expected` holds, or parts."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import torch

from data_contracts.schemas import ADVANTAGES, TOKEN_SCORES
from rft_core.kernels.divergence import token_divergence
from rft_core.teacher_gap import with_teacher_gap
from rft_core.train_state import TrainState


def jsd(inputs):
    student, teacher = (torch.tensor([inputs[f"{who}_p"]]).log() for who in ("student", "teacher"))
    found = [token_divergence(student, teacher, 1.0, beta).item() for beta in inputs.get("betas", [inputs.get("beta")])]
    return found if "betas" in inputs else found[0]


def iw_opd(inputs):
    """Its advantages; the weights by later gaps are TRL's own. Labels of -100 are masked."""
    masks = {(str(row), 0): np.array(labels) != -100 for row, labels in enumerate(inputs["labels"])}
    rows, scores = [], []
    for (name, segment), gaps in zip(masks, inputs["teacher_minus_student_logp"], strict=True):
        credit = {"rollout_id": name, "segment": segment, "group_id": "g", "advantage": 0.0, "weight": 1.0}
        rows.append(credit | {"is_trained": True, "drop_reason": "none", "term": "own"})
        values = [-1.0 + (0.0 if gap == "-Infinity" else gap) for gap in gaps]
        scores += [(name, segment, "old", "p", [-1.0] * len(gaps)), (name, segment, "teacher", "t", values)]
    table = with_teacher_gap(
        pa.Table.from_pylist(rows, ADVANTAGES.schema),
        masks,
        pa.table([list(column) for column in zip(*scores, strict=True)], schema=TOKEN_SCORES.schema),
        1.0,
    )
    return {"advantages": table["token_advantages"].to_pylist()}


def moving_average(inputs):
    """Of the weights, as training.ema_decay keeps it; the reference is not synchronised."""
    policy = SimpleNamespace(master=[torch.tensor([inputs["ref"]])])
    state = TrainState(policy, None)
    state.begin_ema(inputs["openrlhf_beta"])
    policy.master[0].fill_(inputs["policy"])
    state.advance_ema(inputs["openrlhf_beta"])
    return {"openrlhf_ema": state.ema[0].item()}


MET = {"ref_sync": moving_average, "jsd_beta1": jsd, "jsd_beta0": jsd, "jsd_mid": jsd, "iw_opd_loss": iw_opd}
