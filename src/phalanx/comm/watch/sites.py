"""Where in the user's source a call stands: the first frame outside torch.distributed and this package's communication."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType

import torch

_TORCH = str(Path(torch.__file__).parent)
_OURS = str(Path(__file__).parents[1])
# What stands between a user's line and the backend: c10d itself, its wrappers, modules that call it, our own transports.
_BETWEEN = (
    f"{_TORCH}/distributed/", f"{_TORCH}/nn/", f"{_TORCH}/autograd/", f"{_TORCH}/utils/", f"{_TORCH}/_",
    f"{_OURS}/", "<frozen",
)  # fmt: skip
NOWHERE = "called from C++"


class Sites:
    """Ids of call sites, given out by `register` once per line of bytecode and then cached."""

    def __init__(self, register: Callable[[str], int]) -> None:
        self._register = register
        self._ids: dict[tuple[CodeType, int], int] = {}
        self._between: dict[CodeType, bool] = {}

    def here(self, depth: int) -> int:
        """The id of the line that led here, looking from `depth` frames above the caller."""
        frame = sys._getframe(depth + 1)
        between = self._between
        while True:
            code = frame.f_code
            skip = between.get(code)
            if skip is None:
                skip = between[code] = code.co_filename.startswith(_BETWEEN)
            if not skip:
                key = (code, frame.f_lasti)
                id = self._ids.get(key)
                if id is None:
                    text = f"{code.co_filename}:{frame.f_lineno}:{code.co_name}"
                    id = self._ids[key] = self._register(text)
                return id
            above = frame.f_back
            if above is None:
                id = self._ids.get((code, -1))
                if id is None:
                    id = self._ids[code, -1] = self._register(f"{NOWHERE}:0:")
                return id
            frame = above


def stack(thread: int) -> list[str]:
    """`path:line:function` of a thread's frames, the innermost first; the machinery of torch and ours left out at the top."""
    frame = sys._current_frames().get(thread)
    frames = []
    while frame is not None:
        frames.append(f"{frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_code.co_name}")
        frame = frame.f_back
    return frames
