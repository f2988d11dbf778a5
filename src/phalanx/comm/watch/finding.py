"""What a verdict is, the kinds that there are, and the words in which ranks and operations are told of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from phalanx.comm.watch.snapshot import Op, RankView

Views = Mapping[int, RankView]


@dataclass(frozen=True)
class Verdict:
    """What went wrong, in one line; `details` for who wants more. `fatal`: the run cannot go on, whatever the others do."""

    kind: str
    text: str
    culprits: tuple[int, ...] = ()
    details: tuple[str, ...] = ()
    fatal: bool = True
    at: tuple[str, int] = ("", 0)
    """Group and sequence number."""

    @property
    def name(self) -> tuple[object, ...]:
        """What makes two verdicts the same: texts differ with the moment at which they are given."""
        return self.kind, self.at, self.culprits

    def __str__(self) -> str:
        return "\n".join([self.text, *(f"    {line}" for line in self.details)])


KINDS = {
    "new_group": "ranks made different groups by one call of new_group",
    "op": "different operations at one position of a group",
    "dtype": "one collective with different dtypes",
    "size": "one collective with different numbers of elements",
    "reduction": "one collective with different reductions",
    "root": "one collective with different roots",
    "branch": "a collective that only some ranks call, under an `if` on the rank",
    "message": "a send and its receive of different size or dtype",
    "tag": "a send and a receive whose tags never meet",
    "order": "two groups used in opposite orders: a cycle of collectives",
    "sends": "a cycle of ranks that all send first",
    "receives": "a cycle of ranks that all receive first",
    "send": "a send that nobody receives",
    "receive": "a receive that nobody sends to",
    "deadlock": "another cycle of waits",
    "died": "a process that is gone",
    "uneven": "a rank that left its loop earlier",
    "left": "a rank that ended or closed while others wait for it",
    "destroyed": "a group that was destroyed while others wait in it",
    "missing": "a rank that has not come, and where it is",
    "store": "a rank that is blocked in a store or rendezvous",
    "straggler": "a rank that has not come but makes progress",
    "raised": "a rank whose own call raised, which others wait for",
    "never waited": "an asynchronous operation that nobody waited for",
    "unreceived": "a message that was sent and never received",
}


def history(view: RankView, count: int = 5) -> list[str]:
    """The last operations of a rank, one line each."""
    if not view.ops:
        return [f"rank {view.rank} has recorded nothing"]
    lines = [f"rank {view.rank}, last operations:"]
    for op in view.ops[-count:]:
        state = "raised" if op.ended < 0 else "done" if op.ended else "waiting" if op.waited else "issued"
        lines.append(f"  {op.op} {op.seq} of group {op.group!r}, {state}: {op} at {op.site.path}:{op.site.line}")
    return lines


Messages = Mapping[tuple[str, int, str, int, int], Op]


def messages_of(view: RankView) -> Messages:
    """The sends and receives of a rank by (op, peer, group, tag, number)."""
    return {(op.op, op.root, op.group, op.tag, op.seq): op for op in view.ops if op.op in ("send", "recv")}


def other_end(op: Op, rank: int, messages: Messages) -> Op | None:
    """The other end of a message of `rank`: of the same number among those of this pair, direction and tag."""
    return messages.get(("recv" if op.op == "send" else "send", rank, op.group, op.tag, op.seq))


def parties_of(values: Mapping[int, object]) -> list[list[int]]:
    """Ranks by what they hold, the largest party first."""
    parties: dict[object, list[int]] = {}
    for rank in sorted(values):
        parties.setdefault(values[rank], []).append(rank)
    return sorted(parties.values(), key=lambda ranks: (-len(ranks), ranks))


def name_ranks(ranks: list[int]) -> str:
    """`rank 3`, `ranks 0, 1 and 2`, or the first few of many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 8:
        return f"ranks {', '.join(map(str, ranks[:6]))} and {len(ranks) - 6} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def place_of(view: RankView) -> str:
    site = next((site for site in view.stack if site.is_users), None)
    if site is not None:
        return f" at {site}"
    return f" somewhere behind {view.ops[-1].where}" if view.ops else ""
