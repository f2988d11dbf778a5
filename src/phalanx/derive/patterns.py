"""Few patterns for many names: layers.0.up.weight, layers.1.up.weight ... become *.up.weight, if that matches nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


def wildcard(name: str) -> str:
    """A dotted name with * for the numbers of blocks."""
    return _NUMBER.sub("*", name)


def collapsed(
    values: Mapping[str, str], *, avoid: Iterable[str] = (), aliases: Mapping[str, Sequence[str]] | None = None, least: int = 2
) -> dict[str, str]:
    """{pattern: value}, in the order of `values`: every name is matched, and by patterns of its own value only.

    avoid    names that no pattern may match
    aliases  other names that a name goes by, which a pattern may match instead of it
    least    components of a dotted name that a pattern has at least
    """
    meant = {other: value for name, value in values.items() for other in (name, *(aliases or {}).get(name, ()))}
    forbidden = [name for name in avoid if name not in meant]

    def fits(pattern: str, value: str) -> bool:
        return not any(fnmatchcase(name, pattern) for name in forbidden) and all(
            found == value for name, found in meant.items() if fnmatchcase(name, pattern)
        )

    patterns: dict[str, str] = {}
    for name, value in values.items():
        if not any(fnmatchcase(name, pattern) for pattern in patterns):
            patterns[next((p for p in _candidates(name, least) if fits(p, value)), name)] = value
    return patterns


def _candidates(name: str, least: int) -> Iterator[str]:
    """From short to long: the last components after *, then the whole name with * for its numbers, fewer and fewer from the right.

    A number alone says too little to stand behind *.
    """
    words = name.split(".")
    for count in range(least, len(words)):
        if not words[-count].isdecimal():
            yield "*." + ".".join(words[-count:])
    for count in range(len(_NUMBER.findall(name)), 0, -1):
        yield _NUMBER.sub("*", name, count=count)
