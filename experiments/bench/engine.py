"""Our engine against other engines on the same model: batches of equal lengths, and one long-tailed batch.

    python experiments/bench/engine.py --vllm-python /path/to/vllm/bin/python
    python experiments/bench/engine.py --models runs/models/tiny --batches --dtype float32 --peers hf

All sides read the same checkpoint and generate the same numbers of tokens from the same prompts at temperature 1. In
the long tail our engine knows only the cap, and a hidden stop ends its sequences. vLLM and transformers' continuous
batching know each length. Hugging Face's `generate` pads all rows until the longest is done. Times are milliseconds per
step of the longest sequence. The floor is the time to read the weights and the KV that a step needs.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import engines
from engines.config import DType
from engines.constraints import Count, WholeNumber
from engines.sequence import SamplingParams, SequenceState
from experiments import launch
from experiments.bench import harness
from experiments.bench.models import checkpoint, floor_seconds, random_prompts
from experiments.comparison.turns import Row, interleave, make_row, short, timed
from research.workloads.lengths import LogNormalLengths
from research.workloads.shapes import SHAPES

if TYPE_CHECKING:
    import torch

    from experiments.bench.peers import Side

PROMPT_LENGTH = 16


@dataclass(frozen=True, kw_only=True)
class EngineBench(harness.BenchConfig):
    """Time our engine and its peers on the same tokens, interleaved."""

    models: tuple[str, ...] = ("25m", "200m")
    """Names in research/workloads/shapes.py, which get random weights, or Hugging Face folders."""
    batches: tuple[Count, ...] = (1, 8, 32, 64)
    """Batch sizes, with sequences of equal length."""
    length: Count = 128
    """Tokens that each sequence of a batch generates."""
    tail: WholeNumber = 64
    """Sequences of the long tail; 0 leaves it out."""
    cap: Count = 1024
    """Longest length in the long tail. Our engine knows nothing else about the lengths, whose median is 100."""
    dtype: DType = "bfloat16"
    """Dtype of weights and activations, on all sides."""
    peers: tuple[Literal["hf", "hf_cb"], ...] = ("hf", "hf_cb")
    """Peers of this Python, in the long tail only: Hugging Face `generate`, and its continuous batching."""
    vllm_python: Path | None = None
    """A Python that has vLLM; with it, vLLM is a peer in every row."""
    threads: Count | None = None
    """torch threads of our engine and Hugging Face. By default Hugging Face uses all cores, and our engine uses one or
    all, whichever is faster in its warm-up."""
    hf_turns: Count = 1
    """Turns in which Hugging Face is measured; it takes minutes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        unknown = [name for name in self.models if name not in SHAPES and not Path(name).is_dir()]
        if unknown or not self.models:
            raise ValueError(f"models={self.models}: give folders, or some of {', '.join(SHAPES)}")
        if not self.batches and not self.tail:
            raise ValueError(f"batches={self.batches}, tail={self.tail}: give numbers of sequences")
        if self.length > self.cap:
            raise ValueError(f"length={self.length}: must be at most the cap of {self.cap}")
        if self.vllm_python is not None and not self.vllm_python.is_file():
            raise ValueError(f"vllm_python={str(self.vllm_python)!r}: there is no such file; give a venv's bin/python")


