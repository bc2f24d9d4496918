from __future__ import annotations

import gc
import os
import shutil
import subprocess
import types
from collections.abc import Iterator
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Before anything loads OpenMP: several tests run at once, and a thread that spins takes a core from another one.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest


def pytest_sessionstart(session: pytest.Session) -> None:
    """With `-n` the first process only hands tests out, and needs none of the imports, which take seconds."""
    if getattr(session.config.option, "dist", "no") != "no":
        return
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: its kernels then run on a CPU


gc.disable()  # until all is imported: Python would look through it for cycles again and again, for a second in all


def pytest_collection_finish(session: pytest.Session) -> None:
    """What has been imported and collected stays: a full search for cycles would take half a second."""
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny tensors: more threads only cost. So nobody need watch the cores here, either, by a thread that opens files
    between a test's two looks at threads and files (`tests/engines/test_wait_policy.py` has processes for it)."""
    import torch

    from engines.native import wait_policy
    from engines.replica import engine

    torch.set_num_threads(1)
    for module in (engine, wait_policy):
        module.watch_cores = lambda: None  # type: ignore[attr-defined]


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random tiny Qwen3 checkpoint without a tokenizer."""
    from tests.checkpoints import save_checkpoint

    directory = tmp_path_factory.mktemp("qwen3")
    save_checkpoint(directory, "qwen3")
    return str(directory)


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random tiny model over bytes, with its tokenizer."""
    from tests.checkpoints import save_text_checkpoint

    directory = tmp_path_factory.mktemp("text")
    save_text_checkpoint(directory)
    return str(directory)


@pytest.fixture
def forked_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas of a Fleet are forked from a process that has imported torch: each of them starts a second sooner."""
    from engines.fleet import launcher
    from tests.worlds import Popen, get_ready

    get_ready()
    names = types.SimpleNamespace(Popen=Popen, PIPE=subprocess.PIPE, STDOUT=subprocess.STDOUT)
    monkeypatch.setattr(launcher, "subprocess", names)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 64 KiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)
