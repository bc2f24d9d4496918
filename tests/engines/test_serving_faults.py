"""A server whose clients leave, flood it or read nothing, whose engine fails, and that is told to end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engines import LLM, SamplingParams
from engines.sequence import SequenceState
from engines.serving.server import bind
from engines.serving.service import ServingLimits
from tests.serving import Gate, Running, serving, until
from tests.worlds import ROOT, Python, refused_by


def asked(index: int, num_tokens: int, **more: Any) -> dict[str, Any]:
    """A body of its own seed, which gives so many tokens."""
    body = {"prompt": f"{index}+34=", "seed": index, "max_tokens": num_tokens, "ignore_eos": True}
    return {**body, "return_token_ids": True, **more}


def expected(llm: LLM, body: dict[str, Any]) -> list[int]:
    params = SamplingParams(seed=body["seed"], max_tokens=body["max_tokens"], ignore_eos=True)
    return llm.generate([body["prompt"]], params)[0].outputs[0].token_ids


def post(running: Running, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{running.url}/v1/completions", json=body, timeout=60, verify=False)


@contextmanager
def stream(running: Running, body: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
    """The chunks of a stream; its end closes the connection."""
    with httpx.stream(
        "POST", f"{running.url}/v1/completions", json={**body, "stream": True}, timeout=60, verify=False
    ) as answer:
        events = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        yield (json.loads(event) for event in events if event != "[DONE]")


def stream_tokens(running: Running, body: dict[str, Any], most: int = 1000) -> list[int]:
    """Leaves once it has `most` tokens."""
    tokens: list[int] = []
    with stream(running, body) as chunks:
        while len(tokens) < most and (chunk := next(chunks, None)):
            tokens += chunk["choices"][0]["token_ids"]
    return tokens


def test_clients_that_leave_free_their_blocks_and_change_nobody_s_tokens(text_model: str) -> None:
    gate = Gate(1, 20, 70)
    leaving = [asked(index, 200, prompt=f"{index} " * 100) for index in range(10)]
    staying = [asked(index, 100) for index in range(10, 30)]
    with (
        serving(LLM(text_model, dtype="float64", hidden_stop=gate, kv_cache_bytes=2**23)) as running,
        ThreadPoolExecutor(30) as clients,
    ):
        left = [clients.submit(stream_tokens, running, body, 5) for body in leaving]
        stayed = [clients.submit(stream_tokens, running, body) for body in staying]
        until(lambda: running.service.num_calls == 30, "all have come")
        gate.open(1)
        assert all(5 <= len(one.result()) <= 20 for one in left)
        until(lambda: running.outcomes.get("client_left") == 10, "the server has seen them leave")
        until(lambda: gate.waits_at == 20, "nobody has ended")
        gate.open(20)
        until(lambda: gate.waits_at == 70, "the others have gone on")
        num_blocks, num_free = running.blocks
        assert num_blocks - num_free == 20 * 5, "each of the others holds 75 tokens or so, in blocks of 16"
        gate.open(70)
        found = [one.result() for one in stayed]
        until(lambda: running.blocks[0] == running.blocks[1], "all blocks are free")
        until(lambda: sum(running.outcomes.values()) == 30, "all answers have been written")
        assert running.outcomes == {"client_left": 10, "ok": 20}
    alone = LLM(text_model, dtype="float64", kv_cache_bytes=2**23)
    assert found == [expected(alone, body) for body in staying]


def test_a_client_that_leaves_before_a_whole_answer_is_aborted_too(text_model: str) -> None:
    gate = Gate(5)
    with serving(LLM(text_model, hidden_stop=gate, kv_cache_bytes=2**23)) as running:
        with socket.create_connection(("127.0.0.1", running.server.port)) as client:
            send(client, asked(0, 400))
            until(lambda: gate.waits_at == 5, "it runs")
        until(lambda: running.outcomes.get("client_left") == 1, "the server has seen it leave")
        gate.open(5)
        until(lambda: running.blocks[0] == running.blocks[1], "its blocks are free")
        assert running.service.load.num_steps < 100


def send(client: socket.socket, body: dict[str, Any]) -> None:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n"
    client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + data)


def test_a_flood_gets_429_and_what_was_accepted_is_answered(text_model: str) -> None:
    gate = Gate(1)
    with (
        serving(LLM(text_model, dtype="float64", hidden_stop=gate, kv_cache_bytes=2**23), max_sequences=4) as running,
        ThreadPoolExecutor(30) as clients,
    ):
        bodies = [asked(index, 10) for index in range(4)]
        accepted = [clients.submit(post, running, body) for body in bodies]
        until(lambda: running.service.num_calls == 4, "the server is full")
        refused = list(clients.map(lambda index: post(running, asked(index, 10)), range(20)))
        assert {one.status_code for one in refused} == {429}
        assert {(one.headers["retry-after"], one.json()["error"]["code"]) for one in refused} == {("1", "overloaded")}
        too_many = post(running, asked(0, 10, n=5))
        assert too_many.status_code == 400 and too_many.json()["error"]["param"] == "n"
        patient = clients.submit(
            running.client(max_retries=5).completions.create, model="tiny", prompt="x", max_tokens=3
        )
        until(lambda: running.outcomes.get("overload", 0) >= 21, "it was refused once")
        gate.open(1)
        found = [one.result().json()["choices"][0]["token_ids"] for one in accepted]
        assert patient.result().choices[0].finish_reason
        assert post(running, asked(0, 10, n=4)).status_code == 200
    assert found == [expected(LLM(text_model, dtype="float64", kv_cache_bytes=2**23), body) for body in bodies]


@pytest.mark.parametrize(
    "limits", [{"max_unread_tokens": 33, "stall_s": 600}, {"max_unread_tokens": 10**6, "stall_s": 1}]
)
def test_a_client_that_reads_nothing_is_aborted_and_holds_up_nobody(text_model: str, limits: dict[str, Any]) -> None:
    gate = Gate(1, 300)
    with (
        serving(LLM(text_model, hidden_stop=gate, max_num_seqs=16), **limits) as running,
        ThreadPoolExecutor(1) as clients,
    ):
        with socket.socket() as stalled:
            stalled.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            stalled.connect(("127.0.0.1", running.server.port))
            send(stalled, asked(0, 480, n=12, logprobs=20, stream=True))
            until(lambda: running.service.num_calls == 1, "it has come")
            other = clients.submit(stream_tokens, running, asked(1, 100))
            until(lambda: running.service.num_calls == 2, "the other one has come")
            gate.open(1)
            if limits["stall_s"] == 1:
                gate.open(300)
            assert len(other.result()) == 100, "another one is served meanwhile"
            if limits["stall_s"] > 1:
                service, most = running.service, 100 + 12 * 298
                until(
                    lambda: service.num_calls == 0 or service.metrics.num_generated_tokens >= most,
                    "more tokens have come than may be unread",
                )
                gate.open(300)
                until(lambda: running.service.num_calls == 0, "the engine has let go of it")
                assert running.service.load.num_steps < 480, "before its end"
            else:
                # By the server's clock after a second or, if this process did not run then, by the kernel's after two.
                until(lambda: {"stalled", "client_left"} & running.outcomes.keys(), "its time is over")
            until(lambda: running.blocks[0] == running.blocks[1], "its blocks are free")
        until(lambda: sum(running.outcomes.values()) == 2, "its connection has ended")


def test_what_may_be_unread_grows_with_the_completions_of_a_request(text_model: str) -> None:
    """A step brings 16 tokens at once, which no client can have read before they come."""
    with serving(LLM(text_model, kv_cache_bytes=2**23), max_unread_tokens=10) as running:
        assert len(stream_tokens(running, asked(0, 10, n=16))) == 160
        until(lambda: running.outcomes == {"ok": 1}, "its answer has been written")


class Fails:
    """A hidden stop that fails for prompts that begin with an exclamation mark."""

    def __call__(self, state: SequenceState) -> bool:
        if state.tokens[0] == ord("!"):
            raise RuntimeError("as this test wants")
        return False


def test_a_failed_step_fails_its_requests_and_the_engine_goes_on(text_model: str) -> None:
    llm = LLM(text_model, hidden_stop=Fails(), kv_cache_bytes=2**23)
    assert llm.encode(["!"]) == [[ord("!")]]
    with serving(llm) as running:
        for _ in range(2):
            failed = post(running, asked(0, 10, prompt="!"))
            assert failed.status_code == 500 and "RuntimeError" in failed.json()["error"]["message"]
        with stream(running, asked(0, 400)) as chunks:
            assert next(chunks)["choices"]
            post(running, asked(0, 10, prompt="!"))
            assert [chunk for chunk in chunks if "error" in chunk], "its stream ends in an error"
        assert httpx.get(f"{running.url}/health").status_code == 200
        assert len(post(running, asked(0, 10)).json()["choices"][0]["token_ids"]) == 10
        assert running.blocks[0] == running.blocks[1]
        for _ in range(3):
            assert post(running, asked(0, 10, prompt="!")).status_code == 500
        health = httpx.get(f"{running.url}/health")
        assert health.status_code == 503 and "3 steps" in health.json()["error"]["message"]
        assert post(running, asked(0, 10)).status_code == 503


HOLDING = """
import sys, time
from pathlib import Path
from engines import LLM
from tests.serving import Running, until

