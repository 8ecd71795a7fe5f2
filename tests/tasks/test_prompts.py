"""What decides the key of a step's prompts."""

from typing import get_args

import pytest
from pydantic import ValidationError

from data_contracts.store import Store
from rft_core.data.prompt_order import ORDERS, light_columns, select_prompts
from rft_core.data.settings import DataSettings
from tasks.prompts import SETTINGS_OF_ORDER, _light_table, mixture_weights
from tests.rft_core.given_examples import pair, table_of


def test_every_order_says_which_settings_it_reads():
    assert set(SETTINGS_OF_ORDER) == set(ORDERS) == set(get_args(DataSettings.model_fields["order"].annotation))
    assert {name for names in SETTINGS_OF_ORDER.values() for name in names} <= set(DataSettings.model_fields)


def test_weights_go_by_the_names_in_the_data_set():
    parts = [{"source": "/data/sums.jsonl", "weight": 3.0}, {"source": "reasoning_gym:gcd", "label": "gcd"}]
    assert mixture_weights(DataSettings(mixture=parts)) == {"sums.jsonl": 3.0, "gcd": 1.0}
    assert mixture_weights(DataSettings(mixture=parts[:1])) == {}
    assert mixture_weights(DataSettings(source="sums.jsonl")) == {}


def test_parts_of_one_name_need_labels():
    parts = [{"source": "a/sums.jsonl"}, {"source": "b/sums.jsonl"}]
    with pytest.raises(ValidationError, match=r"labels of data.mixture must differ, .*give those that share a name"):
        DataSettings(mixture=parts)


def test_examples_go_by_their_difficulty_as_prompts_do(tmp_path):
    levels = [3, 1, 2]
    examples = table_of(*(pair(f"e{level}", metadata=f'{{"level": {level}}}') for level in levels))
    store = Store(str(tmp_path))
    ref = store.write("examples", "k" * 32, examples, {})
    data = DataSettings(source="pairs.jsonl", record="preferences", order="difficulty", difficulty_field="level")
    light = _light_table(store, ref, tuple(light_columns(data)), data.difficulty_field)
    assert select_prompts(light, 1, 3, data, {}, 0).tolist() == [1, 2, 0]
