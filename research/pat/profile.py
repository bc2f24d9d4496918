"""What a deployment takes, sampled at PAT's points (§4.2): measured and kept in a file, or from a pace. Torch-free."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from engines.config import ModelConfig
from engines.constraints import Count, NonNegative, Positive
from engines.json_files import read_json
from engines.parallel.layout import nested_layout
from engines.replica.replica import StepOutput
from engines.rollout.pace import Pace
from research.pat.lookahead import Deployment
from research.pat.predictor import Point, StepPredictor

BATCHES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 256)
"""Ten sizes from 1 to 256, as PAT profiles; it does not list them."""
CONTEXTS = (8, 64, 128, 256, 384, 512, 2048, 8192, 32768, 131072)
"""Tokens of each sequence: denser below 512."""
_NO_MATTER = ("rope", "max_position_embeddings", "eos_token_ids", "rms_norm_eps")  # for how long a step takes


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is profiled. The times of one subject are not those of another."""

    model: dict[str, Any]
    """The fields of `ModelConfig` on which a step's time depends."""
    dtype: str
    device: str
    transport: str
    num_ranks: int
    num_threads: int
    """torch threads of a rank."""

    @staticmethod
    def sizes(model: ModelConfig) -> dict[str, Any]:
        return {name: value for name, value in asdict(model).items() if name not in _NO_MATTER}


@dataclass(frozen=True, kw_only=True)
class PassTime:
    """A point of the profile: a forward pass of one replica, while all replicas do the same."""

    tp_size: Count
    batch: Count
    num_tokens: Count
    """Sum of the sequences' context lengths."""
    seconds: Positive


@dataclass(frozen=True, kw_only=True)
class SwitchTime:
    """A measured switch."""

    before: Count
    after: Count
    """TP sizes."""
    num_tokens: Count
    """Context tokens of all unfinished sequences."""
    seconds: NonNegative


