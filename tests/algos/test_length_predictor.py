"""Lengths of trajectories: what is learnt from, the regression against plain ones, and the process that may fail."""

from __future__ import annotations

import math
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from algos import length_predictor
from algos.length_predictor import LengthModel, apply_head, features_of, features_of_contexts, fit_lengths, fit_ridge
from algos.predictor_process import LengthPredictorProcess, PredictorConfig
from algos.publish import publish_directory
from algos.tasks.lookup import LookupTask
from algos.trajectory_lengths import Trajectory, count_features, pearson, plain_counts, recall
from algos.warmstart import new_model, template_of, tokenizer_of
from algos.workers.process import WorkerError
from engines.rollout.prediction import Context
from engines.sequence import Completion, Span
from experiments.heddle_predicting import Judged, demonstrated, least_squares, shuffled
from tests.stopping import stopped
from tests.worlds import ROOT

TOKENIZED = template_of("draft-1l")


@pytest.fixture(scope="module")
def trunk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trunk") / "model"
    save(folder, seed=0)
    return folder


def save(folder: Path, seed: int) -> None:
    def write(path: Path) -> None:
        new_model("draft-1l", seed).save_pretrained(path)
        tokenizer_of("draft-1l").save_pretrained(path)

    publish_directory(folder, {}, write)


def completion(token_ids: Sequence[int], observed: Sequence[Span]) -> Completion:
    zeros = [0.0] * len(token_ids)
    return Completion(
        index=0, token_ids=[*token_ids], logprobs=zeros, versions=[0] * len(zeros), finish_reason="stop",
        observed=[*observed],
    )  # fmt: skip


def lookups(count: int) -> list[Trajectory]:
    task = LookupTask()
    return demonstrated(TOKENIZED, task, map(task.train_problem, range(count)))


# -- what is learnt from


def random_completion(random: Random) -> Completion:
    """Turns and observations of any length, also none; a trajectory that ends in either."""
    tokens: list[int] = []
    spans = []
    for _ in range(random.randrange(6)):
        tokens += [1] * random.randrange(4)
        start = len(tokens)
        tokens += [2] * random.randrange(3)
        spans.append((start, len(tokens)))
    tokens += [1] * random.randrange(3)
    return completion(tokens, spans)


def slow_places(num_prompt_tokens: int, one: Completion) -> list[tuple[int, int, int, int]]:
    """Token by token: a turn has ended where a generated token is followed by a break, and more is generated."""
    mask = one.loss_mask
    breaks = {start for start, _ in one.observed}
    places = [(num_prompt_tokens, 0, 0, sum(mask))]
    for place in range(1, len(mask)):
        if mask[place - 1] and place in breaks and any(mask[place:]):
            generated = sum(mask[:place])
            places.append((num_prompt_tokens + place, generated, len(places), sum(mask) - generated))
    return places


def test_a_trajectory_is_decomposed_as_token_by_token():
    random, num_places = Random(0), 0
    for number in range(500):
        one, num_prompt_tokens = random_completion(random), random.randrange(1, 5)
        found = Trajectory.of((0, number, 0), [7] * num_prompt_tokens, one)
        places = [(at.num_tokens, at.num_generated, at.num_turns, at.remaining) for at in found.places]
        assert places == slow_places(num_prompt_tokens, one)
        assert found.tokens == ([7] * num_prompt_tokens + one.token_ids)[: places[-1][0]]
        num_places += len(places)
        for context in found.contexts:
            response = context.tokens[context.num_prompt_tokens :]
            assert (response.count(1), response.count(7)) == (context.num_generated, 0)
    assert num_places > 1000


def test_counts_are_those_of_the_tokens():
    contexts = [context for one in lookups(20) for context in one.contexts]
    counts = plain_counts(contexts)
    assert (counts[:, 0] + counts[:, 1] + counts[:, 2] == counts[:, 3]).all() and counts[:, 2].any()
    assert count_features(contexts).shape == (len(contexts), 5 + 5 + 1 + 9)
    classes = count_features(contexts)[:, -9:]
    assert (classes.argmax(1) == np.minimum(counts[:, 4], 8)).all() and (classes.sum(1) == 1).all()


