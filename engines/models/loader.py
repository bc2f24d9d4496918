"""Loads weights into a decoder: from Hugging Face safetensors, or from any stream of (name, tensor).

A LoRA adapter in peft's format is merged into its base while this is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import torch
from msgspec import Meta, Struct
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engines.adapter_config import ADAPTER_WEIGHTS, MERGE, base_folder, is_adapter, read_adapter
from engines.config import ModelConfig
from engines.json_files import read_json
from engines.models.decoder import Decoder
from engines.models.parameters import logical_shapes
from engines.parallel.sharding import shard_slices


class _Index(Struct, frozen=True):
    """The fields that are read from model.safetensors.index.json."""

    weight_map: dict[str, Annotated[str, Meta(pattern=r"^[A-Za-z0-9._-]{1,255}$")]]


HEAD = "lm_head.weight"
_FACTOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")


def checkpoint_tensors(directory: str | Path, base_model: str | Path | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) for each tensor of a checkpoint in safetensors files, one tensor in memory at a time. For
    an adapter these are its base's, with the adapter merged; `base_model` is as for `base_folder`.

    Raises FileNotFoundError for a missing file, ValueError for a truncated or unreadable one and for a tied model with
    a head of its own, and as `check_adapter`.
    """
    check_adapter(directory, base_model)
    files = _safetensors_files(folder := base_folder(directory, base_model))
    _check_tied_head(folder, files)
    for path in files:
        with _opened(path) as file:
            tensors = ((name, file.get_tensor(name)) for name in file.keys())  # noqa: SIM118 - safe_open is no mapping
            yield from _merged(tensors, Path(directory)) if is_adapter(directory) else tensors


def _check_tied_head(folder: Path, files: Iterable[Path]) -> None:
    """Raises ValueError if config.json ties the head to the embedding, and the files have two that differ: transformers
    then ties neither."""
    if not (folder / "config.json").is_file() or not ModelConfig.from_pretrained(folder).tie_word_embeddings:
        return
    places: dict[str, Path] = {}
    for path in files:
        with _opened(path) as file:
            places |= dict.fromkeys({"model.embed_tokens.weight", HEAD} & {*file.keys()}, path)
    if len(places) < 2:
        return
    pair = []
    for name, path in places.items():
        with _opened(path) as file:
            pair.append(file.get_tensor(name))
    if not torch.equal(*pair):
        raise ValueError(
            f"model={str(folder)!r}: config.json has tie_word_embeddings=true, but {HEAD!r} is not the embedding; set "
            "it to false"
        )


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing; give a Hugging Face checkpoint or adapter in safetensors")
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path}: not a whole safetensors file ({error}); copy the checkpoint again") from None


def check_adapter(directory: str | Path, base_model: str | Path | None = None) -> None:
    """Raises ValueError, before any weights are read, if an adapter in `directory` is of another base or of a kind that
    is not supported. `base_model` is as for `base_folder`."""
    base, path = base_folder(directory, base_model), Path(directory) / ADAPTER_WEIGHTS
    if not is_adapter(directory):
        return
    read_adapter(directory)
    shapes = logical_shapes(ModelConfig.from_pretrained(base))
    factors: dict[str, dict[str, list[int]]] = {}
    with _opened(path) as file:
        for key in file.keys():  # noqa: SIM118
            match = _FACTOR.fullmatch(key)
            if match is None:
                raise ValueError(f"{path}: {key!r} is no factor A or B of LoRA, others are not supported; {MERGE}")
            factor = file.get_slice(key)
            if (dtype := factor.get_dtype()) not in ("F64", "F32", "F16", "BF16"):
                raise ValueError(f"{path}: {key!r} holds {dtype}; save the adapter in float32, float16 or bfloat16")
            factors.setdefault(f"{match[1]}.weight", {})[match[2]] = factor.get_shape()
    if not factors:
        raise ValueError(f"{path}: has no tensors, so it adapts nothing; save the adapter again")
    for name, found in factors.items():
        a, b, whole = found.get("A"), found.get("B"), shapes.get(name)
        fits = a and b and whole and len(whole) == 2 and a[0] > 0 and [b, a] == [[whole[0], a[0]], [a[0], whole[1]]]
        if not fits:
            has = "has no such matrix" if whole is None else f"has {list(whole)} there"
            raise ValueError(
                f"{path}: adapts {name!r} by A {a} and B {b}, but the model in {str(base)!r} {has}; give the adapter's "
                "own base as base_model"
            )


def _merged(tensors: Iterable[tuple[str, Tensor]], adapter: Path) -> Iterator[tuple[str, Tensor]]:
    config = read_adapter(adapter)
    with _opened(adapter / ADAPTER_WEIGHTS) as file:
        keys = {*file.keys()}
        for name, tensor in tensors:
            prefix = f"base_model.model.{name.removesuffix('.weight')}.lora_"
            if prefix + "A.weight" in keys:
                a, b = (file.get_tensor(f"{prefix}{factor}.weight") for factor in "AB")
                tensor = merge_factors(tensor, a, b, config.scale(len(a)))
            yield name, tensor


def merge_factors(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Returns weight [out, in] + scale * b [out, rank] @ a [rank, in], in at least float32, as peft merges them (LoRA,
    Eq. 3). The result is rounded to the engine's dtype once, when it is loaded."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.to(dtype) + (b.to(dtype) @ a.to(dtype)) * scale


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
    decoder.unpack()
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
        if name.endswith("rotary_emb.inv_freq") or (name == HEAD and config.tie_word_embeddings):
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
