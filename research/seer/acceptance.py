"""How many tokens a verification step yields, replayed on sequences that exist (Seer, Table 2). Torch-free.

No model runs: the tokens of each sequence are known, and a draft is accepted as far as it equals them.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from engines.speculation.suffix_tree import SpeculationArgs, SuffixTree
from engines.speculation.verify import num_accepted

_PROMPT, _OWN, _FIRST_REFERENCE = 0, 1, 2
_DEPTH = 24


def tokens_per_step(prompt: list[int], target: list[int], references: Items[list[int]], args: SpeculationArgs) -> float:
    """Returns the mean number of tokens of a step that generates `target`, the one without a draft included.

    The tree holds the prompt, the whole `references`, and the target as far as it is generated. Of several paths the
    one that is accepted longest counts.
    """
    tree = SuffixTree(max_depth=_DEPTH)
    tree.append(_PROMPT, prompt)
    for number, reference in enumerate(references):
        tree.append(_FIRST_REFERENCE + number, prompt[-_DEPTH:] + reference)
        tree.finish(_FIRST_REFERENCE + number)
    tree.append(_OWN, prompt[-_DEPTH:])
    done = num_steps = 0
    while done < len(target):
        drafts = tree.speculate(args, request_id=_OWN)
        count = 1 + max((num_accepted(draft.tokens, target[done : len(target) - 1]) for draft in drafts), default=0)
        tree.append(_OWN, target[done : done + count])
        done += count
        num_steps += 1
    return len(target) / num_steps


def acceptance_length(
    prompts: Items[list[int]], groups: Items[Items[list[int]]], *, num_references: int, args: SpeculationArgs
) -> float:
    """Returns tokens per step over all sequences, each with the next `num_references` of its group as references.

    Raises ValueError for a group of too few.
    """
    num_tokens = num_steps = 0.0
    for prompt, group in zip(prompts, groups, strict=True):
        if num_references >= len(group):
            raise ValueError(
                f"num_references={num_references}: a group of {len(group)} has {len(group) - 1}; give fewer"
            )
        for place, target in enumerate(group):
            others = [group[(place + 1 + number) % len(group)] for number in range(num_references)]
            num_tokens += len(target)
            num_steps += len(target) / tokens_per_step(prompt, target, others, args)
    return num_tokens / num_steps
