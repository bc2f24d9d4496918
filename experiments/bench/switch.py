"""A layout changes under running sequences, from TP1 to TP2 and back, until each of them has its next token.

    python experiments/bench/switch.py
    python experiments/bench/switch.py --transport "shared memory" --figure switch.png

The sequences have as much context as fits in the KV caches of TP1. Every way to switch must draw the same tokens:
- `all_to_all`, `all_gather`: in the memory and the processes that are there;
- `rebuild`: KV goes to files, a new engine loads the checkpoint, which is in the page cache, and the KV;
- `restart`: new processes load the checkpoint and prefill all contexts.
"""

from __future__ import annotations

import contextlib
import gc
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

import engines
from engines.config import DType, Exchange, Transport
from engines.constraints import Count
from engines.decoding import from_msgpack
from engines.parallel.layout import nested_layout
from engines.rollout.generation import make_states
from engines.sequence import SamplingParams, SequenceState, Work
from experiments import launch
from experiments.bench import harness
from experiments.bench.models import checkpoint, random_prompts
from experiments.comparison.machine import this_tier
from experiments.comparison.turns import Row, interleave, make_row, short
from experiments.pat_cases import live_model

RANKS = 2
LAYOUTS = nested_layout(range(RANKS), 1), nested_layout(range(RANKS), RANKS, epoch=1)
RESUME = "CURTAIL_SWITCH_RESUME"
"""Environment of the processes that `restart` starts: names the file with what they continue."""


@dataclass(frozen=True, kw_only=True)
class SwitchBench(harness.BenchConfig):
    """Time a switch of two ranks from TP1 to TP2 and back: in place, with a new engine, and with new processes."""

    hidden: Annotated[int, Meta(ge=128, multiple_of=128, description="a multiple of 128")] = 2048
    """Hidden size of a random Qwen3."""
    layers: Count = 4
    """Layers of this model."""
    sequences: Count = 9
    """Running sequences of both ranks."""
    kv_mib: Count = 256
    """MiB of a rank's KV cache."""
    dtype: DType = "float32"
    """Dtype of weights, activations and KV."""
    transport: Transport = "gloo"
    """Between the ranks."""
    restarts: Count = 1
    """Turns in which new processes are started, too."""
    figure: Path | None = None
    """Also draw the seconds by part (PAT, Fig. 12), and rank 0's memory during more switches, not timed (Fig. 13)."""


class Resume(msgspec.Struct):
    """What the processes that `restart` starts continue; `epoch` names their layout."""

    model: str
    epoch: int
    states: list[SequenceState]


def measure(config: SwitchBench) -> dict[str, Any]:
    began = time.monotonic()
    groups = engines.GroupCache(launch.join_world(RANKS), LAYOUTS, transport=config.transport)
    options: dict[str, Any] = {"world": groups, "dtype": config.dtype, "kv_cache_bytes": config.kv_mib << 20}
    if RESUME in os.environ:
        given = from_msgpack(Path(os.environ[RESUME]).read_bytes(), Resume)
        ranks = Ranks(engines.LLM(given.model, layout=LAYOUTS[given.epoch], **options), groups)
        loaded = time.monotonic()
        tokens = ranks.draw([Work(state=state) for state in given.states], given.epoch)
        return {"rows": [], "moments": [began, loaded, time.monotonic()], "tokens": tokens}
    shape = replace(live_model(config.hidden), layers=config.layers)
    with checkpoint(shape, max_positions=2**15, dtype=config.dtype, world=groups.world) as model:
        llm = engines.LLM(model, layout=LAYOUTS[0], **options)
        ranks, states = Ranks(llm, groups), contexts(llm, config.sequences)
        there: dict[str, Way] = {how: partial(ranks.regroup, how) for how in get_args(Exchange)}
        ways = {**there, "rebuild": ranks.rebuild, "restart": ranks.restart}
        for way in there.values():
            ranks.both(way, states)  # warms up; the first call prefills
        often = {"restart": config.restarts}
        calls = {name: [partial(ranks.both, way, states)] * often.get(name, config.turns) for name, way in ways.items()}
        turns = interleave(calls, config.turns, warm_up=False)
        memory: dict[str, list[tuple[float, float]]] = {}
        if config.figure is not None:
            for name in [*there, "rebuild"]:
                ranks.both(ways[name], states, memory.setdefault(name, []))
        llm.close()
    up, down = ({way: [pair[k] for pair in some] for way, some in turns.items()} for k in (0, 1))
    rows = [compare("TP1 -> TP2", up), compare("TP2 -> TP1", down)]
    if config.figure is not None and launch.rank() == 0:
        from experiments.pat_figures import draw_ways

        draw_ways(config.figure, rows, memory, this_tier())
    return {"context_tokens": len(states[0].tokens), "rows": rows}


