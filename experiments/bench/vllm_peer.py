"""vLLM's side of `engine.py`, for a Python that has vLLM and need not have this project.

Reads one JSON object per line, {"prompts": [[token, ...], ...], "lengths": [...]}, and answers each with a line
{"seconds": ...}. What vLLM itself prints goes to stderr.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    options = json.loads(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams, TokensPrompt

    llm = LLM(skip_tokenizer_init=True, enable_prefix_caching=False, disable_log_stats=True, **options)
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        prompts = [TokensPrompt(prompt_token_ids=tokens) for tokens in request["prompts"]]
        params = [
            SamplingParams(temperature=1.0, max_tokens=length, ignore_eos=True, detokenize=False)
            for length in request["lengths"]
        ]
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert [len(output.outputs[0].token_ids) for output in outputs] == request["lengths"]
        print(json.dumps({"seconds": seconds}), file=answers, flush=True)


if __name__ == "__main__":
    main()
