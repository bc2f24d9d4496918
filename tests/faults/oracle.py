"""What must come out of any schedule: the tokens of one process that runs plainly, for a pool of sequences."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from engines.sequence import Completion, Finished, SamplingParams, SequenceId, SequenceState
from tests.checkpoints import EOS, save_checkpoint
from tests.states import make_state

NUM_VERSIONS = 3
NUM_SAMPLES = 2
MAX_LEN = 128
"""Tokens that the longest sequence of the pool can have."""
KV_BYTES_PER_TOKEN = 1024
"""Of the tiny Qwen3 in float64, whole: 2 * 2 layers * 2 KV heads * 16 * 8 bytes."""

_rng = random.Random(11)
PROMPTS = [[_rng.randrange(2, 131) for _ in range(_rng.randint(1, 38))] for _ in range(40)]
PARAMS = [
    SamplingParams(
        n=NUM_SAMPLES,
        max_tokens=_rng.choice([1, 5, 20, 50, 90, 90]),
        temperature=_rng.choice([0.0, 0.7, 1.0]),
        ignore_eos=_rng.random() < 0.5,
    )
    for _ in PROMPTS
]


def make_oracle(directory: Path) -> None:
    """Writes the checkpoints of `NUM_VERSIONS` policy versions, and what each makes of the pool."""
    from engines import LLM
    from engines.models.loader import checkpoint_tensors

    completions = []
    llm = None
    for version in range(NUM_VERSIONS):
        save_checkpoint(directory / f"version-{version}", "qwen3", seed=version)
        llm = llm or LLM(directory / "version-0", dtype="float64")
        llm.update_weights(checkpoint_tensors(directory / f"version-{version}"), version)
        outputs = llm.generate(PROMPTS, PARAMS, prompt_uids=range(len(PROMPTS)))
        completions.append([output.outputs for output in outputs])
    (directory / "oracle.msgpack").write_bytes(msgspec.msgpack.encode(completions))


class Wrong(AssertionError):
    """A schedule did not end with the oracle's tokens, each sequence once."""


class Oracle:
    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        data = (self.directory / "oracle.msgpack").read_bytes()
        self._completions = msgspec.msgpack.decode(data, type=list[list[list[Completion]]])

    def checkpoint(self, version: int) -> Path:
        return self.directory / f"version-{version}"

    def states(self, version: int, rng: random.Random, count: int) -> list[SequenceState]:
        """New states of `count` random sequences of the pool, in random order."""
        pool = [(uid, index) for uid in range(len(PROMPTS)) for index in range(NUM_SAMPLES)]
        return [
            make_state(uid, PROMPTS[uid], PARAMS[uid], index=index, version=version)
            for uid, index in rng.sample(pool, count)
        ]

    def check(
        self, version: int, ids: Iterable[SequenceId], aborted: set[SequenceId], finished: list[Finished]
    ) -> None:
        """Raises Wrong unless each sequence was delivered once, with the oracle's tokens, or a part when aborted."""
        delivered = [one.state.sequence_id for one in finished]
        if sorted(delivered) != sorted(ids):
            raise Wrong(f"delivered {sorted(delivered)}, submitted {sorted(ids)}")
        for one in finished:
            _, uid, index = one.state.sequence_id
            want, have = self._completions[version][uid][index], one.completion
            count = len(have.token_ids)
            is_cut = have.finish_reason == "abort" and one.state.sequence_id in aborted
            if have.token_ids != (want.token_ids[:count] if is_cut else want.token_ids):
                raise Wrong(f"sequence {one.state.sequence_id}: has tokens {have.token_ids}, not {want.token_ids}")
            if not is_cut and have.finish_reason != want.finish_reason:
                raise Wrong(f"sequence {one.state.sequence_id}: ended by {have.finish_reason}")
            if have.versions != [version] * count:
                raise Wrong(f"sequence {one.state.sequence_id}: has versions {have.versions}, not {version}")
            if any(abs(a - b) > 1e-6 for a, b in zip(have.logprobs, want.logprobs, strict=not is_cut)):
                raise Wrong(f"sequence {one.state.sequence_id}: has log-probs {have.logprobs}, not {want.logprobs}")


def engine_options(rng: random.Random) -> dict[str, Any]:
    """Of an engine that is crowded more or less: preemption is likely at the lower end."""
    num_seqs = rng.randint(2, 12)
    block_size = rng.choice([4, 8, 16])
    return {
        "dtype": "float64",
        "block_size": block_size,
        "kv_cache_bytes": KV_BYTES_PER_TOKEN * (MAX_LEN + 16 * rng.choice([0, 0, 1, 4, 12])),
        "max_num_seqs": num_seqs,
        "max_num_batched_tokens": rng.choice([num_seqs, 16, 4096]),
        "prefill_chunk_size": rng.choice([None, 5, 16]),
    }


assert EOS == 1 and max(map(len, PROMPTS)) + 90 <= MAX_LEN
