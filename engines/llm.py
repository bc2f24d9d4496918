"""The front door: a checkpoint, and `generate` over one process or the replicas of a torchrun world."""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from engines.config import ModelConfig, engine_config, longest_sequence
from engines.coordination.policies import LayoutPolicy, SchedulePolicy
from engines.kvcache.files import FileKVStore
from engines.kvcache.tiers import TieredKVStore, host_pool_bytes, make_kv_store
from engines.memory.free_memory import FreeMemory, free_memory
from engines.memory.plan import MemoryPlan
from engines.models.host_weights import HostWeights
from engines.models.loader import checkpoint_tensors
from engines.models.tokenizer import Prompt, detokenizer, encode_prompt, load_tokenizer
from engines.parallel.collectives import Communicator, SingleRank, together
from engines.parallel.groups import GroupCache, all_layouts, num_torchrun_ranks, start_world
from engines.parallel.layout import Layout, nested_layout
from engines.parallel.sharding import check_shardable
from engines.replica.capacity import Capacity
from engines.replica.engine import LocalEngine, kv_capacity
from engines.replica.preflight import check_engine, check_policy, usable_device
from engines.replica.replica import HiddenStop, Replica
from engines.replica.turn import Turn, alone
from engines.rollout.journal import CompletionStore
from engines.rollout.telemetry import StepRecord
from engines.rollout.worker import Pace
from engines.rollout.world import RolloutWorld
from engines.sequence import (
    Completion,
    Finished,
    RequestOutput,
    SamplingParams,
    SequenceId,
    SequenceKey,
    SequenceState,
    Work,
    is_int64,
)


