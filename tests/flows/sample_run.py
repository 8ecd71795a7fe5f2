"""A small complete run, written table by table through Store and Ledger, as the stages lay it out. No model involved.

Rewards rise with the step by construction: completion i of prompt p at step s is right when
(7 p + 3 i) mod 10 < 2 + 6 s / steps, so that every number can be worked out by hand.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from data_contracts.ledger import Entry, Lease, Ledger
from data_contracts.refs import PolicyRef, TableRef, content_key
from data_contracts.schemas import RECORDS, canonical_json
from data_contracts.store import Store
from rft_core.config import Recipe
from rft_core.recipes import resolved_yaml

HOSTILE = '</td></script><script>alert("x")</script><img src=x onerror=alert(1)> \x1b[31mred'
ROOT_POLICY = "0" * 31 + "a"
SOURCE = "sums.jsonl"


@dataclass
class SampleRun:
    """What was written: the root, the run's name, and the refs by (step, stage, round)."""

    root: str
    name: str
    steps: int
    refs: dict[tuple[int, str, int], TableRef] = field(default_factory=dict)
    policies: list[PolicyRef] = field(default_factory=list)


def is_right(prompt: int, index: int, step: int, steps: int) -> bool:
    return (7 * prompt + 3 * index) % 10 < 2 + 6 * step / max(steps, 1)


def build_sample_run(
    root: Path, name: str = "sample", *, steps: int = 4, prompts: int = 2, group_size: int = 4, evaluate_every: int = 2,
    state: str = "completed", is_off_policy: bool = False, has_kl: bool = False, checkpoint_every: int = 0
) -> SampleRun:  # fmt: skip
    writer = _Writer(root, name, steps, prompts, group_size, evaluate_every, is_off_policy, has_kl)
    writer.data()
    writer.evaluation(0)
    for step in range(1, steps + 1):
        writer.step(step)
        if step == steps or (checkpoint_every and step % checkpoint_every == 0):
            writer.checkpoint(step)
        if step % evaluate_every == 0:
            writer.evaluation(step)
    writer.finish(state)
    return writer.made


