"""Loads weights into a decoder: from Hugging Face safetensors, or from any stream of (name, tensor)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import torch
from msgspec import Meta, Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engines.config import ModelConfig
from engines.json_files import read_json
from engines.models.decoder import Decoder
from engines.models.parameters import logical_shapes
from engines.parallel.sharding import shard_slices


class _Index(Struct, frozen=True):
    """The fields that are read from model.safetensors.index.json."""

    weight_map: dict[str, Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,255}$")]]


def checkpoint_tensors(directory: str | Path) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for each tensor of a checkpoint in safetensors files, one tensor in memory at a time.

    Raises FileNotFoundError for a missing file, ValueError for a truncated or unreadable one.
    """
    for path in _safetensors_files(Path(directory)):
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - safe_open is no mapping
                    yield name, file.get_tensor(name)
        except SafetensorError as error:
            raise ValueError(f"{path}: not a whole safetensors file ({error}); copy the checkpoint again") from None


def _safetensors_files(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    weight_map = read_json(index, _Index).weight_map if index.is_file() else {"": "model.safetensors"}
    files = [directory / name for name in sorted(set(weight_map.values()))]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise FileNotFoundError(
            f"model={str(directory)!r}: {', '.join(missing)} missing; give a Hugging Face checkpoint in safetensors"
        )
    return files


@torch.no_grad()
def load_weights(decoder: Decoder, weights: Iterable[tuple[str, Tensor]]) -> None:
    """Copies every tensor, or the shard's part of it, into its place, converting device and dtype. The decoder is then
    ready for forward passes, also if its memory had been released.

    Raises ValueError as `checked_weights`.
    """
    decoder.release()
    if not decoder.parameters.embedding.untyped_storage().size():
        decoder.parameters.resize(full=True)
    views = decoder.logical_views()
    for name, tensor in checked_weights(weights, decoder.config):
        views[name].copy_(tensor[shard_slices(decoder.config, name, decoder.shard)])
    decoder.prepare()


def checked_weights(weights: Iterable[tuple[str, Tensor]], config: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yields the stream, which must have each parameter exactly once; each is checked before it is yielded.

    A tied head and old checkpoints' rotary buffers are skipped. Raises ValueError for an unknown name, a wrong shape, a
    dtype that is not floating point, and for a repeated or missing parameter.
    """
    shapes = logical_shapes(config)
    seen: set[str] = set()
    for name, tensor in weights:
        if name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        if name not in shapes:
            raise ValueError(f"weights: {name!r} is no parameter of a {config.architecture}")
        if name in seen:
            raise ValueError(f"weights: {name!r} came twice")
        if tensor.shape != shapes[name]:
            raise ValueError(
                f"weights: {name!r} has shape {list(tensor.shape)}, config.json asks for {list(shapes[name])}"
            )
        if not tensor.is_floating_point():
            raise ValueError(f"weights: {name!r} holds {tensor.dtype}; quantised checkpoints are not supported")
        seen.add(name)
        yield name, tensor
    missing = sorted(shapes.keys() - seen)
    if missing:
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(f"weights: {', '.join(missing[:3])}{more} missing; the checkpoint is not complete")
