"""What a deployment takes, sampled at PAT's points (§4.2): measured and kept in a file, or from a pace. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from engines.constraints import Count, NonNegative, Positive
from engines.json_files import read_json
from engines.parallel.layout import nested_layout
from engines.replica.replica import StepOutput
from engines.rollout.pace import Pace, decode_seconds
from research.pat.deployment import Deployment
from research.pat.predictor import Point, StepPredictor
from research.pat.switch_cost import fit_prefills

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256)
"""Ten sizes from 1 to 256, as PAT profiles; it does not list them."""
CONTEXTS = (8, 64, 128, 256, 384, 512, 2048, 8192, 32768, 131072)
"""Tokens of each sequence: denser below 512."""
REACH = 0.9
"""Share of the tokens that a run may have, up to which a profile must have points."""
PassTime = tuple[Count, Count, Count, Positive]
"""(TP size, sequences of a replica, sum of their contexts in tokens, seconds), while all replicas do the same."""
SwitchTime = tuple[Count, Count, Count, NonNegative]
"""(TP size before, after, context tokens of all unfinished sequences, seconds)."""
Subject = dict[str, str | int | bool]
"""What is profiled, by name: the times of one subject are not those of another."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured times of one subject: what `experiments/pat_profile.py` writes."""

    format: Literal[1]
    subject: Subject
    torch: str
    """Its version."""
    decodes: tuple[PassTime, ...]
    prefills: tuple[PassTime, ...]
    switches: tuple[SwitchTime, ...]
    checks: tuple[dict[str, Any], ...] = ()
    """How far the predictor was off."""

    @staticmethod
    def load(path: Path) -> Profile:
        """Raises FileNotFoundError without the file; ValueError if it is damaged."""
        if not path.is_file():
            raise FileNotFoundError(f"profile {str(path)!r}: no such file; make it with experiments/pat_profile.py")
        profile = read_json(path, Profile)
        try:
            profile.predictors()
            if missing := {"device", "num_ranks"} - profile.subject.keys():
                raise ValueError(f"subject: has no {', '.join(sorted(missing))}")
        except ValueError as error:
            raise ValueError(f"{path}: {error}; the file is damaged; profile again") from None
        return profile

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.encode(self) + b"\n")

    def predictors(self) -> dict[int, StepPredictor]:
        """By TP size. Raises ValueError for too few points."""
        return {size: StepPredictor(self._points(size)) for size in sorted({row[0] for row in self.decodes})}

    def _points(self, tp_size: int) -> list[Point]:
        return [row[1:] for row in self.decodes if row[0] == tp_size]

    def deployment(
        self, subject: Subject, *, num_kv_tokens: Mapping[int, int], max_num_seqs: int, max_model_len: int
    ) -> Deployment:
        """Returns what decoding and switching take for the TP sizes of `num_kv_tokens` (tokens of a replica).

        Raises ValueError if the profile is of another subject, or does not reach the batches and contexts that these
        limits allow.
        """
        for name in sorted({*self.subject, *subject}):
            mine, its = self.subject.get(name), subject.get(name)
            if mine != its:
                raise ValueError(
                    f"profile: is of {name}={mine!r}, and this run has {its!r}; make one for this run, by "
                    f"experiments/pat_profile.py"
                )
        for size, most in num_kv_tokens.items():
            points = self._points(size)
            if not points:
                raise ValueError(f"profile: has no points of TP size {size}; profile again with this many ranks")
            batch, num_tokens = max(point[0] for point in points), max(point[1] for point in points)
            needed = min(most, max_num_seqs * max_model_len)
            if batch < max_num_seqs or num_tokens < REACH * needed:
                raise ValueError(
                    f"profile: its points of TP size {size} reach {batch} sequences and {num_tokens} tokens, this run "
                    f"may have max_num_seqs={max_num_seqs} and {needed} tokens in the KV cache; profile with the same "
                    f"max_num_seqs, max_model_len and KV cache"
                )
        if len(num_kv_tokens) > 1 and not self.switches:
            raise ValueError(
                "profile: has no times of switches; profile again, with --switch-tokens and a long enough max_model_len"
            )
        predictors = self.predictors()
        return Deployment(
            num_ranks=int(subject["num_ranks"]),
            steps={size: predictors[size] for size in num_kv_tokens},
            num_kv_tokens=num_kv_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            switch_seconds=_lines(self.switches),
            prefills={
                size: fit_prefills(points)
                for size in num_kv_tokens
                if (points := [row[1:] for row in self.prefills if row[0] == size])
            },
        )


