"""Which rank of a failed call is to blame: the survivors ask one another through the store that they met at.

A rank that fails by itself leaves its reason there. A rank that only notices says that it is alive. One that says nothing is
named.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

PATIENCE_SECONDS = 3.0
"""How long survivors give each other to say that they are alive. They notice a dead peer within milliseconds of a call."""
_ALIVE = "alive"
_GONE = "; the store at which ranks meet is gone, and with it rank 0, unless the launcher holds the store"


def leave_word(rank: int, word: str = _ALIVE) -> Any:
    """Tell the others how this rank is. The store; None if it went with the rank that hosted it."""
    try:
        store = dist.distributed_c10d._get_default_store()
        store.set(f"phalanx/word/{rank}", word)
        return store
    except RuntimeError:
        return None


def roll_call(rank: int, ranks: Sequence[int]) -> str:
    """What to append to an error: which of `ranks` failed by themselves, and why, and which say nothing.

    Empty if nothing is known. The store lives in rank 0, or in a launcher that has one of its own.
    """
    store = leave_word(rank)
    if store is None:
        return _GONE
    words: dict[int, str] = {}
    silent = [other for other in ranks if other != rank]
    until = time.monotonic() + PATIENCE_SECONDS
    try:
        while silent and time.monotonic() < until:
            for other in list(silent):
                if store.check([f"phalanx/word/{other}"]):
                    words[other] = store.get(f"phalanx/word/{other}").decode()
                    silent.remove(other)
            time.sleep(0.02 if silent else 0)
    except RuntimeError:
        return _GONE
    blame = "".join(f"; rank {other} gave up with {word}" for other, word in sorted(words.items()) if word != _ALIVE)
    if silent:
        plural = "s" * (len(silent) > 1)
        blame += f"; no sign of life within {PATIENCE_SECONDS:g} s from rank{plural} {', '.join(map(str, silent))}"
    return blame