@dataclass(frozen=True, kw_only=True)
class PredictorError:
    """How far the predictor is from what was measured after it."""

    tp_size: Count
    what: Literal["held out", "draining"]
    num_points: Count
    error: NonNegative
    """Mean relative error."""
    a_a: NonNegative
    """The same between two measurements of each point."""


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measured times of one subject: what `experiments/pat_profile.py` writes."""

    format: Literal[1]
    subject: Subject
    torch: str
    """Its version."""
    decodes: tuple[PassTime, ...]
    prefills: tuple[PassTime, ...]
    """Passes, or several where they are chunked, over all tokens of the sequences."""
    switches: tuple[SwitchTime, ...]
    checks: tuple[PredictorError, ...] = ()

    @staticmethod
    def load(path: Path) -> Profile:
        """Raises FileNotFoundError without the file; ValueError if it is damaged."""
        if not path.is_file():
            raise FileNotFoundError(f"profile {str(path)!r}: no such file; make it with experiments/pat_profile.py")
        profile = read_json(path, Profile)
        try:
            profile.predictors()
        except ValueError as error:
            raise ValueError(f"{path}: {error}; the file is damaged; profile again") from None
        return profile

    def save(self, path: Path) -> None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self)) + b"\n")

    def predictors(self) -> dict[int, StepPredictor]:
        """By TP size. Raises ValueError for too few points."""
        sizes = sorted({one.tp_size for one in self.decodes})
        return {size: StepPredictor(_points(self.decodes, size)) for size in sizes}

    def deployment(
        self, subject: Subject, *, num_kv_tokens: Mapping[int, int], max_num_seqs: int, max_model_len: int
    ) -> Deployment:
        """Returns what decoding and switching take for the TP sizes of `num_kv_tokens` (tokens of a replica).

        Raises ValueError if the profile is of another subject, or does not reach the batches and contexts that these
        limits allow.
        """
        for name, (mine, other) in _differences(self.subject, subject).items():
            raise ValueError(f"profile: has {name}={mine!r}, and this run has {other!r}; profile this deployment")
        for size, most in num_kv_tokens.items():
            points = _points(self.decodes, size)
            if not points:
                raise ValueError(f"profile: has no points of TP size {size}; profile again with this many ranks")
            batch, num_tokens = max(point[0] for point in points), max(point[1] for point in points)
            needed = min(most, max_num_seqs * max_model_len)
            if batch < max_num_seqs or num_tokens < 0.9 * needed:
                raise ValueError(
                    f"profile: its points of TP size {size} reach {batch} sequences and {num_tokens} tokens, this run "
                    f"may have max_num_seqs={max_num_seqs} and {needed} tokens in the KV cache; profile with the same "
                    f"max_num_seqs, max_model_len and KV cache"
                )
        if len(num_kv_tokens) > 1 and not self.switches:
            raise ValueError("profile: has no times of switches; profile again, without --switch-tokens 0")
        predictors = self.predictors()
        return Deployment(
            num_ranks=subject.num_ranks,
            steps={size: predictors[size] for size in num_kv_tokens},
            num_kv_tokens=num_kv_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=max_model_len,
            switch_seconds=_SwitchSeconds(self.switches),
        )


class _SwitchSeconds:
    """A line over the tokens for each pair of TP sizes, by least squares; it never falls."""

    def __init__(self, switches: Iterable[SwitchTime]) -> None:
        self._lines: dict[tuple[int, int], tuple[float, float]] = {}

        def pair(one: SwitchTime) -> tuple[int, int]:
            return one.before, one.after

        for key, group in groupby(sorted(switches, key=pair), key=pair):
            tokens, seconds = np.array([(one.num_tokens, one.seconds) for one in group], float).T
            centred = tokens - tokens.mean()
            slope = max(0.0, float((centred * seconds).sum() / max(1.0, (centred**2).sum())))
            self._lines[key] = slope, max(0.0, float(seconds.mean() - slope * tokens.mean()))

    def __call__(self, before: int, after: int, num_tokens: float) -> float:
        """Returns seconds; infinity for a pair that was not measured."""
        slope, offset = self._lines.get((before, after), (0.0, np.inf))
        return offset + slope * num_tokens


def _points(times: Iterable[PassTime], tp_size: int) -> list[Point]:
    return [(one.batch, one.num_tokens, one.seconds) for one in times if one.tp_size == tp_size]


def _differences(one: Subject, other: Subject) -> dict[str, tuple[Any, Any]]:
    mine, its = ({**asdict(each), **{f"model.{k}": v for k, v in each.model.items()}} for each in (one, other))
    del mine["model"], its["model"]
    return {name: (mine.get(name), its.get(name)) for name in {**mine, **its} if mine.get(name) != its.get(name)}


def deployment_of(
    pace: Pace, *, num_ranks: int, num_kv_tokens: Mapping[int, int], max_num_seqs: int, max_model_len: int
) -> Deployment:
    """Returns what decoding and switching take at this pace, for the TP sizes of `num_kv_tokens` (tokens of a replica).

    A switch exports the KV of every unfinished sequence from its old replica, regroups, and imports it into the new
    one; the replicas have equal shares. A sample needs at most the KV that a replica has.
    """
    layouts = {size: nested_layout(range(num_ranks), size) for size in num_kv_tokens}

    def step(size: int, batch: int, context: int) -> Point:
        tokens = batch * context
        output = StepOutput(
            num_running=batch, num_tokens=batch, num_context_tokens=tokens, num_pairs=tokens, num_sampled=batch
        )
        return batch, tokens, pace.step(layouts[size].replicas[0], output)

    def switch_seconds(before: int, after: int, num_tokens: float) -> float:
        moves = [
            pace.transfer(layouts[size].replicas[0], round(num_tokens * size / num_ranks), "host")
            for size in (before, after)
        ]
        return sum(moves) + pace.switch(layouts[before], layouts[after], 0)

    return Deployment(
        num_ranks=num_ranks,
        steps={
            size: StepPredictor(
                step(size, batch, context)
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
    )
