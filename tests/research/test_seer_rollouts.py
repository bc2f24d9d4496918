"""Seer's rollouts with real processes: whatever schedules the chunks and holds their KV, the tokens of one process."""

from __future__ import annotations

import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engines import LLM, SamplingParams
from engines.config import ModelConfig
from engines.coordination.policies import SchedulePolicy
from engines.coordination.views import Dispatch, ScheduleView
from engines.sequence import SequenceId
from research.seer.baselines import Divided, RandomStatic
from research.seer.context_aware import ContextAware, ContextOptions
from tests.worlds import join, run_world

CHUNK, BLOCK, CAP = 8, 4, 48
RNG = random.Random(11)
PROMPTS = [[RNG.randrange(2, 131) for _ in range(RNG.randint(1, 12))] for _ in range(8)]
PARAMS = [SamplingParams(max_tokens=RNG.randint(CHUNK, CAP), n=3) for _ in PROMPTS]
OPTIONS = ContextOptions(chunk_tokens=CHUNK)
DRAFTS = {"drafter": "grouped_suffix", "draft_paths": 2, "draft_server": True}


class Elsewhere:
    """No sequence runs two chunks in a row on the same replica."""

    def __init__(self) -> None:
        self.last: dict[SequenceId, int] = {}

    def next(self, view: ScheduleView) -> Dispatch | None:
        for one in view.waiting.values():
            chunk = min(CHUNK, one.max_tokens - one.num_generated)
            for replica in view.replicas.values():
                if replica.spec.id != self.last.get(one.sequence_id) and replica.room_for(one, chunk):
                    self.last[one.sequence_id] = replica.spec.id
                    return Dispatch(sequence_id=one.sequence_id, replica_id=replica.spec.id, max_new_tokens=chunk)
        return None


def policies(lengths: dict[SequenceId, int]) -> dict[str, SchedulePolicy]:
    return {
        "group static": RandomStatic(),
        "divided": Divided(OPTIONS),
        "in turns": Divided(OPTIONS, takes_turns=True),
        "context": ContextAware(OPTIONS),
        "as printed": ContextAware(ContextOptions(chunk_tokens=CHUNK, order="length", spread=0, follow_ups=0)),
        "oracle": ContextAware(OPTIONS, lengths=lengths),
    }


def pools(folder: str) -> dict[str, dict[str, Any]]:
    disk = {"kv_disk_bytes": 2**24, "kv_disk_folder": folder}
    return {
        "host": {},
        "host, disk": {"kv_host_bytes": 2**16, **disk},
        "disk": {"kv_host_bytes": 0, **disk},
        "entries lost": {"kv_host_bytes": 0, **disk},
        "none": {"kv_host_bytes": 0},
    }


def roll_out(model: str, folder: str, ends: list[list[int]]) -> dict[str, Any]:
    groups, rng = join(), random.Random(3)
    lengths = {(0, uid, index): end for uid, some in enumerate(ends) for index, end in enumerate(some)}
    every = pools(folder)
    cases = {f"{name}, drafts": (policy, every["host, disk"], DRAFTS) for name, policy in policies(lengths).items()}
    cases |= {f"elsewhere, {name}": (Elsewhere(), pool, {}) for name, pool in every.items()}
    cases |= {f"elsewhere, {name}, drafts": (Elsewhere(), every[name], DRAFTS) for name in ("host", "entries lost")}
    found: dict[str, Any] = {}
    for name, (policy, pool, drafts) in cases.items():

        def lose_some(_: Any, loses: bool = "lost" in name) -> None:
            files = sorted(path for path in Path(folder).rglob("curtail-*") if path.is_file()) if loses else []
            for path in rng.sample(files, len(files) // 2):
                path.unlink(missing_ok=True)

        llm = LLM(model, world=groups, schedule=policy, **tiny(model, 2 * (CAP + 12)), max_num_seqs=6, **pool, **drafts)
        outputs = llm.generate(PROMPTS, PARAMS, on_finished=lose_some)
        found[name] = {
            "tokens": [[one.token_ids for one in output.outputs] for output in outputs],
            "num_preempted": sum(step.num_preempted for step in llm.step_records),
            **asdict(llm.replica.kv_moves),
        }
        llm.close()
    return found


def tiny(model: str, num_kv_tokens: int) -> dict[str, Any]:
    num_bytes = num_kv_tokens * ModelConfig.from_pretrained(model).kv_bytes_per_token(8)
    return {"dtype": "float64", "kv_cache_bytes": num_bytes, "block_size": BLOCK, "max_model_len": CAP + 12}


def test_tokens_are_those_of_one_process(qwen3: str, tmp_path: Path) -> None:
    alone = LLM(qwen3, **tiny(qwen3, 40 * CAP))
    plain = [[one.token_ids for one in output.outputs] for output in alone.generate(PROMPTS, PARAMS)]
    alone.close()
    lengths = [[len(tokens) for tokens in some] for some in plain]
    least = sum((length - 1) // CHUNK for some in lengths for length in some)
    ranks = run_world(roll_out, 2, qwen3, str(tmp_path), lengths)
    for name in ranks[0]:
        both = [rank[name] for rank in ranks]
        assert all(one["tokens"] == plain for one in both), name
        preempted, imported, recomputed = (
            sum(one[key] for one in both) for key in ("num_preempted", "num_imported", "num_recomputed")
        )
        if not name.startswith("group static"):
            assert preempted == 0, name
            assert imported + recomputed >= (0 if "none" in name else least if "elsewhere" in name else 1), name
            assert (recomputed > 0) == ("lost" in name), name
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
