"""The `--help` of `train.py`: tyro's, in groups of options. Torch-free."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
from collections.abc import Callable, Sequence
from typing import Any

import tyro


def print_help(kind: type, group_of: Callable[[str], str], groups: Sequence[str], **options: Any) -> None:
    """Prints the help of the command line `kind`, in the order of `groups`. `group_of` an option's name, a field or a
    path of fields ("rollout.top_k"), is its group."""
    os.environ["COLUMNS"] = str(min(100, shutil.get_terminal_size().columns))  # tyro then sets nothing side by side
    text = io.StringIO()  # tyro draws no borders into it
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        tyro.cli(kind, args=["--help"], **options)
    usage: list[str] = []
    sections: dict[str, list[str]] = {group: [] for group in groups}
    section = usage
    for line in map(str.rstrip, text.getvalue().splitlines()):
        if option := re.match(r"  --(\w[\w.-]*)", line):
            section = sections[group_of(option[1].replace("-", "_"))]
        elif re.match(r" \S| +-+$", line):  # titles, lines, and what tyro says of a class, until the next option
            section = []
        section.append(line)
    for group, lines in sections.items():
        usage += [group, "-" * len(group), *lines, ""]
    print("\n".join(usage))