def holds(state):
    if state.num_generated == 20:
        until(Path(sys.argv[2]).exists, "the file that lets it go on")
    return False

llm = LLM(sys.argv[1], dtype="float64", hidden_stop=holds, kv_cache_bytes=2**23)
running = Running(llm, "tiny", {}, None)
num_lost = running.server.run(lambda: print(running.url, flush=True))
print(num_lost, running.outcomes)
"""


def first_line(server: Python) -> str:
    until(lambda: "\n" in server.stdout or server.poll() is not None, "it serves")
    assert server.stdout, server.stderr
    return server.stdout.splitlines()[0]


def test_sigterm_lets_running_requests_finish(text_model: str, tmp_path: Path) -> None:
    body = asked(0, 100)
    with Python(["-c", HOLDING, text_model, str(tmp_path / "go on")]) as server:
        url = first_line(server)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        own = {name: body[name] for name in ("ignore_eos", "return_token_ids")}
        known = {name: body[name] for name in body if name not in own}
        chunks = iter(client.completions.create(model="tiny", **known, extra_body=own, stream=True))
        tokens = [*next(chunks).choices[0].token_ids]
        os.kill(server.pid, signal.SIGTERM)
        until(lambda: httpx.get(f"{url}/health").status_code == 503, "it drains")
        with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
            client.completions.create(model="tiny", prompt="x")
        assert refused.value.status_code == 503 and refused.value.response.headers["retry-after"] == "1"
        (tmp_path / "go on").touch()
        for chunk in chunks:
            tokens += chunk.choices[0].token_ids
        assert server.wait(60) == 0
        assert server.stdout.splitlines()[1:] == ["0 {'draining': 1, 'ok': 1}"]
    assert tokens == expected(LLM(text_model, dtype="float64", kv_cache_bytes=2**23), body)


def test_the_command_serves_and_ends(text_model: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret\n")
    options = ["--served-model-name", "tiny", "--port", "0", "--api-key", str(tmp_path / "key"), "--run-seed", "5"]
    with Python([str(ROOT / "experiments/serve.py"), text_model, *options]) as server:
        told = re.fullmatch(r"serving tiny at (http://127\.0\.0\.1:\d+/v1)", first_line(server))
        assert told is not None
        client = openai.OpenAI(base_url=told[1], api_key="secret")
        # As `generate` does, prompts without a seed are numbered from 0 on.
        answer = client.completions.create(model="tiny", prompt=["1+2=", "3+4="], max_tokens=9)
        os.kill(server.pid, signal.SIGINT)
        assert server.wait(60) == 0, server.stderr
        assert json.loads(server.stdout.splitlines()[-1]) == {"experiment": "serve", "requests": {"ok": 1}, "lost": 0}
    outputs = LLM(text_model, seed=5, kv_cache_bytes=2**23).generate(["1+2=", "3+4="], SamplingParams(max_tokens=9))
    assert [one.text for one in answer.choices] == [one.outputs[0].text for one in outputs]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "0.0.0.0"], "error: --host='0.0.0.0': other machines can reach it"),
        (["--api-key", "/nowhere/key"], "error: --api-key: there is no such file"),
        (["--max-sequences", "0"], "max-sequences=0"),
    ],
)
def test_the_command_refuses_in_one_line(text_model: str, options: list[str], message: str) -> None:
    assert message in refused_by("serve", [text_model, "--port", "0", *options])


def test_what_does_not_end_in_time_is_ended_with_an_error(text_model: str) -> None:
    gate = Gate(1, 5)
    with (
        serving(LLM(text_model, hidden_stop=gate, kv_cache_bytes=2**23), drain_s=0.2) as running,
        ThreadPoolExecutor(2) as clients,
    ):
        whole = clients.submit(post, running, asked(0, 400))
        until(lambda: running.service.num_calls == 1, "one has come")
        clients.submit(until, lambda: running.service.num_calls == 2, "both have come").add_done_callback(
            lambda _: gate.open(1)
        )
        with stream(running, asked(1, 400)) as chunks:
            next(chunks)
            running.server.stop()
            (error,) = [chunk["error"] for chunk in chunks if "error" in chunk]
        answer = whole.result()
        assert answer.status_code == 500
        assert "shutting down" in error["message"] and "shutting down" in answer.json()["error"]["message"]
        gate.open(5)


def test_the_key_is_needed_where_one_is_set(text_model: str) -> None:
    with serving(LLM(text_model, kv_cache_bytes=2**23), api_key="a key") as running:
        for key in ("none", "a ke", "a keyy", "A key"):
            with pytest.raises(openai.AuthenticationError, match="key is missing or wrong"):
                running.client(api_key=key).models.list()
        assert httpx.get(f"{running.url}/v1/models").status_code == 401
        assert httpx.get(f"{running.url}/metrics").status_code == 401
        assert httpx.get(f"{running.url}/health").status_code == 200
        client = running.client(api_key="a key")
        assert [one.id for one in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").id == "tiny"
        assert client.completions.create(model="tiny", prompt="x", max_tokens=2).choices
        with pytest.raises(ValueError, match=r"host='0\.0\.0\.0': other machines can reach it"):
            bind("0.0.0.0", 0)
        with pytest.raises(ValueError, match="cannot be listened to"):
            bind(port=running.server.port)


def test_metrics_are_prometheus_text_and_count(text_model: str) -> None:
    with serving(LLM(text_model, kv_cache_bytes=2**23)) as running:
        for index in range(3):
            stream_tokens(running, asked(index, 10))
        assert post(running, asked(0, 10, n=2)).status_code == 200
        assert post(running, {"prompt": 5}).status_code == 400
        until(lambda: sum(running.outcomes.values()) == 5, "all have ended")
        text = httpx.get(f"{running.url}/metrics").text
    values: dict[str, float] = {}
    kinds: dict[str, str] = {}
    for line in text.splitlines():
        if found := re.fullmatch(r"# TYPE (\w+) (counter|gauge|histogram)", line):
            kinds[found[1]] = found[2]
        elif not re.fullmatch(r"# HELP \w+ .+", line):
            sample = re.fullmatch(r'((\w+?)(?:_bucket|_sum|_count)?(?:\{\w+="[^"]+"\})?) ([\d.e+-]+)', line)
            assert sample is not None and ({sample[2], sample[1]} & {*kinds} or sample[1].split("{")[0] in kinds), line
            values[sample[1]] = float(sample[3])
    assert sorted(kinds.values()).count("histogram") == 3
    assert values['curtail_requests_total{outcome="ok"}'] == 4
    assert values['curtail_requests_total{outcome="refused"}'] == 1
    assert values["curtail_prompt_tokens_total"] == 4 * 5 and values["curtail_generated_tokens_total"] == 50
    assert values["curtail_kv_blocks"] == values["curtail_kv_blocks_free"] > 0
    for name, count in (("time_to_first_token", 4), ("time_per_output_token", 5), ("request", 4)):
        buckets = [value for key, value in values.items() if key.startswith(f"curtail_{name}_seconds_bucket")]
        assert buckets == sorted(buckets) and buckets[-1] == values[f"curtail_{name}_seconds_count"] == count
        assert 0 < values[f"curtail_{name}_seconds_sum"] < 60


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match=r"ServingLimits\.stall_s=0: must be above 0"):
        ServingLimits(stall_s=0)
    assert threading.active_count() < 50
