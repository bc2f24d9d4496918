"""Two real models in one process: tokens under cuts, leases that end, stalls and refusals; and the command itself."""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import pytest

from engines import LLM, SamplingParams
from engines.serving.policies import MemoryView, ServingView
from experiments import figures
from experiments.rose import RoseConfig, draw
from experiments.rose_cells import Measured, models_of, save_models
from experiments.rose_lender import LenderOrders, LendingProcess
from experiments.rose_policies import halves, percentile, slo_of
from experiments.rose_serving import Lending, Models, Run, ServingProcess, digest
from research.rose.admission import EqualTurns
from research.rose.memory import ServingFirst, SharingOptions
from research.workloads.arrivals import Arrival
from tests.worlds import refused_by, run_main


class _Sometimes:
    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def admits(self, view: ServingView, seconds: float) -> bool:
        return self._rng.random() < 0.5


class _Cuts(ServingFirst):
    """Cuts the budget at each 20th look, too; the next phase gives it back."""

    def __init__(self, seed: int) -> None:
        super().__init__(SharingOptions(window_s=0.2))
        self._rng, self._num_looks = random.Random(seed), 0

    def cut(self, view: MemoryView) -> int | None:
        self._num_looks += 1
        return self._rng.randrange(view.budget) if view.budget and not self._num_looks % 20 else super().cut(view)


def lending(**changed: object) -> Lending:
    fields = {
        "admission": EqualTurns(),
        "memory": ServingFirst(),
        "prompt_tokens": 24,
        "new_tokens": lambda number: 5 + 7 * number % 41,
    }
    return Lending(**(fields | changed))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [Path(one) for one in save_models(tmp_path_factory.mktemp("rose"))]


def process(folders: list[Path], num_pages: int) -> ServingProcess:
    serving, rollout = folders
    models = Models(
        serving=serving,
        rollout=rollout,
        num_pages=num_pages,
        serving_tokens=64,
        rollout_tokens=16,
        rollout_seqs=6,
        max_model_len=256,
        lease_s=0.02,
        pace=None,
    )
    return ServingProcess(models)


def requests(count: int, seed: int) -> list[Arrival]:
    """More and fewer of them at a time: pages are taken back, and lent again."""
    rng, now, found = random.Random(seed), 0.0, []
    for number in range(count):
        now += rng.expovariate(200 if number % 20 < 12 else 20)
        one = Arrival(time_s=now, num_prompt_tokens=rng.randint(1, 90), num_generated_tokens=rng.randint(1, 30))
        found.append(one)
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_no_token_depends_on_the_other_model(folders: list[Path], seed: int) -> None:
    both = process(folders, num_pages=24)
    arrivals = requests(60, seed)
    alone = both.run(arrivals, None, seed=seed)
    some = lending(admission=_Sometimes(seed), memory=_Cuts(seed), stall_s=0.1, phase_s=0.1)
    found = both.run(arrivals, some, seed=seed, num_rolled=40)
    assert found.lent.num_cuts and found.lent.num_taken_back, "nothing was taken back"
    assert found.served == alone.served
    with closing(LLM(folders[1], dtype="float64", seed=1, kv_cache_bytes=2**22)) as llm:
        for number, tokens in found.rolled.items():
            rng = random.Random(number)
            prompt = [rng.randrange(2, 512) for _ in range(24)]
            params = SamplingParams(max_tokens=5 + 7 * number % 41, ignore_eos=True)
            (plain,) = llm.generate([prompt], params, prompt_uids=[number])
            assert digest(plain.outputs[0].token_ids) == tokens, number


def test_the_rollout_alone_uses_the_whole_machine(folders: list[Path]) -> None:
    found = process(folders, num_pages=200).run([], lending(), seed=0, num_rolled=6)
    assert found.lent.num_tokens > 50 and not found.serving_s
    assert found.lent.num_taken_back == 0


