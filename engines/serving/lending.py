"""Lends a serving process's idle memory and time to rollouts: one job at a time borrows it as a replica (ROSE §3.1)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engines.adapter_config import is_adapter
from engines.control import messages as m
from engines.control.transport import Client
from engines.decoding import DecodeError, from_json
from engines.fleet.borrowing import Agreement, BorrowOrders
from engines.fleet.relayed import version_of
from engines.models.loader import checkpoint_tensors
from engines.parallel.layout import ReplicaSpec
from engines.relay.client import Relay
from engines.relay.pull import Puller
from engines.rollout.coordinator import peer_of
from engines.serving.metrics import Sample
from engines.serving.refusals import Refused, invalid
from engines.serving.tenant import Tenant

log = logging.getLogger(__name__)
_BUSY_S, _IDLE_S = 0.005, 0.1
"""Longest time until what has happened is sent to the coordinator."""
_END_S = 10.0


class Lender:
    """Lends a tenant, which steps beside the serving model. For one thread; each loan has a thread of its own.

    However a loan ends (the job ends it, its coordinator is lost or silent, weights cannot be loaded, a step fails),
    the tenant's weights and pages are released then, and serving goes on.
    """

    def __init__(
        self, tenant: Tenant, agreement: Agreement, *, stall_s: float, kv_use: Callable[[], float] = lambda: 0.0
    ) -> None:
        """`agreement` is the tenant's. `stall_s`: see `CoServingLimits`. `kv_use` returns the share of the memory that
        serving has used lately, for those who look for the idlest server."""
        self.tenant = tenant
        tenant.take_back("it is not lent")
        self._agreement, self._stall_s, self._kv_use = agreement, stall_s, kv_use
        self._thread: threading.Thread | None = None
        self._borrower: int | None = None
        self._last_end = ""
        self._num_loans = 0

    @property
    def is_lent(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def lend(self, body: bytes) -> None:
        """Begins the loan that the body's `BorrowOrders` ask for. Raises `Refused`."""
        try:
            orders: BorrowOrders = from_json(body, BorrowOrders)
        except DecodeError as error:
            raise invalid(None, f"the body must be BorrowOrders as JSON ({error}); use Fleet.borrow") from None
        self._check(orders)
        if self.is_lent:
            raise Refused(409, f"lent to another job, as its replica {self._borrower}; borrow another server, or wait")
        self._borrower, self._num_loans = orders.replica_id, self._num_loans + 1
        self._thread = threading.Thread(target=self._run, args=(orders,), name="lending", daemon=True)
        self._thread.start()

    def _check(self, orders: BorrowOrders) -> None:
        if difference := next(self._agreement.differences(orders.agreement), ""):
            raise invalid(difference.partition("=")[0], f"{difference}; serve the job's model as --rollout-model")
        if orders.interval_s >= orders.patience_s:
            raise invalid("patience_s", f"patience_s={orders.patience_s:g}: must be above {orders.interval_s=:g}")
        if orders.timeout_s <= self._stall_s:
            raise invalid(
                "timeout_s",
                f"timeout_s={orders.timeout_s:g}: sequences may wait here for {self._stall_s:g} s; give a longer time",
            )

    def close(self) -> None:
        """Ends a loan; call it when the engine's thread has ended."""
        self.tenant.stop("the server has stopped")
        if self._thread is not None:
            self._thread.join(_END_S)

    def status(self) -> dict[str, Any]:
        use = self.tenant.use()
        return {
            "lent": self.is_lent,
            "replica_id": self._borrower if self.is_lent else None,
            "num_pages": use.num_pages,
            "num_lent_pages": use.num_lent_pages,
            "budget_pages": use.budget_pages,
            "kv_use": self._kv_use(),
            "num_loans": self._num_loans,
            "last_end": self._last_end,
        }

    def samples(self) -> list[Sample]:
        use = self.tenant.use()
        lent = use.lent
        return [
            ("kv_pages", "gauge", "Pages of the KV memory that two models share.", [f" {use.num_pages}"]),
            ("lent_pages", "gauge", "Of these, pages that a rollout holds.", [f" {use.num_lent_pages}"]),
            ("lent_pages_budget", "gauge", "Pages that it may hold.", [f" {use.budget_pages}"]),
            ("loans_total", "counter", "Loans that have begun.", [f" {self._num_loans}"]),
            ("rollout_steps_total", "counter", "Steps of rollouts.", [f" {lent.num_steps}"]),
            ("rollout_seconds_total", "counter", "Time of these steps.", [f" {lent.seconds}"]),
            ("rollout_cuts_total", "counter", "How often a budget was lowered.", [f" {lent.num_cuts}"]),
            ("rollout_taken_back_total", "counter", "Sequences that left for serving.", [f" {lent.num_taken_back}"]),
            ("rollout_stalled_total", "counter", "Sequences that left as they stalled.", [f" {lent.num_stalled}"]),
        ]

    # -- in the loan's thread

    def _run(self, orders: BorrowOrders) -> None:
        end = ""
        client: Client | None = None
        try:
            name = peer_of(orders.replica_id)
            client = Client(
                name, orders.address, orders.token, interval_s=orders.interval_s, patience_s=orders.patience_s
            )
            end = _Loan(self.tenant, orders, client).run()
        except ConnectionError as error:
            end = str(error)
        except Exception as error:
            end = f"{type(error).__name__}: {error}"
            log.exception("serving: a loan has failed")
        self._last_end = end
        log.info("serving: the loan has ended: %s", end)
        try:
            last = self.tenant.take_back(end)
            if client is not None:
                _say(client, *last, m.ReplicaLost.of(orders.replica_id, orders.replica_id, end))
        finally:
            if client is not None:
                client.close()


