"""A small model that estimates how many tokens a trajectory will still generate. Heddle, §4.1.

The trunk is a causal language model without its output head, for example a copy of the tiny model that is trained. One
pass over a trajectory gives its hidden states at all places. A ridge regression maps the state of a context's last
token and the mean of its states, in all layers, and plain counts to the expected remaining tokens: a conditional mean,
without noise. Training the trunk as well predicts worse than this in the same minutes.

Shape suffixes: F features, B rows, L positions, D hidden size of all layers together.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from algos.micro_batches import plan_micro_batches
from algos.publish import only_writer, publish_directory, read_record
from algos.trajectory_lengths import Trajectory, count_features
from engines.json_files import read_json
from engines.models.hugging_face import read_checkpoint
from engines.rollout.prediction import Context

Head = dict[str, np.ndarray]
"""Mean, scale and weight [F] of the features, and the bias [1]; float64."""
_Row = tuple[Sequence[int], Sequence[int]]
"""Tokens, and the lengths of the contexts among them."""
RIDGES = (1.0, 10.0, 100.0, 1e3, 1e4)
_HELD_OUT = 0.15
"""Share of the prompts on which the ridge is chosen."""
_BATCH_TOKENS = 4096
_MOST_TOKENS = 1024
"""Of a context, so that the predictor costs little beside the rollout; counts see all."""
_HEAD_FILE = "head.safetensors"


@dataclass(frozen=True, kw_only=True)
class FitReport:
    ridge: float
    held_out_mae: float


class LengthModel:
    """A trunk and a linear head on standardised features."""

    def __init__(self, trunk: nn.Module, head: Head, identity: dict[str, Any]) -> None:
        self.trunk, self.head, self.identity = trunk, head, identity

    def predict(self, contexts: Sequence[Context]) -> list[float]:
        """Returns the expected remaining tokens of each; NaN where the trunk's states are no numbers."""
        estimates: list[float] = apply_head(self.head, features_of_contexts(self.trunk, contexts)).tolist()
        return estimates

    def save(self, folder: Path) -> None:
        """Publishes the model: complete or as it was before, even if the process is killed."""
        from safetensors.numpy import save_file

        def write(path: Path) -> None:
            self.trunk.save_pretrained(path)  # type: ignore[operator]
            save_file(self.head, path / _HEAD_FILE)

        with only_writer(folder):
            publish_directory(folder, {"length_predictor": self.identity}, write)

    @staticmethod
    def load(folder: Path, *, of: Path) -> LengthModel:
        """Reads what `save` has written. Raises ValueError if it was fitted for another model than the one in `of`."""
        from safetensors.numpy import load_file

        identity = (read_record(folder) or {}).get("length_predictor")
        expected = identify(of)
        if identity != expected:
            raise ValueError(
                f"predictor={str(folder)!r}: was fitted for another model ({identity}) than {str(of)!r} ({expected}); "
                "remove the folder, or give the one of this model"
            )
        return LengthModel(read_trunk(folder), load_file(folder / _HEAD_FILE), expected)


