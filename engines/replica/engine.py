"""This rank's part of the engine: its shard of the weights, its KV cache, and the replica that uses both."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial

import torch
from torch import Tensor

from engines.config import EngineConfig, ModelConfig, draft_model_config
from engines.kvcache.block_manager import BlockManager
from engines.kvcache.kept import arrivals
from engines.kvcache.migrate import migrate_kv
from engines.kvcache.page_storage import Pages
from engines.kvcache.paged import PagedKVCache
from engines.kvcache.pages import PageShare
from engines.kvcache.store import KVStore
from engines.memory.plan import draft_kv_blocks, kv_block_bytes
from engines.models.decoder import Decoder
from engines.models.loader import load_weights
from engines.native.wait_policy import watch_cores
from engines.parallel.collectives import Communicator, SingleRank
from engines.parallel.layout import ReplicaSpec
from engines.parallel.sharding import Shard
from engines.relay.pull import Puller
from engines.relay.requests import Version
from engines.replica.endings import HiddenStop
from engines.replica.hosted import HostedModel
from engines.replica.model_drafter import ModelDrafter
from engines.replica.mover import KVMover
from engines.replica.regroup import Joint
from engines.replica.replica import Replica
from engines.replica.row_times import DraftTimes, RowTimes
from engines.replica.scheduler import Scheduler
from engines.replica.swap import SwapPolicy
from engines.replica.switch import Switch
from engines.sampling.edits import Editor
from engines.sequence import SequenceId, Tokenizer
from engines.speculation.choose import Connect, choose_drafter
from engines.speculation.drafter import Drafter
from engines.speculation.history import DraftHistory
from engines.speculation.marginal_gain import MarginalGain
from engines.speculation.policy import DraftPolicy, Prices, elsewhere


class LocalEngine:
    """One shard of one replica. Its memory can be released and allocated again; its weights come from a stream."""

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        *,
        spec: ReplicaSpec,
        max_tp_size: int,
        tensor_parallel: Communicator,
        max_model_len: int,
        device: torch.device,
        detokenize: Tokenizer | None,
        hidden_stop: HiddenStop | None = None,
        max_kv_tokens: int | None = None,
        kv_store: KVStore | None = None,
        draft_policy: DraftPolicy = MarginalGain,
        connect_drafts: Connect | None = None,
        draft_history: DraftHistory | None = None,
        own_drafter: Callable[[], Drafter] | None = None,
        remote: Drafter | None = None,
        pages: Pages | None = None,
    ) -> None:
        """Allocates the memory; weights are loaded later. `max_tp_size`: see `Shard.max_count`; `max_kv_tokens`: see
        `Replica`; `kv_store`: see `KVMover`; `draft_policy`, `own_drafter`: see `LLM`; `connect_drafts`,
        `draft_history`, `remote`: see `choose_drafter`. With `pages` the KV cache lies there, and
        `config.kv_cache_bytes` has no effect.

        Raises ValueError when the model cannot be cut into these shards, the KV cache cannot hold a block, there is
        no memory for it, or a model drafts and the KV cache lies in pages.
        """
        if pages is not None and config.drafter == "model":
            raise ValueError("EngineConfig.drafter='model': cannot draft for a model whose KV lies in pages; give None")
        if device.type == "cpu":
            watch_cores()
        self.config, self._model, self._max_model_len = config, model, max_model_len
        self._draft_policy, self._connect_drafts, self._draft_history = draft_policy, connect_drafts, draft_history
        self._own_drafter = own_drafter
        self._detokenize, self._hidden_stop, self._max_kv_tokens = detokenize, hidden_stop, max_kv_tokens
        self._editor = Editor(vocab_size=model.vocab_size, eos_token_ids=model.eos_token_ids, tokenizer=detokenize)
        self.hosted = HostedModel.make(
            model,
            config,
            shard=Shard(index=tensor_parallel.rank, count=spec.tp_size, max_count=max_tp_size),
            tensor_parallel=tensor_parallel,
            max_model_len=max_model_len,
            device=device,
            num_kv_tokens=kv_capacity(model, config, spec.tp_size) if pages is None else 0,
            editor=self._editor,
            pages=pages,
        )
        self._assemble(spec, tensor_parallel, kv_store, remote)
        self._led, self._before = Counter[str](), self._counts()
        self.has_weights = self.is_asleep = False
        self._pulled: Version | None = None
        self.switch: Switch | None = None
        """What the last `regroup` took."""

    @property
    def led_counts(self) -> Counter[str]:
        """Counts of `KVMoves`, of preemptions ("num_preemptions") and of what drafts yielded ("yields/<name>", see
        `DraftHistory`) while this rank was the first of its replica: their sums over all ranks count each replica once,
        in whatever layouts it has been."""
        if self.tensor_parallel.rank > 0:
            return self._led
        return self._led + (self._counts() - self._before)

    def _counts(self) -> Counter[str]:
        yields = self._draft_history.yields if self._draft_history is not None else {}
        counts = Counter({f"yields/{name}": count for name, count in yields.items()})
        counts.update(asdict(self.mover.moves), num_preemptions=self.replica.scheduler.num_preemptions)
        return counts

    @property
    def decoder(self) -> Decoder:
        return self.hosted.decoder

    @property
    def kv(self) -> PagedKVCache:
        return self.hosted.kv

    @property
    def share(self) -> PageShare | None:
        """Its pages, if its KV cache lies in pages."""
        return None if self.kv.pages is None else self.kv.pages.share

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that the KV cache holds; in another layout they may be more or fewer. In pages: those of the largest
        budget so far."""
        return self.hosted.blocks.most_blocks * self.config.block_size

    @property
    def row_times(self) -> RowTimes:
        return self.hosted.row_times

    def _assemble(
        self,
        spec: ReplicaSpec,
        tensor_parallel: Communicator,
        kv_store: KVStore | None,
        remote: Drafter | None,
    ) -> None:
        """Makes all that uses the weights and the KV cache, which have the shapes of this place."""
        config, model = self.config, self._model
        self.spec, self.tensor_parallel = spec, tensor_parallel
        swap_policy = SwapPolicy(config.preemption, self.decoder, self.kv, self._max_model_len, tensor_parallel)
        self.mover = KVMover(self.kv, model, self.decoder.shard, tensor_parallel, swap_policy, kv_store)
        self.replica = Replica(
            runner=self.hosted.runner,
            scheduler=Scheduler(config, self.hosted.blocks),
            mover=self.mover,
            max_model_len=self._max_model_len,
            vocab_size=model.vocab_size,
            eos_token_ids=model.eos_token_ids,
            detokenize=self._detokenize,
            hidden_stop=self._hidden_stop,
            max_kv_tokens=self._max_kv_tokens,
            drafter=self._choose_drafter(remote),
        )

    def _choose_drafter(self, remote: Drafter | None) -> Drafter | None:
        """Returns the drafter of this place's replica; on a rank that only drafts, makes what drafts there."""
        config, shards, is_draft_rank = self.config, self.tensor_parallel, self.spec.role == "draft"
        self._is_remote = remote is not None
        drafts_here = is_draft_rank or remote is None
        self._model_drafter = self.make_model_drafter(config, self._model, self._max_model_len) if drafts_here else None
        choose = partial(
            choose_drafter,
            connect=self._connect_drafts,
            history=self._draft_history,
            model=self._model_drafter if self._own_drafter is None else self._own_drafter(),
        )
        self.drafter: Drafter | None = None
        """On a rank that only drafts: what drafts there."""
        if is_draft_rank:
            alone = replace(config, draft_lengths="fixed")
            self.drafter = choose(alone, self._draft_policy, Prices(self.row_times), SingleRank())
            return None
        return choose(config, self._draft_policy, self.prices(config, self._model_drafter), shards, remote=remote)

    def draft_with(self, remote: Drafter | None) -> None:
        """Drafts on other ranks than before, or here again, while there are no sequences."""
        self.replica.drafter = self._choose_drafter(remote)
        if self.has_weights:
            self.load_draft_model()
        if self.is_asleep and self._model_drafter is not None:
            self._model_drafter.sleep(weights=not self.has_weights)

    def regroup(
        self,
        joint: Joint,
        tensor_parallel: Communicator,
        places: Mapping[SequenceId, int],
        *,
        draft_policy: DraftPolicy = MarginalGain,
        max_kv_tokens: int | None = None,
        remote: Drafter | None = None,
    ) -> None:
        """Takes this rank's next place, in the memory that it has: what it lacks comes from the other ranks of `joint`,
        who call it together, between two steps.

        The KV of paused sequences (`Replica.kept`) goes to the replicas that `places` names. An engine without weights
        needs a `load` then. Memory stays as large as it was at its largest. After an error the engine is of no use.
        Raises ValueError where the KV cache lies in pages.
        """
        if self.share is not None:
            raise ValueError("a KV cache in pages cannot be regrouped; make another engine for the new layout")
        start = time.perf_counter()
        version, store = self.replica.policy_version, self.mover.store
        self.mover.close(waits=False)
        has_weights, self.has_weights = self.has_weights, False
        self._draft_policy, self._max_kv_tokens = draft_policy, max_kv_tokens
        self.hosted.runner.drop_graphs()
        if self._model_drafter is not None:
            self._model_drafter.sleep(weights=True)
        moves, num_preemptions = self.mover.moves, self.replica.scheduler.num_preemptions
        self._led = self.led_counts
        kept = joint.gather_kept(self.replica)
        room = {spec.id: self._num_blocks(spec) for spec in joint.after}
        arriving = arrivals(kept, places, room)
        weight_bytes = self.decoder.reshard(
            joint.weights(self.config.exchange), tensor_parallel, self.config, keep_weights=has_weights
        )
        resharded = time.perf_counter()
        blocks = BlockManager(room[joint.mine.id], self.config.block_size)
        sources = {replica_id: list(found.values()) for replica_id, found in arriving.items()}
        kv_bytes = migrate_kv(
            self.kv,
            joint.kv(self.config.exchange, self._model, sources),
            blocks.num_blocks,
            blocks.adopt(list(arriving[joint.mine.id])),
        )
        moved = time.perf_counter()
        num_kv_tokens = kv_capacity(self._model, self.config, joint.mine.tp_size)
        self.hosted = self.hosted.placed(blocks, tensor_parallel, num_kv_tokens)
        self._assemble(joint.mine, tensor_parallel, store, remote)
        self.mover.moves, self.replica.scheduler.num_preemptions = moves, num_preemptions
        self._before = self._counts()
        if has_weights:
            self.decoder.prepare()
            self.load_draft_model()
        if self.is_asleep and self._model_drafter is not None:
            self._model_drafter.sleep(weights=not has_weights)
        self.has_weights, self.replica.policy_version = has_weights, version
        self.switch = Switch(
            weights_s=resharded - start,
            kv_s=moved - resharded,
            prepare_s=time.perf_counter() - moved,
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
            num_kv_tokens=kv_bytes // self._model.kv_bytes_per_token(self.decoder.dtype.itemsize),
        )

    def _num_blocks(self, spec: ReplicaSpec) -> int:
        return kv_capacity(self._model, self.config, spec.tp_size) // self.config.block_size

    def make_model_drafter(self, config: EngineConfig, model: ModelConfig, max_model_len: int) -> ModelDrafter | None:
        """Returns a drafter for drafter="model", else None; its `load` reads the weights.
        `config` may have other options of drafts than the engine's."""
        draft = draft_model_config(config, model)
        if draft is None:
            return None
        num_blocks = draft_kv_blocks(config, self.num_kv_tokens // config.block_size, max_model_len)
        hosted = HostedModel.make(
            draft,
            config.of_draft_model,
            shard=Shard(count=1),
            tensor_parallel=SingleRank(),
            max_model_len=max_model_len,
            device=self.decoder.device,
            num_kv_tokens=num_blocks * config.block_size,
            editor=self._editor,
        )
        return ModelDrafter(hosted, config)

    def prices(self, config: EngineConfig, drafter: ModelDrafter | None) -> Prices:
        """Returns what drafts cost, as measured here when asked. `config` may have other options of drafts than the
        engine's; `drafter` is its small model's."""
        if self._is_remote:
            return Prices(self.row_times, elsewhere)
        if config.drafter != "model":
            return Prices(self.row_times)
        assert drafter is not None
        return Prices(self.row_times, DraftTimes(drafter.hosted.row_times, self.tensor_parallel))

    def load(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Copies this shard's part of every parameter; `load_draft_model` first, where it was not called. Raises
        ValueError when the stream does not fit the model.

        After a failed load the engine has no weights.
        """
        self.has_weights, self._pulled = False, None
        self.replica.scheduler.blocks.forget()
        self.load_draft_model()
        load_weights(self.decoder, weights)
        self.has_weights = True
        self.replica.policy_version = version

    def pull(self, puller: Puller, version: Version) -> int:
        """Makes its weights those of a version, which a relay has or is about to get; returns their checksum. See
        `Puller.pull`. All ranks of the replica call it together.

        After a failed pull the engine has no weights.
        """
        have = self._pulled if self.has_weights else None
        self.has_weights, self._pulled = False, None
        self.replica.scheduler.blocks.forget()
        self.load_draft_model()
        self.decoder.unpack()
        checksum = puller.pull(self.decoder, self.tensor_parallel, version, have)
        self.decoder.prepare()
        self.has_weights, self._pulled = True, version
        self.replica.policy_version = version.number
        return checksum

    def load_draft_model(self) -> None:
        """Reads the weights of the draft model, if there is one and they are not in memory. Raises FileNotFoundError or
        ValueError for a damaged folder."""
        if self._model_drafter is not None:
            self._model_drafter.load()

    def checksum(self) -> int:
        """Returns the checksum of the replica's weights over logical elements. All its ranks call it together."""
        parts = self.tensor_parallel.all_gather_bytes(self.decoder.checksum().to_bytes(8, "little"))
        return sum(int.from_bytes(part, "little") for part in parts) % 2**64

    def sleep(self, *, weights: bool = False) -> None:
        """Releases the KV caches; with `weights` also the weights, the draft model's too, which `load` reads again."""
        if self._model_drafter is not None:
            self._model_drafter.sleep(weights=weights)
        if not self.is_asleep:
            self.replica.scheduler.blocks.forget()
            self.is_asleep = True
        self.hosted.sleep(weights=weights)
        if weights:
            self.has_weights = False

    def wake_up(self) -> None:
        if self.is_asleep:
            self.hosted.wake_up()
            if self._model_drafter is not None:
                self._model_drafter.wake_up()
            self.is_asleep = False


def kv_capacity(model: ModelConfig, config: EngineConfig, tp_size: int) -> int:
    """Returns the number of tokens, in whole blocks, that the KV cache of a replica of `tp_size` ranks holds.

    Raises ValueError when the model cannot be cut into that many shards, or the memory cannot hold a block.
    """
    assert config.kv_cache_bytes != "auto"  # see `Capacity.with_kv_bytes`
    block_bytes = kv_block_bytes(model, config, tp_size)
    num_blocks = config.kv_cache_bytes // block_bytes
    if num_blocks < 1:
        raise ValueError(
            f"EngineConfig.kv_cache_bytes={config.kv_cache_bytes}: one block of {config.block_size} tokens takes "
            f"{block_bytes} bytes in a replica of {tp_size} ranks; give at least that, or lower block_size"
        )
    return num_blocks * config.block_size
