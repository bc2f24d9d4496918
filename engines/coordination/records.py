"""The core's books: a record of the phase, of each unfinished sequence, of each replica. Mutable. Torch-free."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from engines.control.messages import ReplicaReady, StepReported
from engines.coordination.views import Prediction, ReplicaView, SequenceView, num_reserved_tokens
from engines.parallel.layout import ReplicaSpec
from engines.sequence import Completion, Finished, FinishReason, KVHandle, SequenceId, SequenceState


@dataclass(eq=False, kw_only=True)
class PhaseRecord:
    """The phase that is open."""

    number: int
    policy_version: int
    weights_source: str | None
    """Where replicas outside the world load the weights of `policy_version` from."""
    is_ending: bool = False
    """Whether the phase's end was requested: no more sequences may be submitted."""
    end_seqs: list[int] = field(default_factory=list)
    """`seq` of each `EndPhase` command, once they are sent."""


@dataclass(eq=False, kw_only=True)
class SequenceRecord:
    """A sequence that was submitted and not yet delivered."""

    state: SequenceState
    """The last known state: as submitted, or as a replica last returned it."""
    index: int
    num_tokens: int
    """Tokens as last reported, prompt included; `state` may be older."""
    kv: KVHandle | None = None
    """Exported KV that a replica returned with `state`; kept while the sequence is dispatched with it."""
    replica: ReplicaRecord | None = None
    """The replica that it is assigned to."""
    release_at: int | None = None
    """Length in tokens at which its replica releases it; None when it runs to its end."""
    chunk: int | None = None
    """The largest `max_new_tokens` of its dispatches since the last one without."""
    num_blocks: int = 0
    """KV blocks reserved for it on its replica."""
    pin: ReplicaRecord | None = None
    """The only replica to which it may be dispatched next; None for any."""
    pause_seq: int = -1
    """`seq` of the command that pauses it on its replica; -1 if there is none."""
    is_parked: bool = False
    """Whether it is a trajectory that waits for an observation."""
    parked_since: float = 0.0
    """When it was parked last."""
    expected_at: ReplicaRecord | None = None
    """The replica that reads its KV, while it is parked or waits."""
    priority: float = 0.0
    """Of its last dispatch."""
    prediction: Prediction | None = None
    answered_turns: int = -1
    """See `SequenceView`, like `prediction`."""
    aborting: bool = False
    last_replica_id: int | None = None

    @property
    def id(self) -> SequenceId:
        return self.state.sequence_id

    @property
    def num_left_here(self) -> int | None:
        """The `max_new_tokens` of its next dispatch if no policy decides on it: what is left of the last one's, or as
        many again. None without such a bound."""
        left = 0 if self.release_at is None else self.release_at - self.num_tokens
        return left if left > 0 else self.chunk

    @property
    def max_len(self) -> int:
        return self.state.num_prompt_tokens + self.state.params.most_tokens

    @property
    def num_turns(self) -> int:
        """Turns that it has ended."""
        num_observed = len(self.state.observed)
        return max(0, num_observed - (not self.is_parked)) if num_observed else 0

    def take_back(self, state: SequenceState, kv: KVHandle | None) -> None:
        self.state, self.kv, self.num_tokens = state, kv, len(state.tokens)
        self.pause_seq = -1

    def view(self) -> SequenceView:
        num_observed = self.state.num_observed
        return SequenceView(
            sequence_id=self.id,
            index=self.index,
            group_id=self.state.group_id,
            num_prompt_tokens=self.state.num_prompt_tokens,
            num_generated=self.num_tokens - self.state.num_prompt_tokens - num_observed,
            max_tokens=self.state.params.most_tokens,
            last_replica_id=self.last_replica_id,
            has_kv=self.kv is not None,
            num_observed=num_observed,
            num_turns=self.num_turns,
            is_parked=self.is_parked,
            expected_at=None if self.expected_at is None else self.expected_at.spec.id,
            prediction=self.prediction,
            answered_turns=self.answered_turns,
        )

    def ended(self, reason: FinishReason, text: str = "") -> Finished:
        """Returns the last known state as a completion that ended so."""
        return Finished(state=self.state, completion=Completion.of(self.state, reason, text))


