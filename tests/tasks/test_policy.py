from rft_core.train_rows import train_rows
from tasks.policy import inexact
from tests.rft_core.update_tables import ROOT, tables


def test_every_row_is_off_policy_for_a_policy_that_was_replayed_inexactly():
    rollouts, advantages = tables()
    assert not any(row.is_off_policy for row in train_rows(rollouts, advantages, ROOT))
    assert all(row.is_off_policy for row in train_rows(rollouts, advantages, inexact(ROOT)))
