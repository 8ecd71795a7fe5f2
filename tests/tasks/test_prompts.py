"""What decides the key of a step's prompts."""

from typing import get_args

import pytest
from pydantic import ValidationError

from rft_core.data.prompt_order import ORDERS
from rft_core.data.settings import DataSettings
from tasks.prompts import SETTINGS_OF_ORDER, mixture_weights


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
