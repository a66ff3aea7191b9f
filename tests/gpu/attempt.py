"""One training attempt; prints the GPU's peak memory at the end.

usage: python -m tests.gpu.attempt RECIPE [key=value ...]
"""

import sys

import torch

from pretrain.train import __main__ as train

if __name__ == "__main__":
    code = train.main(sys.argv[1:])
    on_gpu = torch.cuda.is_initialized()
    print(f"peak_bytes {torch.cuda.max_memory_allocated() if on_gpu else 0}", flush=True)
    sys.exit(code)