def test_pearson_and_recall_are_numpys():
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=(2, 200))
    assert pearson(a, a + b) == pytest.approx(np.corrcoef(a, a + b)[0, 1])
    assert pearson(np.full(200, 0.1), b) == 0.0 and math.isnan(pearson([1.0], [1.0]))
    longest, guessed = set(np.argsort(-(a + b))[:20]), set(np.argsort(-a)[:20])
    assert recall(a, a + b) == pytest.approx(len(longest & guessed) / 20)
    assert recall(a, a) == 1.0 and recall(-a, a) == 0.0
    assert recall(np.ones(200), b) == pytest.approx(0.1)  # what chance finds


# -- the regression


def test_the_ridge_is_least_squares_with_rows_for_its_penalty():
    generator = np.random.default_rng(0)
    x, y = generator.normal(2.0, 3.0, size=(80, 6)), generator.normal(size=80)
    x[:, 5] = 4.0  # a constant feature
    for ridge in (1e-9, 5.0, 300.0):
        head = fit_ridge(x, y, ridge)
        scaled = (x[:, :5] - x[:, :5].mean(0)) / x[:, :5].std(0)
        rows = np.vstack([scaled, math.sqrt(ridge) * np.eye(5)])
        weight = np.linalg.lstsq(rows, np.append(y - y.mean(), np.zeros(5)), rcond=None)[0]
        np.testing.assert_allclose(head["weight"], [*weight, 0.0], atol=1e-9)
        np.testing.assert_allclose(apply_head(head, x), np.maximum(scaled @ weight + y.mean(), 0), atol=1e-9)


def test_states_are_those_of_one_context_at_a_time(trunk: Path, monkeypatch: pytest.MonkeyPatch):
    """At all places of a trajectory in one pass, in batches, alone; beyond the window the last tokens count."""
    model = fit_lengths(trunk, lookups(12))[0]
    module = new_model("draft-1l", 0).model.eval()
    for window in (1024, 60):
        monkeypatch.setattr(length_predictor, "_MOST_TOKENS", window)
        trajectories = lookups(12)
        contexts = [context for one in trajectories for context in one.contexts]
        together, batched = features_of(model.trunk, trajectories), features_of_contexts(model.trunk, contexts)
        np.testing.assert_allclose(together, batched, atol=1e-5)
        assert window == 1024 or max(len(one.tokens) for one in contexts) > window
        for row, one in zip(batched, contexts, strict=True):
            np.testing.assert_allclose(features_of_contexts(model.trunk, [one])[0], row, atol=1e-5)
            with torch.no_grad():
                layers = module(torch.tensor([one.tokens[-window:]]), output_hidden_states=True).hidden_states
            states = torch.cat(layers, -1)[0]
            expected = torch.cat([states[-1], states.mean(0)]).numpy()
            np.testing.assert_allclose(row[: len(expected)], expected, atol=1e-5)
    np.testing.assert_allclose(model.predict(contexts), [model.predict([one])[0] for one in contexts], atol=0.05)


def worded(count: int, seed: int) -> list[Trajectory]:
    """Prompts of eight letters, x or y, of which each x makes the trajectory 10 tokens longer: no count tells it."""
    random, found = Random(seed), []
    for index in range(count):
        prompt = [ord(random.choice("xy")) for _ in range(8)]
        length = 1 + 10 * prompt.count(ord("x")) + random.randrange(10)
        found.append(Trajectory.of((0, index, 0), prompt, completion([ord("a")] * length, [(0, 0)])))
    return found


def explained(trunk: Path, known: Sequence[Trajectory], unseen: Sequence[Trajectory]) -> tuple[float, float]:
    """Pearson, and the explained share of the variance."""
    contexts = [context for one in unseen for context in one.contexts]
    true = np.array([place.remaining for one in unseen for place in one.places])
    predicted = np.array(fit_lengths(trunk, known)[0].predict(contexts))
    return pearson(predicted, true.tolist()), 1 - np.mean((predicted - true) ** 2) / np.var(true)


def test_it_learns_what_words_tell_and_shuffled_labels_teach_nothing(trunk: Path):
    known, unseen = worded(400, seed=1), worded(200, seed=2)
    correlation, share = explained(trunk, known, unseen)
    assert correlation > 0.95 and share > 0.9
    assert len(np.unique(plain_counts([context for one in unseen for context in one.contexts]), axis=0)) == 1
    for seed in range(3):
        _, share = explained(trunk, shuffled(known, seed), unseen)
        assert -0.3 < share < 0.1


# -- the process


