"""One sglang engine in a process of its own, driven by JSON lines: requests on stdin, one answer each on stdout.

Started by engine_pool.py. The first line holds {"engine": keyword arguments of sglang.Engine}; the answer to it comes
when the engine serves. Then {"op": "warm" | "decode" | "prefill" | "answers" | "state" | "profile" | "exit", ...}; an answer is
{"ok": true, ...} or {"ok": false, "error": text}. Everything that sglang prints goes to stderr.

Nothing here imports lora_fastpath: whether the overlay is active in this process is the environment's doing alone.
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
import traceback
from pathlib import Path

# This folder's file names must not be importable in the engine: the stock engines are to be as a user has them.
sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != Path(__file__).resolve().parent]


def serve_scheduler(*args, **kwargs):
    """sglang's scheduler process, with what a measurement needs beside it (runs in the child that sglang spawns)."""
    import copy

    from sglang.srt.configs.load_config import LoadFormat
    from sglang.srt.lora.lora import LoRAAdapter
    from sglang.srt.managers.scheduler import Scheduler, run_scheduler_process

    load_adapter = LoRAAdapter.initialize_weights

    def load_real_adapter(adapter):
        # load_format="dummy" is meant for the base weights; sglang applies it to adapters too and then fails
        adapter.load_config = copy.copy(adapter.load_config)
        adapter.load_config.load_format = LoadFormat.SAFETENSORS
        return load_adapter(adapter)

    get_internal_state = Scheduler.get_internal_state

    def with_site_states(scheduler, request):
        answer = get_internal_state(scheduler, request)
        answer.internal_state["lora_fastpath_sites"] = site_states()
        return answer

    # Once in a run, in the same sample of every engine, a generation took about 0.4 s too long; a collection of garbage in
    # processes with the same history would do that.
    gc.disable()
    LoRAAdapter.initialize_weights = load_real_adapter
    Scheduler.get_internal_state = with_site_states
    return run_scheduler_process(*args, **kwargs)


def site_states() -> list[dict]:
    """State of each overlay site in this process; empty without the overlay."""
    if "lora_fastpath.registry" not in sys.modules:
        return []
    registry = sys.modules["lora_fastpath.registry"].registry
    return [
        {"name": name, "state": entry.state.name.lower(), "reason": entry.reason}
        for name, entry in registry.entries.items()
    ]


class Worker:
    def __init__(self, settings: dict):
        from sglang.srt.entrypoints.engine import Engine

        class MeasuredEngine(Engine):
            run_scheduler_process_func = staticmethod(serve_scheduler)

        self.engine = MeasuredEngine(**settings["engine"])
        gc.freeze()
        gc.disable()  # `timed` collects before each measurement
        self.adapters = sorted(settings["engine"].get("lora_paths") or {})
        self.vocabulary = settings["vocabulary"]

    def prompts(self, batch: int, tokens: int) -> list[list[int]]:
        rng = random.Random(batch * 100_003 + tokens)
        margin = self.vocabulary // 100  # special tokens lie at either end
        return [[rng.randrange(margin, self.vocabulary - margin) for _ in range(tokens)] for _ in range(batch)]

    def timed(self, prompts: list[list[int]], new_tokens: int, adapters: int) -> tuple[float, list[list[int]]]:
        """Seconds to generate `new_tokens` for every prompt, adapter i % adapters on prompt i; and the tokens."""
        lora = [self.adapters[i % adapters] for i in range(len(prompts))] if self.adapters else None
        sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        gc.collect()
        start = time.perf_counter()
        answers = self.engine.generate(input_ids=prompts, sampling_params=sampling, lora_path=lora)
        seconds = time.perf_counter() - start
        return seconds, [answer["output_ids"] for answer in answers]

    def warm(self, batch: int, adapters: int, input_len: int) -> dict:
        """Generations at a cell's shapes that nobody times: what is compiled or loaded at first use is so afterwards."""
        prompts = self.prompts(batch, input_len)
        self.timed(prompts[:1], 2, adapters)
        self.timed(prompts, 16, adapters)
        return {"ms": [], "tokens": []}

    def decode(self, batch: int, adapters: int, input_len: int, steps: int) -> dict:
        """One sample of the decode step: two generations that differ by `steps` steps and nothing else."""
        prompts = self.prompts(batch, input_len)
        self.timed(prompts[:1], 2, adapters)  # wake the idle engine and the GPU's clocks
        short, _ = self.timed(prompts, 16, adapters)
        long, tokens = self.timed(prompts, 16 + steps, adapters)
        return {"ms": [(long - short) / steps * 1e3], "tokens": [t[:8] for t in tokens[:2]]}

    def prefill(self, tokens: int, adapters: int, times: int) -> dict:
        """`times` samples of one request of `tokens` tokens up to its first answer token."""
        prompts = self.prompts(1, tokens)
        self.timed(prompts, 1, adapters)
        runs = [self.timed(prompts, 1, adapters) for _ in range(times)]
        return {"ms": [seconds * 1e3 for seconds, _ in runs], "tokens": [t[:8] for t in runs[-1][1]]}

    def answers(self, batch: int, input_len: int, new_tokens: int, lora: list[str | None]) -> dict:
        """Greedy answers to `batch` prompts with the given adapters, with their log-probabilities and each step's best two."""
        sampling = {"temperature": 0.0, "max_new_tokens": new_tokens, "ignore_eos": True}
        found = self.engine.generate(
            input_ids=self.prompts(batch, input_len), sampling_params=sampling, lora_path=lora,
            return_logprob=True, top_logprobs_num=2,
        )  # fmt: skip
        answers = []
        for answer in found:
            meta = answer["meta_info"]
            answers.append(
                {
                    "tokens": answer["output_ids"],
                    "logprobs": [logprob for logprob, *_ in meta["output_token_logprobs"]],
                    "top": [[[logprob, token] for logprob, token, *_ in best] for best in meta["output_top_logprobs"]],
                }
            )
        return {"answers": answers}

    def state(self) -> dict:
        """The overlay's sites as the scheduler process has them, and the GiB that it says it uses."""
        state = self.engine.get_server_info()["internal_states"][0]
        return {"sites": state["lora_fastpath_sites"], "memory_gib": state["memory_usage"]}

    def profile(self, folder: str, batch: int, adapters: int, input_len: int) -> dict:
        """Write a torch profiler trace of 24 decode steps under `folder`."""
        prompts = self.prompts(batch, input_len)
        self.timed(prompts, 8, adapters)
        self.engine.start_profile(output_dir=folder, activities=["GPU"], with_stack=False, record_shapes=False)
        self.timed(prompts, 24, adapters)
        self.engine.stop_profile()
        for _ in range(100):  # the scheduler writes the file after it has answered
            files = sorted(Path(folder).rglob("*.json.gz"))
            if files:
                time.sleep(1.0)
                break
            time.sleep(0.2)
        return {"files": [str(f) for f in files]}


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # from here on prints of sglang and of its children land in the log

    def answer(**fields) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        worker = Worker(json.loads(sys.stdin.readline()))
    except BaseException as error:
        traceback.print_exc()
        answer(ok=False, error=f"{type(error).__name__}: {error}")
        raise
    answer(ok=True)
    for line in sys.stdin:
        request = json.loads(line)
        op = request.pop("op")
        if op == "exit":
            break
        try:
            answer(ok=True, **getattr(worker, op)(**request))
        except Exception as error:  # noqa: BLE001 - the answer carries it, the engine serves on
            traceback.print_exc()
            answer(ok=False, error=f"{type(error).__name__}: {error}")
    worker.engine.shutdown()


if __name__ == "__main__":
    main()
