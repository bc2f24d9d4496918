"""Loads a serving endpoint with OpenAI's client, as a trace of requests says, while others leave or send nonsense.

    python experiments/serving_load.py runs/models/tiny
    python experiments/serving_load.py runs/models/tiny --trace AzureLLMInferenceTrace_conv.csv --dtype float64 \
        --requests 2000 --killed 50 --malformed 1000
    python experiments/serving_load.py path/to/model --url http://127.0.0.1:8001 --killed 0 --malformed 0

Starts `serve.py`, or, with --url, measures a server of OpenAI's API that runs already: vLLM's, say. Clients and server
share the machine. With float64 each answer is compared with that of `LLM.generate`. The last line of stdout is JSON.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from engines.config import DType
from engines.constraints import Count, Positive, WholeNumber, check_fields
from experiments import launch
from experiments.serving_clients import Timed, malformed
from research.workloads.arrivals import Arrival, PoissonArrivals, read_trace
from research.workloads.lengths import LogNormalLengths

if TYPE_CHECKING:
    import httpx2
    from openai import AsyncOpenAI

PROMPT, GENERATED = (
    LogNormalLengths(median=median, sigma=sigma, cap=cap)
    for median, sigma, cap in ((1000, 0.9, 14000), (130, 0.9, 1000))
)
"""About those of the Azure conversation trace of 2023."""


@dataclass(frozen=True, kw_only=True)
class LoadConfig:
    """Load a serving endpoint as a trace says: latency, throughput, and what clients that leave or err change."""

    model: Annotated[Path, tyro.conf.Positional]
    """Folder of the checkpoint, which is served; with --url, the name under which requests ask for it."""
    url: str | None = None
    """A server that runs already, as http://127.0.0.1:8001; by default serve.py is started."""
    trace: Path | None = None
    """An Azure LLM inference trace (CSV); by default arrivals and lengths are drawn."""
    requests: Count = 300
    """Requests, from the first of the trace on."""
    rate: Positive = 8.0
    """Requests per second on average: the trace's gaps are stretched to it."""
    shorten: Count = 8
    """Divides the numbers of tokens."""
    killed: WholeNumber = 8
    """Of the requests, those whose client leaves at half of the tokens; and streams that leave together afterwards."""
    malformed: WholeNumber = 50
    """Bodies beside them that are no requests."""
    dtype: DType = "float32"
    """Of the server that is started."""
    seed: int = 0
    """Of all that is drawn."""

    def __post_init__(self) -> None:
        check_fields(self, "")
        if self.killed > self.requests:
            raise ValueError(f"killed={self.killed}: must be at most requests={self.requests}")

    def arrivals(self) -> list[Arrival]:
        if self.trace is None:
            drawn = PoissonArrivals(rate=self.rate, prompt=PROMPT, generated=GENERATED)
            found = drawn.draw(2 * self.requests / self.rate + 60, self.seed)[: self.requests]
        else:
            found = read_trace(self.trace)[: self.requests]
        if len(found) < self.requests:
            raise ValueError(f"requests={self.requests}: there are {len(found)}; ask for fewer")
        return found


def main() -> dict[str, Any]:
    config = launch.options(LoadConfig)
    if importlib.util.find_spec("openai") is None:
        raise ValueError("serving_load.py: needs OpenAI's client; pip install openai")
    arrivals = config.arrivals()
    with served(config) as (url, process):
        result, answered = asyncio.run(Load(config, url).run(arrivals))
        if process is not None:
            os.kill(process.pid, signal.SIGTERM)
            told, _ = process.communicate(timeout=120)
            if process.returncode:
                raise ValueError(f"serve.py has ended with code {process.returncode}; see above")
            result["server"] = json.loads(told.splitlines()[-1])["requests"]
    if config.url is None and config.dtype == "float64":
        result["tokens_equal"] = tokens_equal(config, answered)
    return result


@contextmanager
def served(config: LoadConfig) -> Iterator[tuple[str, subprocess.Popen[str] | None]]:
    if config.url is not None:
        yield config.url.rstrip("/"), None
        return
    script = Path(__file__).with_name("serve.py")
    command = [sys.executable, str(script), str(config.model), "--port", "0", "--dtype", config.dtype]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = re.search(r" at (\S+)/v1$", process.stdout.readline().strip())
            if found is None:
                raise ValueError("serve.py has not started; see above")
            yield found[1], process
        finally:
            process.kill()


