"""Starts worlds of real processes for tests, with the environment that torchrun gives them."""

from __future__ import annotations

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent


def run_world(
    function: Callable[..., Any], num_ranks: int, *args: Any, timeout: float = 240.0, as_torchrun: bool = True
) -> list[Any]:
    """What `function(*args)` returned on each rank of a new world of `num_ranks` processes, one thread each.

    `function` is a module's, and its arguments and results are what `torch.save` can hold without pickled classes:
    tensors, numbers, strings, and lists and dicts of them. Without `as_torchrun` the one process gets no rank.
    Raises RuntimeError with the ends of all outputs when a rank fails, or when they take longer than `timeout` seconds.
    """
    assert as_torchrun or num_ranks == 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        torch.save(list(args), folder / "args.pt")
        source = Path(sys.modules[function.__module__].__file__ or "").resolve()
        port = str(_free_port())
        processes = []
        for rank in range(num_ranks):
            # As a module from ROOT, so that `algos` is the package and not the folder of its tests.
            command = [sys.executable, "-m", "tests.worlds", str(source), function.__name__, name, str(rank)]
            env = os.environ | {"OMP_NUM_THREADS": "1"}
            if as_torchrun:
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                env |= {"WORLD_SIZE": str(num_ranks), "LOCAL_WORLD_SIZE": str(num_ranks)}
            with open(folder / f"output_{rank}.txt", "wb") as output:
                processes.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
        problem = _wait(processes, timeout)
        if problem:
            ends = [f"--- rank {rank}\n{_tail(folder / f'output_{rank}.txt')}" for rank in range(num_ranks)]
            raise RuntimeError("\n".join([f"{function.__name__}: {problem}", *ends]))
        return [torch.load(folder / f"result_{rank}.pt", weights_only=True) for rank in range(num_ranks)]


def error_of(call: Any) -> str:
    """The type and message of what it raises; empty when it raises nothing."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _wait(processes: list[subprocess.Popen[bytes]], timeout: float) -> str | None:
    """None once all have ended well; else what went wrong. None of them runs on return."""
    deadline = time.monotonic() + timeout
    try:
        while True:
            codes = [process.poll() for process in processes]
            failed = [(rank, code) for rank, code in enumerate(codes) if code not in (None, 0)]
            if failed:
                return "; ".join(f"rank {rank} ended with code {code}" for rank, code in failed)
            if all(code == 0 for code in codes):
                return None
            if time.monotonic() > deadline:
                return f"ranks {[rank for rank, code in enumerate(codes) if code is None]} still ran after {timeout} s"
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _tail(path: Path, num_characters: int = 4000) -> str:
    return path.read_bytes()[-num_characters:].decode(errors="replace")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def _run_one(source: str, function: str, folder: str, rank: str) -> None:
    """A rank's side: calls the function of the file `source`, and leaves what it returns."""
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    result = getattr(module, function)(*torch.load(Path(folder) / "args.pt", weights_only=True))
    torch.save(result, Path(folder) / f"result_{rank}.pt")


if __name__ == "__main__":
    _run_one(*sys.argv[1:])
