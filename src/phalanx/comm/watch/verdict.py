"""Who is to blame, from what every rank recorded: a pure function of views, the same during a run and after it.

The order of the questions is the order of proof. Ranks that called different things at one position of a group have diverged,
whatever else happened. Then come messages whose ends differ, and last the wait-for graph: whoever waits points to the ranks that
it waits for, until the chain ends at a rank that does not wait (missing, gone) or closes into a cycle (a deadlock).
"""

from __future__ import annotations

from collections.abc import Callable

from phalanx.comm.watch.finding import Verdict, Views, history, messages_of, name_ranks, other_end, parties_of, place_of
from phalanx.comm.watch.snapshot import GroupView, Op, RankView
from phalanx.comm.watch.source import guard, is_store_wait

Lines = Callable[[str], list[str]]
"""The lines of a source file; empty if it cannot be read."""


def verdict(
    views: Views, *, before: Views | None = None, lines: Lines = lambda path: [], patience: float = 0.0
) -> Verdict | None:
    """What is wrong, or None. Nothing is wrong with a rank that has waited less than `patience` seconds.

    `before` are the views some time earlier: a rank whose operations advanced since then is a straggler, not stuck.
    """
    case = Case(views, before or {}, lines, int(patience * 1e9))
    return case.diverged() or case.message_differs() or case.hangs() or None


