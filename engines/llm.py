"""The main entry point: load a checkpoint and `generate`, in one process or on the replicas of a torchrun world."""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engines.coordination.policies import LayoutPolicy, SchedulePolicy
from engines.exclusive_calls import ExclusiveCalls, exclusive
from engines.kvcache.files import FileKVStore
from engines.kvcache.tiers import TieredKVStore
from engines.memory.plan import MemoryPlan
from engines.models.chat import ChatTemplate, Messages, Tools, check_template_kwargs, is_conversation
from engines.models.loader import checkpoint_tensors
from engines.models.tokenizer import Prompt
from engines.parallel.collectives import Communicator, SingleRank, together
from engines.parallel.groups import GroupCache
from engines.parallel.layout import Layout
from engines.progress import Bar
from engines.relay.client import Relay
from engines.relay.pull import PullRecord
from engines.relay.requests import Version
from engines.replica.endings import HiddenStop
from engines.replica.engine import LocalEngine
from engines.replica.replica import Replica
from engines.rollout.draft_ranks import DraftRanks
from engines.rollout.drafts import DraftSharing
from engines.rollout.environment import CallCounts, Environments
from engines.rollout.generation import Requests, as_prompts, check_same_options, check_same_states, split_done
from engines.rollout.journal import CompletionStore
from engines.rollout.pace import Pace
from engines.rollout.placement import Arguments, MakePages, Placement
from engines.rollout.prediction import LengthPredictor
from engines.rollout.pulls import WeightPulls
from engines.rollout.steps import roll_out_static
from engines.rollout.telemetry import StepRecord, draft_metrics
from engines.rollout.turns import Turns
from engines.rollout.world import RolloutWorld
from engines.sequence import Completion, Finished, RequestOutput, SamplingParams, SequenceId, SequenceState, is_int64
from engines.speculation.drafter import Drafter
from engines.speculation.history import DraftHistory
from engines.speculation.marginal_gain import MarginalGain
from engines.speculation.policy import DraftPolicy

Prompts = str | Mapping[str, Any] | Items[Prompt | Messages | Mapping[str, Any]]
"""A list of prompts: each is text, token ids, messages, {"prompt": text} or {"prompt_token_ids": ids}. Text or a
dictionary alone is one prompt; the token ids or the messages of one prompt must be in a list, too."""


