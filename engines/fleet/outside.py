"""The process of a replica outside the torchrun world, `python -m engines.fleet.outside`; `ReplicaLauncher` starts it.

It has one control connection and no process group, and ends by itself when the coordinator is gone.
"""

from __future__ import annotations

import os
import sys
import traceback

import msgspec
import torch

from engines.config import ModelConfig, longest_sequence
from engines.control import messages
from engines.control.transport import Client
from engines.fleet.launcher import ReplicaOrders
from engines.fleet.relayed import version_of
from engines.kvcache.store import KVStore
from engines.kvcache.tiers import make_kv_store
from engines.lifetime import die_with, exempt_from_collection
from engines.memory.free_memory import FreeMemory, free_memory
from engines.models.loader import checkpoint_tensors
from engines.models.tokenizer import detokenizer, load_tokenizer, with_end_token
from engines.parallel.collectives import SingleRank
from engines.parallel.layout import Layout, ReplicaSpec
from engines.relay.client import Relay
from engines.relay.pull import Puller
from engines.replica.capacity import Capacity
from engines.replica.engine import LocalEngine
from engines.rollout.coordinator import peer_of
from engines.rollout.pace import of_pace
from engines.rollout.worker import Worker
from engines.speculation.marginal_gain import MarginalGain

FAILED, ORPHANED = 1, 3  # exit codes


def main() -> int:
    """Returns the exit code: 0 after `Shutdown`, `FAILED` after an error, `ORPHANED` when the coordinator was lost."""
    orders = msgspec.json.decode(sys.stdin.buffer.readline(), type=ReplicaOrders)
    die_with(orders.parent_pid)
    exempt_from_collection()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    try:
        client = Client(
            peer_of(orders.spec.ranks[0]),
            orders.address,
            orders.token,
            interval_s=orders.interval_s,
            patience_s=orders.patience_s,
        )
    except ConnectionError as error:
        print(f"replica {orders.spec.id}: {error}", file=sys.stderr)
        return ORPHANED
    store = make_kv_store(
        orders.kv_token,
        host_bytes=orders.kv_store_bytes,
        disk_bytes=orders.config.kv_disk_bytes,
        disk_parent=orders.config.kv_disk_folder,
    )
    try:
        _serve(orders, client, store)
        return 0
    except ConnectionError as error:
        print(f"replica {orders.spec.id}: {error}", file=sys.stderr)
        return ORPHANED
    except Exception as error:
        traceback.print_exc()
        _say_last_words(orders, client, error)
        return FAILED
    finally:
        client.close()
        store.close()


def _serve(orders: ReplicaOrders, client: Client, store: KVStore) -> None:
    """Executes commands until `Shutdown`."""
    engine = make_engine(orders, store)
    puller = Puller(Relay(orders.relay, orders.token, patience_s=orders.patience_s, timeout_s=orders.timeout_s))

    def load_from(source: str, version: int) -> int:
        if (pushed := version_of(source, version)) is not None:
            return engine.pull(puller, pushed)
        engine.load(checkpoint_tensors(source), version)
        return engine.checksum()

    worker = Worker(
        rank=orders.spec.ranks[0],
        client=client,
        layout=Layout(epoch=0, replicas=(orders.spec,)),
        engine=engine,
        regroup=_refuse_regroup,
        pace=None if orders.pace is None else orders.pace.make(),
        load_from=load_from,
    )
    try:
        while not worker.is_shut_down:
            worker.run()
    finally:
        engine.mover.close()
        puller.close()


def make_engine(orders: ReplicaOrders, store: KVStore | None = None) -> LocalEngine:
    """Makes the engine of a replica of one rank, without weights.

    Raises FileNotFoundError or ValueError for an invalid checkpoint, or one that does not fit in the free memory.
    """
    model = ModelConfig.from_pretrained(orders.model)
    tokenizer = load_tokenizer(orders.model, model)
    model = with_end_token(model, tokenizer)
    device = torch.device(orders.device)
    alone = Layout(epoch=0, replicas=(ReplicaSpec(id=0, ranks=(0,)),))
    free = FreeMemory.agree(SingleRank(), free_memory(device))
    pace = None if orders.pace is None else orders.pace.make()
    Capacity(model=model, config=orders.config, device=device, free=free).check(alone)
    return LocalEngine(
        model,
        orders.config,
        spec=orders.spec,
        max_tp_size=1,
        tensor_parallel=SingleRank(),
        max_model_len=longest_sequence(orders.config, model),
        device=device,
        detokenize=detokenizer(tokenizer),
        max_kv_tokens=orders.max_kv_tokens,
        kv_store=store,
        draft_policy=of_pace(MarginalGain, pace, orders.spec, orders.config),
    )


def _refuse_regroup(_: Layout, after: Layout, __: object) -> LocalEngine | None:
    raise RuntimeError(f"Regroup to epoch {after.epoch}: came to a replica outside the world, which has one rank")


def _say_last_words(orders: ReplicaOrders, client: Client, error: Exception) -> None:
    lost = messages.ReplicaLost.of(orders.spec.id, orders.spec.ranks[0], f"{type(error).__name__}: {error}")
    try:
        client.send(messages.encode(lost))
    except ConnectionError:
        traceback.print_exc()  # to the log, which the launcher reads


if __name__ == "__main__":
    sys.exit(main())
