"""The triton backend's lm_head metadata for 70 prompt tokens with logprobs in chunks of 16; prints what it made of them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

os.environ["SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK"] = "1"
os.environ["SGLANG_LOGITS_PROCESSER_CHUNK_SIZE"] = "16"

import torch

sys.path.insert(0, str(Path(__file__).parent))
import toy_manager as toy
from sglang.srt.lora.backend.triton_backend import TritonLoRABackend


def main() -> None:
    backend = TritonLoRABackend(max_loras_per_batch=2, device=torch.device("cpu"))
    batch = toy.extend_batch(["a", "b"], [40, 30], "cpu")
    batch.return_logprob, batch.extend_logprob_start_lens_cpu = True, [0, 0]
    backend.prepare_lora_batch(batch, [0, 1], [8, 8], [1.0, 1.0], use_cuda_graph=False)
    passes = backend.lm_head_pass_batch_infos
    print(json.dumps([[info.weight_indices.tolist(), info.seg_lens.tolist(), info.expected_tokens] for info in passes]))


if __name__ == "__main__":
    main()
