"""Ledger and data source must agree on which groups the data source holds."""

from __future__ import annotations

from typing import Any

from miles.core.ledger import Ledger, LiveState
from miles.errors import LedgerError
from miles.rollout.data_source import RolloutDataSourceWithBuffer


def settle_buffer(ledger: Ledger, data_source: Any, *states: LiveState, reason: str | None = None) -> None:
    """Check that every group which the ledger has in `states` waits in the buffer of the data source.

    A group that does not will never be issued again: it is dropped for `reason` where the user's own functions decide
    about the buffer, and without a `reason` LedgerError is raised. Data sources of other classes are not looked into.
    """
    if not isinstance(data_source, RolloutDataSourceWithBuffer):
        return
    held = {sample.group_index for group in data_source.buffer for sample in group}
    lost = [group for group in ledger.groups(*states) if group not in held]
    if lost and reason is None:
        raise LedgerError(
            f"the prompt groups {lost} are to be issued again, but the data source does not hold them: they are lost\n"
            "    fix: hooks that see the batch or the buffer must leave in it, return or give back each group"
        )
    for group in lost:
        ledger.drop(group, reason or "")
