"""`pretrain.train` on the first GPU, which ranks share: over gloo, as NCCL refuses to."""

import sys

import deepspeed

from pretrain.engine import distributed
from pretrain.train.__main__ import main

join = deepspeed.init_distributed
deepspeed.init_distributed = lambda dist_backend, **settings: join("gloo", **settings)
distributed._gpu_is_shared = lambda environ: False

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
