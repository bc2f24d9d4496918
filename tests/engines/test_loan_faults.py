"""Loans that begin, run or end as nobody wants: each gives all back, and no token is lost."""

from __future__ import annotations

import random
import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engines.coordination.views import Dispatch, ScheduleView
from engines.fleet.borrowing import BorrowOrders
from engines.fleet.fleet import Fleet
from engines.kvcache.tiers import memory_folders
from engines.relay.requests import Version
from engines.serving.policies import MemoryView, ServingView
from research.rose.memory import ServingFirst, SharingOptions
from tests.engines.test_fleet import OPTIONS, states, tokens_of
from tests.engines.test_lending import Together, alone, clients, folders, served
from tests.lending import Lending, lending
from tests.serving import until

pytestmark = pytest.mark.usefixtures("forked_replicas")

__all__ = ["alone", "folders", "served"]  # fixtures


def orders_for(lent: Lending, **fields: Any) -> bytes:
    """Of a coordinator that is not there."""
    orders = BorrowOrders(
        address="tcp://127.0.0.1:9", token=b"x" * 32, replica_id=1, relay=None, interval_s=0.05, patience_s=0.2,
        timeout_s=30.0, max_kv_tokens=100, agreement=lent.lender._agreement,
    )  # fmt: skip
    return msgspec.json.encode(msgspec.structs.replace(orders, **fields))


def test_a_loan_without_a_coordinator_or_after_the_end_is_none(text_model: str, folders: dict[int, Path]) -> None:
    with lending(text_model, str(folders[0])) as lent:
        for fields, words in (
            ({}, "silent for"),
            ({"address": "tcp://*:1"}, "address: 'tcp://*:1'"),
            ({"token": b""}, "launch token: 0 bytes"),
        ):
            lent.lender.lend(orders_for(lent, **fields))
            lent.check_all_is_back()
            assert words in lent.lender.status()["last_end"]
    with Fleet(folders[0], num_replicas=0, **OPTIONS) as fleet:
        orders = fleet._orders
        lent.lender.lend(orders_for(lent, address=orders.address, token=orders.token, patience_s=5.0))
        lent.check_all_is_back()
        assert "the server has stopped" in lent.lender.status()["last_end"]


