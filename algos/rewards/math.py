r"""The reward of mathematical problems: is the final answer equal to the known one? Needs math-verify.

This module extracts the answer, and math-verify compares it. A model's text goes only through math-verify's LaTeX
grammar, because its parser of plain expressions calls Python's `eval`. Its own time limits are off: they use SIGALRM,
which does not work in threads and cannot interrupt a long computation in C. `RewardRunner` limits the time, since an
answer like `9^{9^{9}}` takes forever.
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Sequence
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify

MAX_TAIL_CHARS = 10_000
"""Characters at the end of a completion that are searched for its answer."""
MAX_ANSWER_CHARS = 300
"""A longer answer counts as wrong: no real answer is so long, and the parser is slow on nested LaTeX."""

# A number with its sign, currency, thousands separators and percent sign, as word problems write it, or a fraction.
_NUMBER = re.compile(
    r"(?<![0-9.,])-?\\?\$?-?(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])|[0-9]+)?(?:\.[0-9]+|(?<=[0-9]))"
    r"(?:/[0-9]+)?(?:\s?\\?%)?"
)
# LaTeX between delimiters; dollars by pandoc's rule, so that "$5 and then $6" is two amounts and not one formula.
_FORMULA = re.compile(
    r"\\\((.+?)\\\)|\\\[(.+?)\\\]|\$\$(.+?)\$\$|(?<![\\$])\$(?![\s$])([^$\n]*[^\s$\\])\$(?![\d$])", re.S
)
_BOXED = re.compile(r"\\(?:boxed|fbox)\s*\{")
_TEXT = re.compile(r"\\(?:text|textbf|mathrm|mathbf)\{([^{}]*)\}")
_UNIT = re.compile(r"\s+[A-Za-z][A-Za-z .]+$")
_INTEGER = re.compile(r"-?[0-9]+")
_MINUS = "\N{MINUS SIGN}"

# Hides math-verify's warning, in every process, that its time limits are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)


def math_verify_reward(
    prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[str], **columns: Any
) -> list[float]:
    r"""1.0 where the completion's final answer equals `answer`, 0.0 elsewhere.

    The final answer is the last `\boxed{}`, otherwise the text after the last `####`, otherwise the last number, or the
    formula (`$...$`, `\(...\)`, `\[...\]`) around it. `answer` is a number ("1,080", "$3.50"), LaTeX, or a solution
    with `####` or `\boxed{}`. Raises `ValueError` when an `answer` is empty or cannot be parsed.
    """
    return [float(_is_equal(*pair)) for pair in zip(completions, answer, strict=True)]


def final_answer(text: str) -> str | None:
    """The final answer that a text states, without its box or delimiters, and with "-" for Unicode's minus sign; None
    when there is none."""
    text = text[-MAX_TAIL_CHARS:].replace(_MINUS, "-")
    marked = _marked_answer(text)
    if marked is not None:
        return marked
    numbers = [match for match in _NUMBER.finditer(text) if match.group()]
    if not numbers:
        return None
    last = numbers[-1]
    for match in _FORMULA.finditer(text):
        if match.start() <= last.start() and last.end() <= match.end():
            return next(group for group in match.groups() if group is not None).strip()
    return last.group()


def _marked_answer(text: str) -> str | None:
    boxes = list(_BOXED.finditer(text))
    if boxes:
        return _until_closing_brace(text, boxes[-1].end())
    _, mark, rest = text.rpartition("####")
    return rest.strip().partition("\n")[0].strip() if mark else None


def _until_closing_brace(text: str, start: int) -> str:
    depth = 1
    for position in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[position], 0)
        if depth == 0:
            return text[start:position].strip()
    return text[start:].strip()  # a completion cut at its length limit


def _plain(answer: str) -> str:
    """The answer without delimiters; a number also without currency, thousands separators and unit ("72 clips")."""
    answer = answer.strip().removesuffix(".").strip()
    for opening, closing in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
        if answer.startswith(opening) and answer.endswith(closing) and len(answer) > len(opening) + len(closing):
            answer = answer[len(opening) : -len(closing)].strip()
            break
    text = _TEXT.fullmatch(answer)
    if text:
        answer = text.group(1).strip()
    number = _UNIT.sub("", answer)
    if _NUMBER.fullmatch(number):
        return number.replace(",", "").replace("\\", "").replace("$", "").replace("--", "-")
    return answer


def _is_equal(completion: str, answer: str) -> bool:
    stated = final_answer(completion)
    gold = _gold(answer)
    if stated is None or len(stated) > MAX_ANSWER_CHARS:
        return False
    stated = _plain(stated)
    if stated == gold:
        return True
    if _INTEGER.fullmatch(stated) and _INTEGER.fullmatch(gold):  # nearly all of GSM8K: saves the slow parser
        return _digits(stated) == _digits(gold)
    return verify(_parsed_gold(gold), _parse(stated), timeout_seconds=None)


def _digits(integer: str) -> str:
    # As text: Python refuses to read integers of thousands of digits.
    digits = integer.lstrip("-").lstrip("0") or "0"
    return "-" + digits if integer.startswith("-") and digits != "0" else digits


@functools.lru_cache(maxsize=4096)
def _gold(answer: str) -> str:
    answer = answer.replace(_MINUS, "-")
    marked = _marked_answer(answer)
    gold = _plain(answer if marked is None else marked)
    if not gold:
        raise ValueError(f"answer={answer!r}: must state an answer")
    return gold


@functools.lru_cache(maxsize=4096)
def _parsed_gold(gold: str) -> list[Any]:
    parsed = _parse(gold)
    if not parsed:
        raise ValueError(f"answer={gold!r}: cannot be parsed; give a number or LaTeX")
    return parsed


def _parse(answer: str) -> list[Any]:
    """SymPy expressions, and as a last resort the text itself."""
    return parse(rf"\boxed{{{answer}}}", [LatexExtractionConfig()], parsing_timeout=None)