class Replies:
    """Takes the answers to asks, and counts them."""

    def __init__(self) -> None:
        self.found: dict[int, list[list[float]]] = {}
        self._came: queue.SimpleQueue[int] = queue.SimpleQueue()

    def ask(self, predictor: LengthPredictorProcess, contexts: Sequence[Context]) -> int:
        number = len(self.found)
        self.found[number] = []

        def answer(remaining: Sequence[float]) -> None:
            assert threading.current_thread() is not threading.main_thread()
            self.found[number].append(list(remaining))
            self._came.put(number)

        predictor.ask(contexts, answer)
        return number

    def wait(self, count: int) -> None:
        for _ in range(count):
            self._came.get(timeout=60)

    def check_once(self, predictor: LengthPredictorProcess) -> None:
        """Nothing comes twice, not even when the predictor is closed."""
        predictor.close()
        assert all(len(replies) == 1 for replies in self.found.values())


def contexts_of(count: int) -> list[Context]:
    return [context for one in lookups(count) for context in one.contexts]


def are_nan(remaining: Sequence[float], count: int) -> bool:
    return len(remaining) == count and all(map(math.isnan, remaining))


def test_it_answers_as_the_model_that_it_has_fitted_and_saved(trunk: Path, tmp_path: Path):
    saved, contexts, replies = tmp_path / "predictor", contexts_of(6), Replies()
    with LengthPredictorProcess(trunk, saved) as predictor:
        first = replies.ask(predictor, contexts[:2])
        assert not predictor.is_fitted
        with pytest.raises(WorkerError, match="of 1 prompts; a fit needs those of at least 2"):
            predictor.fit(lookups(1)).result()
        fitted = predictor.fit(lookups(40)).result()
        assert predictor.is_fitted and fitted.held_out_mae > 0
        for one in contexts:  # what waits together is one batch
            replies.ask(predictor, [one])
        together = replies.ask(predictor, contexts)
        replies.wait(2 + len(contexts))
    expected = LengthModel.load(saved, of=trunk).predict(contexts)
    np.testing.assert_allclose(expected, fit_lengths(trunk, lookups(40))[0].predict(contexts), rtol=1e-9)
    assert len({round(one, 3) for one in expected}) > 2
    assert are_nan(replies.found[first][0], 2)
    np.testing.assert_allclose(replies.found[together][0], expected, atol=0.05)
    np.testing.assert_allclose(
        [replies.found[1 + number][0][0] for number in range(len(contexts))], expected, atol=0.05
    )
    model = LengthModel.load(saved, of=trunk)
    model.trunk.embed_tokens.weight.data[ord("k")] = math.nan  # each prompt begins with "key"
    model.save(saved)
    with LengthPredictorProcess(trunk, saved) as predictor:
        assert predictor.is_fitted
        last = replies.ask(predictor, contexts)
        replies.wait(1)
        assert are_nan(replies.found[last][0], len(contexts)) and not predictor.is_lost
        replies.check_once(predictor)


def test_a_silent_or_killed_process_has_no_estimates_until_it_is_revived(trunk: Path, tmp_path: Path):
    saved, contexts, replies = tmp_path / "predictor", contexts_of(3), Replies()
    fit_lengths(trunk, lookups(20))[0].save(saved)
    expected = LengthModel.load(saved, of=trunk).predict(contexts)
    with LengthPredictorProcess(trunk, saved, PredictorConfig(timeout_s=1.0)) as predictor:
        with stopped(predictor.pid):
            silent = [replies.ask(predictor, contexts) for _ in range(3)]
            replies.wait(3)
            assert not predictor.is_lost
        # Now it answers what nobody waits for any more.
        last = silent[-1]
        while are_nan(replies.found[last][0], len(contexts)):
            last = replies.ask(predictor, contexts)
            replies.wait(1)
        np.testing.assert_allclose(replies.found[last][0], expected, atol=1e-6)
        with stopped(predictor.pid):  # so that it is killed with asks that it has not answered
            killed = [replies.ask(predictor, contexts) for _ in range(5)]
            refitted = predictor.fit(lookups(20))
            os.kill(predictor.pid, signal.SIGKILL)
            replies.wait(5)
        with pytest.raises(WorkerError, match="cannot be fitted"):
            refitted.result(timeout=60)
        assert predictor.is_lost
        killed.append(replies.ask(predictor, contexts))
        replies.wait(1)
        assert all(are_nan(replies.found[number][0], len(contexts)) for number in silent + killed)
        pid = predictor.pid
        predictor.config = PredictorConfig()  # a process's first answer may take longer than a second
        predictor.revive()
        assert predictor.pid != pid and predictor.is_fitted and not predictor.is_lost
        last = replies.ask(predictor, contexts)
        replies.wait(1)
        np.testing.assert_allclose(replies.found[last][0], expected, atol=1e-6)
        replies.check_once(predictor)