class HangsUp(threading.Thread):
    """Sends one request on to a server, and not its answer back."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self._port, self._socket = port, socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"

    def run(self) -> None:
        client, _ = self._socket.accept()
        with self._socket, client, socket.create_connection(("127.0.0.1", self._port)) as server:
            client.settimeout(0.3)
            try:
                while data := client.recv(65536):
                    server.sendall(data)
            except TimeoutError:
                server.recv(65536)


def test_a_loan_that_its_job_does_not_know_of_ends(
    text_model: str, folders: dict[int, Path], alone: dict[int, Any]
) -> None:
    with lending(text_model, str(folders[0])) as lent:
        with Fleet(folders[0], num_replicas=1, **OPTIONS) as fleet:
            between = HangsUp(lent.running.server.port)
            between.start()
            with pytest.raises(ConnectionError, match="does not answer"):
                fleet.borrow(between.url)
            between.join(60)
            assert lent.lender.status()["num_loans"] == 1

            def ended() -> bool:
                fleet.coordinator.pump(0.05)
                return not lent.lender.is_lent

            until(ended, "the loan has ended")
            lent.check_all_is_back()
            borrowed = fleet.borrow(lent.running.url)
            fleet.wait_for_replicas(2)
            assert tokens_of(fleet.roll_out(states(0))) == alone[0] and borrowed.id in fleet.coordinator.outside
        lent.check_all_is_back()


class Broken(ServingFirst):
    """Policies of both kinds, one of whose methods fails while `fails` names it."""

    fails = ""

    def _do(self, name: str) -> None:
        if name == self.fails:
            raise ArithmeticError(name)

    def admits(self, view: ServingView, seconds: float) -> bool:
        self._do("admits")
        return True

    def begin(self, view: MemoryView) -> int:
        self._do("begin")
        return super().begin(view)

    def cut(self, view: MemoryView) -> int | None:
        self._do("cut")
        return super().cut(view)

    def observe(self, view: MemoryView) -> None:
        self._do("observe")
        super().observe(view)


def test_a_policy_that_fails_ends_the_loan_and_serving_goes_on(
    text_model: str, folders: dict[int, Path], alone: dict[int, Any], served: list[list[int]]
) -> None:
    broken = Broken(SharingOptions(window_s=1.0))
    policy = Together(2)
    with (
        lending(text_model, str(folders[0]), admission=broken, memory=broken) as lent,
        clients(lent, served),
        Fleet(folders[0], num_replicas=1, schedule_policy=policy, **OPTIONS) as fleet,
    ):
        for name in ("admits", "begin", "cut", "observe"):
            fleet.borrow(lent.running.url)
            fleet.wait_for_replicas(2)
            policy.has_begun = name != "admits"  # the others fail without work, too
            broken.fails = name
            assert tokens_of(fleet.roll_out(states(0))) == alone[0]
            until(lambda: not lent.lender.is_lent, "the loan has ended")
            broken.fails = ""
            fleet.coordinator.pump(0.1)
            assert f"ArithmeticError: {name}" in fleet.coordinator.lost[-1]
            lent.check_all_is_back()


def test_a_version_that_never_comes_ends_the_loan(
    text_model: str, folders: dict[int, Path], served: list[list[int]]
) -> None:
    options = OPTIONS | {"dtype": "float32", "weights": "relay", "timeout_s": 2.0, "patience_s": 60.0}
    with lending(text_model, str(folders[0]), dtype="float32", stall_s=0.5) as lent, clients(lent, served):
        with Fleet(folders[0], num_replicas=0, **options) as fleet:
            fleet.borrow(lent.running.url)
            fleet._timeout_s = 60.0  # until it is there; the versions have the first one
            fleet.wait_for_replicas(1)
            # The fleet gives it up, or it gives the version up: both wait for `timeout_s`.
            with pytest.raises(RuntimeError, match=r"to load weights of version 1|number=1\) did not come within"):
                fleet.roll_out(states(1), weights_source=Version("nobody", 1))
        lent.check_all_is_back()


def test_jobs_that_come_and_go(text_model: str, folders: dict[int, Path], alone: dict[int, Any]) -> None:
    """Two at a time, of which each goes before, during or after its rollout."""
    counts = {"lent": 0, "rolled": 0}
    problems: list[BaseException] = []

    def borrow(url: str, seed: int) -> None:
        rng = random.Random(seed)
        try:
            for use in [0, 1, 2, 3] * 2:
                # A job may go before the loan has reached it: only by its silence is that found out.
                patience_s = 1.0 if use < 2 else 60.0
                with Fleet(folders[0], num_replicas=0, patience_s=patience_s, **OPTIONS) as fleet:
                    while True:
                        try:
                            fleet.borrow(url)
                            break
                        except RuntimeError as error:
                            assert "(409)" in str(error)
                            time.sleep(0.01)
                    counts["lent"] += 1
                    if use == 1:
                        time.sleep(0.1 * rng.random())
                    if use > 1:
                        fleet.wait_for_replicas(1)
                    if use > 2:
                        assert tokens_of(fleet.roll_out(states(0))) == alone[0]
                        counts["rolled"] += 1
        except BaseException as error:
            problems.append(error)

    with lending(text_model, str(folders[0])) as lent:
        threads = [threading.Thread(target=borrow, args=(lent.running.url, seed)) for seed in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert not problems and counts == {"lent": 16, "rolled": 4}
        lent.check_all_is_back()


class Alternating(Together):
    """Six tokens on one replica, six on the other."""

    def next(self, view: ScheduleView) -> Dispatch | None:
        dispatch = super().next(view)
        if dispatch is None:
            return None
        place = view.waiting[dispatch.sequence_id].num_generated // 6
        wanted = sorted(view.replicas)[place % len(view.replicas)]
        replica_id = wanted if view.replicas[wanted].has_room(1) else dispatch.replica_id
        return Dispatch(sequence_id=dispatch.sequence_id, replica_id=replica_id, max_new_tokens=6)


def test_kv_that_others_have_stored_is_dropped_where_it_is_not_read(
    text_model: str, folders: dict[int, Path], alone: dict[int, Any]
) -> None:
    policy = Alternating(2)
    with (
        lending(text_model, str(folders[0])) as lent,
        Fleet(folders[0], num_replicas=1, kv_store_bytes=2**24, schedule_policy=policy, **OPTIONS) as fleet,
    ):
        fleet.borrow(lent.running.url)
        fleet.wait_for_replicas(2)
        assert tokens_of(fleet.roll_out(states(0))) == alone[0] and lent.coserving.lent.num_steps
        token = fleet._orders.kv_token
        assert not [path for folder in memory_folders() for path in folder.iterdir() if token in path.name]
