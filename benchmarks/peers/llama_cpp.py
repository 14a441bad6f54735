"""llama.cpp's plain greedy decode, in process, through xllamacpp; see `benchmarks.peers`."""

import json
import sys
from importlib.metadata import version
from typing import Any

import xllamacpp


def main() -> None:
    request = json.load(sys.stdin)
    params = xllamacpp.CommonParams()
    params.model.path = request["model"]
    params.n_ctx = 2048
    params.n_parallel = 1
    params.cpuparams.n_threads = request["threads"]
    params.cpuparams_batch.n_threads = request["threads"]
    params.warmup = True
    server = xllamacpp.Server(params)
    answers = [answer(server, prompt, request) for prompt in request["prompts"]]
    print()
    print(
        json.dumps(
            {
                "weights": "Q4_1",
                "version": f"xllamacpp {version('xllamacpp')}",
                "answers": answers,
            }
        )
    )


def answer(server: xllamacpp.Server, prompt: list[int], request: dict[str, Any]) -> dict[str, Any]:
    result = server.handle_completions(
        {
            "prompt": prompt,
            "n_predict": request["max_new_tokens"],
            "temperature": 0.0,
            "top_k": 1,
            "cache_prompt": False,
        }
    )
    if isinstance(result, (str, bytes)):
        result = json.loads(result)
    if "timings" not in result:
        raise SystemExit(f"unexpected answer: {str(result)[:300]}")
    timings = result["timings"]
    return {
        "num_tokens": timings["predicted_n"],
        "decode_s": timings["predicted_ms"] / 1000,
    }


if __name__ == "__main__":
    main()
