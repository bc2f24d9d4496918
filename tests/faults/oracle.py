"""What must come out of any schedule: the tokens of one process that runs plainly, for a pool of sequences.

A third of the pool's prompts are of trajectories; the plain process runs these one turn at a time.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from engines.replica.endings import Endings
from engines.rollout.environment import Answer
from engines.rollout.prediction import LengthPredictor
from engines.rollout.turns import Turns
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
STOPS = tuple(range(2, 131, 9))
"""Tokens that end a turn."""
MAX_TURNS = 5


def is_trajectory(uid: int) -> bool:
    return uid % 3 == 0


PARAMS = [
    SamplingParams(
        n=NUM_SAMPLES,
        max_tokens=_rng.choice([1, 5, 20, 50, 90, 90]),
        temperature=_rng.choice([0.0, 0.7, 1.0]),
        ignore_eos=_rng.random() < 0.5,
        stop_token_ids=STOPS if is_trajectory(uid) else (),
        max_turns=MAX_TURNS if is_trajectory(uid) else None,
    )
    for uid in range(len(PROMPTS))
]


def ends(uid: int, index: int, turn: int) -> bool:
    """Whether the environment of this trajectory ends it after this turn."""
    return turn > 0 and random.Random(f"end/{uid}/{index}/{turn}").random() < 0.2


def observation(uid: int, turn: int, said: Sequence[int]) -> list[int]:
    """What a trajectory observes behind the tokens of a turn; turn 0 is before the first one."""
    rng = random.Random(f"{uid}/{turn}/{list(said)}")
    return [rng.randrange(2, 131) for _ in range(rng.choice([0, 1, 3, 8]))]


class Environments:
    """Answers on threads of its own, a moment later. Raises AssertionError for a turn that it has heard before."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._threads = ThreadPoolExecutor(4)
        self._turns: dict[SequenceId, int] = {}
        self._ended: set[SequenceId] = set()

    @property
    def num_open(self) -> int:
        return len(self._turns) - len(self._ended)

    def begin(self, sequence_id: SequenceId, columns: Any, answer: Callable[[Answer], None]) -> None:
        assert sequence_id not in self._turns, "a trajectory begins twice"
        self._turns[sequence_id] = 0
        self._later(lambda: answer(Answer()))

    def step(self, sequence_id: SequenceId, text: str, answer: Callable[[Answer], None]) -> None:
        assert sequence_id not in self._ended, "a turn after the end"
        self._turns[sequence_id] += 1
        _, uid, index = sequence_id
        is_over = ends(uid, index, self._turns[sequence_id])
        self._later(lambda: answer(Answer(text=None if is_over else "", done=is_over)))

    def end(self, sequence_id: SequenceId, reward: Callable[[float | None], None] | None) -> None:
        assert sequence_id not in self._ended, "a trajectory ends twice"
        self._ended.add(sequence_id)
        if reward is not None:
            turns = float(self._turns[sequence_id])
            self._later(lambda: reward(turns))

    def _later(self, act: Callable[[], None]) -> None:
        delay_s = self._rng.choice([0.0, 0.0, 0.002, 0.02])
        self._threads.submit(lambda: (time.sleep(delay_s), act()))

    def turns(self, predictor: LengthPredictor | None = None) -> Turns:
        return Turns(
            self,
            columns={},
            encode=lambda uid, _, said: observation(uid, int(bool(said)), said),
            endings=Endings(eos_token_ids=(EOS,), detokenize=None),
            max_model_len=MAX_CONTEXT,
            predictor=predictor,
        )

    def close(self) -> None:
        self._threads.shutdown()


MAX_CONTEXT = 256
"""Of the tiny models."""


def one_turn_at_a_time(llm: Any, uid: int, index: int) -> Completion:
    """A trajectory's completion: a turn is a call of `generate` behind all that was generated and observed before."""
    params, tokens = PARAMS[uid], [*PROMPTS[uid]]
    most = len(tokens) + params.most_tokens
    state = make_state(uid, tokens, params, index=index)
    said: Sequence[int] = ()
    for turn in itertools.count():
        if ends(uid, index, turn):
            return Completion.of(state, "stop")
        seen = observation(uid, int(turn > 0), said)
        if turn == MAX_TURNS or len(state.tokens) + len(seen) >= most:
            return Completion.of(state, "length")
        state.observe(seen)
        left = replace(params, max_tokens=most - len(state.tokens), max_turns=None)
        ended = llm.generate([state.tokens], left, prompt_uids=[uid])[0].outputs[index]
        said = ended.token_ids
        state.tokens += said
        state.logprobs += ended.logprobs
        state.versions += ended.versions
        if ended.finish_reason == "length":
            return Completion.of(state, "length")
    raise AssertionError


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
        plain = [uid for uid in range(len(PROMPTS)) if not is_trajectory(uid)]
        outputs = llm.generate([PROMPTS[uid] for uid in plain], [PARAMS[uid] for uid in plain], prompt_uids=plain)
        groups = dict(zip(plain, (output.outputs for output in outputs), strict=True))
        for uid in filter(is_trajectory, range(len(PROMPTS))):
            groups[uid] = [one_turn_at_a_time(llm, uid, index) for index in range(NUM_SAMPLES)]
        completions.append([groups[uid] for uid in range(len(PROMPTS))])
    turns = [len(one.turns) for pool in completions for group in pool[::3] for one in group]
    assert max(turns) >= 4 and len(set(turns)) > 3, "too few turns to test anything"
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
        states = [
            make_state(uid, PROMPTS[uid], PARAMS[uid], index=index, version=version)
            for uid, index in rng.sample(pool, count)
        ]
        return [replace(state, in_turns=is_trajectory(state.key.prompt_uid)) for state in states]

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
            if have.versions != [version if kept else -1 for kept in have.loss_mask]:
                raise Wrong(f"sequence {one.state.sequence_id}: has versions {have.versions}, not {version}")
            if not is_cut and have.observed != want.observed:
                raise Wrong(f"sequence {one.state.sequence_id}: observed {have.observed}, not {want.observed}")
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
