"""Completes prompts with a Hugging Face checkpoint: from arguments, a JSONL file or stdin, to JSONL.

    python experiments/generate.py runs/models/tiny "12+34=" "5+6=" --temperature 0
    echo '{"prompt": "12+34="}' | python experiments/generate.py runs/models/tiny --n 4
    torchrun --standalone --nproc-per-node 2 -- experiments/generate.py MODEL --input in.jsonl --output out.jsonl --n 4

(Without the lone `--`, torchrun takes `--n` for an abbreviation of its own options.)

A JSONL line is an object with `prompt` (text) or `prompt_token_ids`, or a plain string; other fields are passed on.
Lines of the output stand in the order of the prompts. Without --output they go to stdout, before the closing JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import tyro
from tqdm import tqdm

from engines import LLM, RequestOutput, SamplingParams
from engines.parallel.collectives import Communicator, SingleRank, TorchGroup
from engines.parallel.groups import GroupCache
from engines.parallel.layout import nested_layout
from engines.sequence import Finished
from experiments import launch
from experiments.engine_options import EngineOptions


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Complete prompts with a Hugging Face checkpoint (Llama, Qwen2/2.5, Qwen3)."""

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint."""
    prompts: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Prompts as text; without any, and without --input, JSONL is read from stdin."""
    input: Path | None = None
    """JSONL file of prompts."""
    output: Path | None = None
    """JSONL file for the completions; stdout by default."""
    run_seed: int = 0
    """Of every sampled token, together with the prompt's place; --seed makes tokens independent of the place."""
    tensor_parallel_size: int = 1
    """Ranks that hold one copy of the model, in shards; the rest is data parallel."""
    engine: Annotated[EngineOptions, tyro.conf.arg(name="")] = field(default_factory=EngineOptions)
    sampling: Annotated[SamplingParams, tyro.conf.arg(name="")] = field(
        default_factory=lambda: SamplingParams(max_tokens=128)
    )

    def __post_init__(self) -> None:
        if self.prompts and self.input is not None:
            raise ValueError(f"input={str(self.input)!r}: prompts were given as arguments too; use one of the two")
        if self.output is not None and not self.output.parent.is_dir():
            raise ValueError(f"output={str(self.output)!r}: there is no folder {str(self.output.parent)!r}; make it")
        if self.output is not None and self.output.is_dir():
            raise ValueError(f"output={str(self.output)!r}: is a folder; name a file in it")


def read_prompts(lines: Iterable[str], source: str) -> list[dict[str, Any]]:
    """One record per line that is not blank. ValueError names file and line of one that cannot be read."""
    records = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f'{source}:{number}: not valid JSON ({error}); a line is {{"prompt": "..."}} or a string'
            ) from None
        record = {"prompt": record} if isinstance(record, str) else record
        ids = record.get("prompt_token_ids") if isinstance(record, dict) else None
        is_ids = isinstance(ids, list) and len(ids) > 0 and all(isinstance(token, int) for token in ids)
        if not is_ids and not (isinstance(record, dict) and isinstance(record.get("prompt"), str)):
            raise ValueError(f"{source}:{number}: needs `prompt`, a string, or `prompt_token_ids`, integers")
        if not is_ids and not _is_utf8(record["prompt"]):
            raise ValueError(f"{source}:{number}: `prompt` holds half a surrogate pair, which is no text")
        records.append(record)
    if not records:
        raise ValueError(f"{source}: holds no prompts; give at least one")
    return records


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _load_records(config: GenerateConfig, group: Communicator) -> list[dict[str, Any]]:
    if config.prompts:
        return [{"prompt": prompt} for prompt in config.prompts]
    if config.input is not None:
        if not config.input.is_file():
            raise FileNotFoundError(f"input={str(config.input)!r}: no such file")
        try:
            return read_prompts(config.input.read_text().split("\n"), str(config.input))
        except UnicodeDecodeError as error:
            raise ValueError(f"input={str(config.input)!r}: is not UTF-8 ({error})") from None
    # torchrun gives stdin to no particular rank: the first reads it for all.
    text = sys.stdin.read() if group.rank == 0 else ""
    return read_prompts(group.all_gather_bytes(text.encode())[0].decode().split("\n"), "stdin")


def _lines(records: list[dict[str, Any]], outputs: list[RequestOutput]) -> Iterable[str]:
    for record, output in zip(records, outputs, strict=True):
        for completion in output.outputs:
            yield json.dumps(
                {
                    **record,
                    "index": completion.index,
                    "text": completion.text,
                    "finish_reason": completion.finish_reason,
                    "token_ids": completion.token_ids,
                    "logprobs": [round(value, 6) for value in completion.logprobs],
                }
            )


def main() -> dict[str, Any]:
    with launch.told_once():
        config = tyro.cli(GenerateConfig)
    launch.share_cores()
    group: Communicator = SingleRank()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", launch.local_rank())
        torch.cuda.set_device(device)
    groups: GroupCache | None = None
    layout = nested_layout(range(launch.num_ranks()), config.tensor_parallel_size)
    if launch.num_ranks() > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        groups = GroupCache(TorchGroup(), [layout], device=device)
        group = groups.world
    records = _load_records(config, group)
    llm = LLM(
        config.model,
        device=device,
        world=groups,
        layout=layout,
        **asdict(replace(config.engine, seed=config.run_seed)),
    )
    launch.tell_engine(llm)
    start = time.perf_counter()
    expected = len(range(0, len(records) * config.sampling.n, len(layout.replicas)))
    with tqdm(total=expected, desc="generate", unit="seq", disable=group.rank > 0) as progress:
        num_tokens = 0

        def show(finished: Finished) -> None:
            nonlocal num_tokens
            num_tokens += len(finished.completion.token_ids)
            progress.update()
            progress.set_postfix(tok_s=f"{num_tokens / (time.perf_counter() - start):.0f}")

        outputs = llm.generate(
            [record.get("prompt_token_ids") or record["prompt"] for record in records],
            config.sampling,
            on_finished=show,
        )
    seconds = time.perf_counter() - start
    if group.rank == 0:
        text = "".join(line + "\n" for line in _lines(records, outputs))
        if config.output is not None:
            config.output.write_text(text)
        else:
            sys.stdout.write(text)
    if group.size > 1:
        group.barrier()
        dist.destroy_process_group()
    total = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
    return {
        "experiment": "generate",
        "prompts": len(records),
        "completions": len(records) * config.sampling.n,
        "tokens": total,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(total / seconds, 1),
        "output": str(config.output) if config.output else None,
    }


if __name__ == "__main__":
    launch.run(main)
