"""Measures what PAT's decisions rest on (§4.2): seconds of decode steps, prefills and switches, by TP size."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import tyro

import engines
from engines.config import EngineConfig, ModelConfig, Transport, longest_sequence
from engines.constraints import Count, Counts, WholeNumber, check_fields
from engines.coordination.policies import OnDemand
from engines.coordination.views import LayoutChange, LayoutView
from engines.parallel.layout import Layout, nested_layout
from engines.parallel.sharding import is_shardable
from engines.progress import Bar
from engines.sequence import SamplingParams, Work
from experiments import launch
from experiments.bench.blank_kv import submit_decodes
from experiments.bench.models import random_sequence
from experiments.comparison.machine import machine
from experiments.comparison.results import check_figure, check_folders
from experiments.comparison.turns import short
from experiments.engine_options import MIB, EngineOptions
from research.pat.deployment import Deployment
from research.pat.predictor import Point, StepPredictor
from research.pat.profile import BATCHES, CONTEXTS, REACH, Profile, Subject, SwitchTime
from research.pat.redistribute import redistribute
from research.workloads.shapes import SHAPES

if TYPE_CHECKING:
    from engines.parallel.collectives import Communicator

WARM_UP = 2
PREFILL_BATCHES = (1, 4)
NO_MATTER = ("rope", "max_position_embeddings", "eos_token_ids", "rms_norm_eps")
"""Fields of a model on which the time of a step does not depend."""


@dataclass(frozen=True, kw_only=True)
class PatProfileConfig:
    """Measure what PAT's decisions rest on, and write it to a file."""

    model: str
    """A Hugging Face folder, or a name in research/workloads/shapes.py, which gets random weights."""
    output: Path
    """The profile to write: one for a model, a device and a transport."""
    ranks: Count = 1
    """Processes; under torchrun, its number of processes applies instead."""
    transport: Transport = "auto"
    """How ranks exchange tensors on a CPU."""
    batches: Counts = BATCHES
    """Sequences of a replica, below --max-num-seqs, which is added."""
    contexts: Counts = CONTEXTS
    """Tokens of each sequence, as far as the KV cache allows; the longest that fit are added."""
    steps: Count = 5
    """Timed steps of a point in a turn (PAT: 60)."""
    turns: Count = 3
    """Times that each point is measured."""
    prefill_tokens: WholeNumber = 2048
    """Most tokens of a timed prefill; 0: none are timed."""
    switch_tokens: WholeNumber = 2048
    """Most context tokens during a timed switch; 0: none are timed."""
    figure: Path | None = None
    """Also draw the times of steps (Fig. 6), and, with --check, tokens per second while sequences end (Fig. 14)."""
    check: bool = False
    """Compare the predictor with points that are not in the profile, and with batches that drain. Needs two turns."""
    engine: Annotated[EngineOptions, tyro.conf.arg(name="")] = field(
        default_factory=lambda: EngineOptions(kv_cache_bytes=256 * MIB)
    )

    def __post_init__(self) -> None:
        check_fields(self, "")
        if self.model not in SHAPES and not Path(self.model).is_dir():
            raise ValueError(f"model={self.model!r}: give a Hugging Face folder, or one of {', '.join(SHAPES)}")
        check_folders(self)
        check_figure(self.figure)
        if self.engine.drafter != "none":
            raise ValueError(f"drafter={self.engine.drafter!r}: the profile has no times of drafts; give 'none'")
        if self.check and self.turns < 2:
            raise ValueError(f"turns={self.turns}: --check compares turns; give 2 or more")


def nested_layouts(num_ranks: int, model: ModelConfig | None = None) -> list[Layout]:
    """Returns the nested layout of each TP size that divides the ranks, and into which the model can be cut."""
    layouts = [nested_layout(range(num_ranks), size) for size in range(1, num_ranks + 1) if num_ranks % size == 0]
    return [one for one in layouts if model is None or is_shardable(model, one.replicas[0].tp_size)]


def transport_of(groups: engines.GroupCache | None) -> str:
    """Returns how all ranks together exchange tensors."""
    return groups.get(tuple(range(groups.world.size))).name if groups is not None else "single"


