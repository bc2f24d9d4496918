"""Random schedules of faults end with the tokens, or the weights, of plain runs; `tests/faults` runs hundreds."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.oracle import make_oracle
from tests.faults.outside import run_outside_schedules
from tests.faults.relay import run_relay_schedules
from tests.faults.world import run_world_schedules

pytestmark = pytest.mark.usefixtures("forked_replicas")


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("oracle")
    make_oracle(directory)
    return directory


def test_schedules_in_a_world(oracle: Path) -> None:
    happened = run_world_schedules(oracle, list(range(8)))
    assert happened["schedules"] == 8
    for what in ("moves", "pauses", "portions", "regroups", "kv_imported", "preemptions", "late", "repeated"):
        assert happened[what] > 0, f"no {what} in {happened}"
    for what in ("handed_over", "prefetches", "a prediction that is no length", "a prediction that comes too late"):
        assert happened[what] > 0, f"no {what} in {happened}"
    assert happened["phases"] > 8


def test_schedules_of_replicas_outside_a_world(oracle: Path) -> None:
    happened = run_outside_schedules(oracle, list(range(4)))
    assert happened["schedules"] == 4
    for what in ("moves", "pauses", "portions", "kills", "launches", "replicas_lost", "late", "repeated"):
        assert happened[what] > 0, f"no {what} in {happened}"
    assert happened["phases"] > 4


def test_schedules_of_weights_by_a_relay() -> None:
    happened = run_relay_schedules(None, [7, 18, 26])
    assert happened["schedules"] == 3
    for what in ("kill_rank", "kill_relay", "kill_replica", "cuts", "late", "repeated", "pulls"):
        assert happened[what] > 0, f"no {what} in {happened}"
    assert happened.get("frames lost", 0) + happened.get("answers lost", 0) > 0, f"nothing was lost in {happened}"
