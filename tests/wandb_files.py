"""What runs have logged to wandb, read from their files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record


def read_back(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: blocks of LevelDB's log, after a header of 7 bytes; each record is a protobuf
    message, in one piece or several."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    place, message = 7, b""
    while place + 7 <= len(data):
        if (left := 32768 - place % 32768) < 7:  # too little for a header: the block ends here
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        message += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield Record.FromString(message)
            message = b""


def logged(path: Path) -> bytes:
    """All records of a .wandb file; in the file itself the end of a block may cut a name in two."""
    return b"".join(record.SerializeToString() for record in read_back(path))