def measure(config: EngineBench) -> dict[str, Any]:
    from experiments.bench.peers import ContinuousBatchingPeer, HuggingFacePeer, vllm_peer

    drawn = LogNormalLengths(median=100.0, sigma=1.0, cap=config.cap).draw(config.tail, seed=0)
    cells = {f"batch {size}": [config.length] * size for size in config.batches} | ({"tail": drawn} if drawn else {})
    prompts = random_prompts(max(map(len, cells.values())), PROMPT_LENGTH)
    rows = []
    for model in config.models:
        with (
            checkpoint(model, max_positions=PROMPT_LENGTH + config.cap, dtype=config.dtype) as folder,
            ExitStack() as stack,
        ):
            ours = OurSide(folder, config)
            sides: dict[str, Side] = {"ours": ours.generate}
            if config.vllm_python is not None:
                peer = vllm_peer(config.vllm_python, folder, config.dtype, **_sizes(config))
                sides["vllm"] = stack.enter_context(peer)
            if drawn and "hf" in config.peers:
                sides["hf"] = HuggingFacePeer(folder, config.dtype, ours.llm.device).generate
            if drawn and "hf_cb" in config.peers:
                num_tokens = config.tail * PROMPT_LENGTH + sum(drawn)
                peer_cb = ContinuousBatchingPeer(folder, config.dtype, ours.llm.device, num_tokens)
                sides["hf_cb"] = peer_cb.generate
            for name, lengths in cells.items():
                here = {side: one for side, one in sides.items() if name == "tail" or not side.startswith("hf")}
                floor = _floor(model, config, lengths, ours.llm.device)
                rows.append(_compare(f"{Path(model).name} {name}", here, prompts, lengths, config) | floor)
    return {"rows": rows}


def _sizes(config: EngineBench) -> dict[str, Any]:
    most = max(*config.batches, config.tail, 1)
    return {"max_num_seqs": most, "max_model_len": PROMPT_LENGTH + config.cap}


class OurSide:
    """Our engine. It knows only the cap of the lengths; a hidden stop ends sequences."""

    def __init__(self, folder: str, config: EngineBench) -> None:
        self._lengths: list[int] = []
        self._params = SamplingParams(max_tokens=config.cap, ignore_eos=True)
        self.llm = engines.LLM(folder, dtype=config.dtype, hidden_stop=self._stops, **_sizes(config))

    def _stops(self, state: SequenceState) -> bool:
        return state.num_generated >= self._lengths[state.key.prompt_uid]

    def generate(self, prompts: list[list[int]], lengths: list[int]) -> float:
        self._lengths = lengths
        seconds, outputs = timed(lambda: self.llm.generate(prompts, self._params, prompt_uids=range(len(prompts))))
        assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
        return seconds


def _compare(
    name: str, sides: dict[str, Side], prompts: list[list[int]], lengths: list[int], config: EngineBench
) -> Row:
    """Milliseconds per step of each side."""
    all_cores = launch.share_cores()
    prompts = prompts[: len(lengths)]
    calls, threads = {}, {}
    for side, generate in sides.items():
        call = partial(generate, prompts, lengths)
        threads[side] = config.threads or all_cores
        if side == "ours":
            threads[side] = _best_threads(call, [config.threads] if config.threads else sorted({1, all_cores}))
        elif side == "vllm":
            call()
        else:  # minutes in a long tail: a short warm-up
            generate(prompts, [min(8, length) for length in lengths])
        turns = config.hf_turns if side.startswith("hf") else config.turns
        calls[side] = [partial(_with_threads, threads[side], call)] * turns
    seconds = interleave(calls, config.turns, name=name, warm_up=False)
    steps = max(lengths)
    per_step = {side: [time / steps for time in times] for side, times in seconds.items()}
    return make_row(name, per_step, steps=steps, tokens=sum(lengths), threads=threads)


def _with_threads(threads: int, call: Callable[[], float]) -> float:
    import torch

    torch.set_num_threads(threads)
    return call()


def _best_threads(call: Callable[[], float], candidates: list[int]) -> int:
    """The number of threads among `candidates` with which `call` is fastest, after a warm-up."""
    call()
    seconds = {threads: min(_with_threads(threads, call) for _ in range(2)) for threads in candidates}
    return min(seconds, key=seconds.__getitem__)


def _floor(model: str, config: EngineBench, lengths: list[int], device: torch.device) -> dict[str, float]:
    """The floor in milliseconds per step; empty for a Hugging Face folder."""
    if model not in SHAPES:
        return {}
    context_tokens = sum(length * PROMPT_LENGTH + length * (length + 1) // 2 for length in lengths)
    steps = max(lengths)
    seconds = floor_seconds(SHAPES[model], config.dtype, steps=steps, context_tokens=context_tokens, device=device)
    return {"floor_ms": short(1e3 * seconds / steps)}


if __name__ == "__main__":
    harness.run(EngineBench, measure)
