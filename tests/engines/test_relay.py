"""Weights by a relay: every bit is the trainer's, whatever was pushed how, whoever died, and into whichever shards."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import LLM
from engines.config import ModelConfig
from engines.control.sealing import new_token
from engines.control.transport import Client, Server
from engines.models.checksums import checksum
from engines.models.loader import checkpoint_tensors
from engines.models.parameters import logical_shapes
from engines.relay import push
from engines.relay.client import RefusedError, Relay, RelayClient
from engines.relay.flat import FlatModel
from engines.relay.held import Held, checksum_of
from engines.relay.process import RelayProcess
from engines.relay.push import Pusher
from engines.relay.requests import Commit, Done, Open, Opened, Put, Version
from engines.relay.server import RelayServer
from experiments.relay_shards import ShardedReplica
from tests.engines.test_fleet import PARAMS, PROMPTS, wait_until
from tests.engines.test_sharding import BASE, CONFIGS
from tests.worlds import error_of, join, run_world

Weights = dict[str, Tensor]
TOKEN = bytes(range(32))
BUCKET = 3000
"""Bytes: many buckets in a tiny model."""


class Replica(ShardedReplica):
    def assert_equal(self, weights: Weights) -> None:
        """Bit for bit, NaN and -0.0 included."""
        assert not self.differing(weights)


class Trainer:
    """Ranks that push parts of the same weights, as ZeRO 0 to 2 ("whole"), or ZeRO-3 ("parts") hold them."""

    def __init__(
        self,
        config: ModelConfig,
        relay: Relay,
        *,
        ranks: int = 2,
        how: str = "whole",
        dtype: Any = "bfloat16",
        **more: Any,
    ) -> None:
        self.shapes = logical_shapes(config)
        flat = FlatModel.of(config, self.shapes)
        torch.manual_seed(0)
        self.weights: Weights = {name: torch.randn(shape) * 0.02 for name, shape in self.shapes.items()}
        session = os.urandom(8).hex()
        self.pushers = [
            Pusher(
                relay,
                flat,
                (lambda rank=rank: self.held(rank, ranks, how)),
                dtype=dtype,
                session=session,
                rank=rank,
                num_ranks=ranks,
                **{"bucket_bytes": BUCKET, **more},
            )
            for rank in range(ranks)
        ]

    def held(self, rank: int, ranks: int, how: str) -> dict[str, Held]:
        if how == "whole":
            return {name: Held(0, tensor.view(-1), is_shared=True) for name, tensor in self.weights.items()}
        held = {}
        for name, tensor in self.weights.items():
            each = -(-tensor.numel() // ranks)
            first = min(rank * each, tensor.numel())
            held[name] = Held(first, tensor.view(-1)[first : first + each].clone())
            if tensor.numel() < 30:  # small ones are whole on every rank
                held[name] = Held(0, tensor.view(-1), is_shared=True)
        return held

    def step(self, share: float = 0.01, seed: int = 1) -> Weights:
        """Changes weights as a step does; some become values that sums would not keep. Returns a copy."""
        generator = torch.Generator().manual_seed(seed)
        for tensor in self.weights.values():
            at = torch.rand(tensor.shape, generator=generator) < share
            tensor[at] *= 1 + 0.01 * torch.randn(tensor.shape, generator=generator)[at]
        first = self.weights["model.norm.weight"]
        first[0], first[1], first[2], first[3] = torch.nan, -0.0, torch.inf, -torch.inf
        return {name: tensor.clone() for name, tensor in self.weights.items()}

    def push(self, number: int) -> Version:
        for pusher in self.pushers:
            pusher.push(number)
        return self.pushers[0].version(number)

    def finish(self) -> list[Any]:
        return [pusher.finish() for pusher in self.pushers]

    def close(self) -> None:
        for pusher in self.pushers:
            pusher.close()


@contextmanager
def relay_in_thread(max_bytes: int = 2**26, port: int = 0) -> Iterator[Relay]:
    server = Server(TOKEN, port=port, interval_s=0.1, patience_s=5.0)
    thread = threading.Thread(target=RelayServer(server, max_bytes).serve, daemon=True)
    thread.start()
    yield Relay(server.address, TOKEN, patience_s=5.0, timeout_s=30.0)
    server.close()
    thread.join()


@pytest.fixture
def closing() -> Iterator[Callable[[Any], Any]]:
    opened: list[Any] = []

    def later(one: Any) -> Any:
        opened.append(one)
        return one

    yield later
    for one in reversed(opened):
        one.close()


@pytest.mark.parametrize("how", ["whole", "parts"])
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_shards_of_any_size_get_the_trainer_s_bits(config: ModelConfig, how: str, closing: Any) -> None:
    """With versions missed, and a late joiner; small steps are sparse, and a shard skips what others hold."""
    with relay_in_thread() as relay:
        trainer = closing(Trainer(config, relay, ranks=3, how=how))
        replicas = {count: closing(Replica(config, count, relay)) for count in (1, 2, 4, 8)}
        for number in range(5):
            weights = trainer.step(seed=number)
            version = trainer.push(number)
            for count, replica in replicas.items():
                if number in (0, count % 3 + 1, 4):
                    replica.pull(version)
                    replica.assert_equal(weights)
            records = trainer.finish()
            assert sum(one.num_elements for one in records) == sum(w.numel() for w in weights.values())
            if number == 1:  # later on tiny buckets are dense again
                assert sum(one.num_changed for one in records) < 0.1 * sum(one.num_elements for one in records)
        late = closing(Replica(config, 4, relay))
        late.pull(version)
        late.assert_equal(weights)
        if config.vocab_size > 5:
            assert all(puller.records[-1].num_skipped for puller in late.pullers[1:])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes(dtype: str, closing: Any) -> None:
    with relay_in_thread() as relay:
        trainer = closing(Trainer(BASE, relay, dtype=dtype))
        replica = closing(Replica(BASE, 2, relay, dtype=dtype))
        for number in range(3):
            weights = trainer.step(seed=number)
            version = trainer.push(number)
            replica.pull(version)
            replica.assert_equal(weights)
            trainer.finish()


def test_forward_passes_use_what_was_patched(closing: Any) -> None:
    """Copies of matrices that a decoder makes for its products follow a patch: its checksum is the trainer's, and so
    is what it computes."""
    with relay_in_thread() as relay:
        config = replace(BASE, hidden_size=512, intermediate_size=512)  # large enough to be packed
        trainer = closing(Trainer(config, relay, dtype="float32", bucket_bytes=2**20))
        replica = closing(Replica(config, 1, relay, dtype="float32"))
        x = torch.randn(64, 512, generator=torch.Generator().manual_seed(2))
        seen = []
        for number in range(2):
            weights = trainer.step(share=0.5, seed=number)
            version = trainer.push(number)
            replica.pull(version)
            trainer.finish()
            decoder = replica.decoders[0]
            found = decoder.logits(x)
            expected = x @ weights["lm_head.weight"].T
            assert torch.allclose(found, expected, atol=1e-3, equal_nan=True)
            seen.append(found)
            assert decoder.checksum() == checksum(weights)
        assert not torch.allclose(*seen, atol=1e-3, equal_nan=True)


def test_after_some_versions_a_bucket_is_dense_again(closing: Any) -> None:
    with relay_in_thread() as relay:
        trainer = closing(Trainer(BASE, relay, snapshot_every=3, bucket_bytes=2**16))
        dense = []
        for number in range(9):
            weights = trainer.step(seed=number)
            version = trainer.push(number)
            dense.append(sum(one.num_dense > 0 for one in trainer.finish()))
        assert dense == [2, 0, 0, 0, 2, 0, 0, 0, 2]
        late = closing(Replica(BASE, 2, relay))
        late.pull(version)
        late.assert_equal(weights)
        with pytest.raises(ValueError, match="version=7: was dropped; the newest whole one is 8"):
            late.pull(Version(version.session, 7))
        late.pull(version)
        late.assert_equal(weights)


def test_a_wrong_base_is_noticed_and_read_again_dense(closing: Any) -> None:
    """The receiver has other weights than it says: payloads are whole, and what comes of them is wrong."""
    with relay_in_thread() as relay:
        trainer = closing(Trainer(BASE, relay))
        replica = closing(Replica(BASE, 2, relay))
        for number in range(2):
            weights = trainer.step(seed=number)
            version = trainer.push(number)
            trainer.finish()
            if number == 0:
                replica.pull(version)
                replica.decoders[1].parameters.layers[0].down[0, 0] += 1
        replica.pull(version)
        replica.assert_equal(weights)
        assert [puller.records[-1].num_dense > 0 for puller in replica.pullers] == [True, True]


def test_weights_that_are_not_the_trainer_s_are_an_error(closing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trainer whose checksum is of other weights than it pushed: dense messages do not help."""
    with relay_in_thread() as relay:
        trainer = closing(Trainer(BASE, relay, ranks=1))
        replica = closing(Replica(BASE, 2, relay))
        monkeypatch.setattr(
            push, "checksum_of", lambda bits, pieces: checksum_of(bits, pieces) + (pieces[0].start == 0)
        )
        version = trainer.push(0)
        trainer.finish()
        with pytest.raises(RuntimeError, match="not the trainer's, with dense messages, either"):
            replica.pull(version)


