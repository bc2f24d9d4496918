"""What replicas gain from each other's drafts (`drafting.py --parts server`): live.

Two ranks, each a replica that generates half of each group's samples. Their draft server is on rank 0; in one rollout
it is closed, with all its tokens, and started again. In float64, where no rounding changes a draw.
"""

from __future__ import annotations

import itertools
import math
import statistics
import sys
import time
from bisect import bisect
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import engines
from engines.coordination.views import Dispatch, ScheduleView
from engines.parallel.layout import nested_layout
from engines.progress import Bar
from engines.sequence import Finished, SamplingParams, SequenceId
from engines.speculation.client import DraftClient, DraftTimes
from engines.speculation.mirror import Grown
from engines.speculation.server import DraftServer
from experiments import launch
from experiments.comparison.real import RealWorld
from experiments.comparison.rollouts import Rollout, Variant, Workload
from experiments.comparison.turns import short
from experiments.trained import encode

if TYPE_CHECKING:
    from engines.parallel.collectives import TorchGroup

APPEND_TOKENS, FETCH_S = (1, 16, 64), (0.02, 0.1, 0.5)
NUM_REPLICAS, GROUP, AT_A_TIME = 2, 16, 4
LAYOUT = nested_layout(range(NUM_REPLICAS), 1)
WITH, KILLED, WITHOUT = "with server", "server killed", "without server"


def replica_of(sequence_id: SequenceId) -> int:
    return sequence_id[2] * NUM_REPLICAS // GROUP