class _Writer:
    def __init__(
        self, root: Path, name: str, steps: int, prompts: int, group: int, every: int, is_off_policy: bool, has_kl: bool
    ) -> None:
        self.recipe = _recipe(steps, prompts, group, every)
        self.steps, self.prompts, self.group = steps, prompts, group
        self.is_off_policy, self.has_kl = is_off_policy, has_kl
        self.store = Store(str(root))
        self.folder = root / "runs" / name
        self.lease = Lease.acquire(self.folder)
        self.ledger = Ledger(self.folder, self.lease)
        self.root = root
        self.policy = PolicyRef(ROOT_POLICY, 0)
        self.made = SampleRun(str(root), name, steps, policies=[self.policy])
        (self.folder / "recipe.yaml").write_text(resolved_yaml(self.recipe))
        head = {
            "run": name,
            "created_at": "2026-01-01T00:00:00+00:00",
            "identity": {"model": "6" * 64},
            "semantics": {},
        }
        head |= {"fingerprint": {"cpu": "toy", "threads": 2}, "parent": None, "resumed": []}
        (self.folder / "run.json").write_text(json.dumps(head))
        (self.folder / "state.json").write_text(json.dumps({"state": "running"}))

    def data(self) -> None:
        rows = [_prompt(i, "train" if i < self.prompts else "heldout") for i in range(2 * self.prompts)]
        rejected = [
            {"source": SOURCE, "source_row": row, "reason": reason, "action": "rejected", "detail": detail, "raw": raw}
            for row, reason, detail, raw in (
                (90, "duplicate", "same text as row 1", b"{}"),
                (91, "bad_json", HOSTILE, b"\xff{"),
            )
        ]
        check = {
            "name": "unique",
            "column": "prompt_id",
            "ok": True,
            "unexpected_count": 0,
            "examples": [],
            "detail": "",
        }
        more = {"validation": {"ok": True, "checks": [check]}, "counts": {"read": len(rows) + 2, "kept": len(rows)}}
        self.dataset = self._write("prompts", rows, [], **more)
        quarantine = self._write("quarantine", rejected, [])
        self._commit(0, "data", {"prompts": self.dataset, "quarantine": quarantine}, 1.5)

    def step(self, step: int) -> None:
        numbers = range(self.prompts)
        chosen = self._write("prompts", [_prompt(i, "train") for i in numbers], [self.dataset], settings={"step": step})
        refs = {"prompts": chosen}
        if step > 1:  # rewards of the step before are known
            refs["prompt_stats"] = self._write("prompt_stats", [self._stats(p, step - 1) for p in numbers], [chosen])
        self._commit(step, "prompts", refs, 0.01)
        rows = [self._rollout(f"step-{step:05d}", step, 0, "train", p, i) for p in numbers for i in range(self.group)]
        rollouts = self._write("rollouts", rows, [chosen])
        self._commit(step, "rollouts", {"rollouts": rollouts}, 4.0 + step / 10)
        scored = [self._reward(row, step) for row in rows]
        rewards = self._write("rewards", scored, [rollouts, chosen])
        self._commit(step, "rewards", {"rewards": rewards}, 0.2)
        advantages = self._write("advantages", _advantages(scored), [rollouts, rewards])
        self._commit(step, "advantages", {"advantages": advantages}, 0.05)
        parent = self.policy.policy_id
        updates = self._write("updates", [self._update(step)], [rollouts, advantages], parent_policy=parent)
        self.policy = PolicyRef(updates.key, step)
        self.made.policies.append(self.policy)
        self._commit(step, "update", {"updates": updates}, 3.0, self.policy)

    def evaluation(self, step: int) -> None:
        both, rewards_of = [], []
        for round_, size in ((0, self.group), (1, 1)):
            rows = [
                self._rollout(f"eval-{step:05d}-{round_}", step, round_, "evaluation", p, i)
                for p in range(self.prompts, 2 * self.prompts)
                for i in range(size)
            ]
            rollouts = self._write("rollouts", rows, [self.dataset])
            self._commit(step, "evaluation-rollouts", {"rollouts": rollouts}, 2.0, round_=round_)
            rewards = self._write("rewards", [self._reward(row, step) for row in rows], [rollouts, self.dataset])
            self._commit(step, "evaluation-rewards", {"rewards": rewards}, 0.1, round_=round_)
            both.append(rollouts)
            rewards_of.append(rewards)
        settings = {"correct_component": "exact_match"}
        table = self._write("evaluations", self._evaluations(step), [*both, *rewards_of], settings=settings)
        self._commit(step, "evaluation", {"evaluations": table}, 0.05, self.policy)

    def finish(self, state: str) -> None:
        (self.folder / "state.json").write_text(json.dumps({"state": state}))
        self.lease.release()

    def _rollout(self, prefix: str, step: int, round_: int, purpose: str, p: int, i: int) -> dict[str, Any]:
        right = is_right(p, i, step, self.steps)
        tokens = [5, 6, 7, 2][: 4 if right else 3]
        is_cut = i == self.group - 1 and purpose == "train"
        text = f"The sum is {p + 1}." if right else HOSTILE
        group = f"{prefix}/p{p}"
        return {
            "rollout_id": f"{group}/{i:02d}", "segment": 0, "prompt_id": f"p{p}", "group_id": group, "rollout_index": i,
            "step": step, "round": round_, "purpose": purpose, "origin": "policy", "policy_id": self.policy.policy_id,
            "policy_version": self.policy.version, "prompt_token_ids": [1, 3, 4], "completion_token_ids": tokens,
            "completion_mask": [True] * len(tokens), "behaviour_logprobs": [-0.5] * len(tokens), "messages": "[]",
            "turns": [{"role": "assistant", "start": 0, "end": len(tokens), "reward": None, "state_digest": None}],
            "step_ends": None, "environment_reward": None, "completion_text": text,
            "finish_reason": "length" if is_cut else "stop", "status": "truncated" if is_cut else "completed",
            "error_reason": None, "seed": i,
            "sampling": canonical_json({"temperature": float(purpose == "train" or round_ == 0)}),
        }  # fmt: skip

    def _reward(self, rollout: dict[str, Any], step: int) -> dict[str, Any]:
        prompt = int(rollout["prompt_id"][1:])
        right = float(is_right(prompt, rollout["rollout_index"], step, self.steps))
        is_unscored = rollout["purpose"] == "train" and step == 1 and rollout["rollout_index"] == 1
        status = "timeout" if is_unscored else "scored"
        return {
            "rollout_id": rollout["rollout_id"], "group_id": rollout["group_id"],
            "reward": None if is_unscored else right, "components": [("exact_match", None if is_unscored else right)],
            "component_status": [("exact_match", status)], "status": "unscored" if is_unscored else "scored",
            "reason": "timeout" if is_unscored else None, "turn_rewards": None, "step_rewards": None,
            "grader_digest": "g",
        }  # fmt: skip

    def _stats(self, prompt: int, step: int) -> dict[str, Any]:
        """After `step` steps; in the first, one rollout of each prompt was unscored."""
        scored = [(s, i) for s in range(1, step + 1) for i in range(self.group) if (s, i) != (1, 1)]
        passes = sum(is_right(prompt, i, s, self.steps) for s, i in scored)
        return {
            "prompt_id": f"p{prompt}", "attempts": float(len(scored)), "passes": float(passes), "draws": step,
            "last_step": step,
        }  # fmt: skip

    def _update(self, step: int) -> dict[str, Any]:
        row: dict[str, Any] = {column.name: None if column.nullable else 0 for column in RECORDS["updates"].schema}
        row.update(dict.fromkeys(("clip_ratio_low", "clip_ratio_high", "clip_ratio_region"), 0.001 * step))
        row.update(policy_version=step, optimizer_step=step, loss=-0.1 / step, policy_loss=-0.1 / step, ratio_max=1.1)
        row.update(entropy=2.0 / step, grad_norm=0.5 + 0.1 * step, learning_rate=1e-6 * step, trained_rows=8)
        row.update(trained_tokens=30, off_policy_rows=8 * self.is_off_policy, forward_rows=8)
        if self.has_kl:
            row["kl"] = 0.001 * step
        if self.is_off_policy:
            row.update(effective_sample_size=0.9 / (1 + 0.01 * step), sampling_ratio_mean=0.98)
        return row

    def _evaluations(self, step: int) -> list[dict[str, Any]]:
        held = range(self.prompts, 2 * self.prompts)
        sampled = [is_right(p, i, step, self.steps) for p in held for i in range(self.group)]
        greedy = [is_right(p, 0, step, self.steps) for p in held]
        solved = [any(is_right(p, i, step, self.steps) for i in range(self.group)) for p in held]
        means = {"sampled_accuracy": sampled, "greedy_accuracy": greedy, "mean_reward": sampled, "pass@4": solved}
        return [
            {
                "policy_id": self.policy.policy_id, "suite": "heldout", "metric": metric, "step": step,
                "policy_version": self.policy.version, "value": sum(values) / len(values),
                "low": max(0.0, sum(values) / len(values) - 0.1), "high": min(1.0, sum(values) / len(values) + 0.1),
                "num_prompts": self.prompts, "num_samples": len(values),
            }
            for metric, values in means.items()
        ]  # fmt: skip

    def _write(self, record: str, rows: list[dict[str, Any]], inputs: list[TableRef], **more: Any) -> TableRef:
        table = pa.Table.from_pylist(rows, schema=RECORDS[record].schema)
        settings = more.pop("settings", {})
        identity = {"source": "5" * 64, "policy": ROOT_POLICY, "rows": canonical_json([str(row) for row in rows])}
        key = content_key(record, inputs=inputs, settings=settings, identity=identity, seed=0, semantics=1)
        identity.pop("rows")
        provenance = {"inputs": [ref.to_json() for ref in inputs], "settings": settings, "identity": identity, **more}
        return self.store.find(record, key) or self.store.write(record, key, table, provenance)

    def _commit(
        self,
        step: int,
        stage: str,
        refs: dict[str, TableRef],
        seconds: float,
        policy: PolicyRef | None = None,
        round_: int = 0,
    ) -> None:
        self.ledger.commit(Entry("main", step, stage, round_, refs, policy=policy, seconds=seconds))
        for ref in list(refs.values())[:1]:
            self.made.refs[step, stage, round_] = ref
        if stage in ("rollouts", "evaluation-rollouts"):
            tokens = sum(len(t) for t in self.store.read(refs["rollouts"])["completion_token_ids"].to_pylist())
            line = {"slot": f"{stage}-{step:05d}", "block": 0, "rows": refs["rollouts"].rows, "tokens": tokens}
            with open(self.folder / "generated.jsonl", "a") as file:
                file.write(json.dumps(line) + "\n")

    def checkpoint(self, step: int) -> None:
        folder = self.root / "checkpoints" / self.policy.policy_id
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "model.safetensors").write_bytes(b"weights")
        files = {"model.safetensors": {"bytes": 7, "sha256": hashlib.sha256(b"weights").hexdigest()}}
        manifest = {"policy": self.policy.to_json(), "weights_digest": "7" * 64, "files": files, "deleted": False}
        (folder / "manifest.json").write_text(json.dumps(manifest))
        self._commit(step, "checkpoint", {}, 0.5, self.policy)


