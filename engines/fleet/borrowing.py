"""What a fleet asks a serving process for, to borrow its idle memory and time as a replica (ROSE §3.1). Torch-free.

It holds no code, and of paths none at all: weights come later, by a relay or from a folder of safetensors files.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from engines.config import DType, ModelConfig
from engines.constraints import Count, Seconds, WholeNumber
from engines.decoding import DecodeError, from_json

PATH = "/curtail/loans"
_MOST_ANSWER_BYTES = 2**16
Address = Annotated[str, Meta(pattern=r"^tcp://[^/\s]+:\d+$", max_length=300)]


class Agreement(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What both must have alike, so that a sequence gets the same tokens on each."""

    model: ModelConfig
    """All of its shape, and the ids that end a sequence."""
    dtype: DType
    block_size: Count
    max_model_len: Count
    batch_invariant: bool
    tokenizer: Annotated[str, Meta(max_length=32)]
    """See `tokenizer_digest`."""
    is_paced: bool = False
    """Whether steps take at least the seconds of a pace, as in measurements of policies; no server of users is."""

    def differences(self, other: Agreement) -> Iterator[str]:
        """Yields a line for each field in which another agreement differs."""
        return _differences(self, other, "")


def _differences(mine: Any, other: Any, name: str) -> Iterator[str]:
    if isinstance(mine, msgspec.Struct) or is_dataclass(mine):
        names = mine.__struct_fields__ if isinstance(mine, msgspec.Struct) else [one.name for one in fields(mine)]
        for field in names:
            yield from _differences(getattr(mine, field), getattr(other, field), f"{name}.{field}".lstrip("."))
    elif mine != other:
        yield f"{name}={other!r}: here it is {mine!r}"


class BorrowOrders(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a serving process must know to become a replica of a fleet."""

    address: Address
    """Of the coordinator's `Server`."""
    token: bytes
    replica_id: WholeNumber
    """Also its rank."""
    relay: Address | None
    """Of the relay of weights, which knows the same token; None without."""
    interval_s: Annotated[float, Meta(ge=0.01, le=600)]
    patience_s: Annotated[float, Meta(gt=0, le=600)]
    """How long the coordinator may be silent before the loan ends."""
    timeout_s: Seconds
    """How long it waits for weights that are still pushed; as long, it may be silent itself while it has sequences."""
    max_kv_tokens: Count
    """See `ReplicaOrders`."""
    agreement: Agreement


def ask_for_loan(url: str, orders: BorrowOrders, *, api_key: str | None, timeout_s: float) -> None:
    """Posts the orders to the serving process at `url`. Raises ValueError, naming the reason, if they can never be
    followed there, RuntimeError if they cannot now, ConnectionError if nobody answers in time."""
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"url={url!r}: must begin with http:// or https://")
    headers = {"Content-Type": "application/json"}
    if api_key is not None:
        headers["Authorization"] = f"Bearer {api_key}"
    request = urllib.request.Request(url.rstrip("/") + PATH, msgspec.json.encode(orders), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # the orders hold the launch token
    try:
        with opener.open(request, timeout=timeout_s):
            return
    except urllib.error.HTTPError as error:
        with error:
            reason = _reason(error.read(_MOST_ANSWER_BYTES)) or error.reason
        kind = ValueError if error.code < 500 and error.code not in (409, 429) else RuntimeError
        raise kind(f"url={url!r}: lends nothing ({error.code}): {reason}") from None
    except (OSError, ValueError) as error:  # ValueError: an address that is none
        raise ConnectionError(f"url={url!r}: does not answer ({error}); is a serving process there?") from None


class _Refusal(msgspec.Struct):
    message: str


class _Answer(msgspec.Struct):
    error: _Refusal


def _reason(body: bytes) -> str:
    try:
        return str(from_json(body, _Answer).error.message)
    except DecodeError:
        return ""
