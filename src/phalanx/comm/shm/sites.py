"""Where in the user's program a communication was called: the innermost frame outside torch and phalanx.comm.

The numbers are the core's, which shows the texts to other ranks. A known place costs a walk over three or four frames.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import CodeType

import torch

from phalanx.comm.shm import _core

_LIBRARIES = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/", contextlib.__file__)
_CACHED_MAX = 10_000  # programs that compile code as they go would fill memory


class _IsLibrary(dict[str, bool]):
    """By file name: is it torch's or ours?"""

    def __missing__(self, filename: str) -> bool:
        self[filename] = ours = filename.startswith(_LIBRARIES)
        return ours


_is_library = _IsLibrary()
# By the code object's id and the instruction. Code objects hash slowly; the value keeps them alive, so that no id comes twice.
_known: dict[tuple[int, int], tuple[int, CodeType]] = {}


def call_site() -> int:
    """The number of the caller's place in the user's program, for `_core`; 0 before this process has a segment."""
    frame = sys._getframe(2)
    while _is_library[(code := frame.f_code).co_filename]:
        outer = frame.f_back
        if outer is None:
            return _core.site("C++ without a Python caller (such as a thread of autograd)") if _core.started() else 0
        frame = outer
    place = (id(code), frame.f_lasti)
    if (known := _known.get(place)) is not None:
        return known[0]
    if not _core.started():
        return 0
    if len(_known) >= _CACHED_MAX:
        _known.clear()
    site = _core.site(f"{code.co_filename}:{frame.f_lineno} in {code.co_name}")
    _known[place] = (site, code)
    return site


def forget_sites() -> None:
    """The numbers belong to a segment: a new one knows none."""
    _known.clear()
