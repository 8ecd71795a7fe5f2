"""Whatever a row holds, it ends as contents or as a Rejected whose reason is a code; contents are JSON, in UTF-8."""

from __future__ import annotations

from contextlib import suppress
from typing import get_args

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from data_contracts.reasons import REASONS
from data_contracts.refs import SourceRow
from data_contracts.schemas import canonical_json
from rft_core.data.examples import read_contents
from rft_core.data.faults import Faults, Rejected
from rft_core.data.field_names import ALWAYS_OPTIONAL, FIELDS, SHAPES
from rft_core.data.fields import Recognised, map_fields, recognise
from rft_core.data.settings import DataSettings, RecordName
from rft_core.errors import ContractError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(codec=None), max_size=8)  # half surrogates too
    | st.sampled_from(
        ["", " ", "a", "[", "[{", "[1]", "true", "1e3", "\n\nHuman: a\n\nAssistant: b", 10**400, "\ud800"]
    )
)
JSON = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ROLES = st.sampled_from(["system", "user", "human", "assistant", "gpt", "tool", "function_call", "robot", None]) | JSON
CALLS = st.lists(
    st.fixed_dictionaries({"function": st.fixed_dictionaries({}, optional={"name": JSON, "arguments": JSON})})
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "role": ROLES,
            "content": st.text(max_size=3) | JSON,
            "from": ROLES,
            "value": JSON,
            "tool_calls": CALLS,
        },
    )
    | JSON,
    max_size=4,
)
TURN = st.sampled_from(["user", "assistant", "tool", "system"])
CHAT = st.lists(st.builds(lambda role, text: {"role": role, "content": text}, TURN, st.text(max_size=2)), max_size=5)
VALUES = JSON | MESSAGES | CHAT | CHAT.map(str)
POLICIES = {"label_not_boolean": "repair", "identical_sides": "keep"}


def outcome(value: dict, recognised: Recognised, record: str, source: str, **choices) -> None:
    chosen = DataSettings(source=source, record=record, **choices)
    faults = Faults(chosen.policies)
    try:
        contents = read_contents(
            map_fields(value, recognised), SourceRow(source, 1, value, b""), record, chosen, faults
        )
    except Rejected as rejected:
        assert rejected.reason in REASONS and str(rejected)
        return
    assert len(contents) == (2 if "-chosen" in contents[0].row_id else 1)
    for content in contents:
        written = canonical_json([content.parts, content.tools, content.answer, content.turn_rewards, content.margin])
        (written + content.metadata + content.row_id).encode()


@pytest.mark.parametrize("record", get_args(RecordName))
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(data=st.data())
def test_any_json_value_in_any_field(record, data):
    fields = [*FIELDS[record], "extra", "score_chosen", "score_rejected", "instruction", "input", "history"]
    value = data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(fields, VALUES)))
    needed, optional = data.draw(st.sampled_from(SHAPES[record]))
    recognised = Recognised({field: field for field in (*needed, *optional, *ALWAYS_OPTIONAL)}, ())
    source = data.draw(st.sampled_from(["rows.jsonl", "rows.csv", "reasoning_gym:x"]))
    choices = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "policies": st.just(POLICIES),
                "system": st.just("s"),
                "suffix": st.just("!"),
                "train_on": st.just("last_turn"),
                "unpair": st.just(record == "labelled"),
            },
        )
    )
    outcome(value, recognised, record, source, **choices)
    # What is recognised from the row itself.
    with suppress(ContractError):
        outcome(value, recognise([value], record, {}), record, source, **choices)