class _Loan:
    """Brings the tenant the coordinator's commands, and the coordinator what happens."""

    def __init__(self, tenant: Tenant, orders: BorrowOrders, client: Client) -> None:
        self._tenant, self._client = tenant, client
        self._spec = ReplicaSpec(id=orders.replica_id, ranks=(orders.replica_id,))
        self._max_kv_tokens = orders.max_kv_tokens
        self._relay: Puller | None = None
        if orders.relay is not None:
            times = {"patience_s": orders.patience_s, "timeout_s": orders.timeout_s}
            self._relay = Puller(Relay(orders.relay, orders.token, **times))

    def run(self) -> str:
        """Returns why it has ended: the coordinator wants it, or the tenant does nothing more. Raises ConnectionError
        when the coordinator is lost, and what loading weights raises."""
        try:
            self._tenant.lend(self._spec, max_kv_tokens=self._max_kv_tokens)
            while True:
                data = self._client.receive(_BUSY_S if self._tenant.has_work else _IDLE_S)
                while data is not None:
                    command = m.decode_command(data)
                    if isinstance(command, m.Shutdown):
                        return "the job has given it back"
                    self._obey(command)
                    data = self._client.receive(0.0)
                for event in self._tenant.take_events():
                    self._client.send(m.encode(event))
                if self._tenant.closed:
                    return self._tenant.closed
        finally:
            if self._relay is not None:
                self._relay.close()

    def _obey(self, command: m.Command) -> None:
        if isinstance(command, m.Regroup):
            raise RuntimeError("Regroup: came to a replica of one rank")
        self._tenant.obey(command)
        if isinstance(command, m.LoadWeights):
            self._tenant.load(command, lambda: self._load(command.source, command.version))

    def _load(self, source: str, version: int) -> int:
        engine, pushed = self._tenant.engine, version_of(source, version)
        if pushed is None:
            if not Path(source).is_absolute() or is_adapter(source):
                raise ValueError(f"LoadWeights.source={source!r}: must be a folder of whole weights in safetensors")
            engine.load(checkpoint_tensors(source), version)
            return engine.checksum()
        if self._relay is None:
            raise ValueError(f"LoadWeights.source={source!r}: is a relay's, and the orders name no relay")
        return engine.pull(self._relay, pushed)


def _say(client: Client, *events: m.Event) -> None:
    try:
        for event in events:
            client.send(m.encode(event))
    except (ConnectionError, RuntimeError, ValueError):
        log.debug("serving: the coordinator did not hear the end of the loan")