class Halves:
    """The first sample of a few prompts, then their second one, and so on; then those of the next prompts. A replica
    has all of its sequences from the start, so that no step waits for a dispatch."""

    def next(self, view: ScheduleView) -> Dispatch | None:
        if not view.waiting or not all(one.accepts for one in view.replicas.values()):
            return None
        first = min(view.waiting, key=lambda id_: (id_[1] // AT_A_TIME, id_[2], id_[1]))
        return Dispatch(sequence_id=first, replica_id=replica_of(first), queued=True)


class Sharing:
    """What a rank of a rollout makes to share drafts: the server on rank 0, and a client with these times."""

    def __init__(self, times: DraftTimes) -> None:
        self._times = times
        self.heard: list[float] = []
        """Times at which tokens of the other replica arrived."""

    @contextmanager
    def used(self) -> Iterator[None]:
        from engines.rollout import drafts

        plain = drafts.DraftServer, drafts.DraftClient
        drafts.DraftServer, drafts.DraftClient = self._serve, self._connect  # type: ignore[assignment, misc]
        try:
            yield
        finally:
            drafts.DraftServer, drafts.DraftClient = plain  # type: ignore[misc]

    def _serve(self, token: bytes, **options: Any) -> DraftServer:
        self._token, self.server = token, DraftServer(token, **options)
        return self.server

    def _connect(self, address: str, token: bytes) -> DraftClient:
        heard = self.heard

        class Client(DraftClient):
            def take(self) -> list[Grown]:
                grown = super().take()
                if grown:
                    heard.append(time.monotonic())
                return grown

        return Client(address, token, self._times)

    def restart(self) -> None:
        """At the same port, with no tokens."""
        self._serve(self._token, port=int(self.server.address.rpartition(":")[2]))


def measure(model: str, texts: list[str], seed: int, world: TorchGroup) -> dict[str, Any]:
    """The result of the part, which docs/drafting.md explains; empty but on rank 0. All ranks call it together."""
    options = {"dtype": "float64", "kv_cache_bytes": 2**26, "max_num_seqs": AT_A_TIME, "max_model_len": 512}
    bench = RealWorld(
        model=model, groups=engines.GroupCache(world, [LAYOUT]), pace=None, options={**options, "seed": seed}
    )
    params = SamplingParams(max_tokens=320, n=GROUP)
    workload = Workload(prompts=encode(Path(model), texts), params=params)
    own: dict[str, Any] = {"drafter": "grouped_suffix", "draft_lengths": "fixed"}

    def roll_out(options: Mapping[str, Any], on_finished: Callable[[Finished], object] = lambda _: None) -> Rollout:
        return bench.roll_out(workload, Variant(layout=LAYOUT, schedule=Halves, options=options), on_finished)

    plain, alone = roll_out({}), roll_out(own)
    shared: dict[tuple[int, float], Rollout] = {}
    cells, default = list(itertools.product(APPEND_TOKENS, FETCH_S)), DraftTimes()
    for cell in Bar(cells, desc="draft server", unit="rollout", disable=launch.rank() > 0):
        with Sharing(replace(default, append_tokens=cell[0], fetch_s=cell[1])).used():
            shared[cell] = roll_out(own | {"draft_server": True})
    moments: list[float] = []
    sharing, counted, total = Sharing(default), itertools.count(1), len(texts) * GROUP

    def kill_and_restart(_: Finished) -> None:
        number = next(counted)
        if number in (total // 3, total * 2 // 3):
            sharing.restart() if moments else sharing.server.close()
            moments.append(time.monotonic())

    with sharing.used():
        killed = roll_out(own | {"draft_server": True}, kill_and_restart)
    everyone = launch.gather(world, sharing.heard)
    if world.rank:
        return {}
    sharing.server.close()
    killed_at, restarted_at = moments
    back_at = [next((one for one in heard if one > restarted_at), math.inf) for heard in everyone]
    length = {cell: acceptance(run) for cell, run in shared.items()}
    finest, at_default = length[cells[0]], length[default.append_tokens, default.fetch_s]
    runs = {WITH: shared[default.append_tokens, default.fetch_s], KILLED: killed, WITHOUT: alone}
    seconds = {name: [step.seconds for step in run.steps] for name, run in runs.items()}
    windows = {
        "before": [(0.0, killed_at)] * NUM_REPLICAS,
        "gone": [(killed_at, restarted_at)] * NUM_REPLICAS,
        "after": [(back, math.inf) for back in back_at],
    }
    result = {
        "tokens_equal": len({run.digest for run in (plain, alone, killed, *shared.values())}) == 1,
        "acceptance_length": {count: {one: length[count, one] for one in FETCH_S} for count in APPEND_TOKENS},
        "acceptance_without_server": acceptance(alone),
        "lost_at_default": short(1 - at_default / finest),
        "lost_without_server": short(1 - acceptance(alone) / finest),
        "longest_step_s": {name: short(max(some)) for name, some in seconds.items()},
        "median_step_s": {name: short(statistics.median(some)) for name, some in seconds.items()},
        "acceptance_after_restart": {name: in_window(runs, times) for name, times in windows.items()},
        "seconds_until_back": short(max(back_at) - restarted_at) if max(back_at) < math.inf else None,
    }
    print(*(f"{name}: {value}" for name, value in result.items()), sep="\n", file=sys.stderr)
    return result


def in_window(runs: Mapping[str, Rollout], times: Items[tuple[float, float]]) -> dict[str, float | None]:
    """Acceptance while the same sequences ran as between these times, one pair per replica, of the killed rollout."""
    spans = [[num_ended(runs[KILLED], replica, time) for time in one] for replica, one in enumerate(times)]
    lengths = {name: acceptance(run, spans) for name, run in runs.items()}
    return {name: None if math.isnan(one) else one for name, one in lengths.items()}


def acceptance(run: Rollout, spans: Items[Items[float]] = ((0, math.inf),) * NUM_REPLICAS) -> float:
    """Returns the tokens of a sequence per step, in the steps before which each replica had ended a number of sequences
    that is in its span. NaN if there is no such step."""
    steps = [
        step
        for step in run.steps
        if spans[step.replica_id][0] <= num_ended(run, step.replica_id, step.start) < spans[step.replica_id][1]
    ]
    running, accepted = (sum(getattr(step, name) for step in steps) for name in ("num_running", "num_accepted"))
    return short(1 + accepted / running) if running else math.nan


def num_ended(run: Rollout, replica_id: int, when: float) -> float:
    """Returns the number of the replica's sequences that had ended then."""
    return bisect([end for id_, end in run.finish_times.items() if replica_of(id_) == replica_id], when)
