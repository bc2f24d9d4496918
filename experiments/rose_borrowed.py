"""rose.py's part `borrowed`: a job that borrows serving processes beside its own replicas (ROSE §3.1), where all keep a
pace, and the same simulated. Sequences go to the job's own replicas while these have room."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engines.config import EngineConfig, ModelConfig
from engines.coordination.policies import OnDemand
from engines.fleet.fleet import Fleet
from engines.memory.plan import kv_block_bytes
from engines.parallel.layout import nested_layout
from engines.progress import Bar
from engines.rollout.generation import make_states
from engines.sequence import SamplingParams, SequenceState
from engines.serving.coserve import CoServingLimits
from experiments.comparison.turns import short
from experiments.rose_cells import (
    PROMPT,
    lending_of,
    lengths_of,
    memory_of,
    models_of,
    serving_tokens_of,
)
from experiments.rose_lender import LenderOrders, LendingProcess
from experiments.rose_policies import admission_of, latencies, percentile, slo_of
from experiments.rose_serving import SERVING_SLOTS, SPEC, Lending, Models, Run, digest
from experiments.rose_sim_cases import NEVER_S, spill_over
from research.rose.admission import ServingTimes
from research.simulator.cluster import Cluster, ClusterConfig, OutsideReplica, Overheads
from research.simulator.pace import ProfilePace
from research.simulator.serving import ServingSetup

if TYPE_CHECKING:
    from experiments.rose import RoseConfig

_FIRST_S = 0.5
_LONGEST = 1600
"""A longer response on a borrowed replica, which is slow, would decide alone how long the rollout takes."""


@dataclass(frozen=True, kw_only=True)
class _Slos:
    ttft_s: float
    tpot_s: float
    margin: float = 0.0
    """See `ServingTimes.margin`."""


@dataclass(frozen=True, kw_only=True)
class _Outcome:
    """Of one rollout. Times are in seconds."""

    ends: list[float]
    """Of the sequences."""
    ttft: list[float]
    gaps: list[list[float]]
    lent_s: list[float]
    num_lent_tokens: int


def measure_borrowed(config: RoseConfig, folders: Items[Path]) -> tuple[dict[str, Any], bool]:
    """Returns what is reported, and whether all tokens are equal."""
    config = replace(config, scale=config.borrowed_scale)
    states = _states(config, ModelConfig.from_pretrained(folders[1]).vocab_size)
    with Bar(total=2, desc="borrowed", unit="rollout") as bar:
        alone, tokens, runs = _paced(config, folders, states, None)
        bar.update()
        steps = sum(run.num_steps for run in runs)
        gap_s = sum(run.busy_s - run.paced_s for run in runs) / steps
        margin = max(0.0, max(run.busy_s / run.paced_s for run in runs) - 1)
        ttft_s, tpot_s = slo_of([alone])
        slos = _Slos(ttft_s=ttft_s, tpot_s=tpot_s, margin=margin)
        lent, others, beside = _paced(config, folders, states, slos)
        bar.update()
    found: dict[str, Any] = {"ttft_slo_ms": short(1e3 * ttft_s), "tpot_slo_ms": short(1e3 * tpot_s)}
    found["gap_ms"], found["late_share"] = short(1e3 * gap_s), short(max(run.num_late / run.num_steps for run in runs))
    simulated = {
        name: _simulated(config, folders, states, some, gap_s) for name, some in (("alone", None), ("dual", slos))
    }
    found["paced"] = {name: _row(one, slos) for name, one in (("alone", alone), ("dual", lent))}
    found["sim"] = {name: _row(one, slos) for name, one in simulated.items()}
    for tier in ("paced", "sim"):
        rows = found[tier]
        rows["speedup"] = {name: short(rows["alone"][name] / rows["dual"][name]) for name in ("rollout_s", "most_s")}
    found["sim_over_paced"] = {
        name: {key: short(row[key] / paced) for key in _COMPARED if (paced := found["paced"][name][key])}
        for name, row in found["sim"].items()
        if name != "speedup"
    }
    served = all(
        one == other
        for before, after in zip(runs, beside, strict=True)
        for one, other in zip(before.served, after.served, strict=False)
    )
    return found, served and tokens == others


_COMPARED = ("rollout_s", "most_s", "ttft_p99", "tpot_p99", "ttft_mean", "tpot_mean", "lent_s_mean")


def _row(outcome: _Outcome, slos: _Slos) -> dict[str, Any]:
    return {
        "rollout_s": short(max(outcome.ends)),
        "most_s": short(percentile(outcome.ends, 0.9)),
        **latencies([outcome], slos.ttft_s, slos.tpot_s),
        "lent_s": [short(one) for one in outcome.lent_s],
        "lent_s_mean": short(sum(outcome.lent_s) / len(outcome.lent_s)),
        "num_lent_tokens": outcome.num_lent_tokens,
    }


def _states(config: RoseConfig, vocab_size: int) -> list[SequenceState]:
    rng, lengths = random.Random(config.seed), lengths_of(config, _LONGEST)
    num_tokens = max(1, PROMPT // config.shorten)
    prompts = [[rng.randrange(2, vocab_size) for _ in range(num_tokens)] for _ in range(config.sequences)]
    params = [SamplingParams(max_tokens=lengths.at(rng.gauss(0, 1)), ignore_eos=True) for _ in prompts]
    return make_states(prompts, params, range(len(prompts)), run_seed=config.seed, policy_step=0)


def _engine(models: Models) -> dict[str, Any]:
    """Options of the rollout's engines."""
    slots, chunk = models.rollout_seqs, models.rollout_tokens
    return {"max_num_seqs": slots, "max_num_batched_tokens": chunk + slots, "prefill_chunk_size": chunk}


