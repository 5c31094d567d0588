"""An overlay that makes LoRA in an unmodified sglang fast. Importing it imports neither torch, sglang nor wrapt."""

from __future__ import annotations

import os

__version__ = "0.1.0"

# A wheel carries patches/ and kernels/ inside this folder, a checkout beside it: either way they are
# lora_fastpath.patches and lora_fastpath.kernels. At the top level `kernels` is Hugging Face's, which sglang requires.
if not os.path.isdir(os.path.join(__path__[0], "patches")):
    __path__.append(os.path.dirname(os.path.abspath(__path__[0])))
