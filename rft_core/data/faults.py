"""What is found wrong with a row, and what the recipe says is done about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from data_contracts.reasons import ACTIONS, REASONS, Policy


class Rejected(ValueError):
    """A row that is not used: a reason code, and what was found and must hold."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


@dataclass(frozen=True)
class Fault:
    """One fault of a row: reason code, words for people, and what was done (rejected | repaired | flagged)."""

    reason: str
    detail: str
    action: str


class Faults:
    """Collects the faults of one row and decides about each by the recipe's policies.

    >>> faults = Faults({"nul_byte": "repair"})
    >>> faults.meet("nul_byte", "found 2")
    'repair'
    >>> faults.found
    [Fault(reason='nul_byte', detail='found 2', action='repaired')]
    """

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        self.policies = policies
        self.found: list[Fault] = []

    def meet(self, reason: str, detail: str) -> Policy:
        """`repair` or `keep`, noted. Raises Rejected where the policy is reject."""
        policy = self.policies.get(reason, REASONS[reason].policy)
        if policy == "reject":
            raise Rejected(reason, detail)
        self.found.append(Fault(reason, detail, ACTIONS[policy]))
        return policy
