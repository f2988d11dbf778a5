"""What the operators of a captured model do with each group of dimensions, and which groups tensor parallelism splits.

Split are those that start in one weight and are summed away in another (Shoeybi et al. 2019, section 3). Of two that would split one
value, the group that moves fewer elements for each parameter element it divides.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from phalanx.derive.dims import head_counts
from phalanx.derive.form import WHOLE, Label
from phalanx.derive.patterns import wildcard
from phalanx.derive.program import Captured
from phalanx.derive.reject import where
from phalanx.derive.together import Dim, Operation, Together, Value

aten = torch.ops.aten
ATTENTION = frozenset((aten.softmax, aten._softmax, aten._safe_softmax, aten.scaled_dot_product_attention))
LAST_DIMENSIONS = frozenset((aten.layer_norm, aten.rms_norm))
CHANNELS = frozenset((aten.group_norm, aten.batch_norm, aten.instance_norm))
RESIDUAL = "the residual stream, which every block reads in full"


@dataclass(eq=False)
class Group:
    """Dimensions that go together."""

    members: list[tuple[str, int]] = field(default_factory=list)
    """Parameters and which of their dimensions."""
    sizes: set[int] = field(default_factory=set)
    """Of these dimensions on all values, and of the parts of fused ones."""
    of_batch: bool = False
    """It is a dimension of a batch entry."""
    residual: bool = False
    """It is the last dimension of values that blocks add to."""
    along_residual: bool = False
    """It is another dimension of those."""
    made: bool = False
    """A weight makes it: it is a dimension of a product that only the weight has."""
    contracted: bool = False
    """A weight sums it away."""
    summed: list[Operation] = field(default_factory=list)
    """Operations that sum it away."""
    looked_up: bool = False
    """It is the rows of a table."""
    of_tokens: bool = False
    """It is the rows of a table that a batch entry points into."""
    logits: bool = False
    heads: int = 0
    """The most heads that a view takes one of its dimensions apart into."""
    attends: bool = False
    """Attention, or a softmax over something else, is computed for each of its entries alone."""
    whole: list[Operation] = field(default_factory=list)
    """Operations that need it in full."""
    twice: str = ""
    """A value that has it twice."""
    beside: set[Group] = field(default_factory=set)
    """Groups that one value has besides it."""
    moved: int = 0
    """Elements that would be exchanged in one step if it were split, forward and backward."""
    why: str = ""
    """Why it is not split, of a group that would be."""

    def unit(self) -> int:
        """Any divisor of it is a number of ranks that divides every dimension of the group."""
        return math.gcd(*self.sizes)

    def needed_whole(self) -> str:
        """By which operator, for any number of its block."""
        return f"{wildcard(where(self.whole[0].node))} needs it whole"


class Groups:
    """All groups of a model, after one pass over its operations."""

    def __init__(self, captured: Captured) -> None:
        self.together = Together(captured)
        self.parameters, self.batch = self.together.parameters, self.together.batch
        self.head_counts = head_counts(captured, {name: value.parts for name, value in self.parameters.items()})
        self.kin: dict[Group, Group] = {}
        """Of a dimension that must be whole where it comes from the same dimension of another value, such as a norm's: that one's."""
        self._of: dict[Dim, Group] = {}
        self._read_whole: set[tuple[Group, Value]] = set()
        for name, value in self.parameters.items():
            for dim in range(len(value.shape)):
                group = self.of(value, dim)
                group.members.append((name, dim))
                group.heads = max(group.heads, self.head_counts.get((name, dim), 0))
        for value in self.batch.values():
            for dim in range(len(value.shape)):
                self.of(value, dim).of_batch = True
        for operation in self.together.operations:
            self._operands(operation)
            self._results(operation)
            self._special(operation)
        for value in self.together.values():
            self._shape(value)

    def of(self, value: Value, dim: int) -> Group:
        return self._of.setdefault(self.together.group((value, dim)), Group())

    def __iter__(self) -> Iterator[Group]:
        return iter(self._of.values())

    def _operands(self, operation: Operation) -> None:
        weights, others = operation.labels(weights=True), operation.labels(weights=False)
        norm = operation.packet in LAST_DIMENSIONS | CHANNELS
        for value, dim, label in operation.read():
            group = self.of(value, dim)
            if label is WHOLE and value.shape[dim] > 1 and not (norm and value.weight):
                group.whole.append(operation)
            if operation.is_summed(label) and operation not in group.summed:
                group.contracted |= label in weights & others
                group.summed.append(operation)
                group.moved += math.prod(operation.results[0].shape)

    def _results(self, operation: Operation) -> None:
        """What has a dimension that some operands lack is computed from all of those on every rank: their gradients are sums over ranks."""
        joins = operation.joins_weight()
        operands = list(zip(operation.operands, operation.form.operands, strict=True))
        labels: dict[Label, Group] = {
            label: self.of(value, dim)
            for value, own in zip(operation.results, operation.form.results, strict=True)
            for dim, label in enumerate(own)
            if label is not WHOLE
        }
        for label, group in labels.items():
            having = [value for value, own in operands if label in own]
            group.made |= joins and bool(having) and all(value.weight for value in having)
            for value, own in operands if having else ():
                if label not in own and value.grad and not value.weight and (group, value) not in self._read_whole:
                    self._read_whole.add((group, value))
                    group.moved += math.prod(value.shape)

    def _special(self, operation: Operation) -> None:
        packet = operation.packet
        if packet in ATTENTION:
            for dim, label in enumerate(operation.form.operands[0]):
                self.of(operation.operands[0], dim).attends |= label is not WHOLE
        elif packet is aten.embedding and operation.operands[0].weight:
            table, ids = operation.operands
            group = self.of(table, 0)
            group.looked_up, group.of_tokens = True, group.of_tokens or self._is_entry(ids)
        elif packet is aten.cross_entropy_loss:
            logits = operation.operands[0]
            self.of(logits, 1 if len(logits.shape) > 1 else 0).logits = True
        elif packet in (aten.add, aten.sub) and len(operation.operands) == 2:
            self._addition(*sorted(operation.operands, key=lambda value: value.products))
        elif packet in LAST_DIMENSIONS | CHANNELS:
            scaled, *weights = operation.operands
            for weight in weights:
                lead = 1 if packet in CHANNELS else len(scaled.shape) - len(weight.shape)
                for dim in range(len(weight.shape)):
                    self.kin.setdefault(self.of(weight, dim), self.of(scaled, lead + dim))
        if operation.ruled and operation.operands and operation.operands[0].shape == operation.results[0].shape:
            for dim, label in enumerate(operation.form.results[0]):
                if label is WHOLE:
                    self.kin.setdefault(self.of(operation.results[0], dim), self.of(operation.operands[0], dim))

    def _addition(self, before: Value, more: Value) -> None:
        """x + f(x), where f multiplies with weights, makes the dimensions of x those of the residual stream."""
        same = before.of_batch and before.shape == more.shape and before.products < more.products
        if same and self.together.leads_to(before, more):
            for dim in range(len(before.shape)):
                last = dim == len(before.shape) - 1
                group = self.of(before, dim)
                group.residual, group.along_residual = group.residual or last, group.along_residual or not last

    def _is_entry(self, value: Value) -> bool:
        """Whether it is a batch entry of tokens, perhaps seen in another shape."""
        while (made := self.together.maker.get(value)) and len(made.operands) == 1:
            (value,) = made.operands
        return value in self.batch.values() and not any(word in value.name for word in ("position", "type"))

    def _shape(self, value: Value) -> None:
        groups = [self.of(value, dim) for dim, size in enumerate(value.shape) if size > 1]
        for dim, size in enumerate(value.shape):
            if size > 1:
                self.of(value, dim).sizes.update((size, *value.parts.get(dim, ())))
        for group in groups:
            group.twice = group.twice or (value.name if groups.count(group) > 1 else "")
            group.beside.update(other for other in groups if other is not group)


def choose(groups: Groups) -> dict[Group, str]:
    """The groups to split and their names: heads, mlp, vocab, classes. Says of the others that would be split why they are not."""
    tables = {size for group in groups if group.of_tokens for size in group.sizes}
    tables &= {max(tables, default=0)}  # smaller ones, of segments or types, are not worth a sum
    candidates: dict[Group, str] = {}
    for group in groups:
        kind = _kind(group, tables) if group.members else ""
        group.why = _obstacle(group) if kind else ""
        if kind and not group.why:
            candidates[group] = kind
    covered = {
        group: sum(math.prod(groups.parameters[name].shape) for name in {name for name, _ in group.members})
        for group in candidates
    }
    chosen: dict[Group, str] = {}
    for group in sorted(candidates, key=lambda group: group.moved / covered[group]):
        rivals = [chosen[other] for other in group.beside if other in chosen]
        if rivals:
            group.why = f"{rivals[0]} is split in the same values and moves fewer bytes for what it divides"
        else:
            chosen[group] = candidates[group]
    return chosen


def _kind(group: Group, tables: set[int]) -> str:
    if group.made and (group.attends or group.heads > 1):
        return "heads"
    if tables & group.sizes and (group.of_tokens or (group.made and group.logits)):
        return "vocab"
    if group.made and group.logits:
        return "classes"
    return "mlp" if group.made and group.contracted else ""


def _obstacle(group: Group) -> str:
    if group.residual:
        return RESIDUAL
    if group.of_batch:
        return "a dimension of the batch"
    if group.twice:
        return f"{group.twice} has it twice"
    if group.whole:
        return group.needed_whole()
    if group.unit() == 1:
        return f"no number of ranks divides {' and '.join(map(str, sorted(group.sizes)))}"
    return ""
