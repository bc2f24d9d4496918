from __future__ import annotations

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: its kernels then run on a CPU

from tests.checkpoints import save_checkpoint


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Tiny tensors: more threads only cost."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A random tiny Qwen3 checkpoint without a tokenizer."""
    directory = tmp_path_factory.mktemp("qwen3")
    save_checkpoint(directory, "qwen3")
    return str(directory)