class Case:
    """The views and what was concluded from them so far."""

    def __init__(self, views: Views, before: Views, lines: Lines, patience: int) -> None:
        self.views, self.before, self.lines, self.patience = views, before, lines, patience
        self.collectives = {
            rank: {(op.group, op.seq): op for op in view.ops if op.is_collective} for rank, view in views.items()
        }
        self.messages = {rank: messages_of(view) for rank, view in views.items()}
        self.reached = {
            rank: {
                group: max((op.seq for op in view.ops if op.is_collective and op.group == group), default=0)
                for group in view.groups
            }
            for rank, view in views.items()
        }

    # Divergence

    def diverged(self) -> Verdict | None:
        """The earliest position of a group at which ranks made different calls."""
        if found := self._groups_differ():
            return found
        positions: dict[tuple[str, int], dict[int, Op]] = {}
        for rank, ops in self.collectives.items():
            for position, op in ops.items():
                positions.setdefault(position, {})[rank] = op
        wrong = [calls for calls in positions.values() if len({op.call for op in calls.values()}) > 1]
        if not wrong:
            return None
        # The first in time; but once ranks have diverged within a group, everything later in it differs too.
        calls = min(wrong, key=lambda calls: max(op.issued for op in calls.values()))
        return self._mismatch(calls)

    def _mismatch(self, calls: dict[int, Op]) -> Verdict:
        first = next(iter(calls.values()))
        parties = parties_of({rank: op.call for rank, op in calls.items()})
        odd = parties[-1] if len(parties[0]) > len(parties[-1]) else sorted(calls)
        kind = _difference([calls[ranks[0]] for ranks in parties])
        group = self._group(first.group)
        told = "; ".join(f"{name_ranks(ranks)} called {calls[ranks[0]].where}" for ranks in parties)
        text = f"{_NAMES[kind]} in call {first.seq} of {group}: {told}"
        details = [line for ranks in parties for line in history(self.views[ranks[0]])]
        guarded = self._guarded({rank: calls[rank] for ranks in reversed(parties) for rank in ranks})
        if kind == "op" and guarded:
            kind = "branch"
        hints = guarded or self._counts(calls)
        details = [*hints[1:], *details]
        text += "".join(f"; {line}" for line in hints[:1])
        return Verdict(kind, text, tuple(odd), tuple(details), at=(first.group, first.seq))

    def _groups_differ(self) -> Verdict | None:
        """One name, different ranks: the n-th new_group of two ranks was not the same call."""
        seen: dict[str, dict[int, GroupView]] = {}
        for rank, view in self.views.items():
            for name, group in view.groups.items():
                seen.setdefault(name, {})[rank] = group
        for name, by_rank in sorted(seen.items()):
            if len({group.ranks for group in by_rank.values()}) > 1:
                parties = parties_of({rank: group.ranks for rank, group in by_rank.items()})
                told = "; ".join(
                    f"{name_ranks(ranks)} asked for ranks {list(by_rank[ranks[0]].ranks)}{self._made_at(ranks[0], name)}"
                    for ranks in parties
                )
                return Verdict(
                    "new_group", f"new_group disagreement about group {name!r}: {told}", tuple(sorted(by_rank)), at=(name, 0)
                )
        return None

    def _made_at(self, rank: int, name: str) -> str:
        return next((f" at {op.site}" for op in self.views[rank].ops if op.op == "new_group" and op.group == name), "")

    # Messages

    def message_differs(self) -> Verdict | None:
        """The n-th send and the n-th receive of a pair of ranks, with one tag, that do not fit."""
        for rank, view in sorted(self.views.items()):
            for op in view.ops:
                if op.op != "send" or op.root not in self.views:
                    continue
                other = other_end(op, rank, self.messages[op.root])
                if other is not None and (op.elements, op.dtype) != (other.elements, other.dtype):
                    what = "size" if op.elements != other.elements else "dtype"
                    text = f"message {what} mismatch: rank {rank} called {op.where}; rank {op.root} called {other.where}"
                    details = [*history(self.views[rank]), *history(self.views[op.root])]
                    return Verdict("message", text, (rank, op.root), tuple(details), at=(op.group, op.seq))
        return None

    # Waits

    def hangs(self) -> Verdict | None:
        """Follow whoever waits longest."""
        waits = [(rank, op) for rank, view in self.views.items() for op in view.stuck() if self._is_late(rank, op)]
        for rank, op in sorted(waits, key=lambda wait: wait[1].waited or wait[1].issued):
            if found := self._follow(rank, op):
                return found
        return None

    def _is_late(self, rank: int, op: Op) -> bool:
        view = self.views[rank]
        return op.ended < 0 or view.life != "running" or view.now - op.waited >= self.patience

    def waits_for(self, rank: int, op: Op) -> list[int]:
        """The ranks without which the operation cannot complete and that have not done their part."""
        group = self.views[rank].groups.get(op.group)
        if group is None:
            return []
        others = [other for other in group.ranks if other != rank]
        if op.op == "new_group":
            return [other for other in others if other not in self.views or op.group not in self.views[other].groups]
        if op.op in ("send", "recv"):
            partner = self.messages.get(op.root)
            return [] if partner is None or other_end(op, rank, partner) is not None else [op.root]
        if op.op == "recv_any":
            return []
        return [other for other in others if other not in self.views or self.reached[other].get(op.group, 0) < op.seq]

    def _follow(self, rank: int, op: Op) -> Verdict | None:
        path: list[tuple[int, Op]] = []
        while True:
            seen = [at for at, (there, _) in enumerate(path) if there == rank]
            if seen:
                return self._cycle(path[seen[0] :])
            path.append((rank, op))
            if found := self._dead_member(op):
                return found
            blockers = self.waits_for(rank, op)
            if not blockers:
                return self._spoiled(op)
            if tagged := self._tags_differ(rank, op):
                return tagged
            # A rank that waits for nobody is the end of the chain and a better answer than one that waits too.
            free = [other for other in blockers if not self._blocking(other)]
            if free:
                return self._absent(path[-1], [other for other in blockers if other in free], path[0])
            rank, op = blockers[0], self._blocking(blockers[0])[0]

    def _spoiled(self, op: Op) -> Verdict | None:
        """Everybody is there, but a rank raised in its own call and the others wait for its part."""
        calls = self._in(op)
        raised = sorted((-other.ended, rank) for rank, other in calls.items() if other.ended < 0)
        if not raised or len(raised) == len(calls) or op.is_message:
            return None
        rank = raised[0][1]
        waiters = [other for other in sorted(calls) if calls[other].ended == 0]
        text = f"rank {rank} raised in {calls[rank].where}: {self.views[rank].reason}; {name_ranks(waiters)} "
        text += "wait for its part" if len(waiters) > 1 else "waits for its part"
        return Verdict("raised", text, (rank,), at=(op.group, op.seq))

    def _blocking(self, rank: int) -> list[Op]:
        return self.views[rank].stuck() if rank in self.views else []

    def _dead_member(self, op: Op) -> Verdict | None:
        """A dead process in the group ends every operation of it. Not if all are dead: then this is a look back."""
        group = self._group(op.group)
        if all(view.life != "running" for view in self.views.values()):
            return None
        dead = [r for r in group.ranks if r in self.views and self.views[r].life == "died" and not self._gave_up(r)]
        if op.is_message:
            dead = [r for r in dead if r == op.root]
        return self._died(dead, op) if dead else None

    def _gave_up(self, rank: int) -> bool:
        return any(op.ended < 0 for op in self.views[rank].ops[-1:]) or bool(self.views[rank].verdict)

    def _died(self, dead: list[int], op: Op) -> Verdict:
        view = self.views[dead[0]]
        reason = f" ({view.reason})" if view.reason else ""
        last = f"; its last operation was {view.ops[-1].where}" if view.ops else ""
        plural = "are" if len(dead) > 1 else "is"
        text = f"{name_ranks(dead)} {plural} gone{reason}: {self._waiters(op)}{last}"
        return Verdict("died", text, tuple(dead), tuple(history(self.views[dead[0]])), at=(op.group, op.seq))

    def _tags_differ(self, rank: int, op: Op) -> Verdict | None:
        """The peer has an unmatched opposite operation with me, under another tag."""
        if op.op not in ("send", "recv") or op.root not in self.views:
            return None
        opposite = "recv" if op.op == "send" else "send"
        for other in self.views[op.root].ops:
            if (other.op, other.root, other.group) != (opposite, rank, op.group) or other.tag == op.tag:
                continue
            if other_end(other, op.root, self.messages[rank]) is None:
                sent, received = sorted([(rank, op), (op.root, other)], key=lambda end: end[1].op == "recv")
                text = f"tag mismatch, {sent[1].tag} and {received[1].tag}: rank {sent[0]} called {sent[1].where}; "
                text += f"rank {received[0]} called {received[1].where}"
                return Verdict("tag", text, (rank, op.root), at=(op.group, op.seq))
        return None

    def _cycle(self, path: list[tuple[int, Op]]) -> Verdict:
        start = min(range(len(path)), key=lambda at: path[at][0])
        path = path[start:] + path[:start]
        ops = [op for _, op in path]
        told = ", ".join(f"rank {rank} waits in {op.where}" for rank, op in path)
        kinds = {op.op for op in ops}
        loose = [(rank, op) for rank, op in path if op.is_message]
        if kinds == {"send"}:
            kind, name = "sends", "every rank sends first and none receives"
        elif kinds <= {"recv"}:
            kind, name = "receives", "every rank receives first and none sends"
        elif loose and len(loose) < len(path):
            rank, op = loose[0]
            peer = "receives" if op.op == "send" else "sends"
            kind = "send" if op.op == "send" else "receive"
            name = f"rank {rank} {kind}s but rank {op.root} never {peer}"
        elif not loose and len({op.group for op in ops}) > 1:
            groups = " and ".join(str(self._group(name)) for name in dict.fromkeys(op.group for op in ops))
            kind, name = "order", f"{groups} are used in different orders"
        else:
            kind, name = "deadlock", "a cycle of waits"
        details = [line for rank, op in path for line in history(self.views[rank])]
        return Verdict(
            kind, f"deadlock, {name}: {told}", tuple(rank for rank, _ in path), tuple(details), at=(ops[0].group, ops[0].seq)
        )

    def _absent(self, wait: tuple[int, Op], absent: list[int], origin: tuple[int, Op]) -> Verdict | None:
        """`absent` do not wait for anybody, and the rank of `wait` cannot go on without them."""
        _, op = wait
        unknown = [rank for rank in absent if rank not in self.views or self.views[rank].life == "silent"]
        if unknown:
            come = "have not come" if op.op == "new_group" else "give no sign of life"
            text = f"{name_ranks(unknown)} {come}: {self._waiters(op)}"
            return Verdict("died", text, tuple(unknown), fatal=False, at=(op.group, op.seq))
        died = [rank for rank in absent if self.views[rank].life == "died"]
        if died:
            return self._died(died, op)
        rank = next((r for r in absent if self.views[r].life != "running"), absent[0])
        view = self.views[rank]
        destroyed = next((o for o in view.ops if o.op == "destroy" and o.group == op.group), None)
        same = [o for o in view.ops if o.site == op.site and o.op == op.op and o.site.line]
        end, waiters = _end(view), self._waiters(op)
        if op.op in ("send", "recv") and (view.life != "running" or destroyed):
            kind, verb = ("send", "received") if op.op == "send" else ("receive", "sent")
            text = f"{kind} without {_OTHER[kind]}: rank {wait[0]} waits in {op.where}; rank {rank} {end} and never {verb}"
            return Verdict(kind, text, (wait[0], rank), tuple(history(view)), at=(op.group, op.seq))
        if view.life == "running" and destroyed is None:
            return self._missing(op, absent, origin)
        mine = [o for o in self.views[wait[0]].ops if o.site == op.site and o.op == op.op]
        if same and len(mine) > len(same):
            kind = "uneven"
            text = f"uneven: rank {rank} made {len(same)} calls of {op.op} at {op.site} and {end}; {waiters}, call {len(mine)} there"
        elif destroyed is not None and view.life == "running":
            kind = "destroyed"
            text = f"rank {rank} destroyed {self._group(op.group)} at {destroyed.site}: {waiters}"
        else:
            kind = "left"
            text = f"rank {rank} {end} without {op.op} {op.seq} of {self._group(op.group)}: {waiters}"
        guarded = self._guarded(self._in(op))
        if guarded and kind == "left":
            kind, text = "branch", f"{text}; {guarded[0]}"
        return Verdict(kind, text, (rank,), (*guarded, *history(view)), at=(op.group, op.seq))

    def _missing(self, op: Op, absent: list[int], origin: tuple[int, Op]) -> Verdict:
        rank = absent[0]
        view, earlier = self.views[rank], self.before.get(rank)
        place = place_of(view)
        guarded = self._guarded(self._in(op))
        waiters = self._waiters(op)
        if origin[1] is not op:
            waiters += f", and behind them rank {origin[0]} in {origin[1].where}"
        advanced = earlier is not None and earlier.life == "running" and _count(view) > _count(earlier)
        details = (*guarded, *(f"rank {rank} is at {site.path}:{site.line} in {site.function}" for site in view.stack[:6]))
        details = (*details, *history(self.views[rank]))
        if is_store_wait(view.stack, self.lines):
            kind, text = "store", f"rank {rank} is blocked in a store or rendezvous{place}: {waiters}"
        elif advanced:
            verb = "are" if len(absent) > 1 else "is"
            kind, text = "straggler", f"{name_ranks(absent)} {verb} late but makes progress{place}: {waiters}"
        else:
            verb = "have" if len(absent) > 1 else "has"
            state = f" ({view.reason})" if view.reason else ""
            kind, text = (
                "missing",
                f"{name_ranks(absent)} {verb} not called {op.op} {op.seq} of {self._group(op.group)}: {waiters}",
            )
            text += f"; rank {rank}{state} is{place or ' nowhere to be seen'}"
            if guarded:
                kind, text = "branch", f"{text}; {guarded[0]}"
        return Verdict(kind, text, tuple(absent), details, fatal=False, at=(op.group, op.seq))

    # Words

    def _group(self, name: str) -> GroupView:
        return next((view.groups[name] for view in self.views.values() if name in view.groups), GroupView(name, "", ()))

    def _in(self, op: Op) -> dict[int, Op]:
        """{rank: its operation} of all that are in this collective or message."""
        if op.op in ("send", "recv", "recv_any", "new_group"):
            return {rank: op for rank, view in self.views.items() if op in view.ops}
        found = {rank: ops[op.group, op.seq] for rank, ops in self.collectives.items() if (op.group, op.seq) in ops}
        return {rank: other for rank, other in found.items() if other.is_stuck or other is op}

    def _waiters(self, op: Op) -> str:
        ranks = sorted(self._in(op))
        return f"{name_ranks(ranks)} {'wait' if len(ranks) > 1 else 'waits'} in {op.where}"

    def _guarded(self, calls: dict[int, Op]) -> list[str]:
        """Calls that stand under an `if` about the rank."""
        told = {op.site: found for op in calls.values() if (found := guard(op.site, self.lines))}
        return [f"{site} stands under `{text}` (line {line})" for site, (text, line) in told.items()]

    def _counts(self, calls: dict[int, Op]) -> list[str]:
        """A line that some ranks called more often than others, who went elsewhere: uneven iterations, or a skipped call."""
        group = next(iter(calls.values())).group
        told = []
        for site in dict.fromkeys(op.site for op in calls.values() if op.site.line):
            by_rank = {
                rank: sum(op.site == site for op in self.views[rank].ops if op.group == group and op.is_collective)
                for rank in calls
            }
            if len(set(by_rank.values())) > 1:
                parties = parties_of(by_rank)
                words = ", ".join(f"{name_ranks(ranks)} made {by_rank[ranks[0]]} calls" for ranks in parties)
                told.append(f"at {site} {words}")
        return told


def _count(view: RankView) -> int:
    """How many operations the rank has recorded, those included that its ring has forgotten."""
    return view.ops[-1].number if view.ops else 0


def _end(view: RankView) -> str:
    words = {"closed": "destroyed its process group", "ended": "came to its end", "died": "is gone", "silent": "is silent"}
    return words.get(view.life, "went on") + (f" with {view.reason}" if view.reason else "")


_OTHER = {"send": "receive", "receive": "send"}
_NAMES = {
    "op": "different operations",
    "dtype": "dtype mismatch",
    "size": "size mismatch",
    "reduction": "reduce op mismatch",
    "root": "root mismatch",
}


def _difference(ops: list[Op]) -> str:
    """The first thing in which calls of one position differ."""
    for kind in ("op", "root", "dtype", "reduction"):
        if len({getattr(op, kind) for op in ops}) > 1:
            return kind
    return "size"