def _subject_of(model: ModelConfig, dtype: str, num_ranks: int, transport: str) -> Subject:
    """Returns what a profile that is made or used here is of."""
    where = machine()
    return {
        **{f"model.{name}": value for name, value in asdict(model).items() if name not in NO_MATTER},
        "dtype": dtype,
        "device": where["cpu"] if where["device"] == "cpu" else where["device"],
        "transport": transport,
        "num_ranks": num_ranks,
        "num_threads": where["threads"],
    }


def deployment_with(
    profile: Profile, model: ModelConfig, engine: EngineConfig, num_ranks: int, transport: str
) -> Deployment:
    """Returns the profile's times for a run. Raises ValueError if it is of another deployment."""
    from engines.replica.engine import kv_capacity

    sizes = [layout.replicas[0].tp_size for layout in nested_layouts(num_ranks, model)]
    return profile.deployment(
        _subject_of(model, engine.dtype, num_ranks, transport),
        num_kv_tokens={size: kv_capacity(model, engine, size) for size in sizes},
        max_num_seqs=engine.max_num_seqs,
        max_model_len=longest_sequence(engine, model),
    )


def measure(config: PatProfileConfig, folder: str, groups: engines.GroupCache | None) -> Profile:
    import torch

    from engines.parallel.collectives import SingleRank

    world: Communicator = groups.world if groups is not None else SingleRank()
    model = ModelConfig.from_pretrained(folder)
    sizes = [layout.replicas[0].tp_size for layout in nested_layouts(world.size, model)]
    options = asdict(config.engine)
    decodes, prefills, switches, checks = [], [], [], []
    with Bar(desc="profile", total=len(sizes) * config.turns, unit="turn", disable=world.rank > 0) as bar:
        for size in sizes:
            llm = engines.LLM(folder, world=groups, tensor_parallel_size=size, **options)
            launch.tell_engine(llm)
            timed = _time_passes(config, Passes(llm, world, config.steps), bar)
            llm.close()
            points = _medians(timed["decodes"])
            decodes += [(size, *point) for point in points]
            prefills += [(size, *point) for point in _medians(timed["prefills"])]
            predictor = StepPredictor(points)
            checks += [
                {"tp_size": size, "what": what, **_errors(predictor, timed[what])}
                for what in ("held out", "draining")
                if config.check
            ]
        if groups is not None and len(sizes) > 1 and config.switch_tokens:
            fastest = {size: min(row[-1] for row in decodes if row[0] == size) for size in sizes}
            switches = _time_switches(config, folder, groups, sizes, fastest)
    return Profile(
        format=1,
        subject=_subject_of(model, config.engine.dtype, world.size, transport_of(groups)),
        torch=str(torch.__version__),
        decodes=tuple(decodes),
        prefills=tuple(prefills),
        switches=tuple(switches),
        checks=tuple(checks),
    )


# -- passes


