"""What `specactor.py` rolls out on paced ranks: sequences, how often guesses of their tokens are right, and who drafts.

A guess is right with a stated probability (`StatedDrafter`), so that ranks with a tiny model stand for a 32B model and
its trained drafters. Policies see outcomes only. Torch-free.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from engines.parallel.layout import Layout, ReplicaSpec
from engines.sequence import SequenceId, SequenceKey, SequenceState
from engines.speculation.policy import DraftPolicy
from experiments.comparison.rollouts import Variant, Workload
from research.simulator.datasheets import H100, QWEN_0_5B, QWEN_1_5B, QWEN_32B
from research.simulator.pace import ProfilePace, WideReplica
from research.simulator.stated import StatedDrafter
from research.specactor.plan import MAX_WINDOW
from research.workloads.lengths import LogNormalLengths
from research.workloads.shapes import DecoderShape

CaseName = Literal["even", "crowded", "mixed"]
Mode = Literal["off", "coupled", "filled", "strict", "naive"]
METHODS = {"0.5B": QWEN_0_5B, "1.5B": QWEN_1_5B}
"""Small models of Qwen2.5 that draft."""
MISSES = {"0.5B": 1.0, "1.5B": 0.85}
"""Wrong guesses of each, over those of the smallest: our assumption."""
MEDIAN, SIGMA, CAP = 3000, 0.884, 20_000
"""Of the lengths, in tokens of the profile: the cap is DAPO-32B-20K's (SpecActor §5.1), the others are our choice."""
BLOCK_SIZE, NUM_PROMPT_TOKENS = 4, 4
INTERVAL = 1000
"""Tokens of the profile after which a sequence is first reconfigured, and after which `mixed` changes sides."""
PACED_MODEL = DecoderShape(hidden=32, layers=1, heads=4, kv_heads=4, head_dim=8, intermediate=32, vocab=64, tied=True)


@dataclass(frozen=True)
class Chances:
    """The probability that a guess is right. Sequences of even and of odd prompts differ, and change sides once."""

    even: float
    odd: float
    changes_at: int
    """Generated tokens."""

    def __call__(self, key: SequenceKey, num_generated: int) -> float:
        return self.even if (key.prompt_uid % 2 == 0) == (num_generated < self.changes_at) else self.odd

    def of(self, method: str) -> Chances:
        even, odd = (1 - MISSES[method] * (1 - chance) for chance in (self.even, self.odd))
        return Chances(even, odd, self.changes_at)


@dataclass(frozen=True)
class Known:
    """The tokens of a plain rollout, as a `TokenOf`."""

    tokens: Mapping[SequenceId, Items[int]]

    def __call__(self, state: SequenceState, position: int) -> int:
        tokens, place = self.tokens[state.sequence_id], position - state.num_prompt_tokens
        return tokens[place] if place < len(tokens) else 0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a case is drafted for."""

    mode: Mode
    method: str = "0.5B"
    window: int = 0
    num_drafters: int = 0
    """Ranks that only draft."""

    @property
    def name(self) -> str:
        return f"{self.mode}, {self.method}, w={self.window}"


@dataclass(frozen=True, kw_only=True)
class Case:
    """Replicas of a 32B model on H100, and their sequences."""

    name: CaseName
    tp_size: int
    """GPUs that each rank stands for."""
    per_rank: int
    """Sequences of each rank, where none drafts."""
    chances: tuple[float, float]
    scale: float
    """Seconds here per second of the profile with which 8 processes on 2 cores can follow."""
    token_scale: int
    """Tokens of the profile per token here. Windows are in tokens here."""

    @property
    def longest(self) -> int:
        return CAP // self.token_scale

    @property
    def interval(self) -> int:
        return INTERVAL // self.token_scale

    def lengths(self, num_ranks: int, seed: int, shrink: int = 1) -> list[int]:
        drawn = LogNormalLengths(median=MEDIAN / self.token_scale, sigma=SIGMA, cap=self.longest)
        return drawn.draw(num_ranks * max(2, self.per_rank // shrink), seed)

    def workload(self, lengths: list[int], prompts: list[list[int]] | None = None) -> Workload:
        groups = [[one] for one in lengths]
        return Workload.forced(groups, num_prompt_tokens=NUM_PROMPT_TOKENS, most=self.longest, prompts=prompts)

    def acceptance(self, method: str) -> Chances:
        return Chances(*self.chances, self.interval).of(method)

    def pace(self, method: str, scale: float = 1.0, dearer: float = 1.0) -> WideReplica:
        """`dearer`: multiplies the drafter's price, about: it has so many times the layers."""
        shape = METHODS[method]
        shape = replace(shape, num_layers=round(dearer * shape.num_layers))
        pace = ProfilePace(
            device=H100,
            shape=QWEN_32B,
            scale=self.scale * scale,
            token_scale=self.token_scale,
            draft_shapes={"own": shape},
        )
        return WideReplica(pace, self.tp_size)

    def options(self) -> dict[str, Any]:
        """Arguments of `LLM` for all variants."""
        return {
            "dtype": "float64",
            "block_size": BLOCK_SIZE,
            "max_num_seqs": 512,
            "max_model_len": NUM_PROMPT_TOKENS + self.longest,
        }

    def variant(
        self,
        setting: Setting,
        num_ranks: int,
        token_of: Callable[[SequenceState, int], int],
        policy: DraftPolicy | None = None,
    ) -> Variant:
        """`policy` adapts windows."""
        pace, options = self.pace(setting.method).pace, dict[str, Any]()
        if setting.mode != "off":
            make = partial(StatedDrafter, token_of, self.acceptance(setting.method), seed=len(setting.method))
            options = {
                "drafter": "own",
                "own_drafter": make,
                "draft_lengths": "fixed",
                "max_draft_tokens": setting.window,
            }
        if setting.num_drafters:
            options["draft_mode"] = setting.mode
        if policy is not None:
            options |= {"draft_lengths": "adaptive", "draft_policy": policy, "max_draft_tokens": MAX_WINDOW}
        return Variant(
            layout=layout(num_ranks, setting.num_drafters),
            num_kv_tokens=pace.num_kv_tokens(self.longest)[self.tp_size],
            options=options,
        )


def layout(num_ranks: int, num_drafters: int) -> Layout:
    """Returns replicas of one rank each; the last ranks draft."""
    first = num_ranks - num_drafters
    specs = (
        ReplicaSpec(id=rank, ranks=(rank,), role="rollout" if rank < first else "draft") for rank in range(num_ranks)
    )
    return Layout(epoch=0, replicas=tuple(specs))


CASES = (
    Case(name="even", tp_size=8, per_rank=16, chances=(0.88, 0.88), scale=5.0, token_scale=32),
    Case(name="crowded", tp_size=4, per_rank=64, chances=(0.6, 0.6), scale=4.5, token_scale=64),
    Case(name="mixed", tp_size=4, per_rank=48, chances=(0.88, 0.5), scale=4.5, token_scale=64),
)
