"""Completes prompts with a Hugging Face checkpoint: from arguments, a JSONL file or stdin, to JSONL.

    python experiments/generate.py runs/models/tiny "12+34=" "5+6=" --temperature 0
    echo '{"prompt": "12+34="}' | python experiments/generate.py runs/models/tiny --n 4
    python experiments/generate.py path/to/Qwen3-0.6B "What is 12+34?" --chat --system-prompt "Be brief."
    torchrun --standalone --nproc-per-node 2 -- experiments/generate.py MODEL --input in.jsonl --output out.jsonl --n 4

(Without the lone `--`, torchrun takes `--n` for an abbreviation of its own options.)

A JSONL line is an object with `prompt` (text), `messages` (a conversation, which the model's chat template renders) or
`prompt_token_ids`, or a plain string. With `--chat` a text is a user's message, too, also one in the arguments. Other
fields are copied to the output, so they must not have the names of a completion's fields.
Output lines are in the order of the prompts. Without --output they go to stdout, before the final JSON line. With
--output, completions are kept in `<output>.partial` as they end, and --resume continues an interrupted run.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from engines.lifetime import imports
from engines.sequence import SamplingParams
from experiments import launch
from experiments.chat_options import ChatOptions
from experiments.engine_options import DraftPolicyName, EngineOptions


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """Complete prompts with a Hugging Face checkpoint (Llama, Qwen2/2.5, Qwen3)."""

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint, or of a LoRA adapter in peft's format, or a name of the hub (Qwen/Qwen3-0.6B: from its
    local cache, or downloaded)."""
    prompts: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Prompts as text; without any, and without --input, JSONL is read from stdin."""
    base_model: Path | None = None
    """Folder of an adapter's base, or a name of the hub; by default what the adapter names."""
    input: Path | None = None
    """JSONL file of prompts."""
    output: Path | None = None
    """JSONL file for the completions; stdout by default. Until the end they are in `<output>.partial`."""
    resume: bool = False
    """Continue from the `<output>.partial` of the same command, which was interrupted."""
    run_seed: int = 0
    """Seed of every sampled token, together with the prompt's position; with --seed the position has no effect."""
    tensor_parallel_size: int = 1
    """Ranks that hold one copy of the model, in shards; the rest is data parallel."""
    draft_policy: DraftPolicyName = "marginal-gain"
    """What decides adaptive lengths of drafts: marginal-gain drafts as long as tokens per second are expected to rise,
    thresholds give all drafts one length by the batch size and the acceptance so far."""
    conversation: Annotated[ChatOptions, tyro.conf.arg(name="")] = field(default_factory=ChatOptions)
    engine: Annotated[EngineOptions, tyro.conf.arg(name="")] = field(default_factory=EngineOptions)
    sampling: Annotated[SamplingParams, tyro.conf.arg(name="")] = field(
        default_factory=lambda: SamplingParams(max_tokens=128)
    )

    def __post_init__(self) -> None:
        if not self.prompts and self.input is None and sys.stdin is None:
            raise ValueError("stdin: is closed; give prompts as arguments, or --input")
        if self.prompts and self.input is not None:
            raise ValueError(f"input={str(self.input)!r}: prompts were given as arguments too; use one of the two")
        for name, path in (("model", self.model), ("input", self.input), ("output", self.output)):
            if path is not None:
                _check_name(name, path, path)
        if self.output is not None and not self.output.parent.is_dir():
            raise ValueError(f"output={str(self.output)!r}: there is no folder {str(self.output.parent)!r}; make it")
        if self.output is not None and self.output.is_dir():
            raise ValueError(f"output={str(self.output)!r}: is a folder; name a file in it")
        if self.output is not None:
            target = self.output.resolve()
            _check_name("output", self.output, target.with_name(f".{target.name}.partial"))  # of `replace_text`
        if self.output is not None and not _is_replaceable(self.output):
            raise ValueError(f"output={str(self.output)!r}: is no file to replace at the end; redirect stdout instead")
        if self.output is not None and self.input is not None and self.output.resolve() == self.input.resolve():
            raise ValueError(f"output={str(self.output)!r}: is the input; name another file")
        if self.resume and self.output is None:
            raise ValueError("resume: without --output nothing was kept to go on with; leave it out")


def _check_name(option: str, path: Path, derived: Path) -> None:
    """Raises ValueError if no file can have the name `derived`, which is `path` or is made from it."""
    try:
        derived.stat()
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ValueError(f"{option}={str(path)!r}: {error.strerror} ({str(derived)!r}); give another") from None


def _is_replaceable(path: Path) -> bool:
    """Whether `path` is no device, pipe, or open stdout or stderr: /dev/stdout can be another name of a user's file."""
    place = os.path.abspath(path)
    if place.startswith(("/dev/", "/proc/")) and not place.startswith("/dev/shm/"):
        return False
    return not path.exists() or (path.is_file() and not any(_is_open_as(number, path) for number in (1, 2)))


def _is_open_as(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:  # it is closed
        return False


def main() -> dict[str, Any]:
    config = launch.options(GenerateConfig)
    launch.end_on_signals(lambda: "interrupted: nothing was generated")
    with imports():
        from experiments.generation import generate  # its imports take seconds; --help and typos need not wait

    return generate(config)


if __name__ == "__main__":
    try:
        launch.run(main)
    except BrokenPipeError:  # the reader of stdout has closed it
        os._exit(128 + signal.SIGPIPE)
