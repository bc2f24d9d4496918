"""Schedules of replicas outside a world: they are killed, stopped, cut off and launched at random moments.

In some fleets, some replicas hold half of the longest sequence; another one that holds all is launched where none is.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec

from engines.control.ends import Lost, Notice
from engines.control.transport import Client
from engines.fleet.fleet import Fleet
from engines.models.loader import checkpoint_tensors
from engines.rollout.pace import ShortestStep
from tests.faults.channel import Faults, FaultyServer
from tests.faults.leftovers import assert_nothing_left
from tests.faults.oracle import NUM_VERSIONS, Environments, Oracle, engine_options
from tests.faults.requests import Caller, count_decisions, num_handed_over, random_policy, random_predictor

PATIENCE_S = 3.0
TIMEOUT_S = 15.0
"""Longest wait for a process to start, and for an answer that a lost command will not get."""
SCHEDULES_PER_FLEET = 10
"""Processes and coordinator are kept for so many, as starting a process takes seconds."""
LONGEST_S = 60.0


def run_outside_schedules(oracle_directory: Path, seeds: list[int]) -> dict[str, Any]:
    """Runs them one after the other; returns the sums of what happened. Raises RuntimeError naming the seed."""
    oracle = Oracle(oracle_directory)
    counts: Counter[str] = Counter()
    seconds = []
    pids: set[int] = set()
    # By the seed's own value, so that one alone gets the engine that it had among others.
    for number, batch in groupby(seeds, lambda seed: seed // SCHEDULES_PER_FLEET):
        rng = random.Random(f"fleet/{number}")
        step_s = rng.choice([0.0, 0.003, 0.01])
        policy, small = random_policy(rng), set[int]() if rng.random() < 0.5 else None
        with Fleet(
            oracle.checkpoint(0),
            num_replicas=0,
            patience_s=PATIENCE_S,
            timeout_s=TIMEOUT_S,
            kv_store_bytes=rng.choice([2**30, 2**18]),
            schedule_policy=policy,
            pace=ShortestStep(step_s=step_s),
            **engine_options(rng),
        ) as fleet:
            for _ in range(3):
                launch(fleet, rng, small)
            for seed in batch:
                began = time.monotonic()
                schedule = _Schedule(seed, oracle, fleet, counts, small)
                try:
                    schedule.run()
                except BaseException as error:
                    raise RuntimeError(
                        f"outside schedule {seed}: {error}\nlost: {fleet.coordinator.lost}\n"
                        f"replay: python -m tests.faults --outside 1 --first-seed {seed}"
                    ) from error
                seconds.append(time.monotonic() - began)
                assert seconds[-1] < LONGEST_S, f"outside schedule {seed} took {seconds[-1]:.0f} s"
                pids |= schedule.pids
            pids |= set(fleet.launcher.pids().values())
            counts["replicas_lost"] += len(fleet.coordinator.lost)
            counts["refused"] += len(fleet.coordinator.refused)
            count_decisions(fleet.coordinator.core, policy, counts)
            weights_folder = fleet._weights.folder
        assert_nothing_left(pids, [weights_folder])
    return {**counts, "longest_s": round(max(seconds), 2), "seconds": round(sum(seconds), 1)}


def launch(fleet: Fleet, rng: random.Random, small: set[int] | None) -> None:
    """Launches a replica; where `small` notes those that hold half, perhaps such a one."""
    launcher = fleet.launcher
    orders = launcher._orders
    if is_small := small is not None and rng.random() < 0.5:
        assert isinstance(orders.config.kv_cache_bytes, int)
        config = replace(orders.config, kv_cache_bytes=orders.config.kv_cache_bytes // 2)
        launcher._orders = msgspec.structs.replace(orders, config=config)
    spec = fleet.launch()
    launcher._orders = orders
    if small is not None and is_small:
        small.add(spec.id)


class _Schedule:
    """All happens in the thread that coordinates, which is the only one."""

    def __init__(self, seed: int, oracle: Oracle, fleet: Fleet, counts: Counter[str], small: set[int] | None) -> None:
        self._oracle, self._fleet, self._counts, self._small = oracle, fleet, counts, small
        rng = self._rng = random.Random(f"outside/{seed}")
        self._num_replicas = rng.randint(2, 3)
        kinds = [self._kill, self._kill_all, self._stop, self._stop_for_good, self._cut_off, self._end_politely]
        num_blows = rng.choice([0, 1, 1, 2, 3])
        self._blows = [
            (rng.choices(kinds, weights=[6, 0.7, 3, 0.7, 1, 1])[0], rng.random() < 0.6) for _ in range(num_blows)
        ]
        """What strikes a replica, and whether another one is launched then: dearer than the rest, as each is to be
        replaced. Drawn here, since how much is drawn later depends on the clock."""
        self._strikes_surely = False
        self._share_acts = rng.choice([0.1, 0.3, 0.6])
        self._faults = Faults(
            rng=rng,
            late=rng.choice([0.0, 0.1, 0.5]),
            repeated=rng.choice([0.0, 0.1, 0.3]),
            lost=rng.choice([0.0, 0.0, 0.0, 0.002]),
        )
        self._versions = [rng.randrange(NUM_VERSIONS) for _ in range(rng.randint(1, 3))]
        self._stopped: dict[int, float] = {}
        """Process id -> when it may go on; never when it stays as it is."""
        self._caller: Caller | None = None
        self.pids: set[int] = set()

    def run(self) -> None:
        fleet, coordinator = self._fleet, self._fleet.coordinator
        end = coordinator._server
        if isinstance(end, FaultyServer):  # the last schedule's: what is on its way stays there
            end.faults, end.on_notice = self._faults, self._on_notice
            end._held._faults = self._faults
        else:
            coordinator._server = FaultyServer(end, self._faults, self._on_notice)
        # Some begin with whoever is there already.
        num_ready = 2 if self._rng.random() < 0.8 else 0
        deadline = time.monotonic() + LONGEST_S
        coordinator.pump(0.0)
        while len(coordinator.outside) < self._num_replicas or len(coordinator.standing_by) < num_ready:
            assert time.monotonic() < deadline, f"no {num_ready} replicas stand by after {LONGEST_S:g} s"
            if len(coordinator.outside) < self._num_replicas:
                launch(fleet, self._rng, self._small)
            coordinator.pump(0.02)
        for version in self._versions:
            self._roll_out(version)
        self._strikes_surely = True
        while self._blows:
            self._roll_out(self._versions[-1])
        for pid in list(self._stopped):
            self._go_on(pid)
        self._counts.update(self._faults.counts)
        self._counts["schedules"] += 1
        self._counts["unequal"] += self._small is not None

    def _roll_out(self, version: int) -> None:
        fleet, rng = self._fleet, self._rng
        if rng.random() < 0.2:
            source = fleet.publish(checkpoint_tensors(self._oracle.checkpoint(version)), version)
        else:
            source = self._oracle.checkpoint(version)
        states = self._oracle.states(version, rng, rng.randint(2, 40))
        caller = self._caller = Caller(fleet.coordinator, states, rng, self._counts)
        environments = Environments(random.Random(f"environments/{version}"))
        turns = environments.turns(random_predictor(rng))
        fleet._turns = lambda *_: turns  # type: ignore[method-assign]  # the model has no tokenizer
        out = fleet.roll_out(
            list(caller.first),
            policy_version=version,
            weights_source=source,
            on_finished=caller.on_finished,
            environment=environments,
        )
        environments.close()
        self._counts["trajectories"] += sum(one.state.in_turns for one in out)
        self._caller = None
        self._oracle.check(version, caller.submitted, caller.aborted, out)
        assert len(caller.submitted) == len(states)
        fleet.coordinator.core.check_integrity()
        self._counts["sequences"] += len(states)
        self._counts["phases"] += 1

    def _on_notice(self, notice: Notice | None) -> None:
        now = time.monotonic()
        for pid in [pid for pid, until in self._stopped.items() if now > until]:
            self._go_on(pid)
        if isinstance(notice, Lost):
            self._counts["connections_lost"] += 1
        caller, rng, core = self._caller, self._rng, self._fleet.coordinator.core
        if caller is not None and not set(self._fleet.coordinator.outside) - (self._small or set()):
            # After the last one's loss; that none comes is tested in test_fleet.py.
            launch(self._fleet, self._rng, None)
            self._counts["launches"] += 1
        if caller is None or notice is None:
            return
        self._counts["handed_over"] += num_handed_over(core, notice)
        if core.phase is None:
            return
        if self._strikes_surely and self._blows:
            self._strike()
            return
        if rng.random() > self._share_acts:
            return
        act = rng.choices(
            [
                partial(caller.move_some, sorted(self._fleet.coordinator.standing_by)),
                caller.submit_more,
                lambda: time.sleep(rng.uniform(0, 0.02)),
                caller.abort_one,
                core.check_integrity,
                self._strike,
            ],
            weights=[6, 1, 1, 0.3, 1, 2],
        )[0]
        act()

    def _strike(self) -> None:
        """One replica is killed, stopped or cut off, or all are killed; usually others are launched."""
        pids = self._fleet.launcher.pids()
        self.pids |= set(pids.values())
        if not pids or not self._blows:
            return
        strike, is_replaced = self._blows.pop(0)
        strike(self._rng.choice(sorted(pids)), pids)
        if is_replaced or len(pids) == 1:
            self._launch()

    def _launch(self) -> None:
        launch(self._fleet, self._rng, self._small)
        self._counts["launches"] += 1

    def _kill(self, replica_id: int, pids: dict[int, int]) -> None:
        self._send(pids[replica_id], signal.SIGKILL, "kills")

    def _send(self, pid: int, number: signal.Signals, count: str) -> None:
        """Counts what has reached a process: it may have ended since its id was read."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
            self._counts[count] += 1

    def _kill_all(self, _: int, pids: dict[int, int]) -> None:
        for replica_id in pids:
            self._kill(replica_id, pids)
        self._launch()

    def _end_politely(self, replica_id: int, pids: dict[int, int]) -> None:
        self._send(pids[replica_id], signal.SIGTERM, "terminations")

    def _stop(self, replica_id: int, pids: dict[int, int]) -> None:
        """For a while, perhaps longer than anybody's patience."""
        self._send(pids[replica_id], signal.SIGSTOP, "stops")
        self._stopped[pids[replica_id]] = time.monotonic() + self._rng.choice([0.05, 0.3, 1.0, 1.5 * PATIENCE_S])

    def _stop_for_good(self, replica_id: int, pids: dict[int, int]) -> None:
        self._send(pids[replica_id], signal.SIGSTOP, "stops_for_good")

    def _go_on(self, pid: int) -> None:
        del self._stopped[pid]
        if pid in self._fleet.launcher.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _cut_off(self, replica_id: int, pids: dict[int, int]) -> None:
        """Another client joins under its name, so that the coordinator drops its connection."""
        if replica_id not in self._fleet.coordinator.standing_by:
            return
        token = self._fleet.launcher._orders.token
        Client(f"rank-{replica_id}", self._fleet.launcher._orders.address, token).close()
        self._counts["cut_off"] += 1