def test_every_parameter_must_be_held(closing: Any) -> None:
    with relay_in_thread() as relay:
        trainer = closing(Trainer(BASE, relay))
        flat = trainer.pushers[0]._flat
        held = trainer.held(0, 1, "whole")
        frozen = {name: one for name, one in held.items() if "norm" not in name}
        more = held | {"model.rotary": Held(0, torch.zeros(3))}
        short = held | {"model.norm.weight": Held(20, torch.zeros(10))}
        for given, words in (
            (frozen, "layernorm.weight' is not held"),
            (more, "'model.rotary' is no"),
            (short, "from 20"),
        ):
            with pytest.raises(ValueError, match=words):
                Pusher(relay, flat, lambda given=given: given, dtype="bfloat16", session="x")


def test_a_session_is_one_trainer_s(closing: Any) -> None:
    """One that starts again under the same session would have its versions taken for those of the first."""
    with relay_in_thread() as relay:
        first = closing(Trainer(BASE, relay, ranks=1))
        first.push(1)
        first.finish()
        flat, session = first.pushers[0]._flat, first.pushers[0]._session
        again = closing(Pusher(relay, flat, lambda: first.held(0, 1, "whole"), dtype="bfloat16", session=session))
        again.push(1)
        with pytest.raises(RefusedError, match=r"rank 0 of another trainer has pushed under it; .* give a new session"):
            again.finish()
        with pytest.raises(RefusedError):
            again.push(2)


