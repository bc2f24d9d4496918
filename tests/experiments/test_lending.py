"""What serve.py lends: what is measured and refused before it serves, and the times by which rollouts are admitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from engines.memory.free_memory import Memory
from engines.replica.replica import StepOutput
from engines.serving.policies import MemoryView
from experiments.lending import LendingOptions, PassTimes, SharedMemory, WatchedMemory
from research.rose.memory import SharingOptions
from tests.worlds import ROOT, run_python


def times(chunk_s: float) -> PassTimes:
    """A row in 2 ms, 8 prompt tokens in `chunk_s`."""
    return PassTimes(rows=lambda rows: 0.001 * (1 + rows), chunk_tokens=8, chunk_s=chunk_s)


def test_times_of_passes_follow_what_was_measured() -> None:
    one = times(chunk_s=0.01)
    assert one.decode(0) == 0 == one.prefill(0)
    assert one.decode(4) == one.rows(4) and one.prefill(16) == pytest.approx(0.02)
    assert one.prefill(12) == pytest.approx(0.01 + (0.002 + 0.01) / 2)
    step = StepOutput(num_running=5, num_tokens=12, num_context_tokens=50, num_sampled=4)
    assert one.step(step) == pytest.approx(1.1 * (one.decode(4) + one.prefill(8)))
    falling = PassTimes(rows=lambda rows: 0.003 - 0.001 * rows, chunk_tokens=8, chunk_s=0.001)
    assert falling.decode(8) == falling.decode(1) and falling.prefill(4) == falling.rows(1), "noise makes no time less"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tpot_slo_ms": 1.5}, "tpot_slo_ms=1.5: the served model alone takes 2.0 ms"),
        ({"ttft_slo_ms": 2.5}, "ttft_slo_ms=2.5: the served model alone takes 3.0 ms"),
        ({"ttft_slo_ms": 40.0}, "rollout_chunk=512: takes 50.0 ms here"),
        ({}, ""),
    ],
)
def test_slos_that_cannot_be_kept_are_refused(qwen3: str, options: dict[str, Any], words: str) -> None:
    from engines import LLM

    shared = SharedMemory(LendingOptions(rollout_model=Path(qwen3), **options))
    LLM(qwen3, dtype="float64", kv_cache_bytes=2**20, pages=shared.pages)
    if words:
        with pytest.raises(ValueError, match=words):
            shared._check_slos(times(chunk_s=0.01), times(chunk_s=0.05))
    else:
        shared._check_slos(times(chunk_s=0.01), times(chunk_s=0.05))


def test_a_model_without_room_beside_the_other_is_refused(qwen3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from engines import LLM
    from engines.memory import free_memory

    shared = SharedMemory(LendingOptions(rollout_model=Path(qwen3)))
    llm = LLM(qwen3, dtype="float64", kv_cache_bytes=2**20, pages=shared.pages)
    monkeypatch.setattr(free_memory, "free_memory", lambda device: Memory("this host", 2**20))
    with pytest.raises(ValueError, match=r"rollout_model=.*: needs \d+ MiB beside .* available: 1 MiB. Lower"):
        shared.lender(llm)


def test_the_mean_use_is_that_of_serving() -> None:
    memory = WatchedMemory(SharingOptions())
    for now, used in ((0.0, 0), (0.5, 90), (1.0, 50), (2.0, 10)):
        memory.observe(MemoryView(now=now, num_pages=100, num_serving=used, num_rollout=0, budget=0))
    assert memory.kv_use() == pytest.approx((0.0 + 0.5) / 2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--tpot-slo-ms", "0.00001"], "--tpot-slo-ms=1e-05: the served model alone takes"),
        (["--rollout-model", "/nowhere"], "rollout-model='/nowhere': no config.json there"),
        (["--rollout-max-model-len", "1000"], "max_model_len=1000: the model's context is 256 tokens"),
        (["--rollout-seqs", "0"], "--rollout-seqs=0: must be an integer of at least 1"),
    ],
)
def test_serve_refuses_in_one_line(text_model: str, qwen3: str, arguments: list[str], words: str) -> None:
    command = [str(ROOT / "experiments/serve.py"), text_model, "--port", "0", "--kv-cache-mib", "8"]
    ended = run_python([*command, "--rollout-model", qwen3, *arguments])
    assert ended.returncode and not ended.stdout
    assert words in ended.stderr.splitlines()[-1] and "Traceback" not in ended.stderr
