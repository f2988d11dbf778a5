"""From compute orders to lists: where messages, sums and the end of the step go, and what each action needs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx

from phalanx.derive.program import Parameter, Program, Segment, SegmentClass, Source, Value
from phalanx.mesh import Mesh
from phalanx.schedule import build, from_program
from phalanx.schedule.actions import Action, Schedule
from phalanx.schedule.check import check
from phalanx.schedule.data import reductions
from phalanx.schedule.lower import lower
from phalanx.schedule.pipeline import Order, Step
from phalanx.schedule.view import Weight
from phalanx.spec import Spec

from .toys import toy


def names(actions: tuple[Action, ...]) -> list[str]:
    return [str(action) for action in actions]


def needed(schedule: Schedule, rank: int, name: str) -> set[str]:
    actions = schedule.ranks[rank]
    return {str(actions[need]) for action in actions if str(action) == name for need in action.needs}


def test_two_stages_by_hand() -> None:
    schedule = build(toy(2, dp=2), "1f1b", 2, 2)
    assert names(schedule.ranks[0]) == (
        [
            "COUNT",
            "F0.0",
            "F1.0",
            "SEND_F1.0",
            "F0.1",
            "F1.1",
            "SEND_F1.1",
            "RECV_B2.0",
            "B1.0",
            "B0.0",
            "RECV_B2.1",
            "B1.1",
            "REDUCE1",
            "B0.1",
            "REDUCE0",
            "NORM",
            "OPT",
        ]
    )
    assert names(schedule.ranks[1]) == (
        [
            "COUNT",
            "RECV_F1.0",
            "RECV_F1.1",
            "F2.0",
            "F3.0",
            "B3.0",
            "B2.0",
            "SEND_B2.0",
            "F2.1",
            "F3.1",
            "B3.1",
            "REDUCE3",
            "B2.1",
            "SEND_B2.1",
            "REDUCE2",
            "NORM",
            "OPT",
        ]
    )
    assert needed(schedule, 1, "F2.1") == {"RECV_F1.1"}
    assert needed(schedule, 1, "B3.0") == {"COUNT", "F3.0"}
    assert needed(schedule, 0, "B1.0") == {"RECV_B2.0", "F1.0"}
    assert needed(schedule, 1, "SEND_B2.0") == {"B2.0"}
    assert needed(schedule, 0, "REDUCE0") == {"B0.1"}
    assert needed(schedule, 0, "NORM") == {"COUNT", "B0.1", "REDUCE0", "REDUCE1"}
    assert needed(schedule, 0, "OPT") == {"NORM"}
    lanes = {str(action): action.lane for actions in schedule.ranks for action in actions}
    assert lanes["SEND_F1.0"] == lanes["RECV_F1.0"] == "pp:0>1:F"
    assert lanes["SEND_B2.0"] == lanes["RECV_B2.0"] == "pp:1>0:B"
    assert (lanes["REDUCE0"], lanes["COUNT"], lanes["NORM"], lanes["B0.0"]) == ("reduce:dp", "count:dp", "world", "compute")


def test_every_buffer_is_released_once_where_it_is_last_used() -> None:
    schedule = build(toy(2, dp=2), "1f1b", 2, 2)
    released = {name: str(action) for action in schedule.ranks[0] for name in action.releases}
    assert released == {
        **{f"cut:0:F:{j}": f"F1.{j}" for j in range(2)},
        **{f"cut:1:F:{j}": f"SEND_F1.{j}" for j in range(2)},
        **{f"cut:2:B:{j}": f"B1.{j}" for j in range(2)},
        **{f"cut:1:B:{j}": f"B0.{j}" for j in range(2)},
        **{f"saved:{k}:{j}": f"B{k}.{j}" for k in range(2) for j in range(2)},
    }


def test_without_a_gradient_nothing_is_sent_back() -> None:
    view = toy(2, blocks=2, grad=False)
    order = Order((0, 1), tuple(tuple(Step(kind, r, 0) for kind in "FB") for r in range(2)))  # type: ignore[arg-type]
    schedule = lower(view, order, ((0,), (1, 2, 3)), 1, "by hand")
    check(schedule, view)
    assert names(schedule.ranks[0]) == ["COUNT", "F0.0", "SEND_F0.0", "B0.0", "NORM", "OPT"]
    assert "SEND_B1.0" not in names(schedule.ranks[1])


def test_stages_on_one_rank_hand_over_without_a_message() -> None:
    """V placement: stages 1 and 2 are neighbours on the last rank."""
    view = toy(2, blocks=4)
    ranks = tuple(
        tuple(Step("F", s, j) for s in pair for j in range(2))
        + tuple(Step("B", s, j) for s in reversed(pair) for j in range(2))
        for pair in ((0, 3), (1, 2))
    )
    schedule = lower(view, Order((0, 1, 1, 0), ranks), ((0, 1), (2,), (3,), (4, 5)), 2, "v")
    for channel in ("host", "rank", "direction", "edge"):
        check(schedule, view, channel)
    assert needed(schedule, 1, "F3.0") == {"F2.0"} and needed(schedule, 1, "B2.0") == {"B3.0"} | set()
    assert not [a for r, actions in enumerate(schedule.ranks) for a in actions if a.peer == r]


def test_tied_on_one_rank_is_summed_once_after_its_last_host() -> None:
    view = toy(1, blocks=1, dp=2, tied=True)
    found = reductions(view, ((0,),) * 3)
    assert [part.parameters for part in found[0].parts] == [("embed", "w0")]
    assert [part.parameters for part in found[2].parts] == [("w2",)]
    assert found[0].after == (0, 2) and not found[0].tied


def test_tied_over_stages_is_summed_over_axes_then_hosts() -> None:
    view = toy(3, dp=2, tied=True)
    found = reductions(view, ((0,), (0,), (1,), (2,), (2,)))
    for k in (0, 4):
        own, tied, hosts = found[k].parts
        assert (own.axes, own.parameters) == (("dp",), (f"w{k}",))
        assert (tied.axes, tied.parameters) == (("dp",), ("embed",))  # alone, since it goes on over the hosts
        assert (hosts.coordinates, hosts.parameters, hosts.bytes) == ((0, 2), ("embed",), 400)
    schedule = build(view, "1f1b", 3, 4)
    # Both ends of the sum over hosts stand at the same point: after the last backward of the first segment.
    assert names(schedule.ranks[0])[-4:] == ["B0.3", "REDUCE0", "NORM", "OPT"]
    assert names(schedule.ranks[2])[-5:] == ["SEND_B3.3", "REDUCE3", "REDUCE4", "NORM", "OPT"]


def test_tied_sets_that_meet_in_one_reduce_share_one_everywhere() -> None:
    view = toy(2, blocks=2)
    extra = {0: "x", 1: "y", 2: "xy", 3: ""}
    segments = tuple(
        replace(segment, weights=tuple(Weight(name, 4, ("dp",)) for name in extra[k]))
        for k, segment in enumerate(view.segments)
    )
    found = reductions(replace(view, segments=segments), ((0,), (0,), (1,), (1,)))
    # Segment 2 has both sums, so segment 0 takes y over from segment 1, once REDUCE1 has summed it over dp.
    assert [part.parameters for part in found[0].tied] == [("x",), ("y",)] == [part.parameters for part in found[2].tied]
    assert found[0].earlier == (1,) and found[0].after == (0, 1) and not found[1].tied


def test_pp_must_be_that_of_the_mesh() -> None:
    with pytest.raises(ValueError, match=r"pp=4.*pp=2"):
        build(toy(2), "1f1b", 4, 2)


def test_printed_schedule_joins_neighbouring_segments() -> None:
    text = str(build(toy(2, blocks=4, dp=2), "1f1b", 2, 1))
    assert text.splitlines()[:3] == [
        "1f1b: 2 stages on 2 ranks, 1 microbatches",
        "pp 0 (segments 0-2):",
        "  COUNT  F0-2.0  SEND_F2.0  RECV_B3.0  B2.0  REDUCE2  B1.0  REDUCE1  B0.0  REDUCE0  NORM  OPT",
    ]


def program(mesh: Mesh) -> Program:
    """Embedding, one block, head; the first and last share a weight, the norm's gradient is partial over tp as well."""
    graph = fx.GraphModule({}, fx.Graph())
    split = Spec((("dp",), (), ()))

    def value(name: str, *shape: int, spec: Spec, dtype: torch.dtype = torch.bfloat16, grad: bool = True) -> Value:
        return Value(name, shape, dtype, spec, grad)

    ids = value("ids", 8, 16, spec=Spec((("dp",), ())), dtype=torch.int64, grad=False)
    mask = value("mask", 8, 16, spec=Spec((("dp",), ())), dtype=torch.bool, grad=False)
    hidden = value("h", 8, 16, 64, spec=split)
    loss = value("loss", spec=Spec((), frozenset({"dp"})), dtype=torch.float32)
    table = value("embed", 128, 64, spec=Spec((("tp",), ())))
    norm = value("norm", 64, spec=Spec(((),)), dtype=torch.float32)
    both, data = frozenset({"dp", "tp"}), frozenset({"dp"})

    def cls(params: tuple[Value, ...], ins: tuple[Value, ...], outs: tuple[Value, ...], deferred: tuple) -> SegmentClass:
        return SegmentClass("key", graph, params, (), ins, outs, deferred)

    cut = Source("cut", "h"), Source("cut", "mask")
    segments = (
        Segment(
            0, "embed", cls((table,), (ids,), (mask, hidden), (data,)), ("embed",), (), (Source("batch", "ids"),), ("mask", "h")
        ),
        Segment(1, "block", cls((norm,), (hidden, mask), (hidden, mask), (both,)), ("norm",), (), cut, ("h", "mask")),
        Segment(2, "head", cls((table,), (hidden,), (loss,), (data,)), ("embed",), (), cut[:1], ("loss",)),
    )
    parameters = {
        "embed": Parameter("embed", table.shape, table.dtype, table.spec),
        "norm": Parameter("norm", norm.shape, norm.dtype, norm.spec),
    }
    count = Segment(0, "count", cls((), (), (), ()), (), (), (), ())
    return Program(mesh, 2, segments, parameters, {}, {"ids": ids}, None, False, count, ("dp",))


