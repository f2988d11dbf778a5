"""The transport whose process groups are watched."""

from __future__ import annotations

from phalanx.comm.c10d import C10dTransport
from phalanx.comm.transport import CommError
from phalanx.comm.watch.register import PREFIX


class WatchedTransport(C10dTransport):
    """Opens its groups as `watched:BACKEND` and is in everything else the transport of `backend`."""

    prefix = PREFIX

    def abort(self, reason: BaseException) -> None:
        """As without a watch; the ring, from which the other ranks learn why this one does not come, gets the reason too."""
        if not isinstance(reason, CommError):
            for lane in self._all_lanes()[:1]:
                lane.pg.ring.write_area("reason", f"{type(reason).__name__}: {str(reason).partition(chr(10))[0]}"[:300])
        super().abort(reason)