def test_what_is_held_is_checked_at_each_push(closing: Any) -> None:
    with relay_in_thread() as relay:
        trainer = closing(Trainer(BASE, relay, ranks=1))
        flat, held = trainer.pushers[0]._flat, trainer.held(0, 1, "whole")
        now = dict(held)
        pusher = closing(Pusher(relay, flat, lambda: now, dtype="bfloat16", session="x"))
        now["model.norm.weight"] = Held(0, torch.zeros(100)[:5])
        pusher.push(1)
        with pytest.raises(ValueError, match=r"'model.norm.weight': elements 0 to 24 are not held any more"):
            pusher.finish()


def test_options_of_a_pusher_are_checked(closing: Any) -> None:
    with relay_in_thread() as relay:
        trainer = closing(Trainer(BASE, relay, ranks=1))
        flat, held = trainer.pushers[0]._flat, trainer.held(0, 1, "whole")
        good: dict[str, Any] = {"dtype": "bfloat16", "session": "x"}
        for options, words in (
            ({"rank": 2, "num_ranks": 2}, "Pusher.rank=2: must be below num_ranks=2"),
            ({"rank": -1}, "Pusher.rank=-1: must be"),
            ({"num_ranks": 0}, "Pusher.num_ranks=0: must be"),
            ({"dtype": "float64"}, "Pusher.dtype='float64': weights travel by a relay in 16 or 32 bits"),
            ({"snapshot_every": -3}, "Pusher.snapshot_every=-3: must be"),
            ({"bucket_bytes": 2**40}, "Pusher.bucket_bytes=.*: must be from 1024 to"),
            ({"session": "a b"}, "Pusher.session='a b': must be 1 to 64 letters"),
        ):
            with pytest.raises(ValueError, match=words):
                Pusher(relay, flat, lambda: held, **(good | options))
        for number in (-1, 2**63, None):
            with pytest.raises(ValueError, match=f"version={number}: must be"):
                trainer.pushers[0].push(number)  # type: ignore[arg-type]
        for one in (
            torch.zeros(24),
            Held(-1, torch.zeros(5)),
            Held(0, torch.zeros(4, 6)),
            Held(0, torch.zeros(24).int()),
        ):
            with pytest.raises(ValueError, match=r"weights: 'model.norm.weight'"):
                bad = held | {"model.norm.weight": one}
                Pusher(relay, flat, lambda bad=bad: bad, **good)  # type: ignore[misc]
        for port in (-1, 70000):
            with pytest.raises(ValueError, match=f"RelayProcess.port={port}: must be"):
                RelayProcess(TOKEN, max_bytes=2**20, port=port)