def _block_bytes(folder: Path) -> int:
    return kv_block_bytes(ModelConfig.from_pretrained(folder), EngineConfig(dtype="float64"), 1)


def _schedule(config: RoseConfig) -> OnDemand:
    return OnDemand(partial(spill_over, config.own))


def _lending(config: RoseConfig, slos: _Slos | None) -> Lending:
    """Without SLOs for a process that is not borrowed."""
    slos = slos or _Slos(ttft_s=1.0, tpot_s=1.0)
    times = ServingTimes.of(_pace(config), SPEC, chunk_tokens=serving_tokens_of(config), max_num_seqs=SERVING_SLOTS)
    times = replace(times, margin=slos.margin)
    admission = admission_of("dual", times, slos.ttft_s, slos.tpot_s, 1e-3 * config.guard_ms * config.scale)
    return lending_of(config, admission, memory_of(config))


def _pace(config: RoseConfig) -> ProfilePace:
    return ProfilePace.of(config.profile, scale=config.scale, token_scale=config.shorten)


# -- paced


def _paced(
    config: RoseConfig, folders: Items[Path], states: Items[SequenceState], slos: _Slos | None
) -> tuple[_Outcome, dict[Any, str], list[Run]]:
    """Returns also a digest of the tokens of each sequence, and what each serving process did."""
    models = models_of(config, folders, _pace(config))
    with _lenders(config, models, slos) as lenders, _fleet(config, models) as fleet:
        addresses = [one.address() for one in lenders]
        for address in addresses if slos is not None else ():
            fleet.borrow(address)
        fleet.wait_for_replicas(config.own + (config.lenders if slos is not None else 0))
        start = time.monotonic() + _FIRST_S
        for one in lenders:
            one.begin(start)
        time.sleep(max(0.0, start - time.monotonic()))
        ends: list[float] = []
        finished = fleet.roll_out(
            [SequenceState.from_bytes(state.to_bytes()) for state in states],
            on_finished=lambda _: ends.append(time.monotonic() - start),
        )
        for one in lenders:
            one.end()
        runs = [one.result() for one in lenders]
    outcome = _Outcome(
        ends=ends,
        ttft=[one for run in runs for one in run.ttft],
        gaps=[one for run in runs for one in run.gaps],
        lent_s=[run.lent.seconds for run in runs],
        num_lent_tokens=sum(run.lent.num_tokens for run in runs),
    )
    return outcome, {one.state.sequence_id: digest(one.completion.token_ids) for one in finished}, runs


@contextmanager
def _lenders(config: RoseConfig, models: Models, slos: _Slos | None) -> Iterator[list[LendingProcess]]:
    with ExitStack() as undo:
        made = []
        for number in range(config.lenders):
            orders = LenderOrders(
                models=models,
                lending=partial(_lending, config, slos),
                arrivals=config.arrivals_of_lender(number),
                seed=number,
            )
            made.append(LendingProcess(orders, f"serving process {number}"))
            undo.callback(made[-1].close)
        yield made


@contextmanager
def _fleet(config: RoseConfig, models: Models) -> Iterator[Fleet]:
    fleet = Fleet(
        models.rollout,
        num_replicas=config.own,
        schedule_policy=_schedule(config),
        pace=models.pace,
        dtype=models.dtype,
        kv_cache_bytes=models.num_pages * _block_bytes(models.rollout),
        max_model_len=models.max_model_len,
        **_engine(models),
    )
    try:
        yield fleet
    finally:
        fleet.close()


# -- simulated


def _simulated(
    config: RoseConfig, folders: Items[Path], states: Items[SequenceState], slos: _Slos | None, gap_s: float
) -> _Outcome:
    pace = _pace(config)
    models = models_of(config, folders, pace)
    engine = EngineConfig(**_engine(models))
    served, rolled = map(_block_bytes, folders)
    page_bytes, lending = max(served, rolled), _lending(config, slos)
    outside = [
        OutsideReplica(
            join_s=NEVER_S if slos is None else 0.0,
            serving=ServingSetup(
                arrivals=config.arrivals_of_lender(number),
                pace=pace,
                engine=EngineConfig(max_num_seqs=SERVING_SLOTS, max_num_batched_tokens=models.serving_tokens),
                rollout_engine=engine,
                num_pages=models.num_pages,
                serving_blocks=page_bytes // served,
                rollout_blocks=page_bytes // rolled,
                admission=lambda: _lending(config, slos).admission,
                memory=lambda: memory_of(config),
                lease_s=models.lease_s,
                limits=CoServingLimits(stall_s=lending.stall_s),
            ),
        )
        for number in range(config.lenders)
    ]
    cluster = Cluster(
        ClusterConfig(
            layout=nested_layout(range(config.own), 1),
            engine=engine,
            pace=pace,
            num_kv_tokens={1: models.num_pages * engine.block_size},
            max_model_len=models.max_model_len,
            outside=tuple(outside),
            pool_tokens=0,
            records_steps=False,
            overheads=Overheads(gap_s=gap_s),
        ),
        schedule_policy=_schedule(config),
        lengths={state.sequence_id: state.params.max_tokens or 0 for state in states},
    )
    done = cluster.roll_out([SequenceState.from_bytes(state.to_bytes()) for state in states])
    requests = [one for each in done.served for one in each.requests]
    return _Outcome(
        ends=[*done.finish_times.values()],
        ttft=[one.ttft_s for one in requests],
        gaps=[one.gaps_s for one in requests],
        lent_s=[one.lent.seconds for one in done.served],
        num_lent_tokens=sum(one.lent.num_tokens for one in done.served),
    )
