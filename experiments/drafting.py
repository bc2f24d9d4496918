"""What speculative drafting gains, and that it changes no token: a trained model that adds numbers, on this machine.

    python experiments/drafting.py
    python experiments/drafting.py --parts speedup --batches 1 --turns 5

Makes the models if need be. Parts: `equal`, that each drafter draws the same tokens as none, in float64;
`acceptance`, tokens per step by the number of references and paths (Seer, Table 2), replayed on the model's own
groups; `speedup`, of a batch whose groups have generated all other samples before; `rollout`, of whole groups;
`agreement`, how often a small model's guess is drawn, beside the closed form; `server`, what replicas gain from each
other; `drift`, acceptance while the model is trained; `epochs`, what completions of earlier epochs add. Tables
go to stderr, one JSON object to stdout. docs/drafting.md shows and explains a result. Tier: live.
"""

from __future__ import annotations

import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta

import engines
from algos.warmstart_config import ModelSize
from engines.config import DraftNoise, EngineConfig, ModelConfig
from engines.constraints import Count
from engines.models.hugging_face import read_checkpoint
from engines.progress import Bar
from engines.rollout.generation import make_states
from engines.sequence import SamplingParams, SequenceState, Work
from engines.speculation.choose import choose_drafter
from engines.speculation.drafter import Ask, News
from engines.speculation.marginal_gain import MarginalGain
from engines.speculation.policy import AdaptedDrafter
from engines.speculation.suffix_tree import SpeculationArgs
from experiments import draft_drift, draft_epochs, draft_sharing, launch
from experiments.comparison.results import ResultOptions, report
from experiments.comparison.turns import Row, in_columns, interleave, make_row, short, table
from experiments.trained import dtype, encode, make_model, prompts, trained
from research.seer.acceptance import acceptance_length
from research.seer.thresholds import Thresholds

Part = Literal["equal", "acceptance", "speedup", "rollout", "agreement", "server", "drift", "epochs"]
PARTS: tuple[Part, ...] = ("equal", "acceptance", "speedup", "rollout", "agreement")
DRAFT_MODELS: tuple[ModelSize, ...] = ("draft-2l", "draft-1l")
NOISES: tuple[DraftNoise, ...] = ("target", "own")
REFERENCES, PATHS, PATH_TOKENS = (0, 1, 5, 15), (1, 2, 4), 8
GROUP = 16
_MAX_LEN = 512
Tokens = list[list[list[int]]]
"""Those that each sample of each prompt has generated."""