def test_parameters_of_one_rank_each(closing: Any) -> None:
    """As with pipeline parallelism: a rank has whole parameters that no other has."""
    with relay_in_thread() as relay:
        trainer = closing(Trainer(BASE, relay, ranks=1))
        flat, names = trainer.pushers[0]._flat, sorted(trainer.weights)
        nothing = torch.zeros(0)
        pushers = []
        for rank in range(2):
            held = {
                name: Held(0, trainer.weights[name].view(-1) if index % 2 == rank else nothing)
                for index, name in enumerate(names)
            }
            more: dict[str, Any] = {"dtype": "bfloat16", "session": "pipeline", "rank": rank, "num_ranks": 2}
            pushers.append(closing(Pusher(relay, flat, lambda held=held: held, **more)))  # type: ignore[misc]
        for pusher in pushers:
            pusher.push(0)
        replica = closing(Replica(BASE, 2, relay))
        replica.pull(pushers[0].version(0))
        replica.assert_equal(trainer.weights)
        for pusher in pushers:
            pusher.finish()


def test_another_model_or_dtype_is_refused_by_name(closing: Any) -> None:
    with relay_in_thread() as relay:
        trainer = closing(Trainer(BASE, relay))
        version = trainer.push(0)
        trainer.finish()
        with pytest.raises(ValueError, match="dtype='bfloat16': expected 'float32'"):
            closing(Replica(BASE, 1, relay, dtype="float32")).pull(version)
        with pytest.raises(ValueError, match=r"model='.*': expected"):
            closing(Replica(replace(BASE, num_layers=2), 1, relay)).pull(version)
        other = closing(Trainer(replace(BASE, vocab_size=132), relay))
        other.push(0)
        with pytest.raises(RefusedError, match=r"Open.model='.*': this relay keeps weights of"):
            other.finish()
        with pytest.raises(ValueError, match="launch token"):
            closing(Replica(BASE, 1, replace(relay, token=new_token()))).pull(version)


def test_a_full_relay_is_an_error_that_names_the_option(closing: Any) -> None:
    with relay_in_thread(max_bytes=10_000) as relay:
        trainer = closing(Trainer(BASE, relay, ranks=1))
        trainer.push(0)
        with pytest.raises(RefusedError, match=r"is full: .* raise max_bytes"):
            trainer.finish()


def test_pieces_that_are_torn_or_reordered_are_refused(closing: Any) -> None:
    with relay_in_thread() as relay:
        trainer = closing(Trainer(BASE, relay, ranks=1))
        version = trainer.push(0)
        trainer.finish()
        client = closing(RelayClient(relay))
        flat = trainer.pushers[0]._flat
        client.ask(Open("t", flat.fingerprint, "bfloat16", flat.length, time.time_ns()), Opened)
        for piece in (Put("t", 5, 10, b"x" * 5), Put("t", 0, 3, b"x" * 5)):
            with pytest.raises(RefusedError, match="send the message again from 0 on"):
                client.ask(piece, Done)
        client.ask(Put("t", 0, 10, b"x" * 5), Done)
        with pytest.raises(RefusedError, match="a message has at least"):
            client.ask(Put("t", 5, 10, b"x" * 5), Done)
        with pytest.raises(RefusedError, match="are not here"):
            client.ask(Commit(Version("t", 1), 0, 1, [(0, 5)], 0), Done)
        raw = closing(Client("fuzz", relay.address, TOKEN))
        for data in (b"", b"\xff" * 40, b"[]"):
            raw.send(data)
            assert b"request" in (raw.receive(5.0) or b"")
        replica = closing(Replica(BASE, 1, relay))
        replica.pull(version)
        replica.assert_equal(trainer.weights)


def test_who_did_not_push_is_named(closing: Any) -> None:
    with relay_in_thread() as relay:
        hasty = replace(relay, timeout_s=1.0)
        trainer = closing(Trainer(BASE, hasty))
        trainer.pushers[0].push(3)
        with pytest.raises(TimeoutError, match=r"version 3 of the weights: ranks \[1\] did not push it within 1 s"):
            trainer.pushers[0].finish()
        with pytest.raises(TimeoutError, match=r"number=3\) did not come .* whole: None.* ranks \[1\] are not done"):
            closing(Replica(BASE, 1, hasty)).pull(trainer.pushers[0].version(3))


def test_a_trainer_that_starts_again_is_not_mixed_up_with_the_first(closing: Any) -> None:
    """Both make version 1, with other weights, and the replica has the first one's."""
    with relay_in_thread() as relay:
        first = closing(Trainer(BASE, relay))
        replica = closing(Replica(BASE, 2, relay))
        for number in range(2):
            first.step(seed=number)
            version = first.push(number)
            first.finish()
        replica.pull(version)
        replica.assert_equal(first.weights)
        assert replica.pullers[0].wait_for_one() == version
        second = closing(Trainer(BASE, relay, ranks=1))
        second.step(seed=7)
        version = second.push(1)
        replica.pull(version)
        replica.assert_equal(second.weights)
        second.finish()
        first.push(2)
        with pytest.raises(RefusedError, match="another trainer has begun since"):
            first.finish()


