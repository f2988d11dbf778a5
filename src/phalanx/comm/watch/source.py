"""What the user's source says around a line: the `if` about ranks that a call stands under, a wait in a store."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from phalanx.comm.watch.snapshot import Site

_STORE_CALL = re.compile(r"store\w*\.(get|wait|multi_get|compare_set|add)\(|_store_based_barrier|rendezvous", re.IGNORECASE)


def guard(site: Site, lines: Callable[[str], list[str]]) -> tuple[str, int] | None:
    """The innermost `if` around a line whose condition speaks of a rank: its text and line."""
    text = lines(site.path)
    if not site.line or not text:
        return None
    try:
        tree = ast.parse("\n".join(text))
    except SyntaxError:
        return None
    found = None
    for node in ast.walk(tree):
        if not isinstance(node, ast.If) or not _covers(node.body + node.orelse, site.line):
            continue
        if "rank" in ast.unparse(node.test).lower() and (found is None or node.lineno > found[1]):
            found = (f"if {ast.unparse(node.test)}:", node.lineno)
    return found


def _covers(body: Sequence[ast.stmt], line: int) -> bool:
    return any(statement.lineno <= line <= (statement.end_lineno or statement.lineno) for statement in body)


def is_store_wait(stack: Sequence[Site], lines: Callable[[str], list[str]]) -> bool:
    """True if the innermost frame is a call that waits for a key of a store."""
    for site in stack[:1]:
        text = lines(site.path)
        if 0 < site.line <= len(text) and _STORE_CALL.search(text[site.line - 1]):
            return True
    return False


def read_lines(path: str) -> list[str]:
    """The lines of a file; empty if it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").splitlines()
    except OSError:
        return []
