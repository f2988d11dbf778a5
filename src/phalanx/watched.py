"""`import phalanx.watched`, then `dist.init_process_group("watched:gloo")`: a plain script gets flight rings and verdicts.

Registers `watched:gloo`, `watched:nccl`, `watched:cpu:gloo,cuda:nccl` and, once the backend itself is there (`import phalanx.shm`),
`watched:shm`; `watch("name", devices)` adds any other backend.
Imports nothing beyond torch. PHALANX_RUN_DIR says where the rings go, PHALANX_PATIENCE how many seconds a wait may take before
the ranks are asked; a script says it with `pg_options=phalanx.watched.Options(patience=..., run_dir=...)` instead.

When a mistake is found:

    before damage    other operation, size, dtype, reduction or root, and a message (without tag) of other size or dtype, between
                     ranks of one host: whoever comes second refuses before anything is sent
    at once          a rank that is gone or has left, where the wires notice: Gloo
    after patience   everything that hangs, and whatever ranks of different hosts disagree about, if it hangs
    at the end       messages that were never received, operations that nobody waited for
    not at all       ranks of different hosts that disagree about dtype or reduction where the backend completes the call;
                     swapped messages of equal size and dtype

On NCCL, `batch_isend_irecv` issues its messages one by one, because torch groups them for its own process groups only.
"""

from __future__ import annotations

import os

from phalanx.comm.watch.monitor import Options, options_from
from phalanx.comm.watch.register import registry

__all__ = ["Options", "watch"]

registry.options = options_from(os.environ, Options())
watch = registry.add
