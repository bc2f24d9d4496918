"""The only code that steps a replica in a rollout; it records what each step did."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import msgspec

from engines.decoding import from_msgpack
from engines.parallel.collectives import Communicator
from engines.parallel.layout import Layout
from engines.replica.engine import LocalEngine
from engines.replica.replica import StepOutput
from engines.rollout.generation import split_done
from engines.rollout.pace import Pace, paced_step_s
from engines.rollout.telemetry import StepRecord
from engines.rollout.turns import Parked, Turns
from engines.sequence import Completion, Finished, SequenceId, SequenceState, Work


class Stepper:
    """Steps one rank's engine in one layout."""

    def __init__(self, engine: LocalEngine, epoch: int, pace: Pace | None = None) -> None:
        self._engine = engine
        self._epoch = epoch
        self._pace = pace
        self._moved_tokens = engine.replica.kv_moves.moved_tokens
        if pace is not None:
            engine.mover.fetch_s = lambda num_tokens: pace.transfer(engine.spec, num_tokens, "host")

    def wait_for_transfers(self, start: float) -> None:
        """In a paced run, waits until the KV that has moved since the last step or call has taken its time."""
        if self._pace is not None:
            wait_until(start + self._transfer_s(self._pace))

    def _transfer_s(self, pace: Pace) -> float:
        moved = self._engine.replica.kv_moves.moved_tokens
        num_tokens, self._moved_tokens = moved - self._moved_tokens, moved
        return pace.transfer(self._engine.spec, num_tokens, "host")

    def step(self) -> tuple[StepOutput, StepRecord]:
        start, waited_s = time.monotonic(), self._engine.replica.kv_moves.waited_s
        output = self._engine.replica.step()
        spec, paced_s = self._engine.spec, 0.0
        if self._pace is not None:
            waited_s = self._engine.replica.kv_moves.waited_s - waited_s
            paced_s = (
                waited_s
                + paced_step_s(self._pace, spec, output, self._engine.config.draft_method)
                + self._transfer_s(self._pace)
            )
            wait_until(start + paced_s)
        return output, StepRecord.of(spec, self._epoch, start, time.monotonic() - start, output, paced_s)

    def complete(
        self,
        states: list[SequenceState],
        hear: Callable[[Finished], None] | None,
        records: list[StepRecord],
        turns: Turns | None = None,
    ) -> list[Finished]:
        """Steps until these sequences have ended; returns them in that order, and adds to `records`.

        `hear` is called for each sequence when it ends. `turns` answers between the turns of trajectories. After an
        error or an interrupt the replica holds no sequence.
        """
        replica = self._engine.replica
        done: list[Finished] = []
        parked = Parked(turns, self._engine.mover.drop)

        def end(finished: Finished) -> None:
            done.append(finished)
            if hear is not None:
                hear(finished)

        try:
            for work in [Work(state=state) for state in states]:
                if not parked.begin(work):
                    replica.submit(work)
            while replica.has_work or parked.num_open:
                for work in parked.take(is_running=replica.has_work):
                    replica.submit(work)
                for finished in parked.take_finished():
                    end(finished)
                if not replica.has_work:
                    continue
                output, record = self.step()
                records.append(record)
                for work in output.released:
                    parked.add(work)
                for finished in output.finished:
                    if not parked.end(finished):
                        end(finished)
                if len(done) + parked.num_open + replica.num_sequences < len(states):
                    raise RuntimeError(
                        "generate: on_finished has paused or aborted sequences; do that between two calls only"
                    )
        except BaseException:
            replica.clear()
            raise
        finally:
            if turns is not None:
                turns.close()
        return done


def wait_until(moment: float) -> None:
    """Returns at this time of `time.monotonic`, or at once if it has passed."""
    time.sleep(max(0.0, moment - time.monotonic()))


def roll_out_static(
    engine: LocalEngine,
    layout: Layout,
    world: Communicator,
    states: list[SequenceState],
    done: Mapping[SequenceId, Completion],
    hear: Callable[[Finished], None],
    records: list[StepRecord],
    turns: Turns | None = None,
) -> list[tuple[int, Completion]]:
    """Runs sequence i on replica i mod dp: a dispatch that does not depend on time.

    Returns all completions, also those in `done`, with their prompt uids, on every rank. `turns` are for one rank.
    """
    is_first = engine.tensor_parallel.rank == 0
    position = layout.replicas.index(engine.spec)
    known, left = split_done(states[position :: len(layout.replicas)], done)
    if is_first:
        for one in known:
            hear(one)
    ended = Stepper(engine, layout.epoch).complete(left, hear if is_first else None, records, turns)
    mine = [(one.state.key.prompt_uid, one.completion) for one in known + ended]
    if world.size == 1:
        return mine
    # All shards of a replica have drawn the same tokens; only the first shard sends them.
    parts = world.all_gather_bytes(msgspec.msgpack.encode(mine if is_first else []))
    return [pair for part in parts for pair in from_msgpack(part, list[tuple[int, Completion]])]