def test_a_relay_that_is_killed_comes_back_and_gets_all_again(closing: Any, capsys: pytest.CaptureFixture[str]) -> None:
    process = closing(RelayProcess(TOKEN, max_bytes=2**26, patience_s=5.0))
    relay = replace(process.relay, timeout_s=60.0)
    trainer = closing(Trainer(BASE, relay))
    replica = closing(Replica(BASE, 2, relay))
    for number in range(2):
        trainer.step(seed=number)
        version = trainer.push(number)
        replica.pull(version)
        trainer.finish()
    trainer.step(seed=5)
    version = trainer.push(2)
    wait_until(lambda: all(pusher._whole == 2 for pusher in trainer.pushers), 60, "version 2 is whole")
    process.process.send_signal(signal.SIGKILL)
    replica.pull(version)
    assert (
        "relay: has ended with code -9 (it printed nothing); trainers push all weights again" in capsys.readouterr().err
    )
    replica.assert_equal(trainer.weights)
    assert process.num_starts == 2
    assert all(one.num_dense == one.num_buckets and one.num_elements for one in trainer.finish())
    trainer.step(seed=6)
    version = trainer.push(3)
    replica.pull(version)
    replica.assert_equal(trainer.weights)
    assert not any(one.num_dense for one in trainer.finish())


def test_a_relay_that_cannot_start_says_why() -> None:
    with relay_in_thread() as relay:
        port = int(relay.address.rpartition(":")[2])
        with pytest.raises(RuntimeError, match=f"{port} is in use; choose another"):
            RelayProcess(TOKEN, max_bytes=2**20, port=port)
    with pytest.raises(ValueError, match="max_bytes=0: must be"):
        RelayProcess(TOKEN, max_bytes=0)


def pull_in_a_world(model: str) -> list[Any]:
    """Rank 0 has the relay, and pushes for both; a shard each. Returns tokens and errors."""
    groups = join()
    llm = LLM(model, world=groups, tensor_parallel_size=2, dtype="float32", kv_cache_bytes=2**20, load=False)
    world = groups.world
    with relay_in_thread() as here:
        address = world.broadcast_bytes(here.address.encode() if world.rank == 0 else None).decode()
        relay = Relay(address, TOKEN, patience_s=30.0, timeout_s=1.0)
        patient = replace(relay, timeout_s=30.0)
        errors = [error_of(lambda: llm.update_weights(source=relay))]
        flat = FlatModel.of(llm.model_config, logical_shapes(llm.model_config))
        held = {name: Held(0, tensor.reshape(-1)) for name, tensor in checkpoint_tensors(model) if name in flat.shapes}
        pusher = None
        if world.rank == 0:
            pusher = Pusher(patient, flat, lambda: held, dtype="float32", session="s")
            pusher.push(3)
        errors.append(error_of(lambda: llm.update_weights(source=relay, version=Version("s", 4))))
        errors.append(error_of(lambda: llm.generate(PROMPTS, PARAMS)))
        checksum = llm.update_weights(source=patient)
        tokens = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, prompt_uids=range(len(PROMPTS)))]
        errors.append(error_of(lambda: llm.update_weights([], 1, source=relay)))
        errors.append(error_of(lambda: llm.update_weights(source=relay, version=3)))
        errors.append(error_of(lambda: llm.update_weights(source=relay, version=Version("s", 3 + world.rank))))
        assert llm.policy_version == 3 and checksum == llm.checksum() and len(llm.pulls) == 1
        world.barrier()
        llm.close()
        if pusher is not None:
            pusher.close()
    return [tokens, *errors]


def test_ranks_of_a_world_pull_together(qwen3: str) -> None:
    """And raise together, where there is no version, or not the one that was asked for."""
    llm = LLM(qwen3, dtype="float32", kv_cache_bytes=2**20, load=False)
    llm.update_weights(checkpoint_tensors(qwen3), 3)
    alone = [one.outputs[0].token_ids for one in llm.generate(PROMPTS, PARAMS, prompt_uids=range(len(PROMPTS)))]
    ranks = run_world(pull_in_a_world, 2, qwen3)
    assert "no version became whole in 1 s" in ranks[0][1] and "rank 0 has found no version" in ranks[1][1]
    for tokens, _, other, not_ready, both, number, mixed in ranks:
        assert tokens == alone
        assert "there are no weights" in not_ready and "give weights, or the relay" in both
        assert "give what `Pusher.version` returns" in number
        assert "version: rank 1 has Version(session='s', number=4), rank 0 has" in mixed
        assert "number=4) did not come" in other
