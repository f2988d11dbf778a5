"""What each action consumes and produces on its rank, by name. Needs, releases and proofs all follow from these two tables.

cut:k:F:j   outputs of segment k                 made by F or RECV_F, used by F of k+1 or SEND_F
cut:k:B:j   gradient of the inputs of segment k  made by B, I or RECV_B, used by B or I of k-1, or SEND_B
saved:k:j   what F keeps for the backward        made by F, used by B, or by I and W
pending:k:j what I leaves for W
params:k    full parameters                      made by GATHER, used by F B I W, freed by FREE; absent if they are always there
grad:k:j    a contribution to the accumulators   made by B or W, used by REDUCE and NORM
reduced:k:j the summed gradients of a REDUCE, of microbatch j or, if j is None, of all
count, norm the two scalars of a step            made by COUNT and NORM; OPT reads norm, or, if it is late, what NORM reads
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from phalanx.schedule.actions import Action, places_of
from phalanx.schedule.data import Reduction, reductions
from phalanx.schedule.view import View

BUFFERS = ("cut", "saved", "pending", "params")
"""Kinds of value that take memory until an action releases them; the others live in accumulators or scalars."""


@dataclass(frozen=True)
class Values:
    """The two tables for one placement of a Program."""

    view: View
    chains: tuple[tuple[int, ...], ...]
    """For each copy of the model, the pp coordinate of each segment."""
    microbatches: int
    places: tuple[tuple[int, ...], ...]
    """pp coordinates that host each segment."""
    reductions: Mapping[int, Reduction]

    @classmethod
    def of(cls, view: View, chains: Sequence[Sequence[int]], microbatches: int) -> Values:
        places = places_of(chains)
        return cls(view, tuple(tuple(chain) for chain in chains), microbatches, places, reductions(view, places))

    def at(self, segment: int, microbatch: int) -> int:
        """pp coordinate that computes a segment for a microbatch."""
        return self.chains[microbatch * len(self.chains) // self.microbatches][segment]

    def microbatches_at(self, segment: int, at: int) -> Sequence[int]:
        """Microbatches that a coordinate computes a segment for."""
        return [j for j in range(self.microbatches) if self.at(segment, j) == at]

    def produced(self, action: Action) -> tuple[str, ...]:
        k, j = action.segment, action.microbatch
        match action.kind:
            case "COUNT":
                return ("count",)
            case "NORM":
                return ("norm",)
            case "OPT" | "FREE" | "SEND_F" | "SEND_B":
                return ()
        assert k is not None, f"{action.kind} has no segment"
        segment = self.view.segments[k]
        match action.kind:
            case "F":
                return (f"saved:{k}:{j}", *([f"cut:{k}:F:{j}"] if segment.outputs else []))
            case "B":
                return (f"grad:{k}:{j}", *([f"cut:{k}:B:{j}"] if segment.input_grads else []))
            case "I":
                return (f"pending:{k}:{j}", *([f"cut:{k}:B:{j}"] if segment.input_grads else []))
            case "W":
                return (f"grad:{k}:{j}",)
            case "RECV_F":
                return (f"cut:{k}:F:{j}",)
            case "RECV_B":
                return (f"cut:{k}:B:{j}",)
            case "GATHER":
                return (f"params:{k}",)
        return (f"reduced:{k}:{j}",)

    def consumed(self, action: Action, at: int) -> tuple[str, ...]:
        """What an action of pp coordinate `at` reads, apart from gathered parameters, which depend on the list around it."""
        k, j = action.segment, action.microbatch
        match action.kind:
            case "COUNT" | "RECV_F" | "RECV_B" | "GATHER" | "FREE":
                return ()
            case "OPT" if not self.view.late:
                return ("norm",)
            case "NORM" | "OPT":
                mine = [segment for segment, places in enumerate(self.places) if at in places]
                reduced = [f"reduced:{k}:{j}" for k in mine for j in self.reduced_at(k, at)]
                return ("count", *self._grads(mine, at), *reduced)
        assert k is not None, f"{action.kind} has no segment"
        match action.kind:
            case "F":
                return (f"cut:{k - 1}:F:{j}",) if self.view.segments[k].inputs else ()
            case "B" | "I":
                gradient = [f"cut:{k + 1}:B:{j}"] if self.view.segments[k].output_grads else []
                # The backward is seeded with 1/count by the segment that holds the loss.
                return (f"saved:{k}:{j}", *gradient, *(["count"] if k == self.view.last else []))
            case "W":
                return (f"saved:{k}:{j}", f"pending:{k}:{j}")
            case "SEND_F":
                return (f"cut:{k}:F:{j}",)
            case "SEND_B":
                return (f"cut:{k}:B:{j}",)
        if k not in self.reductions:
            return ()
        reduction = self.reductions[k]
        return (*self._grads(reduction.after, at, j), *(f"reduced:{other}:{j}" for other in reduction.earlier))

    def _grads(self, segments: Iterable[int], at: int, microbatch: int | None = None) -> tuple[str, ...]:
        if microbatch is not None:
            return tuple(f"grad:{k}:{microbatch}" for k in segments if self.at(k, microbatch) == at)
        return tuple(f"grad:{k}:{j}" for k in segments for j in self.microbatches_at(k, at))

    def reduced_at(self, segment: int, at: int) -> Sequence[int | None]:
        """Microbatches of the REDUCEs of a segment on a coordinate; None is one for all of them."""
        if segment not in self.reductions:
            return ()
        each = self.view.storage is not None and self.view.storage.by_microbatch
        return self.microbatches_at(segment, at) if each else (None,)


def link(values: Values, at: int, actions: Sequence[Action]) -> tuple[Action, ...]:
    """The list of coordinate `at` with `needs` and `releases` filled in.

    An action needs the makers of what it consumes; a buffer is released by the action that reads it last, gathered parameters
    by the FREE that the list names.
    """
    maker: dict[str, int] = {}
    reader: dict[str, int] = {}
    computed: dict[int, int] = {}  # segment -> latest action on lane compute that read its parameters
    linked: list[Action] = []
    for index, action in enumerate(actions):
        names = list(values.consumed(action, at))
        if action.kind in ("F", "B", "I", "W") and f"params:{action.segment}" in maker:
            names.append(f"params:{action.segment}")
        needs = [maker[name] for name in names if name in maker]
        if action.segment is not None and action.kind in ("F", "B", "I", "W"):
            computed[action.segment] = index
        if action.segment is not None and action.kind in ("FREE", "GATHER") and action.segment in computed:
            needs.append(computed[action.segment])
        for name in names:
            if name.startswith(("cut", "saved", "pending")):
                reader[name] = index
        maker.update((name, index) for name in values.produced(action))
        linked.append(replace(action, needs=_pruned(needs, actions), releases=()))
    for name, index in reader.items():
        linked[index] = replace(linked[index], releases=(*linked[index].releases, name))
    return tuple(replace(a, releases=(*a.releases, f"params:{a.segment}")) if a.kind == "FREE" else a for a in linked)


def _pruned(needs: Iterable[int], actions: Sequence[Action]) -> tuple[int, ...]:
    """Without the needs on lane compute that the latest of them implies."""
    issued = {need for need in needs if actions[need].communicates}
    computed = [need for need in needs if not actions[need].communicates]
    return tuple(sorted(issued | {max(computed)} if computed else issued))