def test_view_of_a_program() -> None:
    view = from_program(program(Mesh(pp=1, dp=2, tp=4)))
    embed, block, head = view.segments
    # What the next segment reads, in the order that the producer makes it, on one rank: the batch of 8 is split over dp=2.
    assert [(m.name, m.shape, m.dtype, m.bytes) for m in embed.outputs] == [
        ("mask", (4, 16), "bool", 64),
        ("h", (4, 16, 64), "bfloat16", 8192),
    ]
    assert block.inputs == embed.outputs and [m.name for m in block.input_grads] == ["h"]
    assert [m.name for m in block.outputs] == ["h"] == [m.name for m in head.inputs]  # the mask that nobody reads stays
    assert embed.inputs == () and head.outputs == () and head.output_grads == ()
    # Gradients accumulate in float32: 128/4 x 64 elements of 4 bytes.
    assert embed.weights == (Weight("embed", 8192, ("dp",), "bfloat16", itemsize=2),)
    assert block.weights == (Weight("norm", 256, ("dp", "tp"), "float32"),)
    assert view.hosts("embed") == (0, 2) and view.batch_axes == ("dp",)
    assert embed.param_bytes == 32 * 64 * 2
    check(build(view, "1f1b", 1, 2), view)


def test_axes_of_one_rank_need_no_sum() -> None:
    view = from_program(program(Mesh(pp=1, dp=1, tp=4)))
    assert [segment.weights[0].axes for segment in view.segments] == [(), ("tp",), ()] and view.batch_axes == ()
    assert [str(a) for a in build(view, "1f1b", 1, 1).ranks[0] if a.kind == "REDUCE"] == ["REDUCE1"]


def test_frozen_parameters_are_not_summed() -> None:
    made = program(Mesh(dp=2))
    made.parameters["norm"] = replace(made.parameters["norm"], trainable=False)
    assert from_program(made).segments[1].weights == ()


def test_a_cut_that_nobody_makes_is_refused() -> None:
    made = program(Mesh(dp=2))
    made = replace(made, segments=(replace(made.segments[0], outputs=("mask", "other")), *made.segments[1:]))
    with pytest.raises(ValueError, match=r"'block' reads \['h'\], but the segment before makes \['mask', 'other'\]"):
        from_program(made)