class LLM:
    """A Hugging Face checkpoint (Llama, Qwen2/2.5, Qwen3) ready to generate.

    Under torchrun the ranks form replicas: each `tensor_parallel_size` of them hold one copy of the model, in shards
    (`nested_layout`). Every rank makes the same LLM, calls `generate` with the same prompts, and gets all outputs.
    Replica i mod dp runs sequence i; with a `schedule` policy replicas are given sequences while they have room, and a
    `layout_policy` may regroup the ranks under way. Ranks that share their groups with a trainer give them as `world`;
    without it, an LLM with neither a `tensor_parallel_size` nor a `layout` nor a `schedule` is its own rank's alone.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        device: str | torch.device | None = None,
        world: GroupCache | None = None,
        tensor_parallel_size: int = 1,
        layout: Layout | None = None,
        schedule: SchedulePolicy | None = None,
        layout_policy: LayoutPolicy | None = None,
        pace: Pace | None = None,
        hidden_stop: HiddenStop | None = None,
        load: bool = True,
        **options: Any,
    ) -> None:
        """`options` are the fields of `EngineConfig`. With `load=False` the weights come by `update_weights`.

        A `layout` of all ranks stands in for the one that `tensor_parallel_size` makes. A `layout_policy` needs a
        `schedule`, and may name groups of ranks that `world` has; sequences are then taken only if they fit in the KV
        cache of every layout that `world` was made for, and that the model can be cut into. `pace` stretches each step
        to what it says, and `hidden_stop` ends sequences without a policy's knowledge: both are for benchmarks.

        Raises FileNotFoundError or ValueError, naming field, value and fix, before memory is taken; in a world on every
        rank, where all must be given the same.
        """
        if world is not None and not isinstance(world, GroupCache):
            raise ValueError(f"world={world!r}: give a GroupCache of the ranks, as docs/rollouts.md shows")
        self._own_groups: GroupCache | None = None
        has_replicas = tensor_parallel_size != 1 or isinstance(layout, Layout) or schedule is not None
        if world is None and has_replicas and num_torchrun_ranks() > 1:
            ranks = range(num_torchrun_ranks())
            first = layout or nested_layout(ranks, tensor_parallel_size)
            layouts = [first] if layout_policy is None else [first, *all_layouts(ranks)]
            world = self._own_groups = start_world(layouts, on_cuda=str(device or "cuda").startswith("cuda"))
        self._groups = world
        self._world: Communicator = world.world if world is not None else SingleRank()
        self._hidden_stop = hidden_stop
        self._closed = False
        self._turn = Turn()
        given = {"schedule": schedule, "layout_policy": layout_policy, "pace": pace, "hidden_stop": hidden_stop}
        with together(self._world, "LLM"):
            self.config = engine_config("LLM", options)
            self.model_config = ModelConfig.from_pretrained(model)
            self.device = usable_device("LLM", device)
            self.max_model_len = longest_sequence(self.config, self.model_config)
            self.tokenizer = load_tokenizer(model, self.model_config)
            if schedule is not None:
                check_policy("schedule", schedule, "next")
            if layout_policy is not None:
                check_policy("layout_policy", layout_policy, "decide")
            for name, function in (("pace", pace), ("hidden_stop", hidden_stop)):
                if function is not None and not callable(function):
                    raise ValueError(f"{name}={function!r}: give a function")
            if not isinstance(load, bool):
                raise ValueError(f"load={load!r}: must be True or False")
            if layout is not None and not isinstance(layout, Layout):
                raise ValueError(f"layout={layout!r}: give a Layout, as `nested_layout` makes them")
            if layout is not None and tensor_parallel_size != 1:
                raise ValueError(f"tensor_parallel_size={tensor_parallel_size}: the layout says it; leave one out")
            if world is None and tensor_parallel_size != 1:
                raise ValueError(
                    f"tensor_parallel_size={tensor_parallel_size}: one process has one shard; start ranks with torchrun"
                )
            self.layout = layout or nested_layout(range(self._world.size), tensor_parallel_size)
            """Of the world; during a rollout still the one of its start."""
            self._check_groups(self.layout)
            self._host_bytes = host_pool_bytes(self.config.kv_host_bytes, num_ranks=self._num_local_ranks())
            if schedule is not None and world is None:
                raise ValueError(
                    "schedule: one process has nothing to dispatch to; give a world of ranks, or leave it out"
                )
            if schedule is None and (layout_policy is not None or pace is not None):
                raise ValueError("layout_policy, pace: are for coordinated rollouts; give a schedule policy too")
            check_engine(self.config, self.model_config, self.device)
            memory = free_memory(self.device, world.hosts[self._world.rank] if world is not None else "this host")
        self._check_same_options(load=load, **{name: value is not None for name, value in given.items()})
        sizes = self._replica_sizes(with_policy=layout_policy is not None)
        self._capacity = Capacity(
            model=self.model_config,
            config=self.config,
            device=self.device,
            free=FreeMemory.agree(self._world, memory),
            max_tp_size=world.max_tp_size if world is not None else 1,
            host_copy=layout_policy is not None,
        ).with_kv_bytes(sizes)
        self.config = self._capacity.config
        self._capacities = {size: kv_capacity(self.model_config, self.config, size) for size in sizes}
        """Tokens of KV by the sizes of replicas that this run may have."""
        self._capacity.check(self.layout)
        self._kv_store: FileKVStore | TieredKVStore | None = None
        """Of preempted sequences; that of coordinated rollouts is theirs."""
        if schedule is None and self.config.preemption != "recompute":
            mine = secrets.token_hex(16).encode() if self._world.rank == 0 else None
            self._kv_store = self._make_kv_store(self._world.broadcast_bytes(mine).decode())
            weakref.finalize(self, self._kv_store.close)
        with together(self._world, "LLM"):
            self._engine = self._make_engine(self.layout)
            if load:
                self._engine.load(checkpoint_tensors(model), version=0)
        self._weights: Callable[[], Iterable[tuple[str, Tensor]]] = lambda: checkpoint_tensors(model)
        """Whole weights, to build this rank's part of another layout from."""
        self._host_weights: HostWeights | None = None
        self.rollout: RolloutWorld | None = None
        if schedule is not None:
            self._coordinate(schedule, layout_policy, pace)
        self._next_uid = 0
        self.step_records: list[StepRecord] = []
        """One entry per step of this rank's part of the last `generate`."""

    def _check_groups(self, layout: Layout) -> None:
        if self._groups is not None:
            self._groups.check(layout)
        else:
            layout.check_places(self._world.size)

    def _replica_sizes(self, *, with_policy: bool) -> list[int]:
        """Of all replicas that this run may have, whatever its layout is now."""
        sizes = {replica.tp_size for replica in self.layout.replicas}
        if with_policy and self._groups is not None:
            sizes |= {size for size in self._groups.replica_sizes if _can_be_cut(self.model_config, size)}
        return sorted(sizes)

    def _check_layout(self, layout: Layout) -> None:
        """Raises ValueError for a layout that this run cannot go to."""
        self._check_groups(layout)
        for replica in layout.replicas:
            check_shardable(self.model_config, replica.tp_size)
            if replica.tp_size not in self._capacities:
                raise ValueError(
                    f"layout: replica {replica.id} has {replica.tp_size} ranks, and the KV cache is checked for those "
                    f"of {sorted(self._capacities)}; add the layout to GroupCache's, and give LLM a layout_policy"
                )
        self._capacity.check(layout)
        if self._weights is _no_whole_weights:
            raise ValueError("layout: whole weights are kept after an update only with a layout_policy; give LLM one")

    def _check_same_options(self, **options: bool) -> None:
        """Raises ValueError, on every rank, where they were not given the same."""
        values: dict[str, Any] = {"layout": self.layout, **options}
        values |= {f"EngineConfig.{name}": value for name, value in dataclasses.asdict(self.config).items()}
        values |= {f"ModelConfig.{name}": value for name, value in dataclasses.asdict(self.model_config).items()}
        mine = {name: repr(value) for name, value in values.items()}
        everyone = self._world.all_gather_bytes(msgspec.msgpack.encode(mine))
        first, *others = [msgspec.msgpack.decode(one, type=dict[str, str]) for one in everyone]
        for rank, other in enumerate(others, start=1):
            for name, value in first.items():
                if other[name] != value:
                    raise ValueError(
                        f"LLM: {name}: rank {rank} has {other[name]}, rank 0 has {value}; give all ranks the same"
                    )

    def _num_local_ranks(self) -> int:
        """Of this rank's host."""
        return 1 if self._groups is None else self._groups.hosts.count(self._groups.hosts[self._world.rank])

    def _make_kv_store(self, token: str) -> FileKVStore | TieredKVStore:
        return make_kv_store(
            token,
            host_bytes=self._host_bytes,
            disk_bytes=self.config.kv_disk_bytes,
            disk_parent=self.config.kv_disk_folder,
        )

    def _make_engine(self, layout: Layout) -> LocalEngine:
        spec = layout.replica_of(self._world.rank)
        assert spec is not None
        return LocalEngine(
            self.model_config,
            self.config,
            spec=spec,
            max_tp_size=self._capacity.max_tp_size,
            tensor_parallel=self._groups.get(spec.ranks) if self._groups is not None else SingleRank(),
            max_model_len=self.max_model_len,
            device=self.device,
            detokenize=detokenizer(self.tokenizer),
            hidden_stop=self._hidden_stop,
            max_kv_tokens=min(self._capacities.values()),
            kv_store=self._kv_store,
        )

    def _coordinate(self, schedule: SchedulePolicy, layout_policy: LayoutPolicy | None, pace: Pace | None) -> None:
        assert self._groups is not None
        if layout_policy is not None:
            self._host_weights = HostWeights(self._groups, self.model_config, self.config.dtype)
        try:
            self.rollout = RolloutWorld(
                self._groups,
                self.layout,
                engine=self._engine,
                rebuild=self._rebuild,
                schedule_policy=schedule,
                layout_policy=layout_policy,
                check_layout=self._check_layout,
                pace=pace,
                make_kv_store=self._make_kv_store,
            )
        except BaseException:
            self.close()
            raise

    def _rebuild(self, layout: Layout) -> LocalEngine:
        """This rank's part of another layout, made after the one it had is given up."""
        version = self.policy_version
        self._engine.sleep(weights=True)
        self._engine = self._make_engine(layout)
        self._engine.load(self._weights(), version)
        return self._engine

    @property
    def replica(self) -> Replica:
        """This rank's; between two calls of `generate` it may be stepped by hand."""
        return self._engine.replica

    @property
    def kernels(self) -> str:
        """ "native" or "torch": see `EngineConfig.kernels`."""
        return "torch" if self._engine.decoder.library is None else "native"

    @property
    def product_dtype(self) -> str:
        """What matrices are multiplied in: float32 for bfloat16 on a CPU that has no instructions for it."""
        return str(self._engine.decoder.product_dtype).removeprefix("torch.")

    @property
    def memory(self) -> MemoryPlan:
        """What this rank takes in the current layout."""
        return self._capacity.plan(self._engine.spec.tp_size, self._world.rank)

    @property
    def attention(self) -> str:
        """ "flash_attn", "triton", "native" or "sdpa": what runs of those that `EngineConfig.attention` may name."""
        return self._engine.decoder.attention_backend

    @property
    def policy_version(self) -> int:
        return self.replica.policy_version

    # -- generation

    @alone
    def generate(
        self,
        prompts: Items[Prompt],
        sampling_params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        prompt_uids: Items[int] | None = None,
        on_finished: Callable[[Finished], None] | None = None,
        journal: CompletionStore | None = None,
    ) -> list[RequestOutput]:
        """Completes every prompt `n` times; outputs in the order of the prompts.

        `prompt_uids` name the prompts within a policy step: the same uid, step and seed draw the same tokens
        whatever else runs. By default they count on from call to call.

        `on_finished` is called for each sequence as it ends: for those of a replica on its first rank; with a
        `schedule` policy for all of them on rank 0, by another thread. A `journal` keeps what it is called for.
        Sequences found there are not generated again; `on_finished` gets them first, as if they had just ended.

        Raises ValueError before anything runs, which begins with `prompts[3]` where that one cannot run here. Raises
        RuntimeError while another call runs. After an error or an interrupt nothing of the call is left; but where
        several ranks run it, an error that not all of them raise ends it on all, and they need a new LLM.
        """
        with together(self._world, "generate"):
            self._check_ready()
            token_lists = self.encode(prompts)
            params = _broadcast_params(sampling_params, len(prompts))
            states = self._make_states(token_lists, params, prompt_uids)
            for index, (tokens, one) in enumerate(zip(token_lists, params, strict=True)):
                self.replica.check(tokens, one, f"prompts[{index}]")
        if prompt_uids is None:
            self._next_uid += len(prompts)
        if self._world.size > 1:
            self._check_same_request(states)
        done = journal.find(states, len(self.layout.replicas)) if journal is not None else {}

        def hear(finished: Finished) -> None:
            if journal is not None and finished.state.sequence_id not in done:
                journal.append(finished)
            if on_finished is not None:
                on_finished(finished)

        if self.rollout is None:
            completions = self._roll_out_static(states, done, hear)
        else:
            completions = self._roll_out_coordinated(self.rollout, states, done, hear)
        texts = [prompt if isinstance(prompt, str) else None for prompt in prompts]
        return [
            RequestOutput(
                prompt_token_ids=tokens,
                outputs=[completions[uid, index] for index in range(one.n)],
                prompt=text,
            )
            for tokens, one, text, uid in zip(
                token_lists, params, texts, dict.fromkeys(s.key.prompt_uid for s in states), strict=True
            )
        ]

    def encode(self, prompts: Items[Prompt]) -> list[list[int]]:
        """Token ids of each prompt; text goes through the checkpoint's tokenizer without a chat template.

        Raises ValueError that names a prompt which is none by its place, as `prompts[3]`.
        """
        if isinstance(prompts, str | bytes) or not hasattr(prompts, "__len__") or not len(prompts):
            raise ValueError(f"prompts={prompts!r}: give a list of at least one prompt")
        return [encode_prompt(self.tokenizer, prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]

    def check(self, prompt: Prompt, sampling_params: SamplingParams) -> None:
        """Raises ValueError, with the numbers, when the prompt's completions could never run here."""
        self.replica.check(encode_prompt(self.tokenizer, prompt, "prompt"), sampling_params)

    def _make_states(
        self, token_lists: list[list[int]], params: list[SamplingParams], uids: Items[int] | None
    ) -> list[SequenceState]:
        if uids is None:
            uids = range(self._next_uid, self._next_uid + len(token_lists))
        wrong = [uid for uid in uids if not is_int64(uid)]
        if wrong:
            raise ValueError(f"prompt_uids: {wrong[0]!r} is not an integer of 64 bits")
        if len(set(uids)) != len(token_lists):
            raise ValueError(
                f"prompt_uids: {len(set(uids))} distinct values for {len(token_lists)} prompts; give one each"
            )
        return [
            SequenceState(
                key=SequenceKey(
                    run_seed=self.config.seed, policy_step=self.policy_version, prompt_uid=uid, sample_index=index
                ),
                group_id=uid,
                tokens=list(tokens),
                num_prompt_tokens=len(tokens),
                params=one,
            )
            for tokens, one, uid in zip(token_lists, params, uids, strict=True)
            for index in range(one.n)
        ]

    def _check_ready(self) -> None:
        self._check_open()
        if self._engine.is_asleep:
            raise RuntimeError("LLM: memory is released; call wake_up() first")
        if not self._engine.has_weights:
            raise RuntimeError("LLM: there are no weights; call update_weights() first")
        if self.replica.has_work:
            raise RuntimeError("LLM: the replica has sequences; pause() or abort() them first, or clear() it")

    def _roll_out_coordinated(
        self,
        rollout: RolloutWorld,
        states: list[SequenceState],
        done: Mapping[SequenceId, Completion],
        hear: Callable[[Finished], None],
    ) -> dict[tuple[int, int], Completion]:
        known, left = _split(states, done)
        if self._world.rank == 0:
            for one in known:
                hear(one)
        try:
            finished = rollout.roll_out(left, policy_version=self.policy_version, on_finished=hear)
        finally:
            self.layout = rollout.layout  # only the ranks that a regroup moves have heard of it
        self.step_records = rollout.step_records
        return {(one.state.key.prompt_uid, one.completion.index): one.completion for one in known + finished}

    def _roll_out_static(
        self, states: list[SequenceState], done: Mapping[SequenceId, Completion], hear: Callable[[Finished], None]
    ) -> dict[tuple[int, int], Completion]:
        """Replica i mod dp runs sequence i: a dispatch that depends on nothing timed."""
        is_first = self._engine.tensor_parallel.rank == 0
        position = self.layout.replicas.index(self._engine.spec)
        known, left = _split(states[position :: len(self.layout.replicas)], done)
        if is_first:
            for one in known:
                hear(one)
        ended = known + self._run(left, hear if is_first else None)
        return self._gather([(one.state.key.prompt_uid, one.completion) for one in ended])

    def _run(self, states: list[SequenceState], hear: Callable[[Finished], None] | None) -> list[Finished]:
        """This rank's sequences, in the order they finish."""
        replica = self.replica
        self.step_records = []
        done: list[Finished] = []
        try:
            for state in states:
                replica.submit(Work(state=state))
            while replica.has_work:
                start = time.monotonic()
                output = replica.step()
                self.step_records.append(
                    StepRecord(
                        replica_id=self._engine.spec.id,
                        epoch=self.layout.epoch,
                        tp_size=self._engine.spec.tp_size,
                        start=start,
                        seconds=time.monotonic() - start,
                        num_running=output.num_running,
                        num_tokens=output.num_tokens,
                        num_preempted=output.num_preempted,
                        num_swapped_out=output.num_swapped_out,
                        num_swapped_in=output.num_swapped_in,
                    )
                )
                for finished in output.finished:
                    done.append(finished)
                    if hear is not None:
                        hear(finished)
                if len(done) + replica.num_sequences < len(states):
                    raise RuntimeError(
                        "generate: on_finished has paused or aborted sequences; do that between two calls only"
                    )
        except BaseException:  # the next call starts clean
            replica.clear()
            if self._kv_store is not None:
                self._kv_store.close()
            raise
        return done

    def _check_same_request(self, states: list[SequenceState]) -> None:
        digest = hashlib.blake2b(msgspec.msgpack.encode(states), digest_size=16).digest()
        others = [rank for rank, other in enumerate(self._world.all_gather_bytes(digest)) if other != digest]
        if others:
            raise ValueError(
                f"generate: ranks {others} were given other prompts or parameters than rank "
                f"{self._world.rank}; give all ranks the same"
            )

    def _gather(self, mine: list[tuple[int, Completion]]) -> dict[tuple[int, int], Completion]:
        if self._world.size > 1:
            decode = msgspec.msgpack.Decoder(list[tuple[int, Completion]]).decode
            # Every shard of a replica has drawn the same tokens; the first one's are sent.
            told = mine if self._engine.tensor_parallel.rank == 0 else []
            parts = self._world.all_gather_bytes(msgspec.msgpack.encode(told))
            mine = [pair for part in parts for pair in decode(part)]
        return {(uid, completion.index): completion for uid, completion in mine}

    # -- weights and memory

    @alone
    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> int:
        """Takes new weights, parameter by parameter, under Hugging Face names; returns their checksum.

        All cached KV is of the old weights and is dropped. Raises RuntimeError while sequences are running,
        ValueError when the stream does not fit the model. All ranks call it together, and where one fails all raise
        and none has weights.
        """
        with together(self._world, "update_weights"):
            self._check_open()
            if not (is_int64(version) and version >= 0):
                raise ValueError(f"version={version!r}: must be an integer of 64 bits, at least 0")
            if self.replica.has_work:
                raise RuntimeError("update_weights: sequences are running; pause() them first")
        if self._kv_store is not None:
            self._kv_store.close()  # paused sequences may have left with some; the version need not tell it from new KV
        kept = self._host_weights
        self._weights = kept.tensors if kept is not None else _no_whole_weights
        try:
            with together(self._world, "update_weights"):
                self._engine.load(kept.keep(weights) if kept is not None else weights, version)
        except BaseException:
            self._engine.has_weights = False
            raise
        return self.checksum()

    def checksum(self) -> int:
        """Of the weights in use, over logical elements: equal for equal weights, however they are laid out.

        All ranks of a replica call it together.
        """
        return self._engine.checksum()

    @alone
    def sleep(self, *, weights: bool = False) -> None:
        """Gives the KV cache's memory back for training, and the weights' too when asked (then update them)."""
        if self.replica.has_work:
            raise RuntimeError("sleep: sequences are running; pause() them first")
        self._engine.sleep(weights=weights)

    @alone
    def wake_up(self) -> None:
        """Takes the KV cache's memory again."""
        self._engine.wake_up()

    @alone
    def close(self) -> None:
        """Ends the connections of coordinated rollouts; gives back the host's copy of the weights, and the groups of
        ranks that this LLM has made.

        All ranks together. Nothing can be generated any more.
        """
        self._closed = True
        if self._kv_store is not None:
            self._kv_store.close()
        if self.rollout is not None:
            self.rollout.close()
            self.rollout = None
        if self._host_weights is not None:
            self._host_weights.close()
        if self._own_groups is not None:
            self._own_groups.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("LLM: is closed; make a new one")
        if self.rollout is not None and self.rollout.has_failed:
            raise RuntimeError("LLM: a rollout has failed, which ended the ranks' connections; make a new one")


def _no_whole_weights() -> Iterable[tuple[str, Tensor]]:
    raise RuntimeError("regroup: whole weights are kept after an update only with a layout_policy; give LLM one")


def _can_be_cut(model: ModelConfig, tp_size: int) -> bool:
    try:
        check_shardable(model, tp_size)
    except ValueError:
        return False
    return True


def _split(
    states: Items[SequenceState], done: Mapping[SequenceId, Completion]
) -> tuple[list[Finished], list[SequenceState]]:
    """Those that are done already, as if they had just ended, and the others."""
    known = []
    for state in states:
        if state.sequence_id in done:
            completion = done[state.sequence_id]
            ended = dataclasses.replace(
                state,
                tokens=state.tokens + completion.token_ids,
                logprobs=completion.logprobs,
                versions=completion.versions,
            )
            known.append(Finished(state=ended, completion=completion))
    return known, [state for state in states if state.sequence_id not in done]


def _broadcast_params(params: SamplingParams | Items[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not hasattr(params, "__len__"):
        raise ValueError(f"sampling_params={params!r}: give SamplingParams, or a list of one per prompt")
    if len(params) != count:
        raise ValueError(f"sampling_params: {len(params)} for {count} prompts; give one, or one per prompt")
    for index, one in enumerate(params):
        if not isinstance(one, SamplingParams):
            raise ValueError(f"sampling_params[{index}]={one!r}: give SamplingParams")
    return list(params)