def identify(folder: Path, name: str = "trunk") -> dict[str, Any]:
    """What a predictor's trunk must share with the model of a run: shape, vocabulary and tokenizer, not weights, since
    those are trained. Raises ValueError for a folder that is no checkpoint, as the value of the field `name`."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"{name}={str(folder)!r}: holds no config.json; give a Hugging Face checkpoint directory")
    config = read_json(folder / "config.json", dict[str, Any])
    tokenizer = folder / "tokenizer.json"
    digest = hashlib.sha256(tokenizer.read_bytes()).hexdigest()[:16] if tokenizer.is_file() else None
    names = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers")
    return {**{name: config.get(name) for name in names}, "tokenizer": digest}


def fit_lengths(folder: Path, trajectories: Sequence[Trajectory], seed: int = 0) -> tuple[LengthModel, FitReport]:
    """Fits a model whose trunk is the checkpoint in `folder`. Deterministic. Raises ValueError as `fit_head`."""
    trunk = read_trunk(folder)
    head, report = fit_head(features_of(trunk, trajectories), trajectories, seed)
    return LengthModel(trunk, head, identify(folder)), report


def read_trunk(folder: Path) -> nn.Module:
    from transformers import AutoModel

    trunk: nn.Module = read_checkpoint(AutoModel, folder).float().eval()
    return trunk


def fit_head(features: np.ndarray, trajectories: Sequence[Trajectory], seed: int = 0) -> tuple[Head, FitReport]:
    """`features` [places of all trajectories, F]. The strength of the ridge is the one with the least squared error on
    prompts that are held out for this; then all are learnt from. Raises ValueError for fewer than two prompts."""
    is_held_out = _held_out([one.sequence_id[1] for one in trajectories for _ in one.places], seed)
    remaining = np.array([place.remaining for one in trajectories for place in one.places], dtype=np.float64)
    errors = {}
    for ridge in RIDGES:
        head = fit_ridge(features[~is_held_out], remaining[~is_held_out], ridge)
        errors[ridge] = apply_head(head, features[is_held_out]) - remaining[is_held_out]
    best = min(RIDGES, key=lambda one: float(np.mean(errors[one] ** 2)))
    report = FitReport(ridge=best, held_out_mae=float(np.mean(abs(errors[best]))))
    return fit_ridge(features, remaining, best), report


def _held_out(prompt_uids: Sequence[int], seed: int) -> np.ndarray:
    """Whole prompts: samples of one prompt have similar lengths."""
    uids = sorted(set(prompt_uids))
    if len(uids) < 2:
        raise ValueError(f"trajectories: of {len(uids)} prompts; a fit needs those of at least 2")
    count = min(max(1, round(_HELD_OUT * len(uids))), len(uids) - 1)
    chosen = np.random.default_rng(seed).permutation(uids)[:count]
    return np.isin(prompt_uids, chosen)


def fit_ridge(features: np.ndarray, targets: np.ndarray, ridge: float) -> Head:
    """Minimises the squared error plus `ridge` times the squared weights of the standardised features."""
    mean, scale = features.mean(0), features.std(0)
    scale = np.where(scale > 1e-9 * (1 + abs(mean)), scale, 1.0)  # a constant one is of no use, and does no harm
    x = (features - mean) / scale
    bias = targets.mean()
    weight = np.linalg.solve(x.T @ x + ridge * np.eye(x.shape[1]), x.T @ (targets - bias))
    return {"mean": mean, "scale": scale, "weight": weight, "bias": np.array([bias])}


def apply_head(head: Head, features: np.ndarray) -> np.ndarray:
    """Returns the remaining tokens, at least 0."""
    estimates: np.ndarray = (features - head["mean"]) / head["scale"] @ head["weight"] + head["bias"]
    return np.maximum(estimates, 0.0)  # NaN stays NaN


def features_of(trunk: nn.Module, trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Returns [places of all trajectories, F] in float64; one pass over the tokens of each trajectory."""
    rows, window = list[_Row](), _window(trunk)
    for one in trajectories:
        ends = [place.num_tokens for place in one.places]
        if ends[-1] <= window:
            rows.append((one.tokens, ends))
        else:
            rows += [(one.tokens[max(0, end - window) : end], [min(end, window)]) for end in ends]
    contexts = [context for one in trajectories for context in one.contexts]
    return np.column_stack([_states(trunk, rows), count_features(contexts)])


def features_of_contexts(trunk: nn.Module, contexts: Sequence[Context]) -> np.ndarray:
    """Returns [contexts, F] in float64: of a trajectory's contexts the same as `features_of`, but for rounding."""
    window = _window(trunk)
    rows: list[_Row] = [(tokens, [len(tokens)]) for one in contexts for tokens in [one.tokens[-window:]]]
    return np.column_stack([_states(trunk, rows), count_features(contexts)])


def _window(trunk: nn.Module) -> int:
    """Tokens of a context that are read, its last ones."""
    return min(_MOST_TOKENS, int(trunk.config.max_position_embeddings))  # type: ignore[union-attr,arg-type]


@torch.inference_mode()
def _states(trunk: nn.Module, rows: Sequence[_Row]) -> np.ndarray:
    """Returns [places, 2 D]: the state of each place's last token, and the mean of the states up to it."""
    found: dict[int, np.ndarray] = {}
    for members in plan_micro_batches([len(tokens) for tokens, _ in rows], _BATCH_TOKENS, 1).of_rank(0):
        tokens_BL = torch.zeros(len(members), max(len(rows[index][0]) for index in members), dtype=torch.long)
        for row, index in enumerate(members):
            tokens_BL[row, : len(rows[index][0])] = torch.tensor(rows[index][0])
        layers = trunk(tokens_BL, use_cache=False, output_hidden_states=True).hidden_states  # causal: no mask is needed
        states_BLD: Tensor = torch.cat(layers, -1)
        for states_LD, index in zip(states_BLD.double(), members, strict=True):
            ends = torch.tensor(rows[index][1])
            means = states_LD.cumsum(0)[ends - 1] / ends[:, None]
            found[index] = torch.cat([states_LD[ends - 1], means], 1).numpy()
    return np.concatenate([found[index] for index in range(len(rows))])
