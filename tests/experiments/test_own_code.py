"""A checkpoint that brings Python code of its own: the code is never run, and nothing is asked on stdin."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.checkpoints import save_text_checkpoint
from tests.worlds import ROOT, run_python

OWN_CODE = """
from pathlib import Path
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
Path({ran!r}).touch()
class OwnConfig(Qwen3Config):
    model_type = "own"
class OwnModel(Qwen3ForCausalLM):
    config_class = OwnConfig
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
"""
ENTRIES = {
    "generate": ["-c", "import sys; from engines import LLM; LLM(sys.argv[1]).generate(['hello'])"],
    "train": [str(ROOT / "experiments/train.py"), "--rollout.kv-cache-mib", "8", "--wandb", "off", "--model"],
    "widen": ["-c", "import sys; from algos.widening import widen; widen(sys.argv[1], sys.argv[1] + '-wide', 2)"],
    "peer": [
        "-c",
        "import sys, torch; from experiments.bench.peers import HuggingFacePeer;"
        "HuggingFacePeer(sys.argv[1], 'float32', torch.device('cpu'))",
    ],
}


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A checkpoint whose `auto_map` names code in its folder, which leaves the file `ran`."""
    directory = tmp_path / "model"
    save_text_checkpoint(directory)
    (directory / "own.py").write_text(OWN_CODE.format(ran=str(tmp_path / "ran")))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    edit(directory / "config.json", auto_map=auto_map)
    edit(directory / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "own.OwnTokenizer"]})
    return directory


def run(entry: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Says yes to whatever is asked."""
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return run_python([*ENTRIES[entry], str(folder)], stdin="y\n" * 50, env=environment, cwd=folder.parent)


@pytest.mark.parametrize("entry", ENTRIES)
def test_what_needs_its_own_code_is_refused(folder: Path, entry: str) -> None:
    edit(folder / "config.json", model_type="own")
    edit(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer")
    done = run(entry, folder)
    assert done.returncode != 0 and not (folder.parent / "ran").exists()
    assert f"model={str(folder)!r}: an auto_map in its JSON files wants Python code" in done.stderr, done.stderr[-3000:]
    assert "[y/N]" not in done.stdout + done.stderr


def test_what_transformers_knows_is_read_by_its_own_classes(folder: Path) -> None:
    done = run("generate", folder)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not (folder.parent / "ran").exists()
