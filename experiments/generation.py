"""A run of `generate.py`: reads prompts, generates completions, writes them as they end."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from engines import LLM, Completion, ModelConfig, RequestOutput, SamplingParams
from engines.adapter_config import base_folder, checkpoint_folder
from engines.models.tokenizer import load_tokenizer
from engines.parallel.collectives import Communicator, SingleRank, TorchGroup, together
from engines.parallel.groups import GroupCache
from engines.parallel.layout import nested_layout
from engines.progress import Bar
from engines.rollout.telemetry import StepRecord, draft_metrics
from engines.sequence import Finished, SequenceId, SequenceState
from experiments import launch
from experiments.engine_options import DRAFT_POLICIES
from experiments.partial_output import PartialOutput, completion_line, write_all
from experiments.prompts import Records, read_prompts
from experiments.run_folder import POINTER, last_published

if TYPE_CHECKING:
    from experiments.generate import GenerateConfig


def generate(config: GenerateConfig) -> dict[str, Any]:
    config = replace(config, model=checkpoint_folder(config.model))
    _check_model(config.model)
    launch.share_cores()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", launch.local_rank())
        torch.cuda.set_device(device)
    group: Communicator = SingleRank()
    groups: GroupCache | None = None
    layout = nested_layout(range(launch.num_ranks()), config.tensor_parallel_size)
    if launch.num_ranks() > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        groups = GroupCache(TorchGroup(), [layout], device=device)
        group = groups.world
    records, places = _load_records(config, group)
    with together(group, "generate"):
        prompts = _encode(config, records, places)
    sink: PartialOutput | StdoutLines = StdoutLines(group, records=records, num_samples=config.sampling.n)
    if config.output is not None:
        sink = PartialOutput(config.output, group, records=records, request=_request(config, records))
    with contextlib.closing(sink):
        launch.end_on_signals(lambda: f"interrupted: {sink.tell()}")
        sink.open(resume=config.resume)
        engine = asdict(replace(config.engine, seed=config.run_seed)) | {"base_model": config.base_model}
        policy = DRAFT_POLICIES[config.draft_policy]
        llm = LLM(config.model, device=device, world=groups, layout=layout, draft_policy=policy, **engine)
        launch.tell_engine(llm)
        _check(llm, prompts, places, config.sampling)
        sink.begin(model_digest=_digest((llm.checksum(), llm.model_config, prompts)))
        start = time.perf_counter()
        outputs = _generate(llm, prompts, config.sampling, sink, is_shown=group.rank == 0)
        seconds = time.perf_counter() - start
        sink.publish(outputs)
        leads = any(replica.ranks[0] == group.rank for replica in llm.layout.replicas)
        steps = launch.gather(group, llm.step_records if leads else [], list[StepRecord])
        if group.size > 1:
            group.barrier()
            dist.destroy_process_group()
    total = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    num_new = total - sum(len(completion.token_ids) for completion in sink.kept.values())
    return {
        "experiment": "generate",
        "prompts": len(records),
        "completions": len(records) * config.sampling.n,
        "resumed": len(sink.kept),
        "tokens": total,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(num_new / seconds, 1),
        **(draft_metrics([step for part in steps for step in part]) if config.engine.drafter != "none" else {}),
        "output": str(config.output) if config.output else None,
    }


def _generate(
    llm: LLM, prompts: list[list[int]], sampling: SamplingParams, sink: PartialOutput | StdoutLines, *, is_shown: bool
) -> list[RequestOutput]:
    start, num_tokens = time.perf_counter(), 0
    expected = len(range(0, len(prompts) * sampling.n, len(llm.layout.replicas)))
    with Bar(total=expected, desc="generate", unit="seq", disable=None if is_shown else True) as progress:

        def show(finished: Finished) -> None:
            nonlocal num_tokens
            key = finished.state.key
            if (key.prompt_uid, key.sample_index) not in sink.kept:
                num_tokens += len(finished.completion.token_ids)
            progress.update()
            progress.set_postfix(tok_s=f"{num_tokens / (time.perf_counter() - start):.0f}", refresh=False)

        return llm.generate(prompts, sampling, on_finished=show, journal=sink)


def _load_records(config: GenerateConfig, group: Communicator) -> tuple[Records, list[str]]:
    if config.prompts:
        return [{"prompt": one} for one in config.prompts], [f"prompts[{i}]" for i in range(len(config.prompts))]
    if config.input is not None:
        if not config.input.exists() or config.input.is_dir():
            raise FileNotFoundError(f"input={str(config.input)!r}: no such file")
        if config.input.is_file():
            return read_prompts(config.input.read_bytes(), str(config.input))
    # A pipe can be read only once, and torchrun gives stdin to no particular rank, so rank 0 reads it for all.
    read = config.input.read_bytes if config.input is not None else sys.stdin.buffer.read
    return read_prompts(launch.on_rank_0(group, read), str(config.input or "stdin"))


def _encode(config: GenerateConfig, records: Records, places: list[str]) -> list[list[int]]:
    """Returns the prompts' token ids. Raises ValueError, with its place, for a prompt that cannot be rendered."""
    source, base = config.model, config.base_model
    sizes = ModelConfig.from_pretrained(source if base is None else base_folder(source, base))
    template = config.conversation.template(load_tokenizer(source, sizes, base))
    return [
        template.encode(record.get("prompt_token_ids") or record.get("messages") or record["prompt"], place)
        for record, place in zip(records, places, strict=True)
    ]