class Passes:
    """Times passes of this rank's replica, while the other replicas do the same."""

    def __init__(self, llm: engines.LLM, world: Communicator, num_steps: int) -> None:
        from engines.replica.engine import kv_capacity

        self._llm, self._world, self._num_steps = llm, world, num_steps
        self._uids = itertools.count()
        self.num_kv_tokens = kv_capacity(llm.model_config, llm.config, llm.layout.replicas[0].tp_size)

    def longest(self, batch: int) -> int:
        """Returns the tokens of the longest contexts with which a batch fits and can decode."""
        block_size = self._llm.config.block_size
        fitting = self.num_kv_tokens // block_size // batch * block_size
        return min(self._llm.max_model_len, fitting) - WARM_UP - self._num_steps - 1

    def grid(self, batches: Iterable[int], contexts: Iterable[int]) -> list[tuple[int, int]]:
        """Returns the batches and contexts that fit, the largest that fit included."""
        slots, points = self._llm.config.max_num_seqs, []
        for batch in sorted({slots, *(one for one in batches if one < slots)}):
            most = self.longest(batch)
            mine = sorted({most, *(one for one in contexts if 1.1 * one < most)})
            points += [(batch, context) for context in mine if len(mine) > 1]
        held, needed = slots * self.longest(slots), min(self.num_kv_tokens, slots * self._llm.max_model_len)
        if held + slots * (WARM_UP + (self._num_steps - 1) // 2) < REACH * needed:
            raise ValueError(
                f"steps={self._num_steps}: contexts grow by a token with each, so that the longest that fit are too "
                f"far below the {needed} tokens that a run may have; give fewer, or a larger --max-model-len"
            )
        if len({batch for batch, _ in points}) < 2:
            raise ValueError(
                f"kv_cache_bytes={self._llm.config.kv_cache_bytes}: fewer than two batch sizes fit with two contexts "
                f"each; raise --kv-cache-mib, or give other --batches and --contexts"
            )
        return points

    def decode(self, batch: int, context: int) -> Point:
        """Returns the batch, its tokens, and the seconds of a step."""
        num_steps = WARM_UP + self._num_steps
        submit_decodes(self._llm, num_sequences=batch, context=context, length=num_steps + 1)
        rows = self._run(num_steps)[WARM_UP:]
        assert {running for running, _, _ in rows} == {batch}
        return self._median(rows)

    def drain(self, batch: int) -> list[Point]:
        """Decodes unequal sequences that end one by one; returns a point for each number of them. Where they would not
        fit, fewer steps pass between two ends, and where not even one would, there are fewer sequences."""
        room = self.longest(batch) + self._num_steps  # for a context and what it generates after the warm-up
        batch = min(batch, room - 2)
        steps = min(self._num_steps, max(1, 3 * room // (4 * batch)))
        num_steps = WARM_UP + batch * steps
        longest = min(1024, room - batch * steps)
        contexts = np.geomspace(2, longest, batch).astype(int).tolist()
        places = random.Random(0).sample(range(1, batch + 1), batch)
        for uid, (context, place) in enumerate(zip(contexts, places, strict=True)):
            length = WARM_UP + place * steps
            submit_decodes(self._llm, num_sequences=1, context=context, length=length, first_uid=uid)
        rows = self._run(num_steps)[WARM_UP:]
        return [self._median([row for row in rows if row[0] == size]) for size in sorted({row[0] for row in rows})]

    def prefill(self, batch: int, context: int) -> Point:
        """Returns the batch, its tokens, and the seconds until each sequence has its first new token."""
        for uid in itertools.islice(self._uids, batch):
            self._llm.replica.submit(Work(state=random_sequence(uid, num_tokens=context, length=1)))
        return self._median([(batch, batch * context, sum(seconds for _, _, seconds in self._run()))])

    def _run(self, most_steps: int = 2**31) -> list[Point]:
        """Steps while there are sequences, but at most so often, and removes those that are left."""
        rows: list[Point] = []
        self._world.barrier()
        while self._llm.replica.has_work and len(rows) < most_steps:
            start = time.perf_counter()
            output = self._llm.replica.step()
            rows.append((output.num_running, output.num_context_tokens, time.perf_counter() - start))
        self._llm.replica.clear()
        return rows

    def _median(self, rows: list[Point]) -> Point:
        """Of one batch size: the median tokens, and the median seconds, of which the ranks take the mean."""
        _, tokens, seconds = (statistics.median(column) for column in zip(*rows, strict=True))
        return rows[0][0], round(tokens), statistics.fmean(launch.gather(self._world, seconds))


def _time_passes(config: PatProfileConfig, passes: Passes, bar: Bar) -> dict[str, list[list[Point]]]:
    """Returns the points of each turn. All kinds take turns, so that a machine that gets slower or faster favours
    none."""
    grid = passes.grid(config.batches, config.contexts)
    batches = sorted({batch for batch, _ in grid})
    most = min(config.prefill_tokens, passes.num_kv_tokens // 2)
    contexts = [one for one in config.contexts if one < passes.longest(1)]
    prompts = [point for point in itertools.product(PREFILL_BATCHES, contexts) if point[0] * point[1] <= most]
    between = [round((a * b) ** 0.5) for a, b in itertools.pairwise(batches) if b > a + 1] or batches
    held_out = [(size, max(2, round(share * passes.longest(size)))) for size in between for share in (0.03, 0.2, 0.6)]
    timed: dict[str, list[list[Point]]] = {"decodes": [], "prefills": [], "held out": [], "draining": []}
    for point in prompts:
        passes.prefill(*point)  # the first pass of a shape may compile kernels
    for _ in range(config.turns):
        timed["decodes"].append([passes.decode(*point) for point in grid])
        timed["prefills"].append([passes.prefill(*point) for point in prompts])
        if config.check:
            timed["held out"].append([passes.decode(*point) for point in held_out])
            timed["draining"].append(passes.drain(min(24, batches[-1])))
        bar.update()
    return timed


def _medians(turns: list[list[Point]]) -> list[Point]:
    return [(*same[0][:2], statistics.median(point[2] for point in same)) for same in zip(*turns, strict=True)]


def _errors(predictor: StepPredictor, turns: list[list[Point]]) -> dict[str, Any]:
    """Mean relative errors of single turns: the predictor's, and one turn taken for the next (A/A); and the points."""
    pairs = [(float(predictor.seconds(batch, tokens)), s) for turn in turns for batch, tokens, s in turn]
    again = [(a[2], b[2]) for one, other in itertools.pairwise(turns) for a, b in zip(one, other, strict=True)]
    error, a_a = (short(statistics.fmean(abs(a / b - 1) for a, b in some)) for some in (pairs, again))
    return {"error": error, "a_a": a_a, "points": _medians(turns)}


# -- switches


class _OneSwitch:
    """A `LayoutPolicy` that regroups to its target once a sequence has ended."""

    target: Layout | None = None

    def decide(self, view: LayoutView) -> LayoutChange | None:
        if self.target is None or not view.num_delivered:
            return None
        target, self.target = self.target, None
        layout = replace(target, epoch=view.layout.epoch + 1)
        return LayoutChange(layout=layout, places=redistribute(view.unfinished.values(), view.layout, layout))


def _time_switches(
    config: PatProfileConfig,
    folder: str,
    groups: engines.GroupCache,
    sizes: list[int],
    fastest_s: dict[int, float],
) -> list[SwitchTime]:
    """Between each two sizes, both ways, with few and with many tokens. Switches that come too late in their rollout
    are left out."""
    policy = _OneSwitch()
    llm = engines.LLM(
        folder,
        world=groups,
        tensor_parallel_size=sizes[0],
        schedule=OnDemand(),
        layout_policy=policy,
        **asdict(config.engine),
    )
    walk = [
        (size, tokens)
        for pair in itertools.combinations(sizes, 2)
        for tokens in (64, max(65, config.switch_tokens))
        for size in (*pair[::-1], *pair[::-1])
    ]
    count = min(2 * groups.world.size, llm.config.max_num_seqs - 1)
    times: list[SwitchTime] = []
    route = Bar([*walk[:2], *config.turns * walk], desc="switches", unit="switch", disable=groups.world.rank > 0)
    for place, (size, most) in enumerate(route):
        before = llm.layout.replicas[0].tp_size
        if size == before:
            continue
        policy.target = nested_layout(range(groups.world.size), size)
        # Tokens of the other sequences: enough for messages to arrive before they end.
        length = 16 + min(llm.max_model_len // 2, round(0.2 / fastest_s[before]))
        context = max(1, min(most // count, llm.max_model_len - length - 1))
        seconds = _time_switch(llm, groups.world, count, context, length)
        if seconds is not None and place > 1:  # the first two warm up
            times.append((before, size, count * context, seconds))
    llm.close()
    return times


def _time_switch(llm: engines.LLM, world: Communicator, count: int, context: int, length: int) -> float | None:
    """Seconds of a switch on the rank that took longest, with its waits for the others; None if there was none."""
    import torch

    vocab_size = llm.model_config.vocab_size
    prompts = launch.on_rank_0(world, lambda: torch.randint(2, vocab_size, (count + 1, context)).tolist())
    # The first sequence ends early, which starts the switch.
    params = [SamplingParams(max_tokens=most, ignore_eos=True) for most in [2] + [length] * count]
    before = llm.layout.epoch
    llm.generate(prompts, params)
    assert llm.rollout is not None
    everyone = launch.gather(world, [one.seconds for one in llm.rollout.switches if one.epoch > before])
    return max((seconds for mine in everyone for seconds in mine), default=None)