class Load:
    """Clients of one server."""

    def __init__(self, config: LoadConfig, url: str) -> None:
        self._config, self._url, self._rng = config, url, random.Random(config.seed)
        self._name = str(config.model)
        self._outcomes: Counter[str] = Counter()

    async def run(self, arrivals: list[Arrival]) -> tuple[dict[str, Any], list[Timed]]:
        import httpx2
        from openai import AsyncOpenAI

        config = self._config
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            httpx2.AsyncClient(limits=limits, timeout=600) as http,
            AsyncOpenAI(base_url=f"{self._url}/v1", api_key="none", http_client=http, max_retries=3) as client,
        ):
            cards = (await http.get(f"{self._url}/v1/models")).json()["data"]
            context = next(int(card["max_model_len"]) for card in cards if card["id"] == self._name)
            requests = [self._request(index, one, context) for index, one in enumerate(arrivals)]
            for index in self._rng.sample(range(len(requests)), config.killed):
                requests[index].leaves_at = 1 + requests[index].num_tokens // 2
            await Timed(prompt=[50] * 8, num_tokens=8, seed=0).run(client, self._name)  # warms up
            factor = len(arrivals) / config.rate / max(arrivals[-1].time_s, 1e-9)
            start = time.monotonic()
            seconds = arrivals[-1].time_s * factor
            tasks = [
                self._at(start + one.time_s * factor, request.run(client, self._name))
                for one, request in zip(arrivals, requests, strict=True)
            ]
            wrong = [
                self._at(start + self._rng.uniform(0, seconds), self._send_nonsense(http, index))
                for index in range(config.malformed)
            ]
            await asyncio.gather(*tasks, *wrong)
            lasted = time.monotonic() - start
            freed_s = await self._leave_together(client, http, context) if config.killed and not config.url else None
        return self._result(requests, lasted, freed_s), [one for one in requests if one.outcome == "ok"]

    @staticmethod
    async def _at(moment: float, act: Any) -> None:
        await asyncio.sleep(moment - time.monotonic())
        await act

    def _request(self, index: int, one: Arrival, context: int) -> Timed:
        num_new = min(max(2, one.num_generated_tokens // self._config.shorten), context // 2)
        num_prompt = min(max(1, one.num_prompt_tokens // self._config.shorten), context - num_new - 1)
        prompt = [self._rng.randrange(32, 127) for _ in range(num_prompt)]
        return Timed(prompt=prompt, num_tokens=num_new, seed=index)

    async def _send_nonsense(self, http: httpx2.AsyncClient, index: int) -> None:
        path, body = malformed(random.Random(f"{self._config.seed}/{index}"))
        try:
            answer = await http.post(self._url + path, content=body, headers={"content-type": "application/json"})
            is_right = 400 <= answer.status_code < 500 and bool(answer.json()["error"]["message"])
        except Exception as error:  # no answer, or one in another form
            is_right = False
            print(f"malformed: {path}, {body[:100]!r}: {error!r} ({error.__cause__!r})", file=sys.stderr)
        self._outcomes["refused" if is_right else "malformed_wrong"] += 1

    async def _leave_together(self, client: AsyncOpenAI, http: httpx2.AsyncClient, context: int) -> float:
        """Returns the seconds from the end of the last connection until all blocks are free."""
        prompts = [[32 + index % 90] * (context // 4) for index in range(self._config.killed)]
        streams = [Timed(prompt=one, num_tokens=context // 2, seed=0, leaves_at=4) for one in prompts]
        await asyncio.gather(*(one.run(client, self._name) for one in streams))
        start = time.monotonic()
        while True:
            text = (await http.get(f"{self._url}/metrics")).text
            held, free = (float(value) for value in re.findall(r"^curtail_kv_blocks(?:_free)? (\S+)", text, re.M))
            if held == free:
                return time.monotonic() - start
            await asyncio.sleep(0.005)

    def _result(self, requests: list[Timed], lasted: float, freed_s: float | None) -> dict[str, Any]:
        outcomes = Counter(one.outcome for one in requests)
        done = [one for one in requests if one.outcome == "ok"]
        for error in {one.error for one in requests if one.error}:
            print(f"failed: {error}", file=sys.stderr)
        return {
            "experiment": "serving_load",
            "tier": "live",
            "requests": len(requests),
            "failed": outcomes["failed"],
            "killed": outcomes["killed"],
            "freed_s": None if freed_s is None else round(freed_s, 4),
            "malformed": self._outcomes["refused"],
            "malformed_wrong": self._outcomes["malformed_wrong"],
            "ttft_ms": percentiles([one.ttft_s for one in done]),
            "tpot_ms": percentiles([one.tpot_s for one in done]),
            "prompt_tokens": sum(len(one.prompt) for one in done),
            "tokens": sum(len(one.token_ids) for one in done),
            "tokens_per_second": round(sum(len(one.token_ids) for one in requests) / lasted, 1),
            "seconds": round(lasted, 1),
        }


def percentiles(seconds: list[float]) -> dict[str, float]:
    ranked = sorted(seconds) or [0.0]
    return {
        f"p{share}": round(1000 * ranked[min(len(ranked) - 1, len(ranked) * share // 100)], 2) for share in (50, 99)
    }


def tokens_equal(config: LoadConfig, answered: list[Timed]) -> bool:
    """Whether the answers are those of `LLM.generate`."""
    from engines import LLM, SamplingParams

    launch.share_cores()
    params = [SamplingParams(seed=one.seed, max_tokens=one.num_tokens, ignore_eos=True) for one in answered]
    outputs = LLM(config.model, dtype=config.dtype).generate([one.prompt for one in answered], params)
    return [one.outputs[0].token_ids for one in outputs] == [one.token_ids for one in answered]


if __name__ == "__main__":
    launch.run(main)
