"""The process of a length predictor: `python -m algos.predictor_worker`, which predictor_process.py starts.

What waits together is computed as one batch. It dies with the run (`guard.py`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from algos.predictor_messages import Answers, Ask, Fit, Fitted, Ready
from algos.workers.messages import receive, send
from algos.workers.user_code import describe_error, start_worker
from engines.decoding import DecodeError
from engines.lifetime import exempt_from_collection, imports

if TYPE_CHECKING:
    from algos.length_predictor import LengthModel

logger = logging.getLogger(__name__)


def serve(sock: socket.socket, trunk: Path, saved: Path, model: LengthModel | None) -> None:
    """Answers until the run closes the connection."""
    waiting: queue.SimpleQueue[Ask | Fit | None] = queue.SimpleQueue()
    threading.Thread(target=_receive_all, args=(sock, waiting), daemon=True).start()
    with contextlib.suppress(ConnectionError):
        while True:
            items = [waiting.get()]
            while not waiting.empty():
                items.append(waiting.get())
            for kind, group in groupby(items, type):
                if kind is Ask:
                    for answers in answer(model, [one for one in group if isinstance(one, Ask)]):
                        send(sock, answers)
                    continue
                for one in group:
                    if not isinstance(one, Fit):
                        return
                    model, fitted = _fit(one, trunk, saved, model)
                    send(sock, fitted)


def answer(model: LengthModel | None, asks: Sequence[Ask]) -> Iterator[Answers]:
    """Predicts for all contexts together. An error of the model leaves them without an estimate."""
    contexts = [context for ask in asks for context in ask.contexts]
    remaining = [math.nan] * len(contexts)
    if model is not None:
        try:
            remaining = model.predict(contexts)
        except Exception:
            logger.exception("no estimates of lengths")
    for ask in asks:
        mine, remaining = remaining[: len(ask.contexts)], remaining[len(ask.contexts) :]
        yield Answers(number=ask.number, remaining=mine)


def _fit(fit: Fit, trunk: Path, saved: Path, model: LengthModel | None) -> tuple[LengthModel | None, Fitted]:
    from algos.length_predictor import fit_lengths

    start = time.perf_counter()
    try:
        fitted, report = fit_lengths(trunk, fit.trajectories, fit.seed)
        fitted.save(saved)
    except Exception as error:
        return model, Fitted(number=fit.number, error=describe_error(error))
    seconds = time.perf_counter() - start
    return fitted, Fitted(number=fit.number, seconds=seconds, ridge=report.ridge, held_out_mae=report.held_out_mae)


def _receive_all(sock: socket.socket, waiting: queue.SimpleQueue[Ask | Fit | None]) -> None:
    mine = sock.dup()  # each thread sets its own timeout
    with contextlib.suppress(EOFError, OSError, DecodeError):
        while True:
            message: Ask | Fit = receive(mine, Ask | Fit)  # type: ignore[arg-type]
            waiting.put(message)
    waiting.put(None)


def main() -> None:
    sock, (trunk, saved) = start_worker()
    exempt_from_collection()
    with imports():
        from algos.length_predictor import LengthModel, identify  # in the child: the guard needs no torch

    try:
        identify(Path(trunk))
        model = LengthModel.load(Path(saved), of=Path(trunk)) if Path(saved).exists() else None
    except (ValueError, OSError) as error:
        send(sock, Ready(error=str(error)))
        return
    send(sock, Ready(is_fitted=model is not None, pid=os.getpid()))
    serve(sock, Path(trunk), Path(saved), model)


if __name__ == "__main__":
    main()
