"""Weights of a fleet by a relay: the tokens of a plain run, also of replicas that come late or wait for the trainer."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engines import LLM
from engines.config import ModelConfig
from engines.fleet.fleet import Fleet
from engines.models.loader import checkpoint_tensors
from engines.models.parameters import logical_shapes
from engines.relay.flat import FlatModel
from engines.relay.held import Held
from engines.relay.push import Pusher
from engines.relay.requests import Version
from tests.checkpoints import save_checkpoint
from tests.engines.test_fleet import PARAMS, PROMPTS, states, tokens_of, wait_until

pytestmark = pytest.mark.usefixtures("forked_replicas")

OPTIONS: dict[str, Any] = {"dtype": "float32", "kv_cache_bytes": 2**20, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def folders(qwen3: str, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """The weights of each version."""
    made = {0: Path(qwen3)}
    for version in (1, 2):
        made[version] = tmp_path_factory.mktemp(f"version-{version}")
        save_checkpoint(made[version], "qwen3", seed=version)
    return made


@pytest.fixture(scope="module")
def alone(folders: dict[int, Path]) -> dict[int, list[list[int]]]:
    tokens = {}
    for version, folder in folders.items():
        llm = LLM(folder, load=False, **OPTIONS)
        llm.update_weights(checkpoint_tensors(folder), version)
        outputs = llm.generate(PROMPTS, PARAMS, prompt_uids=range(len(PROMPTS)))
        tokens[version] = [one.outputs[0].token_ids for one in outputs]
        llm.close()
    return tokens


@pytest.fixture
def fleet(qwen3: str) -> Iterator[Fleet]:
    with Fleet(qwen3, num_replicas=2, weights="relay", **OPTIONS) as fleet:
        fleet.wait_for_replicas(2)
        yield fleet


def test_replicas_pull_what_was_published(fleet: Fleet, folders: dict[int, Path], alone: dict[int, Any]) -> None:
    assert tokens_of(fleet.roll_out(states(0))) == alone[0]
    fleet.publish(checkpoint_tensors(folders[1]), version=1)
    assert tokens_of(fleet.roll_out(states(1))) == alone[1]
    with pytest.raises(ValueError, match="version=1: 1 was published before; give a higher number"):
        fleet.publish(checkpoint_tensors(folders[2]), version=1)
    with pytest.raises(ValueError, match="missing; the checkpoint is not complete"):
        fleet.publish([], version=2)
    late = fleet.launch()
    fleet.wait_for_replicas(3)
    fleet.publish(checkpoint_tensors(folders[2]), version=2)
    relay = fleet._weights._process  # type: ignore[union-attr]
    os.kill(relay.process.pid, signal.SIGKILL)  # it comes back, and gets the weights again
    for spec in fleet.coordinator.outside:
        if spec != late.id:
            fleet.launcher.kill(spec)
    wait_until(lambda: fleet.coordinator.pump(0.0) or fleet.num_ready == 1, 20, "two replicas are lost")  # type: ignore[func-returns-value]
    assert tokens_of(fleet.roll_out(states(2))) == alone[2]


def test_a_trainer_pushes_to_a_fleet_beside_its_rollout(
    fleet: Fleet, folders: dict[int, Path], alone: dict[int, Any]
) -> None:
    """The rollout begins before the weights are there; replicas wait for them, and join."""
    config = ModelConfig.from_pretrained(folders[1])
    flat = FlatModel.of(config, logical_shapes(config))
    held = {name: Held(0, tensor.reshape(-1)) for name, tensor in checkpoint_tensors(folders[1]) if name in flat.shapes}
    pusher = Pusher(fleet.relay, flat, lambda: held, dtype="float32", session="trainer")
    pushing = threading.Timer(1.0, pusher.push, (1,))
    pushing.start()
    finished = fleet.roll_out(states(1), weights_source=Version("trainer", 1))
    assert tokens_of(finished) == alone[1]
    assert pusher.finish() is not None
    pusher.close()
    pushing.join()


def test_options_that_do_not_go_together_are_refused(qwen3: str, tmp_path: Path) -> None:
    for options, words in (
        ({"weights": "relay", "weights_folder": tmp_path}, "weights_folder=.*: with weights='relay' there is none"),
        ({"weights": "carrier pigeon"}, "Fleet.weights='carrier pigeon': must be one of"),
        ({"weights": "relay", "dtype": "float64"}, "EngineConfig.dtype='float64': weights travel by a relay in"),
    ):
        with pytest.raises(ValueError, match=words):
            Fleet(qwen3, num_replicas=0, **(OPTIONS | options))
    with Fleet(qwen3, num_replicas=0, **OPTIONS) as fleet, pytest.raises(ValueError, match="has no relay"):
        _ = fleet.relay


def test_weights_of_a_trainer_that_starts_again_are_loaded(
    fleet: Fleet, folders: dict[int, Path], alone: dict[int, Any]
) -> None:
    """Its version 1 is not that of the trainer before, which the replicas have."""
    config = ModelConfig.from_pretrained(folders[1])
    flat = FlatModel.of(config, logical_shapes(config))
    for session, version in (("first", 1), ("second", 2)):
        tensors = checkpoint_tensors(folders[version])
        held = {name: Held(0, tensor.reshape(-1)) for name, tensor in tensors if name in flat.shapes}
        pusher = Pusher(fleet.relay, flat, lambda held=held: held, dtype="float32", session=session)  # type: ignore[misc]
        pusher.push(1)
        finished = fleet.roll_out(states(1), weights_source=pusher.version(1))
        outputs = tokens_of(finished)
        assert (outputs == alone[1]) == (version == 1)
        assert len({replica.source for replica in fleet.coordinator.core._books.replicas.values()}) == 1
        pusher.close()


def test_a_fleet_s_relay_takes_its_own_model_only(fleet: Fleet, folders: dict[int, Path]) -> None:
    """Whoever comes first; the fleet's weights can still be published."""
    config = replace(ModelConfig.from_pretrained(folders[1]), num_layers=1)
    shapes = logical_shapes(config)
    held = {name: Held(0, torch.zeros(shape).view(-1)) for name, shape in shapes.items()}
    pusher = Pusher(fleet.relay, FlatModel.of(config, shapes), lambda: held, dtype="float32", session="wrong")
    pusher.push(1)
    with pytest.raises(ValueError, match=r"Open.model=.*: this relay keeps weights of"):
        pusher.finish()
    pusher.close()
    fleet.publish(checkpoint_tensors(folders[1]), version=1)