def _recipe(steps: int, prompts: int, group: int, every: int) -> Recipe:
    return Recipe.model_validate(
        {
            "steps": steps,
            "model": {"path": "models/tiny"},
            "data": {"source": SOURCE},
            "rollout": {"engine": "scripted", "prompts_per_step": prompts, "group_size": group},
            "reward": {"functions": [{"name": "exact_match"}]},
            "evaluation": {"every": every, "samples": group},
        }
    )


def _prompt(number: int, split: str) -> dict[str, Any]:
    text = f"What is {number} + 1?"
    return {
        "prompt_id": f"p{number}", "messages": canonical_json([{"role": "user", "content": text}]), "prompt_text": text,
        "prompt_token_ids": [1, 3, 4], "tools": None, "answer": str(number + 1), "metadata": "{}", "media": None,
        "source": SOURCE, "source_row": number + 1, "dataset": SOURCE, "split": split,
    }  # fmt: skip


def _advantages(rewards: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Reward minus the group's mean; unscored rows are dropped, groups without spread marked."""
    groups: dict[str, list[float]] = {}
    for row in rewards:
        if row["reward"] is not None:
            groups.setdefault(row["group_id"], []).append(row["reward"])
    rows = []
    for row in rewards:
        scored = groups[row["group_id"]]
        is_flat = max(scored) == min(scored)
        reason = "unscored" if row["reward"] is None else "zero_variance" if is_flat else "none"
        advantage = 0.0 if reason != "none" else row["reward"] - sum(scored) / len(scored)
        made = {
            "rollout_id": row["rollout_id"], "segment": 0, "group_id": row["group_id"], "advantage": advantage,
            "token_advantages": None, "returns": None, "weight": 1.0, "is_trained": reason != "unscored",
            "drop_reason": reason, "pair_id": None, "pair_role": None, "term": "own",
        }  # fmt: skip
        rows.append(made)
    return rows
