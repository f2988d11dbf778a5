"""`phalanx data`: from text to what training reads."""

from __future__ import annotations

from phalanx.cli import choose

CHOICES = {"pack": "Text, JSONL or parquet into a folder of tokens that training maps into memory."}


def main(args: list[str]) -> int:
    return choose("data", CHOICES, args)
