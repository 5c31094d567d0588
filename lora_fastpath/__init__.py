"""lora-fastpath: an overlay that makes LoRA in an unmodified sglang fast. Importing it imports neither torch nor sglang."""

from __future__ import annotations

import os

__version__ = "0.1.0"

# A wheel carries patches/ and kernels/ inside this folder, a checkout beside it: either way they are lora_fastpath.patches
# and lora_fastpath.kernels. The second is no name for the top level, sglang requires Hugging Face's package `kernels`.
if not os.path.isdir(os.path.join(__path__[0], "patches")):
    __path__.append(os.path.dirname(os.path.abspath(__path__[0])))
