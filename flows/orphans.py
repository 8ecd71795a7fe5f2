"""Mend what a killed process left: its flow run still says Running and its lease is unreleased."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_contracts.errors import DamagedTable, RunBusy
from data_contracts.files import LocalFiles
from data_contracts.ledger import Lease, is_held, read_lease


def orphaned_leases(root: Path) -> list[Path]:
    """Folders of the runs whose writer died without releasing its lease."""
    folders = [path.parent for path in sorted((root / "runs").glob("*/lease.json"))]
    return [folder for folder in folders if _is_orphaned(folder)]


def _is_orphaned(folder: Path) -> bool:
    try:
        lease = read_lease(folder)
    except DamagedTable:  # said to whoever opens that run
        return False
    return lease is not None and not lease["released"] and not is_held(folder)


def crash_flow_run(lease: dict[str, Any]) -> str | None:
    """Set the dead holder's flow run to Crashed, if it had one that has not ended; gives its id."""
    flow_run_id = lease.get("flow_run_id")
    if flow_run_id is None:
        return None
    from prefect.client.orchestration import get_client
    from prefect.exceptions import ObjectNotFound
    from prefect.states import Crashed

    with get_client(sync_client=True) as client:
        try:
            state = client.read_flow_run(flow_run_id).state
        except ObjectNotFound:  # another server's run
            return None
        if state is not None and state.is_final():
            return None
        message = f"process {lease['pid']} on {lease['host']} is gone"
        client.set_flow_run_state(flow_run_id, Crashed(message=message), force=True)
    return flow_run_id


def mend_orphans(root: Path) -> list[str]:
    """Set the flow runs of dead processes to Crashed and mark their leases released; gives the runs' names."""
    mended = []
    for folder in orphaned_leases(root):
        # Taking the lease for a moment keeps a run that starts just now from being mistaken for the dead one.
        try:
            lease = Lease.acquire(folder, crash_flow_run)
        except RunBusy:
            continue
        LocalFiles(folder).write("state.json", json.dumps({"state": "crashed"}, indent=1).encode())
        lease.release()
        mended.append(folder.name)
    return mended
