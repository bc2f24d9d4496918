"""Tokens drawn with drafts follow the model's distribution, whatever the drafter guesses: chi-square tests."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from scipy import stats

from engines import LLM, SamplingParams
from engines.sequence import SequenceState
from tests.checkpoints import save_checkpoint
from tests.engines.test_drafts import ScriptedDrafter, Truth

VOCAB_SIZE = 5
PROMPT = [2, 4, 3, 3, 2, 0, 4]
PARAMS = SamplingParams(max_tokens=4, n=1000, temperature=3.0, ignore_eos=True)
UIDS = range(6)
Model = tuple[str, torch.nn.Module]


class Guesser(ScriptedDrafter):
    """Guesses the truth, another token, or any. Expects nothing of the rule that accepts."""

    def _propose(self, state: SequenceState, limit: int) -> list[int]:
        rng = random.Random(repr((state.sequence_id, len(state.tokens))))
        right = self._truth[state.sequence_id][len(state.tokens) :]
        wrong = [(token + rng.randint(1, VOCAB_SIZE - 1)) % VOCAB_SIZE for token in right]
        anything = [rng.randrange(VOCAB_SIZE) for _ in right]
        return {"truth": right, "wrong": wrong, "random": anything}[self._kind][:limit]

    def follow(self, *_: object) -> None: ...


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("few tokens")
    return str(folder), save_checkpoint(folder, "qwen3", vocab_size=VOCAB_SIZE)


@pytest.fixture(scope="module")
def truth(model: Model) -> Truth:
    return generate(LLM(model[0], kv_cache_bytes=2**24))


def generate(llm: LLM) -> Truth:
    """The prompt's tokens with those generated: 6000 samples, each with other noise."""
    tokens: Truth = {}
    llm.generate(
        [PROMPT] * len(UIDS), PARAMS, prompt_uids=UIDS,
        on_finished=lambda one: tokens.__setitem__(one.state.sequence_id, list(one.state.tokens)),
    )  # fmt: skip
    return tokens


@torch.no_grad()
def p_value(model: torch.nn.Module, sequences: list[list[int]], place: int) -> float:
    """Of the tokens at this place, given all before them; of what came before often enough for a chi-square."""
    counts = Counter(tuple(sequence[: place + 1]) for sequence in sequences)
    contexts = Counter(tuple(sequence[:place]) for sequence in sequences)
    logits = model(torch.tensor(list(contexts))).logits[:, -1].double()
    statistic, freedom = 0.0, 0
    for (context, total), share in zip(contexts.items(), (logits / PARAMS.temperature).softmax(-1), strict=True):
        expected = total * share
        if (expected >= 5).all():
            observed = torch.tensor([counts[*context, token] for token in range(VOCAB_SIZE)])
            statistic += float(((observed - expected) ** 2 / expected).sum())
            freedom += VOCAB_SIZE - 1
    assert freedom >= (VOCAB_SIZE - 1) * VOCAB_SIZE ** min(2, place - len(PROMPT))
    return float(stats.chi2.sf(statistic, freedom))


@pytest.mark.parametrize(("kind", "least", "most"), [("truth", 1.0, 1.0), ("wrong", 0.0, 0.0), ("random", 0.1, 0.3)])
def test_tokens_follow_the_models_distribution(
    model: Model, truth: Truth, kind: str, least: float, most: float
) -> None:
    folder, oracle = model
    llm = LLM(folder, kv_cache_bytes=2**24, drafter="ngram", draft_lengths="fixed", max_draft_tokens=PARAMS.max_tokens)
    llm.replica.drafter = Guesser(kind, truth, PARAMS.max_tokens)
    sequences = list(generate(llm).values())
    drafted = sum(record.num_drafted for record in llm.step_records)
    accepted = sum(record.num_accepted for record in llm.step_records)
    assert min(p_value(oracle, sequences, len(PROMPT) + number) for number in range(PARAMS.max_tokens)) > 1e-3
    assert drafted >= len(sequences) and least <= accepted / drafted <= most