def test_the_command_measures_every_policy_and_a_run_at_its_own_speed() -> None:
    """A handful of requests on two ranks: which figures there are, not what they are."""
    options = ["--requests", "12", "--runs", "1", "--cells", "conversation", "full", "--full-rate", "2"]
    options += ["--parts", "cells", "live", "borrowed", "--policies", "none", "dual", "static_split"]
    options += ["--own", "1", "--lenders", "1", "--sequences", "24", "--borrowed-scale", "1"]
    found = run_main("rose", options, num_ranks=2)
    assert found["tokens_equal"] and found["compared"] > 12 * 3 + 24 * 3
    for cell in ("conversation", "full"):
        assert {*found["slo"][cell]} == {"alone", "none", "dual", "static_split"}
        assert {*found["harvest"][cell]} == {"none", "dual", "static_split"}
        assert found["harvest"][cell]["none"] > 0.1
        assert found["cells"][cell]["dual"]["of_alone"] >= 0  # on a busy machine, too, as below
    assert found["live"]["rollout_tokens_per_s"] >= 0
    for tier in ("paced", "sim"):  # on a busy machine SLOs may leave no room for the rollout
        assert found["borrowed"][tier]["alone"]["lent_s_mean"] == 0 <= found["borrowed"][tier]["dual"]["lent_s_mean"]
    for compared in found["borrowed"]["sim_over_paced"].values():
        assert {*compared} >= {"rollout_s", "most_s", "ttft_p99", "tpot_p99"}


def test_more_ranks_than_runs() -> None:
    options = ["--requests", "5", "--runs", "1", "--cells", "conversation", "--parts", "cells", "--policies", "dual"]
    found = run_main("rose", options, num_ranks=2)
    assert found["tokens_equal"] and {*found["slo"]["conversation"]} == {"alone", "dual"}


def test_the_figure_says_what_was_paced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[plt.Figure] = []
    monkeypatch.setattr(figures.plt, "close", drawn.append)
    one = {"ttft_p99": 1.0, "tpot_p99": 1.0}
    measured = Measured(
        slo={"code": {"alone": one, "dual": one}},
        limits={"code": {"ttft_slo_ms": 1.0, "tpot_slo_ms": 1.0}},
        harvest={"code": {"dual": 1.0}},
    )
    for profile, tier in (("h100-8b-tp1", "paced, H100, 8B"), ("a40-qwen3-8b-tp1", "paced, A40, Qwen3-8B")):
        draw(RoseConfig(profile=profile, figure=tmp_path / "cells.png"), measured)
        assert drawn.pop().get_suptitle().endswith(f"({tier})")


def test_a_serving_process_that_is_killed_is_named(folders: list[Path]) -> None:
    config = RoseConfig(traces=None, requests=5)
    orders = LenderOrders(
        models=models_of(config, folders, None), lending=lending, arrivals=config.arrivals_of_lender(0), seed=0
    )
    killed = LendingProcess(orders, "serving process 3")
    assert killed.address().startswith("http://127.0.0.1:")
    killed.close()
    for call in (killed.result, lambda: killed.begin(0.0), killed.end):
        with pytest.raises(RuntimeError, match="serving process 3: has ended with code -9"):
            call()


def test_what_is_computed_of_latencies() -> None:
    assert percentile([3.0, 1.0, 2.0], 0.99) == 3.0 and percentile(range(1, 201), 0.99) == 198
    run = Run(ttft=[1.0, 2.0], gaps=[[0.1, 0.3], [0.2]])
    assert slo_of([run]) == (3.2, 0.8)
    assert halves([run]) == 2.0


def test_bad_input_of_the_part_with_lenders() -> None:
    assert "sequences=64: the own=4 replicas run all of them at once" in refused_by("rose", ["--sequences", "64"])


def test_requests_are_those_of_the_trace_shortened(tmp_path: Path) -> None:
    rows = "".join(f"2023-11-16 18:15:{second:02}.0000000,{80 + second},{17}\n" for second in range(50))
    for name in ("conv", "code"):
        (tmp_path / f"AzureLLMInferenceTrace_{name}.csv").write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    config = RoseConfig(traces=tmp_path, requests=20, runs=2)
    first, second = config.arrivals("code", 0), config.arrivals("code", 1)
    assert [one.time_s for one in first[:3]] == [0.0, 0.125, 0.25] == [one.time_s for one in second[:3]]
    assert (first[0].num_prompt_tokens, second[0].num_prompt_tokens, first[0].num_generated_tokens) == (10, 12, 2)
    full = RoseConfig(traces=tmp_path, requests=10, runs=1, full_rate=3).arrivals("full", 0)
    assert len(full) == 30 and full[3].time_s == pytest.approx(0.125)
    with pytest.raises(ValueError, match="requests=30: the trace has too few"):
        RoseConfig(traces=tmp_path, requests=30, runs=2).arrivals("conversation", 1)
    with pytest.raises(ValueError, match=r"traces=.*has no Azure"):
        RoseConfig(traces=tmp_path / "absent")