@dataclass(eq=False, kw_only=True)
class ReplicaRecord:
    """A replica from its creation to its end; (spec.id, epoch) identifies it in messages."""

    spec: ReplicaSpec
    epoch: int
    outside: bool
    """Whether it is outside the torchrun world: its loss does not end the run."""
    ready: ReplicaReady | None = None
    version: int | None = None
    """`policy_version` of the weights it holds."""
    source: str | None = None
    """Where it has loaded them from, if it was sent to."""
    closed: bool = False
    """Whether it takes no sequences because of a regroup."""
    num_events: int = 0
    last_heard: float = 0.0
    """Time of its last event, or, if later, of the assignment of a sequence when it had none."""
    assigned: dict[SequenceId, SequenceRecord] = field(default_factory=dict)
    pins: OrderedDict[SequenceId, SequenceRecord] = field(default_factory=OrderedDict)
    """Sequences pinned to it; another replica may still have them."""
    pinned_waiting: OrderedDict[SequenceId, SequenceRecord] = field(default_factory=OrderedDict)
    """Sequences pinned to it that wait to be dispatched."""
    expected: dict[SequenceId, SequenceRecord] = field(default_factory=dict)
    """Sequences that are not here, whose KV it reads."""
    num_tokens: int = 0
    num_reserved_blocks: int = 0
    report: StepReported | None = None

    def holds(self, version: int, source: str | None) -> bool:
        """Whether it has these weights; other sources may have others under the same version."""
        return self.version == version and (source is None or self.source in (None, source))

    def __str__(self) -> str:
        ranks = ", ".join(map(str, self.spec.ranks))
        return f"replica {self.spec.id} (rank{'s' * (len(self.spec.ranks) > 1)} {ranks})"

    @property
    def ready_key(self) -> tuple[str, int, int]:
        """The key of its `ReplicaReady` among the awaited answers."""
        return ("ready", self.spec.id, self.epoch)

    @property
    def block_size(self) -> int:
        return self.ready.block_size if self.ready else 1

    def assign(self, sequence: SequenceRecord, max_new_tokens: int | None) -> None:
        sequence.replica = self
        sequence.last_replica_id = self.spec.id
        sequence.release_at = None if max_new_tokens is None else sequence.num_tokens + max_new_tokens
        sequence.chunk = None if max_new_tokens is None else max(max_new_tokens, sequence.chunk or 0)
        self.assigned[sequence.id] = sequence
        self.num_tokens += sequence.num_tokens
        self._reserve(sequence)

    def progress(self, sequence: SequenceRecord, num_new_tokens: int) -> None:
        sequence.num_tokens += num_new_tokens
        self.num_tokens += num_new_tokens
        if sequence.num_tokens > (sequence.num_blocks - 1) * self.block_size:  # else it has a block ahead
            self._reserve(sequence)

    def give_up(self, sequence: SequenceRecord) -> None:
        del self.assigned[sequence.id]
        self.num_tokens -= sequence.num_tokens
        self.num_reserved_blocks -= sequence.num_blocks
        sequence.replica, sequence.num_blocks = None, 0
        if not self.assigned and self.report is not None:  # nothing runs, whatever it last reported
            self.report = msgspec.structs.replace(self.report, num_running=0, num_waiting=0)

    def num_blocks_for(self, sequence: SequenceRecord) -> int:
        """Returns the blocks to reserve for a sequence that is assigned here."""
        num_ahead = self.block_size if sequence.release_at is None else sequence.release_at - sequence.num_tokens
        num_tokens = num_reserved_tokens(sequence.num_tokens, sequence.max_len, num_ahead)
        return -(-num_tokens // self.block_size)

    def _reserve(self, sequence: SequenceRecord) -> None:
        num_blocks = self.num_blocks_for(sequence)
        self.num_reserved_blocks += num_blocks - sequence.num_blocks
        sequence.num_blocks = num_blocks

    def view(self, accepts: bool) -> ReplicaView:
        ready, report = self.ready, self.report
        num_blocks = ready.num_kv_tokens // ready.block_size if ready else 0
        if report is not None and report.num_blocks is not None:
            num_blocks = report.num_blocks
        return ReplicaView(
            spec=self.spec,
            accepts=accepts,
            max_num_seqs=ready.max_num_seqs if ready else 0,
            num_assigned=len(self.assigned),
            num_tokens=self.num_tokens,
            block_size=self.block_size,
            num_blocks=num_blocks,
            num_reserved_blocks=self.num_reserved_blocks,
            num_running=report.num_running if report else 0,
            num_waiting=report.num_waiting if report else 0,
            num_free_blocks=report.num_free_blocks if report else num_blocks,
            seconds=report.seconds if report else 0.0,
        )
