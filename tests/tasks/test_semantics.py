"""Each stage's sources are held to a digest, so that nobody changes results without saying so."""

import hashlib
import json
from pathlib import Path

import pytest

from tasks.semantics import SEMANTICS, STAGE_SOURCES
from tests.house.sources import imports_of, sources

BASE = Path(__file__).parent.parent.parent
GOLDEN = Path(__file__).parent / "golden_sources.json"


def source_digest(stage: str) -> str:
    """SHA-256 over the stage's source files, in name order."""
    files = sorted({path for pattern in STAGE_SOURCES[stage] for path in BASE.glob(pattern)})
    assert files, f"no file matches {STAGE_SOURCES[stage]}"
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]


@pytest.mark.parametrize("stage", SEMANTICS)
def test_a_stage_whose_sources_changed_raises_its_semantics_or_confirms(stage):
    golden = json.loads(GOLDEN.read_text())
    found = {"semantics": SEMANTICS[stage], "sources": source_digest(stage)}
    assert found == golden[stage], (
        f"sources of {stage} changed. Raise SEMANTICS[{stage!r}] in tasks/semantics.py if results differ, "
        "or confirm that they do not: `make confirm-semantics`"
    )


def test_every_stage_names_its_sources():
    assert set(STAGE_SOURCES) == set(SEMANTICS)


# Names of settings and errors, and what the machine is, decide no row.
NEUTRAL = {
    "rft_core",
    "rft_core.kernels",
    "rft_core.kernels.implementation",
    "rft_core.algorithm_settings",
    "rft_core.config",
    "rft_core.data.settings",
    "rft_core.distillation_settings",
    "rft_core.rewards.settings",
    "rft_core.errors",
    "rft_core.preference_settings",
    "rft_core.hardware",
    "rft_core.phases",
    "rft_core.rollout_settings",
    "rft_core.settings",
    "rft_core.vllm_settings",
}
# A file that two stages share imports more than either needs.
OF_ANOTHER_STAGE = {
    "data": {
        "rft_core.evaluation",
        "rft_core.rewards",
        "rft_core.rewards.plugin",
        "rft_core.rewards.rows",
        "rft_core.rewards.user_state",
        "rft_core.seeds",
    },
    "rollouts": {
        "rft_core.attending",
        "rft_core.batching",
        "rft_core.checkpoint",
        "rft_core.rewards.event_loop",
        "rft_core.kernels.linear_logprob",
        "rft_core.kernels.token_logprob",
        "rft_core.layers",
        "rft_core.packing",
        "rft_core.data.examples",
        "rft_core.data.faults",
        "rft_core.data.masks",
        "rft_core.data.prompts",
    },
    "rewards": {"rft_core.data.examples", "rft_core.data.faults", "rft_core.data.prompts"},
    "advantages": {
        "rft_core.rewards.given",
        "rft_core.gates",
        "rft_core.losses",
        "rft_core.objective",
        "rft_core.rewards.plugin",
        "rft_core.rewards.rows",
        "rft_core.rewards.user_state",
        "rft_core.surrogates",
    },
    "update": {
        "rft_core.advantages",
        "rft_core.data.prompts",
        "rft_core.rewards.plugin",
        "rft_core.rewards.rows",
        "rft_core.rewards.user_state",
    },
    "token_scores": {"rft_core.data.prompts", "rft_core.seeds", "rft_core.terms"},
    "given": {
        "rft_core.advantages",
        "rft_core.batching",
        "rft_core.data.examples",
        "rft_core.data.faults",
        "rft_core.data.prompts",
        "rft_core.engines",
        "rft_core.policy",
    },
}


@pytest.mark.parametrize("stage", SEMANTICS)
def test_a_stage_names_every_module_that_its_sources_import(stage):
    named = {path.relative_to(BASE) for pattern in STAGE_SOURCES[stage] for path in BASE.glob(pattern)}
    by_module = {source.module: source for source in sources(("rft_core",))}
    imported = {
        name
        for source in sources(("rft_core",))
        if source.path in named
        for found in imports_of(source)
        for name in found.names
        if name in by_module
    }
    missing = {name for name in imported if by_module[name].path not in named} - NEUTRAL
    assert missing == OF_ANOTHER_STAGE.get(stage, set())


def confirm() -> None:
    """What `make confirm-semantics` runs."""
    golden = {stage: {"semantics": SEMANTICS[stage], "sources": source_digest(stage)} for stage in SEMANTICS}
    GOLDEN.write_text(json.dumps(golden, indent=1) + "\n")
