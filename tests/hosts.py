"""Two hosts for a test: those of phalanx.bench.bed, or a skip with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from phalanx.bench import bed


@contextmanager
def two_hosts(rate: str = "1gbit") -> Iterator[bed.Bed]:
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(bed.two_hosts(rate))
        except bed.NotPermitted as why:
            pytest.skip(f"no network namespaces here: {why}")
        yield hosts
