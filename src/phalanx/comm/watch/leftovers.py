"""What a run that ended left undone."""

from __future__ import annotations

from phalanx.comm.watch.finding import Verdict, Views, messages_of, other_end


def leftovers(views: Views) -> list[Verdict]:
    """What a run that ended left undone: messages that were never received, operations that nobody waited for."""
    found = []
    messages = {rank: messages_of(view) for rank, view in views.items()}
    # A ring forgets: only what comes behind the last receive is known to be missing.
    received = {
        rank: {(op.root, op.group, op.tag): op.seq for op in view.ops if op.op == "recv"} for rank, view in views.items()
    }
    for rank, view in sorted(views.items()):
        for op in view.ops:
            if op.op == "send" and (partner := views.get(op.root)) is not None and partner.life != "running":
                behind = op.seq > received[op.root].get((rank, op.group, op.tag), 0)
                anybody = any(other.op == "recv_any" and other.group == op.group for other in partner.ops)
                if behind and not anybody and other_end(op, rank, messages[op.root]) is None:
                    text = f"rank {op.root} never received what rank {rank} sent: {op.where}"
                    found.append(Verdict("unreceived", text, (rank, op.root), fatal=False, at=(op.group, op.seq)))
            unwaited = not op.waited and op.ended >= 0 and not op.is_message and op.op != "destroy"
            if unwaited and view.life in ("closed", "ended"):
                text = f"rank {rank} never waited for its {op.where}: its result may not have been there when it was used"
                found.append(Verdict("never waited", text, (rank,), fatal=False, at=(op.group, op.seq)))
    return found