def test_a_process_that_does_not_read_is_given_up(trunk: Path, tmp_path: Path):
    """An ask does not wait for it, even when no more bytes fit into the connection."""
    contexts, replies = contexts_of(3) * 400, Replies()
    with LengthPredictorProcess(trunk, tmp_path / "predictor", PredictorConfig(timeout_s=1.0)) as predictor:
        with stopped(predictor.pid):
            for _ in range(2):
                replies.ask(predictor, contexts)
            assert not any(replies.found.values())
            replies.wait(2)
            while not predictor.is_lost:
                time.sleep(0.01)
        replies.check_once(predictor)


def test_it_ends_with_its_run(trunk: Path, tmp_path: Path):
    script = (
        "import os, sys, time; from pathlib import Path; from algos.predictor_process import LengthPredictorProcess\n"
        "print(LengthPredictorProcess(*map(Path, sys.argv[1:])).pid, flush=True); os.kill(os.getpid(), 9)"
    )
    words = [sys.executable, "-c", script, str(trunk), str(tmp_path / "predictor")]
    ran = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert ran.returncode == -signal.SIGKILL
    while Path(f"/proc/{int(ran.stdout)}").exists():
        time.sleep(0.01)


def test_another_models_predictor_is_refused(trunk: Path, tmp_path: Path):
    saved = tmp_path / "predictor"
    fit_lengths(trunk, lookups(20))[0].save(saved)
    save(tmp_path / "trained", seed=5)  # the same model, with other weights
    LengthModel.load(saved, of=tmp_path / "trained")
    shutil.copytree(trunk, tmp_path / "other")
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"predictor=.*was fitted for another model .*remove the folder"):
        LengthPredictorProcess(tmp_path / "other", saved)
    with pytest.raises(ValueError, match=r"trunk=.*holds no config.json; give a Hugging Face checkpoint"):
        LengthPredictorProcess(tmp_path / "nothing", saved)


# -- the measurement


def test_the_baseline_is_least_squares_for_each_number_of_turns_and_figures_are_of_total_lengths():
    known, unseen = lookups(60), lookups(90)[60:]
    found = least_squares(known, unseen)
    places = [(c, p) for one in unseen for c, p in zip(one.contexts, one.places, strict=True)]
    learnt = [(c, p) for one in known for c, p in zip(one.contexts, one.places, strict=True)]
    for turns in (0, 1, 2):
        here = [number for number, (context, _) in enumerate(places) if context.num_turns == turns]
        group = [(c, p.remaining) for c, p in learnt if c.num_turns == turns]
        x, z = (
            np.column_stack([plain_counts(cs), np.ones(len(cs))])
            for cs in ([c for c, _ in group], [places[n][0] for n in here])
        )
        expected = z @ np.linalg.pinv(x) @ [length for _, length in group]
        np.testing.assert_allclose(found[here], np.maximum(expected, 0), atol=1e-6)
        judged = Judged.of(unseen)
        true = [places[n][1].num_generated + places[n][1].remaining for n in here]
        guess = [places[n][1].num_generated + found[n] for n in here]
        figures = judged.figures(found)[str(turns)]
        assert figures["pearson"] == pytest.approx(pearson(guess, true), rel=1e-3)
        assert figures["recall"] == pytest.approx(recall(guess, true), rel=1e-3)
        ratios = [math.log((1 + places[n][1].remaining) / (1 + found[n])) for n in here]
        residuals = judged.residuals(found)[str(turns)]
        assert (residuals[0], residuals[-1]) == pytest.approx((min(ratios), max(ratios)), rel=1e-3)
        assert residuals[20] == pytest.approx(np.median(ratios), rel=1e-3, abs=1e-3)
    labels = sorted(place.remaining for one in known for place in one.places)
    mixed = [place.remaining for one in shuffled(known, 0) for place in one.places]
    assert sorted(mixed) == labels and mixed != [p.remaining for _, p in learnt]