def _lines(switches: Collection[SwitchTime]) -> Callable[[int, int, float], float]:
    """Returns, for each pair of TP sizes, a line over the tokens, which never falls, by least squares through medians;
    infinity for a pair that was not measured."""
    lines: dict[tuple[int, int], tuple[float, float]] = {}
    for pair in {(before, after) for before, after, _, _ in switches}:
        rows = [row[2:] for row in switches if row[:2] == pair]
        tokens = np.array(sorted({num_tokens for num_tokens, _ in rows}), float)
        seconds = np.array([np.median([took for num_tokens, took in rows if num_tokens == one]) for one in tokens])
        offsets = tokens - tokens.mean()
        slope = max(0.0, float((offsets * seconds).sum()) / max(1.0, float((offsets**2).sum())))
        lines[pair] = slope, float(seconds.mean() - slope * tokens.mean())

    def seconds_of(before: int, after: int, num_tokens: float) -> float:
        slope, start = lines.get((before, after), (0.0, np.inf))
        return max(0.0, start + slope * num_tokens)

    return seconds_of


def deployment_of(
    pace: Pace,
    *,
    num_ranks: int,
    num_kv_tokens: Mapping[int, int],
    max_num_seqs: int,
    max_model_len: int,
    goes_back: bool = False,
) -> Deployment:
    """Returns what decoding and switching take at this pace, for the TP sizes of `num_kv_tokens` (tokens of a replica).

    In a switch between nested replicas, which have equal shares of the sequences, ranks exchange the KV that they lack.
    A sample needs at most the KV that a replica has. With `goes_back`, the way back to the first layout counts, too.
    """
    layouts = {size: nested_layout(range(num_ranks), size) for size in num_kv_tokens}

    def decode(size: int, batch: int, context: int) -> Point:
        tokens = batch * context
        return batch, tokens, decode_seconds(pace, layouts[size].replicas[0], batch, tokens)

    def prefill(size: int, batch: int, context: int) -> Point:
        tokens = batch * context
        output = StepOutput(
            num_running=batch,
            num_tokens=tokens,
            num_context_tokens=tokens,
            num_pairs=tokens * (context + 1) // 2,
            num_sampled=batch,
        )
        return batch, tokens, pace.step(layouts[size].replicas[0], output)

    def switch_seconds(before: int, after: int, num_tokens: float) -> float:
        share = (1 - before / after) / after if after > before else 1 / after - 1 / before
        return pace.switch(layouts[before], layouts[after], round(share * num_tokens * after / num_ranks))

    return Deployment(
        num_ranks=num_ranks,
        steps={
            size: StepPredictor(
                decode(size, batch, context)
                for batch in BATCHES
                for place, context in enumerate(CONTEXTS)
                if place < 2 or batch * context <= most
            )
            for size, most in num_kv_tokens.items()
        },
        num_kv_tokens=num_kv_tokens,
        max_num_seqs=max_num_seqs,
        max_model_len=max_model_len,
        switch_seconds=switch_seconds,
        way_back_seconds=(lambda end, start: switch_seconds(end, start, 0.0)) if goes_back else None,
        prefills={
            size: fit_prefills(prefill(size, batch, context) for batch in BATCHES[:4] for context in CONTEXTS[1:8])
            for size in num_kv_tokens
        },
    )