def _check(llm: LLM, prompts: list[list[int]], places: list[str], sampling: SamplingParams) -> None:
    """Raises ValueError, with its place, for a prompt that the engine refuses."""
    for prompt, place in zip(prompts, places, strict=True):
        try:
            llm.check(prompt, sampling)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from None


class StdoutLines:
    """Writes each prompt's lines to rank 0's stdout as soon as this prompt and all prompts before it are complete.

    Rank 0 receives the completions of other replicas only at the end.
    """

    kept: Mapping[tuple[int, int], Completion] = {}

    def __init__(self, group: Communicator, *, records: Records, num_samples: int) -> None:
        self._group = group
        self._records = records
        self._num_samples = num_samples
        self._waiting: dict[int, list[Completion]] = {}
        self._num_written = 0

    def open(self, *, resume: bool) -> None: ...

    def begin(self, **request: Any) -> None: ...

    def find(self, states: Sequence[SequenceState], num_replicas: int) -> dict[SequenceId, Completion]:
        return {}

    def append(self, finished: Finished) -> None:
        self._waiting.setdefault(finished.state.key.prompt_uid, []).append(finished.completion)
        while len(self._waiting.get(self._num_written, ())) == self._num_samples:
            self._write(self._waiting.pop(self._num_written))

    def publish(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs[self._num_written :]:
            self._write(output.outputs)

    def _write(self, completions: list[Completion]) -> None:
        if self._group.rank == 0:
            record = self._records[self._num_written]
            lines = [completion_line(record, one) for one in sorted(completions, key=lambda one: one.index)]
            try:
                write_all(sys.stdout.fileno(), "".join(lines))
            except BrokenPipeError:
                raise
            except OSError as error:
                raise ValueError(f"stdout: cannot be written ({error}); make room, or give --output") from None
        self._num_written += 1

    def tell(self) -> str:
        written = f"{self._num_written} of {len(self._records)} prompts"
        return f"{written} were written to stdout; a run with --output can go on after an interrupt"

    def close(self) -> None:
        return None


def _check_model(path: Path) -> None:
    """Raises ValueError for the folder of a run or of a resume point: its checkpoint is in a folder further down."""
    point = last_published(path) if (path / "checkpoints" / POINTER).is_file() else path
    if (point / "huggingface").is_dir():
        raise ValueError(f"model={str(path)!r}: is no checkpoint but has one; give {str(point / 'huggingface')!r}")


def _digest(value: object) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()


def _request(config: GenerateConfig, records: Records) -> dict[str, Any]:
    """The settings that, besides the model, determine the completions, as JSON data."""
    request = {
        "num_prompts": len(records),
        "prompts_digest": _digest(records),
        "run_seed": config.run_seed,
        "dtype": config.engine.dtype,
        "max_model_len": config.engine.max_model_len,
        **asdict(config.conversation),
        **asdict(config.sampling),
    }
    return json.loads(json.dumps(request))