@dataclass(frozen=True, kw_only=True)
class DraftingConfig(ResultOptions):
    """Measure drafting on the additions that the embedded model has learnt."""

    models: Path = Path("runs/models")
    """Folder of the models: tiny, and the same function at several times the cost. What is missing is made."""
    parts: Annotated[tuple[Part, ...], Meta(min_length=1, description="one or more parts")] | None = None
    """What to measure; by default equal, acceptance, speedup, rollout and agreement, with `--full` all."""
    groups: Count = 20
    """Prompts of the acceptance part, with 16 samples each, and of the agreement part, with 4."""
    server_groups: Count = 12
    """Prompts of the server part, with 16 samples each."""
    drift_steps: Annotated[int, Meta(ge=2, description="an integer of at least 2")] = 20
    """Training steps of the drift part."""
    temperatures: tuple[float, ...] = (1.0, 0.6)
    """Sampling temperatures of the acceptance part."""
    batches: Annotated[tuple[Count, ...], Meta(min_length=1, description="one or more batch sizes")] = (1, 8, 64)
    """Batch sizes of the speedup part."""
    widen: Annotated[int, Meta(ge=2)] = 16
    """Width of the speedup part's model, in multiples of tiny's."""
    rollout_widen: Annotated[int, Meta(ge=2)] = 8
    """Width of the rollout part's model."""
    rollout_sizes: Annotated[tuple[Count, ...], Meta(min_length=1, description="one or more sizes")] = (4, 16, 128)
    """Sequences at a time in the rollout part."""
    turns: Count = 3
    """Interleaved measurements of each variant; medians are reported."""
    full: bool = False
    """Measure each drafter at every batch, and rollouts also with drafts of a sequence's own tokens; without `--parts`,
    all parts."""
    seed: int = 0
    """Seed of the sampling noise."""
    figure: Path | None = None
    """Draw acceptance and speed-up to this file."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for temperature in self.temperatures:
            SamplingParams(temperature=temperature)  # raises ValueError


def main() -> dict[str, Any] | None:
    config = launch.options(DraftingConfig)
    if config.parts == ("server",):
        launch.start_under_torchrun(draft_sharing.NUM_REPLICAS)
    launch.share_cores()
    measures: dict[Part, Callable[[DraftingConfig], dict[str, Any]]] = {
        "equal": tokens_equal,
        "acceptance": acceptance,
        "speedup": speedup,
        "rollout": rollout_speedup,
        "agreement": agreement,
        "server": server,
        "drift": drift,
        "epochs": lambda config: draft_epochs.measure(make_model(config.models), config.turns),
    }
    start = time.monotonic()
    parts: dict[str, Any] = {}
    for part in config.parts or (measures if config.full else PARTS):
        parts |= measures[part](config)
    if launch.rank() > 0:
        return None
    if config.figure is not None and "acceptance_length" in parts:
        from experiments.figures import draw_drafting

        draw_drafting(config.figure, parts["acceptance_length"], parts.get("speedup", {}), "live")
    measured = {"tier": "live", "seconds": round(time.monotonic() - start, 1), **parts}
    result = report("drafting", config, measured, hidden=["models"])
    if idle := [variant for variant, count in parts.get("drafted", {}).items() if not count]:
        print(json.dumps(result), flush=True)
        raise ValueError(f"parts: equal has drafted nothing with {idle}, which shows nothing; give more --groups")
    return result


def generate(llm: engines.LLM, texts: list[str], params: SamplingParams) -> Tokens:
    outputs = llm.generate(texts, params, prompt_uids=range(len(texts)))
    return [[one.token_ids for one in output.outputs] for output in outputs]


# -- the same tokens


def tokens_equal(config: DraftingConfig) -> dict[str, Any]:
    """Every drafter against none, in float64, at temperature 1 and greedily, with room for all and with too little.

    `drafted` says how many guesses were tried: where none was, equal tokens show nothing.
    """
    folder, texts = make_model(config.models), prompts(min(8, config.groups))
    draft_model = trained(config.models, "draft-2l")
    drafters: dict[str, dict[str, Any]] = {"ngram": {"drafter": "ngram"}}
    for drafter, paths in itertools.product(("suffix", "grouped_suffix"), PATHS):
        several = f", {paths} paths" if paths > 1 else ""
        drafters[drafter + several] = {"drafter": drafter, "draft_paths": paths}
    for noise in NOISES:
        drafters[f"draft-2l, {noise} noise"] = {"drafter": "model", "draft_model": draft_model, "draft_noise": noise}
    drafters = {"none": {}} | {name: {"draft_lengths": "fixed", **chosen} for name, chosen in drafters.items()}
    found: dict[str, bool] = {}
    drafted: dict[str, int] = {}
    for temperature in (1.0, 0.0):
        params = SamplingParams(max_tokens=200, n=4, temperature=temperature)
        plain: Tokens | None = None
        for drafter, chosen in drafters.items():
            for name, num_bytes in (("", 64 * 2**20), (", preempted", 4 * 2**20)):
                options = {"kv_cache_bytes": num_bytes, "preemption": "recompute", "seed": config.seed, **chosen}
                llm = engines.LLM(folder, dtype="float64", max_num_seqs=16, max_model_len=320, **options)
                tokens = generate(llm, texts, params)
                llm.close()
                plain = plain or tokens
                variant = f"{drafter}{name}, T={temperature:g}"
                found[variant] = tokens == plain
                if chosen:
                    drafted[variant] = sum(one.num_drafted for one in llm.step_records)
    return {"tokens_equal": all(found.values()), "equal": found, "drafted": drafted}


# -- acceptance


def acceptance(config: DraftingConfig) -> dict[str, Any]:
    """Table 2 of Seer: {temperature: {references: {paths: tokens per step}}}."""
    texts = prompts(config.groups)
    found: dict[str, Any] = {}
    for temperature in config.temperatures:
        llm = engines.LLM(make_model(config.models), max_num_seqs=64, seed=config.seed)
        groups = generate(llm, texts, SamplingParams(max_tokens=320, n=GROUP, temperature=temperature))
        ids = llm.encode(texts)
        llm.close()
        table: dict[int, dict[int, float]] = {}
        for count in Bar(REFERENCES, desc=f"acceptance, T={temperature:g}", unit="row"):
            table[count] = {}
            for paths in PATHS:
                args = SpeculationArgs(max_spec_tokens=PATH_TOKENS, top_k=paths)
                length = acceptance_length(ids, groups, num_references=count, args=args)
                table[count][paths] = short(length)
        found[f"{temperature:g}"] = table
        rows = [["references", *(f"{paths} paths" for paths in PATHS)]]
        rows += [[str(count), *(f"{one:.2f}" for one in row.values())] for count, row in table.items()]
        print(f"tokens per step, T={temperature:g}", in_columns(rows), sep="\n", file=sys.stderr)
    return {"acceptance_length": found}


# -- speedup of a batch with references


Variant = dict[str, Any]
"""A drafter: options of the engine, and `draft_policy`."""
PLAIN = "none"
AT_ALL_BATCHES = (PLAIN, "grouped", "grouped, always 8", "grouped, never")
FEWEST = 3
"""Sequences that a turn of the speedup part generates at least."""
GROUPED: Variant = {"drafter": "grouped_suffix"}
VARIANTS: dict[str, Variant] = {
    PLAIN: {},
    "grouped": GROUPED,
    "grouped, 4 paths": GROUPED | {"draft_paths": 4},
    "grouped, thresholds": GROUPED | {"draft_policy": Thresholds},
    "grouped, always 8": GROUPED | {"draft_lengths": "fixed"},
    "grouped, never": GROUPED | {"draft_policy": partial(MarginalGain, margin=1e9)},
    "suffix": {"drafter": "suffix"},
    "ngram": {"drafter": "ngram"},
    "draft-2l": {"drafter": "model", "draft_model": "draft-2l"},
    "draft-1l": {"drafter": "model", "draft_model": "draft-1l"},
}


@dataclass(frozen=True)
class Timed:
    seconds: float
    tokens_per_step: float
    """Of a sequence."""


class Bench:
    """One engine for all variants, so that all compute with the same memory: only the drafter is exchanged."""

    def __init__(self, folder: Path, *, max_num_seqs: int) -> None:
        """Plans for the largest drafts of the variants."""
        self._models, self._model, self._max_num_seqs = folder.parent, ModelConfig.from_pretrained(folder), max_num_seqs
        largest = self._config(GROUPED | {"draft_paths": max(PATHS)})
        self._llm = engines.LLM(folder, **asdict(largest))
        self._engine = self._llm._engine
        self.replica = self._engine.replica

    def _config(self, options: Variant) -> EngineConfig:
        if size := options.get("draft_model"):
            options = {**options, "draft_model": str(trained(self._models, size))}
        return EngineConfig(
            dtype=dtype(),
            kv_cache_bytes=(self._max_num_seqs + 1) * _MAX_LEN * self._model.kv_bytes_per_token(4),
            max_num_seqs=self._max_num_seqs,
            max_model_len=_MAX_LEN,
            **options,
        )

    def use(self, variant: Variant, siblings: Sequence[SequenceState] = ()) -> None:
        """Gives the replica a new drafter; one that drafts from groups has seen these sequences, which have ended."""
        if not variant:
            self.replica.drafter = None
            return
        options = {"draft_policy": MarginalGain, "draft_lengths": "adaptive", **variant}
        policy, adapts = options.pop("draft_policy"), options.pop("draft_lengths") == "adaptive"
        config = self._config(options | {"draft_lengths": "fixed"})
        model = self._engine.make_model_drafter(config, self._model, _MAX_LEN)
        if model is not None:
            model.load()
        prices = self._engine.prices(config, model)
        from engines.parallel.collectives import SingleRank

        drafter = choose_drafter(config, policy, prices, SingleRank(), model=model)
        assert drafter is not None
        if config.drafter == "grouped_suffix":
            drafter.propose([Ask(state, 1) for state in siblings], len(siblings), len(siblings))
            drafter.follow(News(ended=siblings))
        self.replica.drafter = AdaptedDrafter(drafter, policy(prices)) if adapts else drafter

    def roll_out(self, states: Iterable[SequenceState]) -> Timed:
        """Generates all sequences, as many at a time as there is room for."""
        num_tokens = num_rows = 0
        start = time.perf_counter()
        for state in states:
            self.replica.submit(Work(state=state))
        while self.replica.has_work:
            output = self.replica.step()
            num_rows += output.num_running
            num_tokens += sum(len(one.completion.token_ids) for one in output.finished)
        return Timed(time.perf_counter() - start, num_tokens / num_rows)


def speedup(config: DraftingConfig) -> dict[str, Any]:
    """{drafter: {batch: ratio to plain}}: the last sample of each prompt, when its 15 siblings have ended.

    Small batches run one after the other, until some sequences have ended.
    """
    texts = prompts(max(*config.batches, FEWEST))
    llm = engines.LLM(make_model(config.models), dtype=dtype(), max_num_seqs=64, seed=config.seed)
    tokens = generate(llm, texts, SamplingParams(max_tokens=320, n=GROUP))
    ids = llm.encode(texts)
    llm.close()
    rows: list[Row] = []
    found: dict[str, dict[int, float]] = {}
    for batch in config.batches:
        bench = Bench(make_model(config.models, config.widen), max_num_seqs=batch)
        used = ids[: max(batch, FEWEST)]
        names = VARIANTS if config.full or batch == 1 else AT_ALL_BATCHES
        timed = {name: partial(time_last_samples, bench, VARIANTS[name], used, tokens) for name in names}
        turns = interleave(timed, config.turns, name=f"batch {batch}")
        seconds = {name: [one.seconds for one in some] for name, some in turns.items()}
        per_step = {name: statistics.fmean(one.tokens_per_step for one in turns[name]) for name in timed}
        row = make_row(f"batch {batch}", seconds)
        rows.append(row | {f"tokens a step, {name}": short(one) for name, one in per_step.items()})
        for name, ratio in row["ratios"].items():
            found.setdefault(name, {})[batch] = short(1 / ratio)
    print(table(rows), file=sys.stderr)
    return {"speedup": found, "speedup_rows": rows}


def time_last_samples(bench: Bench, variant: Variant, ids: list[list[int]], tokens: Tokens) -> Timed:
    """Times the last sample of each prompt; a drafter knows the other samples of its group."""
    states = samples(ids, GROUP)
    siblings = [state for state in states if state.key.sample_index < GROUP - 1]
    for state in siblings:
        state.tokens += tokens[state.key.prompt_uid][state.key.sample_index]
    bench.use(variant, siblings)
    return bench.roll_out(state for state in states if state.key.sample_index == GROUP - 1)


def samples(ids: list[list[int]], count: int, *, seed: int = 0) -> list[SequenceState]:
    """`count` of each prompt."""
    params = [SamplingParams(max_tokens=320, n=count)] * len(ids)
    return make_states(ids, params, range(len(ids)), run_seed=seed, policy_step=0)


# -- speedup of a rollout


def rollout_speedup(config: DraftingConfig) -> dict[str, Any]:
    """Whole groups, some sequences at a time, against plain decoding in its best order."""
    folder = make_model(config.models, config.rollout_widen)
    ids = encode(folder, prompts(16))
    names = (PLAIN, "grouped", "suffix") if config.full else (PLAIN, "grouped")
    rows: list[Row] = []
    found: dict[int, dict[str, float]] = {}
    for size in config.rollout_sizes:
        bench = Bench(folder, max_num_seqs=size)
        timed = {name: partial(time_rollout, bench, VARIANTS[name], ids) for name in names}
        turns = interleave(timed, config.turns, name=f"{size} at a time", warm_up=False)
        row = make_row(f"{size} at a time", turns)
        rows.append(row)
        found[size] = {name: short(1 / ratio) for name, ratio in row["ratios"].items()}
    print(table(rows), file=sys.stderr)
    return {"rollout_speedup": found[config.rollout_sizes[0]]["grouped"], "rollouts": found, "rollout_rows": rows}


def time_rollout(bench: Bench, variant: Variant, ids: list[list[int]]) -> float:
    """Seconds of 8 samples of each prompt. Group drafts take sample 0 of all prompts first, as `LLM.generate` does."""
    bench.use(variant)
    states = samples(ids, 8)
    if variant == GROUPED:
        states.sort(key=lambda state: state.key.sample_index)
    return bench.roll_out(states).seconds


# -- how often a small model's guess is drawn


def agreement(config: DraftingConfig) -> dict[str, Any]:
    """{draft model: {noise: the share of single guesses that were drawn at temperature 1, and what it should be}}.

    The closed form is computed by transformers from both models' logits at the positions of the guesses. The standard
    error is that of the measured share, if the closed form holds.
    """
    found: dict[str, Any] = {}
    rows = [["draft model", "noise", "guesses", "drawn", "closed form", "standard error"]]
    for size, noise in itertools.product(DRAFT_MODELS, NOISES):
        folder, draft_model = make_model(config.models), trained(config.models, size)
        options: dict[str, Any] = {"draft_noise": noise, "max_draft_tokens": 1, "draft_lengths": "fixed"}
        llm = engines.LLM(
            folder, drafter="model", draft_model=draft_model, kv_cache_bytes=2**24, max_num_seqs=1, **options
        )
        places, num_drawn = guess_singly(llm, prompts(config.groups), seed=config.seed)
        llm.close()
        shares = expected_agreement(folder, draft_model, noise, places)
        error = math.sqrt(sum(share * (1 - share) for share in shares)) / len(shares)
        one = {"guesses": len(shares), "drawn": num_drawn / len(shares), "expected": statistics.fmean(shares)}
        one |= {"standard_error": error}
        found.setdefault(size, {})[noise] = one
        rows.append(
            [size, noise, *(f"{value:.4f}" if isinstance(value, float) else str(value) for value in one.values())]
        )
    print(in_columns(rows), file=sys.stderr)
    return {"agreement": found}


def guess_singly(llm: engines.LLM, texts: list[str], *, seed: int) -> tuple[list[tuple[list[int], list[int]]], int]:
    """Runs four samples of each prompt one after the other. Returns each one's tokens with the positions of its
    guesses, and the number of guesses that were drawn."""
    places, num_drawn = [], 0
    for state in Bar(samples(llm.encode(texts), 4, seed=seed), desc="agreement", unit="sample"):
        llm.replica.submit(Work(state=state))
        positions: list[int] = []
        while llm.replica.has_work:
            length = len(state.tokens)
            output = llm.replica.step()
            positions += [length] * output.num_drafted
            num_drawn += output.num_accepted
        places.append((state.tokens, positions))
    return places, num_drawn


def expected_agreement(
    target: Path, draft_model: Path, noise: DraftNoise, places: list[tuple[list[int], list[int]]]
) -> list[float]:
    """Returns for each guess the probability that draws of both models at its position are the same token i.

    It is the sum over i of p_i q_i for independent noise; if both are the argmax of log-probability plus the same
    Gumbel noise, of 1 / sum_j max(p_j / p_i, q_j / q_i).
    """
    import torch
    from transformers import AutoModelForCausalLM

    models = [read_checkpoint(AutoModelForCausalLM, folder, dtype=torch.float64) for folder in (target, draft_model)]
    shares: list[float] = []
    with torch.inference_mode():
        for tokens, positions in places:
            if not positions:
                continue
            rows = torch.tensor(positions) - 1
            p, q = (one(torch.tensor([tokens])).logits[0, rows].log_softmax(-1) for one in models)
            if noise == "own":
                shares += (p + q).exp().sum(-1).tolist()
                continue
            for p_V, q_V in zip(p, q, strict=True):
                larger_VV = torch.maximum(p_V - p_V[:, None], q_V - q_V[:, None])  # [i, j]
                shares.append((-larger_VV.logsumexp(-1)).exp().sum().item())
    return shares


# -- what replicas gain from each other


def server(config: DraftingConfig) -> dict[str, Any]:
    """See `draft_sharing.measure`. Only this part has ranks: beside others it is a run of its own."""
    if launch.num_ranks() < draft_sharing.NUM_REPLICAS:
        return {"server": launch.start_anew("--parts", "server")["server"]}
    world = launch.join_world(draft_sharing.NUM_REPLICAS)
    model = launch.on_rank_0(world, lambda: str(make_model(config.models)))
    return {"server": draft_sharing.measure(model, prompts(config.server_groups), config.seed, world)}


# -- acceptance while the model is trained


def drift(config: DraftingConfig) -> dict[str, Any]:
    """See `draft_drift.measure`."""
    drafters = {name: ["--rollout.drafter", name] for name in ("ngram", "suffix", "grouped_suffix")}
    for size in DRAFT_MODELS:
        folder = str(trained(config.models, size).resolve())
        drafters[size] = ["--rollout.drafter", "model", "--rollout.draft-model", folder]
    return draft_drift.measure(make_model(config.models), config.drift_steps, drafters)


if __name__ == "__main__":
    launch.run(main)