def contexts(llm: engines.LLM, num_sequences: int) -> list[SequenceState]:
    """Prompts that fill, with the three tokens drawn here, the cache of the TP1 replica with the most sequences."""
    blocks, per_replica = llm.replica.scheduler.blocks.num_blocks, -(-num_sequences // RANKS)
    length = blocks // per_replica * llm.config.block_size - 3
    if length < 1:
        raise ValueError(f"kv_mib: holds {blocks} blocks, and a replica has {per_replica} sequences; give more")
    prompts = random_prompts(num_sequences, length, llm.model_config.vocab_size)
    params = [SamplingParams(max_tokens=4, ignore_eos=True)] * num_sequences
    return make_states(prompts, params, range(num_sequences), run_seed=0, policy_step=0)


Tokens = list[int]
"""The token that each sequence has drawn."""
Taken = tuple[list[Work], dict[str, float], Tokens | None]
"""All sequences, paused, in the next layout; seconds by part; where other processes have drawn the tokens, these."""
Way = Callable[[int], Taken]


class Ranks:
    """This rank's side of the switches; both ranks call the same methods. Layouts are named by their epoch."""

    def __init__(self, llm: engines.LLM, groups: engines.GroupCache) -> None:
        self._llm, self._groups, self._placement = llm, groups, llm._placement

    def both(
        self, way: Way, states: Items[SequenceState], memory: list[tuple[float, float]] | None = None
    ) -> list[Row]:
        """Runs the sequences in TP1, and switches up and down. All but the first call find the KV in the cache.

        Adds to `memory`, if given, samples of this process's memory during the switches; see `_sampled`.
        """
        self._llm.replica.pause()
        gc.collect()  # engines of earlier turns
        self.draw([Work(state=SequenceState.from_bytes(state.to_bytes())) for state in states], 0)
        with contextlib.nullcontext() if memory is None else _sampled(memory):
            return [self._switch(way, epoch) for epoch in (1, 0)]

    def draw(self, works: Iterable[Work], epoch: int) -> Tokens:
        """Submits the sequences to their replicas; returns the next token of each."""
        replica, spec, count = self._llm.replica, self._placement.engine.spec, len(LAYOUTS[epoch].replicas)
        mine = [(one, len(one.state.tokens)) for one in works if one.state.key.prompt_uid % count == spec.id]
        for work, _ in mine:
            replica.submit(work)
        while any(len(work.state.tokens) == length for work, length in mine):
            replica.step()
        # While the last prompts are prefilled, the first sequences go on: only the next token of each counts.
        drawn = [(work.state.key.prompt_uid, work.state.tokens[length]) for work, length in mine]
        everyone = launch.gather(self._groups.world, drawn)
        return list({uid: token for uid, token in sorted(pair for part in everyone for pair in part)}.values())

    def regroup(self, how: Exchange, epoch: int) -> Taken:
        engine = self._placement.engine
        engine.config = replace(engine.config, exchange=how)
        start = time.perf_counter()
        works = self._pause(keeping=[state.sequence_id for state in engine.replica.states()])
        paused = time.perf_counter()
        count = len(LAYOUTS[epoch].replicas)
        places = {work.state.sequence_id: work.state.key.prompt_uid % count for work in works}
        self._placement.regroup(LAYOUTS[1 - epoch], LAYOUTS[epoch], places)
        switch = engine.switch
        assert switch is not None
        parts = {"weights": switch.weights_s, "kv": switch.kv_s, "prepare": switch.prepare_s}
        return works, {"pause": paused - start, **parts}, None

    def rebuild(self, epoch: int) -> Taken:
        from engines.models.loader import checkpoint_tensors

        start = time.perf_counter()
        works = self._pause(with_kv=True)
        paused = time.perf_counter()
        del self._placement.engine
        self._placement.build(LAYOUTS[epoch])
        mover = self._placement.engine.mover
        assert mover.store is not None
        mover.use(mover.store, in_background=False)  # else some sequences would draw several tokens
        built = time.perf_counter()
        self._placement.engine.load(checkpoint_tensors(self._placement.source), version=0)
        loaded = time.perf_counter()
        return works, {"pause": paused - start, "build": built - paused, "load": loaded - built}, None

    def restart(self, epoch: int) -> Taken:
        works, *_ = self.regroup("all_to_all", epoch)  # untimed: so that these ranks follow
        task = Resume(model=str(self._placement.source), epoch=epoch, states=[work.state for work in works])
        parts, tokens = launch.on_rank_0(self._groups.world, lambda: _start_anew(task))
        return works, parts, tokens

    def _switch(self, way: Way, epoch: int) -> Row:
        """Returns seconds, by part those of the slower rank, the tokens, and both ranks' bytes and what they made."""
        held = _held(self._groups)
        self._groups.world.barrier()
        start = time.perf_counter()
        works, parts, theirs = way(epoch)
        ready = time.perf_counter()
        tokens = self.draw(works, epoch)
        end = time.perf_counter()
        made = {f"made_{name}": now - held[name] for name, now in _held(self._groups).items()}
        switch = self._placement.engine.switch
        moved = {} if switch is None else {"weight_bytes": switch.weight_bytes, "kv_bytes": switch.kv_bytes}
        if theirs is None:
            parts["step"] = end - ready
        else:
            assert tokens == theirs, f"new processes have drawn other tokens: {tokens} {theirs}"
        everyone = launch.gather(self._groups.world, [parts, made | moved])
        return {
            "seconds": end - start if theirs is None else sum(parts.values()),
            "tokens": tokens,
            "parts": {name: max(one[name] for one, _ in everyone) for name in parts},
            "facts": {name: sum(one[name] for _, one in everyone) for name in made | moved},
        }

    def _pause(self, **how: Any) -> list[Work]:
        """Returns the sequences of all replicas."""
        engine, world = self._placement.engine, self._groups.world
        works = engine.replica.pause(**how)
        told = launch.gather(world, works if engine.spec.ranks[0] == world.rank else [], list[Work])
        return [work for part in told for work in part]


def _start_anew(task: Resume) -> tuple[dict[str, float], Tokens]:
    """Seconds by part, and the tokens, of new processes."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(msgspec.msgpack.encode(task))
        start = time.monotonic()
        result = launch.start_anew("--output", "None", **{RESUME: file.name})
    began, loaded, ended = result["moments"]
    return {"start": began - start, "load": loaded - began, "prefill": ended - loaded}, result["tokens"]


@contextlib.contextmanager
def _sampled(memory: list[tuple[float, float]]) -> Iterator[None]:
    """Adds a sample every 5 ms: seconds, and MiB of this process's own memory beyond the start. Files, also those in
    memory, and memory that is shared with other processes do not count."""
    ended, start, before = threading.Event(), time.perf_counter(), _own_mib()

    def sample() -> None:
        while not ended.wait(0.005):
            memory.append((time.perf_counter() - start, _own_mib() - before))

    thread = threading.Thread(target=sample, name="memory")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _own_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


def _held(groups: engines.GroupCache) -> dict[str, int]:
    """What this process has of each kind."""
    children = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
    return {
        "processes": sum(map(len, children)),
        "files": len(os.listdir("/proc/self/fd")),
        "groups": len(groups._made),
    }


def compare(name: str, turns: Mapping[str, Items[Row]]) -> Row:
    assert len({str(one["tokens"]) for some in turns.values() for one in some}) == 1, "ways have drawn other tokens"
    row = make_row(name, {way: [one["seconds"] for one in some] for way, some in turns.items()})
    for other in ("rebuild", "restart"):
        row[f"vs_{other}"] = short(1 - 1 / row["ratios"][other])
    row["parts_s"] = {
        way: {part: short(statistics.median(one["parts"][part] for one in some)) for part in some[0]["parts"]}
        for way, some in turns.items()
    }
    return row | turns["all_to_all"][-1]["facts"]


if __name__ == "__main__":
    harness.run(SwitchBench, measure)
