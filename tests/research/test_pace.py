"""What steps, transfers and regroups take, against arithmetic written out."""

from __future__ import annotations

import pytest

from engines.parallel.layout import ReplicaSpec, contiguous_layout, nested_layout
from engines.replica.replica import StepOutput
from engines.rollout.pace import ShortestStep, row_seconds
from engines.speculation.drafter import DraftPass
from research.simulator.datasheets import H100, QWEN_0_5B, QWEN_32B
from research.simulator.latency import LatencyProfile, profile
from research.simulator.links import HostLinks, Link
from research.simulator.pace import ProfilePace, WideReplica

SPEC = ReplicaSpec(id=0, ranks=(0, 1, 2, 3))
LINKS = HostLinks(host=Link(bandwidth=50e9, latency_s=1e-5), network=Link(bandwidth=25e9, latency_s=1e-4))


def test_a_link_by_hand() -> None:
    link = Link(bandwidth=1e9, latency_s=1e-3)
    assert link.seconds(5e8) == pytest.approx(1e-3 + 0.5)
    assert link.seconds(0) == 0.0
    assert LINKS.seconds("network", 5e9) == pytest.approx(1e-5 + 0.1 + 1e-4 + 0.2)
    assert LINKS.seconds("host", 1e9) == pytest.approx(1e-5 + 0.02)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"bandwidth": -1.0}, r"Link\.bandwidth=-1\.0: must be above 0"),
        ({"bandwidth": 1.0, "latency_s": -1.0}, r"Link\.latency_s=-1\.0: must be at least 0"),
    ],
)
def test_impossible_links(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Link(**values)  # type: ignore[arg-type]


def test_a_step_of_prefills_and_decodes() -> None:
    """A chunk of 100 tokens behind 50, and 7 decodes at 1,000: the pairs of each count, and 8 rows are sampled."""
    pace = ProfilePace(device=H100, shape=QWEN_32B, scale=2.0)
    pairs = 100 * 50 + 100 * 101 // 2 + 7 * 1000
    output = StepOutput(num_running=8, num_tokens=107, num_context_tokens=150 + 7000, num_pairs=pairs, num_sampled=8)
    expected = profile("h100-32b-tp4").step_seconds(8, 107, 7150, pairs=pairs, logit_rows=8)
    assert pace.step(SPEC, output) == pytest.approx(2 * expected, rel=1e-12)
    longer = ProfilePace(device=H100, shape=QWEN_32B, token_scale=16.0)
    expected = profile("h100-32b-tp4").step_seconds(8, 107, 16 * 7150, pairs=16 * pairs, logit_rows=8)
    assert longer.step(SPEC, output) == pytest.approx(expected, rel=1e-12)


def test_a_step_with_drafts() -> None:
    """Six sequences of 1,000 tokens, of which four verify 3 guesses each: all rows are sampled, and a draft was looked
    up for each of the six."""
    pace = ProfilePace(device=H100, shape=QWEN_32B, scale=2.0, lookup_s=1e-4)
    pairs, context = 2 * 1000 + 4 * (1000 + 1001 + 1002 + 1003), 2 * 1000 + 4 * 1003
    sizes = {"num_running": 6, "num_tokens": 18, "num_context_tokens": context, "num_pairs": pairs, "num_sampled": 18}
    expected = profile("h100-32b-tp4").step_seconds(6, 18, context, pairs=pairs, logit_rows=18)
    assert pace.step(SPEC, StepOutput(**sizes)) == pytest.approx(2 * expected, rel=1e-12)
    assert pace.draft(SPEC, "suffix", [DraftPass(6)]) == pytest.approx(2 * 6 * 1e-4, rel=1e-12)
    rows = row_seconds(pace, SPEC)
    assert rows(18) == pytest.approx(2 * profile("h100-32b-tp4").step_seconds(18, 18, 18, pairs=18), rel=1e-12)
    assert rows(4000) > 2 * rows(18), "so many rows are bound by arithmetic"


def test_a_small_models_passes_are_shared_by_the_gpus_of_a_replica() -> None:
    """Four GPUs draft for ten sequences: the one with most has three of them, and a quarter of the context."""
    pace = ProfilePace(device=H100, shape=QWEN_32B, scale=2.0, token_scale=8.0, draft_shapes={"small": QWEN_0_5B})
    small = LatencyProfile(device=H100, shape=QWEN_0_5B, tp_size=1)
    expected = small.step_seconds(3, 3, 2000) + small.step_seconds(1, 1, 8)
    assert pace.draft(SPEC, "small", [DraftPass(10, 1000), DraftPass(1, 4)]) == pytest.approx(2 * expected, rel=1e-12)
    alone, one = ReplicaSpec(id=0, ranks=(0,)), [DraftPass(1, 4)]
    assert WideReplica(pace, 4).draft(alone, "small", one) == pace.draft(SPEC, "small", one)
    with pytest.raises(ValueError, match=r"draft_shapes=\['small'\]: has no shape of draft model 'large'"):
        pace.draft(SPEC, "large", [DraftPass(1)])


def test_a_sequence_that_stands_for_three() -> None:
    """Everything takes what three sequences take that run together, and KV caches hold a third."""
    few = ProfilePace(device=H100, shape=QWEN_32B, links=LINKS, sequence_scale=3, draft_shapes={"small": QWEN_0_5B})
    many = ProfilePace(device=H100, shape=QWEN_32B, links=LINKS, draft_shapes={"small": QWEN_0_5B})
    sizes = {"num_running": 8, "num_tokens": 107, "num_context_tokens": 7150, "num_pairs": 17_050, "num_sampled": 8}
    three = StepOutput(**{name: 3 * value for name, value in sizes.items()})
    assert few.step(SPEC, StepOutput(**sizes)) == pytest.approx(many.step(SPEC, three), rel=1e-12)
    assert few.transfer(SPEC, 100, "host") == pytest.approx(many.transfer(SPEC, 300, "host"), rel=1e-12)
    for method in ("suffix", "small"):
        passes = few.draft(SPEC, method, [DraftPass(4, 90)]), many.draft(SPEC, method, [DraftPass(12, 270)])
        assert passes[0] == pytest.approx(passes[1], rel=1e-12)
    layouts = nested_layout(range(8), 2), nested_layout(range(8), 4, epoch=1)
    assert few.switch(*layouts, 100) == pytest.approx(many.switch(*layouts, 300), rel=1e-12)
    assert few.num_kv_tokens(1) == {size: count // 3 for size, count in many.num_kv_tokens(1).items()}


def test_transfers_and_regroups_by_hand() -> None:
    pace = ProfilePace(device=H100, shape=QWEN_32B, links=LINKS, scale=3.0)
    kv_bytes = 10_000 * 262_144 / 4  # each of four ranks moves its heads
    assert pace.transfer(SPEC, 10_000, "host") == pytest.approx(3 * (1e-5 + kv_bytes / 50e9))
    assert pace.transfer(SPEC, 0, "host") == 0.0
    half = ProfilePace(device=H100, shape=QWEN_32B, links=LINKS, token_scale=2.0)
    assert half.transfer(SPEC, 10_000, "host") == pytest.approx((1e-5 + 2 * kv_bytes / 50e9) / 2)


def test_regroups_by_hand() -> None:
    """KV and the weights that a rank lacks come at 0.8 of 450 GB/s; a rank of two holds half of the model."""
    pace = ProfilePace(device=H100, shape=QWEN_32B, scale=3.0, token_scale=10.0, restart_s=1.5)
    two, four = nested_layout(range(8), 2), nested_layout(range(8), 4, epoch=1)
    other_two = contiguous_layout(range(8), 2, epoch=1)
    kv_s, weights_s = 1_000 * 10 * 262_144 / 360e9, 32_763_876_352 * 2 / 360e9
    assert pace.switch(two, four, 1_000) == pytest.approx(0.3 * (1.5 + kv_s)), "its new part is in its old one"
    assert pace.switch(four, two, 0) == pytest.approx(0.3 * (1.5 + weights_s / 4)), "it holds half of its new part"
    assert pace.switch(two, other_two, 1_000) == pytest.approx(0.3 * (kv_s + weights_s / 2)), "some hold the other half"
    assert pace.switch(two, two, 0) == 0.0


def test_only_sizes_that_split_the_heads() -> None:
    assert set(ProfilePace(device=H100, shape=QWEN_0_5B).profiles) == {1, 2}
    with pytest.raises(ValueError, match=r"ProfilePace\.scale=0\.0: must be above 0"):
        ProfilePace(device=H100, shape=QWEN_0_5B, scale=0.0)
    with pytest.raises(ValueError, match=r"ShortestStep\.step_s=-1\.0: must be at least 0"):
        ShortestStep(step_s=-1.0)
