"""Schedules of weights by a relay: its trainer, itself and its replicas are killed, stopped and cut off.

Whatever happens, a pull gives the bits of the session and the number that it names, or says why not; and once nothing
happens any more, the next one succeeds.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from engines.control.sealing import new_token
from engines.models.parameters import logical_shapes
from engines.relay.client import Relay
from engines.relay.flat import FlatModel, cut
from engines.relay.held import owned
from engines.relay.message import BIT_TYPES
from engines.relay.process import RelayProcess, room_for
from engines.relay.requests import Version
from tests.engines.test_sharding import CONFIGS
from tests.faults.channel import Faults
from tests.faults.proxy import Proxy
from tests.faults.relay_ends import START_S, End, Ends
from tests.faults.relay_process import Finish, Model, Pull, Push, RankOrders, ReplicaOrders, Reply, Step, held, initial
from tests.worlds import Python

PATIENCE_S = 2.0
TIMEOUT_S = 15.0
"""For a version that does not come."""
LONGEST_WAIT_S = 2 * TIMEOUT_S
LONGEST_S = 90.0
MOMENTS = ("before", "while pushed", "whole", "while pulled")
BYTES_PER_MESSAGE = 150
"""Headers."""


def run_relay_schedules(_: object, seeds: list[int]) -> dict[str, Any]:
    """Runs them one after the other; returns the sums of what happened. Raises RuntimeError naming the seed."""
    counts: Counter[str] = Counter()
    seconds = []
    with Python(["-c", ""]) as first:  # the next ones are quick
        first.wait(LONGEST_S)
    for seed in seeds:
        began = time.monotonic()
        threads = set(threading.enumerate())
        schedule = _Schedule(seed, counts)
        try:
            schedule.run()
            left = set(threading.enumerate()) - threads
            assert not left, f"threads are left: {left}"
        except BaseException as error:
            happened = "\n".join(schedule.log)
            raise RuntimeError(
                f"relay schedule {seed}: {error}\n{happened}\n"
                f"replay: python -m tests.faults --relay 1 --first-seed {seed}"
            ) from error
        seconds.append(time.monotonic() - began)
        assert seconds[-1] < LONGEST_S, f"relay schedule {seed} took {seconds[-1]:.0f} s"
    return {**counts, "longest_s": round(max(seconds), 2), "seconds": round(sum(seconds), 1)}


@dataclass
class _Replica:
    orders: ReplicaOrders
    end: End
    pulling: Version | None = None


class _Schedule:
    def __init__(self, seed: int, counts: Counter[str]) -> None:
        self.log: list[str] = []
        self._began = time.monotonic()
        self._counts, self._rng = counts, random.Random(f"relay/{seed}")
        rng, self._seed = self._rng, seed
        self._rng_of_acts = random.Random(f"acts/{seed}")
        """Of its own, since how much is drawn from the other one depends on the clock."""
        self._settings = [(rng.randint(1, 3), rng.choice(["whole", "parts", "uneven"])) for _ in range(2)]
        self._options = {
            "bucket_bytes": rng.choice([1024, 3000, 3000, 20_000, 10**6]),
            "snapshot_every": rng.choice([1, 3, 64]),
            "deflates": rng.random() < 0.8,
        }
        self._push_s = rng.choice([0.0, 0.1, 0.5])
        """That a dense push by one rank takes at least."""
        self._faults = Faults(
            rng=random.Random(f"proxy/{seed}"), late=rng.choice([0.0, 0.05, 0.3]), repeated=rng.choice([0.0, 0.1, 0.3])
        )
        self._has_proxy = rng.random() < 0.6
        self._num_versions, self._num_replicas = rng.randint(3, 8), rng.randint(1, 3)
        self._num_relay_kills = 2  # a relay that dies three times at once is not started again
        self._steps: list[Step] = []
        self._numbers: list[int] = []
        self._num_sessions = 0
        self._ranks: list[End] = []
        self._replicas: list[_Replica] = []
        self._model = Model(
            seed=seed,
            config_name=rng.choice([*CONFIGS]),
            dtype=rng.choice([*BIT_TYPES]),
            is_raw=rng.random() < 0.5,
            piece_bytes=rng.choice([100, 1000, 1 << 22]),
            relay=Relay("", b""),
        )

    def run(self) -> None:
        with contextlib.ExitStack() as stack:
            closing = stack.enter_context
            patience = {"patience_s": PATIENCE_S, "timeout_s": TIMEOUT_S}
            process = RelayProcess(new_token(), max_bytes=self._room(), **patience)
            closing(contextlib.closing(process))
            self._process, relay = process, process.relay
            if self._has_proxy:
                self._proxy = closing(contextlib.closing(Proxy(relay.address, self._faults)))
                relay = replace(relay, address=self._proxy.address)
            self._model = replace(self._model, relay=relay)
            self._note(f"{self._model} {self._settings} {self._options} {self._push_s}")
            self._ends = closing(Ends(self._model))
            self._start_trainer()
            rng = self._rng
            orders = [ReplicaOrders(rng.choice([1, 2, 4])) for _ in range(self._num_replicas)]
            ends = self._ends.start(orders)
            self._replicas = [_Replica(order, end) for order, end in zip(orders, ends, strict=True)]
            for end in ends:
                self._ready(end)
            for _ in range(self._num_versions):
                self._one_version()
            self._settle()
            self._close()
        assert process.process is not None and process.process.poll() is not None, "the relay still runs"
        self._counts.update(self._faults.counts)
        self._counts["schedules"] += 1

    # -- the trainer

    def _room(self) -> int:
        """What a relay needs at most: with buckets as small as here, headers are much of it."""
        model = self._model
        flat = FlatModel.of(model.config, logical_shapes(model.config))
        size = BIT_TYPES[model.dtype]().itemsize
        self._num_bytes = flat.length * size
        most = max(1, self._options["bucket_bytes"] // size)
        weights, count = initial(model), 0
        for num_ranks, how in self._settings:
            everyone = [held(weights, rank, num_ranks, how, self._seed) for rank in range(num_ranks)]
            runs = [owned(flat, one, rank, num_ranks)[0] for rank, one in enumerate(everyone)]
            count = max(count, sum(len(cut(run, most)) for run in runs))
        return room_for(flat.length, model.dtype) - (64 << 20) + 3 * BYTES_PER_MESSAGE * count

    def _start_trainer(self) -> None:
        """A trainer that begins anew resumes behind some step, and makes other weights of the next numbers."""
        rng = self._rng
        for end in self._ranks:
            end.kill()
        kept = rng.randint(0, len(self._steps))
        del self._steps[kept:], self._numbers[kept:]
        num_ranks, how = rng.choice(self._settings)
        self._session = f"session-{self._num_sessions}"
        self._num_sessions += 1
        orders = [
            RankOrders(
                session=self._session,
                rank=rank,
                num_ranks=num_ranks,
                how=how,
                steps=list(self._steps),
                s_per_byte=self._push_s / self._num_bytes,
                options=self._options,
            )
            for rank in range(num_ranks)
        ]
        self._ranks = self._ends.start(orders)
        for end in self._ranks:
            self._ready(end)
        self._note(f"trainer {self._session}: {num_ranks} ranks, {how}, behind {self._numbers}")
        self._counts["trainers"] += 1

    def _ready(self, end: End) -> None:
        reply = end.reply(START_S)
        assert reply == Reply(), f"did not start: {reply} {end.process.stderr}"

    @property
    def _is_whole(self) -> bool:
        """Whether all ranks of the trainer are alive."""
        return all(end.is_alive for end in self._ranks)

    def _one_version(self) -> None:
        acts = self._draw_acts()
        self._strike(acts["before"])
        if not self._is_whole:
            self._start_trainer()
        self._push()
        self._begin_pulls(0.4)
        self._strike(acts["while pushed"])
        self._finish()
        self._strike(acts["whole"])
        self._begin_pulls(0.5)
        self._strike(acts["while pulled"])
        if self._rng.random() < 0.5:
            self._reap(lambda version: not self._is_over(version))  # another one may never come
        else:
            self._reap(lambda _: False)

    def _push(self) -> None:
        rng = self._rng
        self._numbers.append((self._numbers[-1] if self._numbers else 0) + rng.choice([1, 1, 2]))
        self._steps.append(Step(rng.randrange(2**31), rng.choice([0, 0.01, 0.01, 0.5, 1.0])))
        self._note(f"push {self._numbers[-1]} {self._steps[-1]}")
        for end in self._ranks:
            end.send(Push(self._numbers[-1], self._steps[-1]))
        self._counts["versions"] += 1

    def _finish(self) -> None:
        """Ranks that live must all come to an end; without one they wait, so the trainer is killed."""
        for end in self._ranks:
            end.send(Finish())
        deadline = time.monotonic() + LONGEST_WAIT_S
        grace = time.monotonic() + self._rng.choice([0.2, 1.0])
        replies = []
        while any(end.is_alive and end.num_due for end in self._ranks):
            assert time.monotonic() < deadline, f"finish() hangs for {LONGEST_WAIT_S:g} s"
            for end in self._ranks:
                if end.is_alive and end.num_due and (reply := end.reply(0.01)) is not None:
                    replies.append(reply)
            if not self._is_whole and time.monotonic() > grace:
                break
        for reply in replies:
            self._counts.update(reply.counts)
            assert not reply.error or not self._is_whole, f"finish(): {reply.error}\n{reply.trace}"
        if not self._is_whole:
            self._note(f"the trainer has died; the others said {[reply.error for reply in replies]}")
            for end in self._ranks:
                end.kill()

    # -- replicas

    def _begin_pulls(self, share: float) -> None:
        for replica in self._replicas:
            if not replica.end.is_alive and self._rng.random() < 0.5:
                self._launch(replica)
            if replica.end.is_alive and replica.pulling is None and self._rng.random() < share:
                self._pull(replica)

    def _launch(self, replica: _Replica) -> None:
        replica.end, replica.pulling = self._ends.start([replica.orders])[0], None
        self._ready(replica.end)
        self._counts["replicas that came late"] += 1

    def _pull(self, replica: _Replica) -> None:
        replica.pulling = Version(self._session, self._numbers[-1])
        replica.end.send(Pull(replica.pulling, list(self._steps)))
        self._note(f"replica {self._replicas.index(replica)} pulls {replica.pulling}")

    def _is_over(self, version: Version) -> bool:
        """Whether its trainer has died."""
        return version.session != self._session or not self._is_whole

    def _reap(self, waits: Callable[[Version], bool]) -> None:
        """Takes what replicas say of what they pull, perhaps later."""
        for replica in self._replicas:
            version, deadline = replica.pulling, time.monotonic() + LONGEST_WAIT_S
            while version is not None and replica.end.is_alive:
                if (reply := replica.end.reply(0.1 if waits(version) else 0.0)) is not None:
                    replica.pulling = None
                    self._check(replica, version, reply)
                    break
                if not waits(version):
                    break
                assert time.monotonic() < deadline, f"pull({version}) hangs for {LONGEST_WAIT_S:g} s"

    def _check(self, replica: _Replica, version: Version, reply: Reply) -> None:
        """Errors are right only where the version cannot be had: another is newer, or its trainer died before all
        was pushed."""
        self._note(f"replica {self._replicas.index(replica)}: {version}: {reply.error or 'has it'}")
        self._counts.update(reply.counts)
        if not reply.error:
            self._counts["pulls"] += 1
            return
        kind, _, said = reply.error.partition(": ")
        if "another shard of the replica could not pull it: " in said:
            kind, _, said = said.partition("could not pull it: ")[2].partition(": ")
        is_over = self._is_over(version)
        is_old = is_over or version.number < self._numbers[-1]
        self._counts[f"pulls: {kind}"] += 1
        if kind == "RefusedError" and "was dropped" in said and is_old:
            return
        if kind in ("TimeoutError", "ConnectionError") and is_over and ("version" in said.lower() or "relay" in said):
            return
        raise AssertionError(f"pull({version}): {reply.error}\n{reply.trace}")

    # -- what happens to them

    def _draw_acts(self) -> dict[str, list[Callable[[], None]]]:
        acts: dict[str, list[Callable[[], None]]] = {moment: [] for moment in MOMENTS}
        kinds = [self._kill_relay, self._stop_relay, self._kill_rank, self._stop_rank, self._kill_replica]
        kinds += [self._stop_replica, self._lose, self._cut, self._mute]
        rng = self._rng_of_acts
        for _ in range(rng.choice([0, 1, 1, 2])):
            by_proxy = [share * self._has_proxy for share in (2, 2, 0.7)]
            act = rng.choices(kinds, [3 * bool(self._num_relay_kills), 0.7, 2, 1, 2, 1, *by_proxy])[0]
            self._num_relay_kills -= act == self._kill_relay
            acts[rng.choice(MOMENTS)].append(act)
        return acts

    def _strike(self, acts: list[Callable[[], None]]) -> None:
        for act in acts:
            time.sleep(self._rng.choice([0.0, self._rng.uniform(0, 0.05), self._rng.uniform(0, 0.4)]))
            self._note(act.__name__)
            self._counts[act.__name__.strip("_")] += 1
            act()

    def _how_long(self) -> float:
        return self._rng.choice([0.05, 0.3, 1.0, 1.5 * PATIENCE_S])

    def _kill_relay(self) -> None:
        assert self._process.process is not None
        self._process.process.kill()

    def _stop_relay(self) -> None:
        assert self._process.process is not None
        self._process.process.send_signal(signal.SIGSTOP)
        time.sleep(self._how_long())
        self._process.process.send_signal(signal.SIGCONT)

    def _kill_rank(self) -> None:
        self._rng.choice(self._ranks).kill()

    def _stop_rank(self) -> None:
        if (end := self._rng.choice(self._ranks)).is_alive:
            end.stop(self._how_long())

    def _kill_replica(self) -> None:
        self._rng.choice(self._replicas).end.kill()

    def _stop_replica(self) -> None:
        if (end := self._rng.choice(self._replicas).end).is_alive:
            end.stop(self._how_long())

    def _lose(self) -> None:
        lose = self._rng.choice([self._proxy.lose, self._proxy.lose_answers, self._proxy.lose_answers])
        lose(self._rng.randint(1, 3))

    def _cut(self) -> None:
        self._proxy.cut()

    def _mute(self) -> None:
        self._proxy.mute()

    # -- the end

    def _settle(self) -> None:
        """With nothing that disturbs them, all pull the next version."""
        self._note("settle")
        if not self._is_whole:
            self._start_trainer()
        for replica in self._replicas:
            if not replica.end.is_alive:
                self._launch(replica)
        self._push()
        self._finish()
        self._reap(lambda _: True)
        for replica in self._replicas:
            self._pull(replica)
        before = self._counts["pulls"]
        self._reap(lambda _: True)
        assert self._counts["pulls"] == before + len(self._replicas), "a replica has not got the last version"

    def _close(self) -> None:
        """In the middle of a push, and behind the relay's end, too."""
        if self._rng.random() < 0.4:
            self._push()
            time.sleep(self._rng.uniform(0, 0.1))
        port = int(self._process.relay.address.rpartition(":")[2])
        closes = [self._end_all, self._process.close]
        if self._rng.random() < 0.3:
            closes.reverse()
        closes[0]()
        closes[1]()
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)), "the relay's port is still open"

    def _end_all(self) -> None:
        for end in (*self._ranks, *(replica.end for replica in self._replicas)):
            end.close(LONGEST_WAIT_S)

    def _note(self, what: str) -> None:
        self.log.append(f"{time.monotonic() - self._began:7.3f} {what}")