class LLM:
    """A Hugging Face checkpoint (Llama, Qwen2/2.5, Qwen3) ready to generate.

    Under torchrun the ranks form replicas: `tensor_parallel_size` ranks each hold one copy of the model, in shards
    (`nested_layout`). Every rank makes the same LLM, calls `generate` with the same prompts, and gets all outputs.
    Replica i mod dp runs sequence i; with a `schedule` policy, sequences are dispatched to replicas that have room, and
    a `layout_policy` may regroup the ranks during the rollout. Sequences are in the order of their prompts, or, when a
    group's drafts come from its samples that have ended, sample 0 of all prompts before sample 1. Ranks that share
    their groups with a trainer pass them as `world`. Without it, an LLM with no `tensor_parallel_size`, `layout` or
    `schedule` runs on its own rank alone.
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
        draft_policy: DraftPolicy = MarginalGain,
        own_drafter: Callable[[], Drafter] | None = None,
        load: bool = True,
        base_model: str | Path | None = None,
        pages: MakePages | None = None,
        **options: Any,
    ) -> None:
        """`model` is a folder, or a name of the Hugging Face hub ("Qwen/Qwen3-0.6B"), which is taken from the hub's
        local cache, or downloaded. It may be a LoRA adapter in peft's format, which is merged into its base:
        `base_model`, or the folder that the adapter names. `options` are the fields of `EngineConfig`, or vLLM's names
        of them (docs/rollouts.md). With `load=False` there are no weights before `update_weights`.

        A `layout` of all ranks replaces the one that `tensor_parallel_size` makes. A `layout_policy` needs a
        `schedule`, and may use only groups of ranks that `world` has; only sequences are then accepted that fit in the
        KV cache of every layout that `world` was made for and that the model can be sharded into. `pace` sets how long
        each step lasts at least, `hidden_stop` ends sequences without a policy's knowledge: both are for benchmarks.
        `draft_policy` makes what decides adaptive lengths of drafts, a `SpeculationPolicy` for each replica, from what
        drafts cost (`Prices`), which is measured when needed. `own_drafter` makes the drafter of drafter="own". `pages`
        makes the pages in which the KV cache of one process alone is to lie, of `kv_cache_bytes` in all.

        Raises FileNotFoundError or ValueError, naming field, value and fix, before memory is allocated. In a world,
        every rank raises, and all ranks must pass the same arguments.
        """
        arguments = Arguments(
            world=world,
            tensor_parallel_size=tensor_parallel_size,
            layout=layout,
            schedule=schedule,
            layout_policy=layout_policy,
            pace=pace,
            hidden_stop=hidden_stop,
            draft_policy=draft_policy,
            own_drafter=own_drafter,
            load=load,
            base_model=base_model,
            pages=pages,
        )
        self._calls = ExclusiveCalls()
        self._closed = self._has_failed = False
        self._next_uid = 0
        self.step_records: list[StepRecord] = []
        """One entry per step of this rank's part of the last `generate`."""
        self.environment_calls = CallCounts()
        """On rank 0, those of the last `generate`."""
        self.rollout: RolloutWorld | None = None
        self._kv_store: FileKVStore | TieredKVStore | None = None
        """KV of preempted sequences; coordinated rollouts (`rollout`) have their own store."""
        self._drafts: DraftSharing | None = None
        self._draft_ranks: DraftRanks | None = None
        self._own_groups = arguments.start_world(device)
        groups = world or self._own_groups
        self._world: Communicator = groups.world if groups is not None else SingleRank()
        self._pulls = WeightPulls(self._world)
        try:
            self._placement = Placement(model, device, arguments, options, groups)
            self._start(arguments, groups)
        except BaseException:
            self.close()
            raise

    def _start(self, given: Arguments, groups: GroupCache | None) -> None:
        """Allocates the memory and loads the weights; with a schedule policy, connects the ranks."""
        placement = self._placement
        self.config, self.model_config = placement.config, placement.model
        self.device, self.tokenizer, self.max_model_len = placement.device, placement.tokenizer, placement.max_model_len
        self.chat_template = ChatTemplate(tokenizer=self.tokenizer)
        """What makes tokens of prompts; put another one in its place for a system prompt or a template's arguments."""
        self.layout = placement.layout
        """The world's layout; during a rollout, still the layout at its start."""
        if given.schedule is None and self.config.preemption != "recompute":
            token = self._world.broadcast_bytes(secrets.token_hex(16).encode() if self._world.rank == 0 else None)
            self._kv_store = placement.kv_store = placement.make_kv_store(token.decode())
        if self.config.draft_server and groups is not None:
            self._drafts = DraftSharing(groups, max_bytes=self.config.draft_tree_bytes)
            placement.connect_drafts = self._drafts.connect
        if groups is not None and any(spec.role == "draft" for spec in self.layout.replicas):
            placement.draft_ranks = self._draft_ranks = DraftRanks(groups, self.config, given.pace)
        with together(self._world, "LLM"):
            placement.build(self.layout)
            if given.load:
                placement.engine.load(checkpoint_tensors(placement.source, given.base_model), version=0)
        if given.schedule is None or groups is None:
            return
        self.rollout = RolloutWorld(
            groups,
            self.layout,
            engine=placement.engine,
            regroup=placement.regroup,
            can_regroup=placement.can_regroup,
            schedule_policy=given.schedule,
            layout_policy=given.layout_policy,
            check_layout=placement.check,
            pace=given.pace,
            make_kv_store=placement.make_kv_store,
            draft_ranks=placement.draft_ranks,
        )

    @property
    def _engine(self) -> LocalEngine:
        return self._placement.engine

    @property
    def replica(self) -> Replica:
        """This rank's replica; between two calls of `generate` the caller may step it directly."""
        return self._engine.replica

    @property
    def led_counts(self) -> Counter[str]:
        """See `LocalEngine.led_counts`."""
        return self._engine.led_counts

    @property
    def kernels(self) -> str:
        """ "native", "triton" or "torch": see `EngineConfig.kernels`."""
        return self._engine.decoder.kernels.name

    @property
    def product_dtype(self) -> str:
        """The dtype of matrix products: float32 for bfloat16 on a CPU without bfloat16 instructions."""
        return str(self._engine.decoder.product_dtype).removeprefix("torch.")

    @property
    def memory(self) -> MemoryPlan:
        """The plan of this rank's memory in the current layout; after a regroup to wider replicas the weights keep the
        memory that they had."""
        return self._placement.memory

    @property
    def attention(self) -> str:
        """The attention backend in use: "flash_attn", "triton", "native" or "sdpa"; see `EngineConfig.attention`."""
        return self._engine.decoder.attention_backend

    @property
    def draft_history(self) -> DraftHistory | None:
        """The completions of earlier calls that drafts copy from; None without `EngineConfig.draft_history_bytes`."""
        return self._placement.draft_history

    @property
    def policy_version(self) -> int:
        return self.replica.policy_version

    # -- generation

    @exclusive
    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
        prompt_uids: Items[int] | None = None,
        on_finished: Callable[[Finished], None] | None = None,
        journal: CompletionStore | None = None,
        environment: Environments | None = None,
        columns: Items[Mapping[str, Any]] | None = None,
        in_rounds: bool = False,
        predictor: LengthPredictor | None = None,
    ) -> list[RequestOutput]:
        """Completes every prompt `n` times; returns the outputs in the order of the prompts.

        `prompt_uids` name the prompts within a policy step: the same uid, step and seed draw the same tokens
        whatever else runs. By default they are numbered on from call to call, so the same call made again draws other
        tokens (at a temperature above 0): give `prompt_uids` or `SamplingParams.seed` to repeat some. `use_tqdm` shows
        a progress bar on rank 0, of the sequences that `on_finished` hears of there.

        `on_finished` is called for each sequence when it ends: on the first rank of its replica, or, with a `schedule`
        policy, on rank 0 for all sequences, by another thread. A `journal` stores each sequence as `on_finished` gets
        it. Sequences found in the journal are not generated again; `on_finished` gets them first, as if just ended.

        With an `environment`, each completion is a trajectory: a stop ends its turn, and what the environment observes
        follows, until that ends it (docs/trajectories.md). `columns` are for its `reset`, one mapping per prompt. Rank
        0 calls it (others may give `OnRankZero()`); several ranks need a `schedule`. With `in_rounds`, trajectories go
        on together, when none runs: with `Static` no batch then depends on how long a call takes. A `predictor`
        estimates their lengths for the `schedule` policy; rank 0 asks it.

        Raises ValueError before anything runs; its message begins with `prompts[3]` if that prompt cannot run here.
        Raises RuntimeError while another call runs. After an error or an interrupt the LLM holds no sequence of the
        call. With several ranks, an error that not all of them raise ends the call on all, and they need a new LLM.
        """
        with together(self._world, "generate"):
            self._check_ready()
            requests = Requests.read(
                prompts,
                sampling_params,
                prompt_uids,
                self.chat_template,
                first_uid=self._next_uid,
                max_model_len=self.max_model_len,
                in_turns=environment is not None,
            )
            states = requests.states(run_seed=self.config.seed, policy_step=self.policy_version)
            if self.config.drafter == "grouped_suffix":
                states.sort(key=lambda state: state.key.sample_index)  # a group in lockstep has nothing to copy
            for index, (tokens, one) in enumerate(zip(requests.tokens, requests.params, strict=True)):
                self.replica.check(tokens, one, f"prompts[{index}]")
            if predictor is not None and (environment is None or self.rollout is None):
                raise ValueError(
                    "predictor: is for trajectories and policies; give an environment and LLM(schedule=...)"
                )
            turns = None
            if environment is not None:
                turns = self._turns(environment, requests, columns, in_rounds, predictor)
        if prompt_uids is None:
            self._next_uid += len(requests.uids)
        if self._world.size > 1:
            check_same_states(self._world, states)
        done = journal.find(states, len(self.layout.replicas)) if journal is not None else {}

        here = states if self.rollout is not None else states[:: len(self.layout.replicas)]
        bar = Bar(total=len(here), desc="generate", unit="seq", disable=not use_tqdm or self._world.rank > 0)

        def hear(finished: Finished) -> None:
            bar.update()
            if journal is not None and finished.state.sequence_id not in done:
                journal.append(finished)
            if on_finished is not None:
                on_finished(finished)

        with bar:
            completions = self._roll_out(states, done, hear, turns)
        self.environment_calls = CallCounts() if turns is None else turns.calls
        outputs = requests.outputs(completions, None if self.tokenizer is None else self.tokenizer.decode)
        if (history := self.draft_history) is not None:
            for output in outputs:
                history.keep(output.prompt_token_ids, self.policy_version, [one.token_ids for one in output.outputs])
        return outputs

    def _turns(
        self,
        environment: Environments,
        requests: Requests,
        columns: Items[Mapping[str, Any]] | None,
        in_rounds: bool,
        predictor: LengthPredictor | None,
    ) -> Turns:
        """Raises ValueError if this LLM, or one of the requests, cannot have an environment, or the chat template no
        message that its tools answer with."""
        if self.rollout is None and self._world.size > 1:
            raise ValueError("environment: several ranks need LLM(schedule=OnDemand()), or another schedule policy")
        if self.tokenizer is None or not all(one.detokenize for one in requests.params):
            raise ValueError("environment: reads the text of turns; give a model with a tokenizer, and detokenize=True")
        template, rendered = self.chat_template, dict(zip(requests.uids, requests.rendered, strict=True))
        if any(requests.rendered):
            for said in ([], [0]):
                template.observe("An observation.", "user", said, is_rendered=True)
            if getattr(environment, "tools", None):  # as an `EnvironmentPool` of tools has
                try:
                    template.observe("A result.", "tool", [0], is_rendered=True)
                except ValueError as error:
                    raise ValueError(
                        "environment: its tools answer in messages of role 'tool', which the model's chat template "
                        f"does not take ({error}); give the model a chat_template.jinja with this role, or an "
                        "environment whose `step` makes the calls and answers in role 'user'"
                    ) from None
        return Turns(
            environment,
            columns=requests.columns(columns),
            encode=lambda uid, answer, said: template.observe(
                answer.text, answer.role, said, is_rendered=rendered[uid]
            ),
            endings=self.replica.endings,
            max_model_len=self.max_model_len,
            in_rounds=in_rounds,
            predictor=predictor,
        )

    def get_tokenizer(self) -> Any:
        """Returns the checkpoint's tokenizer, or None."""
        return self.tokenizer

    @property
    def draft_counts(self) -> dict[str, float]:
        """What this rank has drafted for others in the last `generate`: see `DraftRanks.counts`; empty if nothing."""
        return {} if self._draft_ranks is None else self._draft_ranks.counts

    @property
    def draft_metrics(self) -> dict[str, float]:
        """How many tokens the drafter guessed in this rank's part of the last `generate`, and how many were right: see
        `engines.rollout.telemetry.draft_metrics`."""
        return draft_metrics(self.step_records)

    def chat(
        self,
        messages: Messages | Items[Messages],
        sampling_params: SamplingParams | Items[SamplingParams] | None = None,
        *,
        chat_template: str | None = None,
        tools: Tools | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[RequestOutput]:
        """Continues a conversation, or each of a list of them, as the model's chat template, or the text of another
        `chat_template`, renders it.

        `tools` are JSON schemas or typed functions. `options` are the other keyword arguments of `generate`. Raises
        ValueError, as `generate` does, also for a template that is missing, fails or drops a message.
        """
        with together(self._world, "chat"):
            many: dict[str, Any] = {"messages": messages} if is_conversation(messages) else {}
            if not many and isinstance(messages, list | tuple):
                many = {f"messages[{index}]": one for index, one in enumerate(messages)}
            check_template_kwargs(kwargs := {} if chat_template_kwargs is None else chat_template_kwargs)
            if not many:
                raise ValueError(f"messages={messages!r}: give a conversation, or a list of at least one")
            if not isinstance(chat_template, str | None):
                raise ValueError(f"chat_template={chat_template!r}: give the text of a template")
            more = {
                "chat_template": chat_template,
                "tools": tools,
                "add_generation_prompt": add_generation_prompt,
                **kwargs,
            }
            prompts = [self.chat_template.render(one, where=name, **more) for name, one in many.items()]
        outputs = self.generate(prompts, sampling_params, **options)
        return [replace(one, prompt=self.tokenizer.decode(one.prompt_token_ids)) for one in outputs]

    def encode(self, prompts: Prompts) -> list[list[int]]:
        """Returns the token ids of each prompt: of text by the tokenizer alone, of messages by the chat template.

        Raises ValueError for an invalid prompt, which the message names by its index, as `prompts[3]`.
        """
        prompts = as_prompts(prompts)
        return [self.chat_template.encode(prompt, f"prompts[{index}]") for index, prompt in enumerate(prompts)]

    def check(self, prompt: Prompt | Messages, sampling_params: SamplingParams) -> None:
        """Raises ValueError, with the numbers, if the prompt's completions could never run here."""
        self.replica.check(self.chat_template.encode(prompt, "prompt"), sampling_params)

    def _check_ready(self) -> None:
        self._check_open()
        if self._engine.is_asleep:
            raise RuntimeError("LLM: memory is released; call wake_up() first")
        if not self._engine.has_weights:
            raise RuntimeError("LLM: there are no weights; call update_weights() first")
        if self.replica.has_work:
            raise RuntimeError("LLM: the replica has sequences; pause() or abort() them first, or clear() it")

    def _roll_out(
        self,
        states: list[SequenceState],
        done: Mapping[SequenceId, Completion],
        hear: Callable[[Finished], None],
        turns: Turns | None,
    ) -> dict[tuple[int, int], Completion]:
        """Returns all completions, by (prompt uid, sample index)."""
        if self.rollout is None:
            self.step_records = []
            try:
                pairs = roll_out_static(
                    self._engine, self.layout, self._world, states, done, hear, self.step_records, turns
                )
            except BaseException:
                if self._kv_store is not None:
                    self._kv_store.close()
                raise
            return {(uid, completion.index): completion for uid, completion in pairs}
        known, left = split_done(states, done)
        if self._world.rank == 0:
            for one in known:
                hear(one)
        try:
            finished = self.rollout.roll_out(left, policy_version=self.policy_version, on_finished=hear, turns=turns)
        finally:
            self.layout = self.rollout.layout  # during the rollout, a regroup reaches only the ranks that it moves
        self.step_records = self.rollout.step_records
        return {(one.state.key.prompt_uid, one.completion.index): one.completion for one in known + finished}

    # -- weights and memory

    @exclusive
    def update_weights(
        self,
        weights: Iterable[tuple[str, Tensor]] | None = None,
        version: int | Version | None = None,
        *,
        source: Relay | None = None,
    ) -> int:
        """Loads new weights, parameter by parameter, under Hugging Face names; returns their checksum.

        With a `source`, pulls from a relay what this rank's shard lacks of a version (docs/relay.md), by default of the
        newest whole one, and waits for a version that is still pushed.

        Drops all cached KV, which the old weights computed. Raises RuntimeError while sequences are running, ValueError
        when the parameters do not fit the model, and as `Puller.pull`. All ranks call it together; if one fails, all
        raise and none has weights.
        """
        with together(self._world, "update_weights"):
            self._check_open()
            if (weights is None) == (source is None):
                raise ValueError("update_weights: give weights, or the relay that has them as source")
            if weights is not None and not (is_int64(version) and version >= 0):  # type: ignore[operator]
                raise ValueError(f"version={version!r}: must be an integer of 64 bits, at least 0")
            if source is not None and not isinstance(source, Relay):
                raise ValueError(f"source={source!r}: give a Relay (docs/relay.md)")
            if source is not None and not isinstance(version, Version | None):
                raise ValueError(f"version={version!r}: of a relay, give what `Pusher.version` returns, or None")
            if self.replica.has_work:
                raise RuntimeError("update_weights: sequences are running; pause() them first")
        check_same_options(self._world, {"update_weights(source=)": source is not None, "version": version})
        if self._kv_store is not None:
            self._kv_store.close()  # it may hold KV of paused sequences, and new weights may have the old version
        if source is not None:
            assert isinstance(version, Version | None)
            return self._placement.update(self._pulls.loading(source, version))
        assert weights is not None and isinstance(version, int)
        return self._placement.update(lambda engine: engine.load(weights, version))

    @property
    def pulls(self) -> list[PullRecord]:
        """What `update_weights` has pulled from its last source on this rank, one entry per version."""
        return self._pulls.records

    @exclusive
    def regroup(self, layout: Layout, *, keep_weights: bool = True) -> None:
        """Changes the layout between two rollouts; its epoch must be the next one. All ranks call it together.

        Weights move between the ranks that change their replicas; without `keep_weights`, which is faster, there are
        none until `update_weights`. Drops all cached KV. Raises ValueError, on every rank, for a layout that this LLM
        cannot have, as its world was not made for it; RuntimeError while sequences are running.
        """
        with together(self._world, "regroup"):
            self._check_open()
            if self.replica.has_work:
                raise RuntimeError("regroup: sequences are running; pause() them first")
            if not isinstance(layout, Layout) or layout.epoch != self.layout.epoch + 1:
                raise ValueError(f"layout={layout!r}: give a Layout with the next epoch, {self.layout.epoch + 1}")
            self._placement.check(self.layout, layout)
        before, self.layout = self.layout, layout
        self._has_failed = True  # until all ranks have their places
        with together(self._world, "regroup"):
            if not keep_weights:
                self._engine.has_weights = False
            if self.rollout is not None:
                self.rollout.regroup(layout)
            else:
                self._placement.regroup(before, layout, {})
            self._placement.settle(before, layout)
        self._has_failed = False

    def checksum(self) -> int:
        """Checksum of the weights in use, over logical elements: equal for equal weights, in any layout.

        All ranks of a replica call it together.
        """
        return self._engine.checksum()

    @exclusive
    def sleep(self, *, weights: bool = False) -> None:
        """Releases the KV cache's memory for training; with `weights=True` also the weights' (then update them)."""
        if self.replica.has_work:
            raise RuntimeError("sleep: sequences are running; pause() them first")
        self._engine.sleep(weights=weights)

    @exclusive
    def wake_up(self) -> None:
        """Allocates the KV cache's memory again."""
        self._engine.wake_up()

    @exclusive
    def close(self) -> None:
        """Closes the connections of coordinated rollouts and of drafts, and the groups of ranks that this LLM made.

        All ranks call it together. The LLM cannot generate any more.
        """
        self._closed = True
        self._pulls.close()
        if self._kv_store is not None:
            if (engine := getattr(self._placement, "engine", None)) is not None:  # else it could not be built
                engine.mover.close()
            self._kv_store.close()
        if self.rollout is not None:
            self.rollout.close()
            self.rollout = None
        if self._drafts is not None:
            self._drafts.close()
        if self._draft_ranks is not None:
            self._draft_ranks.close()
        if self._own_groups is not None:
            self._own_groups.close()

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("LLM: is closed; make a new one")
        if self._has_failed:
            raise RuntimeError("LLM: a regroup has failed, and the ranks have different layouts; make a new one")
        if self.rollout is not None and self.rollout.has_failed:
            raise RuntimeError("LLM: a rollout has failed, which ended the ranks' connections; make a new one")
