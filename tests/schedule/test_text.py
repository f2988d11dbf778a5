"""Orders as CSV, against the schedules that torch itself makes."""

from __future__ import annotations

import csv
import io
import re
from types import SimpleNamespace
from typing import Any

import pytest

from phalanx.schedule.pipeline import Order, Step, compute_order, times
from phalanx.schedule.pipeline.text import read_csv, write_csv


def torchs(name: str, pp: int, microbatches: int, chunks: int = 1) -> str:
    """What torch's schedule of that name dumps. Its constructors only read a stage's numbers."""
    from torch.distributed.pipelining import schedules

    stages = [
        SimpleNamespace(
            num_stages=pp * chunks,
            group_size=pp,
            group_rank=0,
            stage_index=chunk * pp,
            submod=None,
            has_backward=True,
            is_first=False,
            is_last=False,
        )
        for chunk in range(chunks)
    ]
    make: Any = getattr(schedules, f"Schedule{name}")
    made = make(stages if issubclass(make, schedules.PipelineScheduleMulti) else stages[0], microbatches)
    order = made.pipeline_order if hasattr(made, "pipeline_order") else made._get_pipeline_order()
    out = io.StringIO()
    csv.writer(out).writerows(order[rank] for rank in range(pp))
    text = out.getvalue()
    # The picture that torch makes of 1F1B counts the forwards of the last rank from 1, which no step that it runs does.
    last = pp * chunks - 1
    if name == "1F1B" and f"{last}F{microbatches}" in text:
        text = re.sub(rf"\b{last}F(\d+)", lambda match: f"{last}F{int(match[1]) - 1}", text)
    return text


SAME = [
    ("GPipe", "gpipe", 1),
    ("1F1B", "1f1b", 1),
    ("Interleaved1F1B", "interleaved", 2),
    ("Interleaved1F1B", "interleaved", 4),
    ("InterleavedZeroBubble", "zb-h1", 1),
    ("ZBVZeroBubble", "zb-v", 2),
    ("DualPipeV", "dualpipe-v", 2),
]


@pytest.mark.parametrize(("torch_name", "name", "chunks"), SAME)
@pytest.mark.parametrize(("pp", "turns"), [(2, 2), (3, 2), (4, 2), (4, 4), (8, 2), (8, 3)])
def test_our_orders_are_torchs(torch_name: str, name: str, chunks: int, pp: int, turns: int) -> None:
    """Step for step, for whole turns of pp microbatches: for others torch's interleaved schedules make other turns."""
    assert read_csv(torchs(torch_name, pp, turns * pp, chunks)) == compute_order(name, pp, turns * pp, chunks)


@pytest.mark.parametrize(("pp", "microbatches", "chunks"), [(2, 4, 2), (4, 8, 2), (4, 5, 3), (8, 16, 4)])
def test_looped_bfs_is_torchs_but_for_the_order_of_the_backwards(pp: int, microbatches: int, chunks: int) -> None:
    """torch takes the last microbatch first on the way back. That is as long: the microbatches are alike."""
    theirs, ours = (
        read_csv(torchs("LoopedBFS", pp, microbatches, chunks)),
        compute_order("looped-bfs", pp, microbatches, chunks),
    )

    def turned(step: Step) -> Step:
        return step._replace(microbatch=microbatches - 1 - step.microbatch) if step.kind == "B" else step

    assert theirs == Order(ours.host, tuple(tuple(map(turned, steps)) for steps in ours.ranks))
    assert max(end for _, end in times(theirs.ranks).values()) == max(end for _, end in times(ours.ranks).values())


@pytest.mark.parametrize("name", ["gpipe", "looped-bfs", "interleaved", "zb-h2", "v-half", "dualpipe-v"])
def test_torch_loads_what_we_write(name: str) -> None:
    from torch.distributed.pipelining.schedules import _Action, _validate_schedule

    order = compute_order(name, 4, 8)
    text = write_csv(order)
    assert read_csv(text) == order
    actions: Any = {rank: [_Action.from_str(cell) for cell in row] for rank, row in enumerate(csv.reader(io.StringIO(text)))}
    placed = _validate_schedule(actions, 4, len(order.host), 8)
    assert [placed[stage] for stage in range(len(order.host))] == list(order.host)


def test_what_is_no_compute_is_left_out() -> None:
    text = "0UNSHARD,0F0,0SEND_F0, ,(0F1;0B0)OVERLAP_F_B,0RECV_B1,0I1,0W1,0REDUCE_GRAD,0RESHARD\n"
    steps = [("F", 0, 0), ("F", 0, 1), ("B", 0, 0), ("I", 0, 1), ("W", 0, 1)]
    assert read_csv(text) == Order((0,), (tuple(Step(kind, stage, j) for kind, stage, j in steps),))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0\n", r"row 2, cell 2: '1X0' is no action such as 2F0"),
        ("0F0,F0\n", r"row 1, cell 2: 'F0' is no action"),
        ("0F0,0F\n", r"row 1, cell 2: '0F' is no action"),
        ("0F0,(0F1;0B0\n", r"row 1, cell 2: '\(0F1;0B0' is no action"),
        ("0F0,(0F1;0Z0)OVERLAP_F_B\n", r"row 1, cell 2: '0Z0' is no action"),
        ("0F0,0B0\n,0F1\n", r"row 2, cell 2: stage 0 is on rank 0, but '0F1' is on rank 1"),
        ("0F0,0B0,0F0\n", r"row 1, cell 3: '0F0' repeats what row 1, cell 1 does"),
        ("0F0,0I0,0B0,0W0\n", r"microbatch 0 has 2 B or I on stage 0, not 1"),
        ("0F0,0I0\n", r"microbatch 0 has 0 B or W on stage 0, not 1, of 1 stages and 1 microbatches"),
        ("0F0,0B0,2F0,2B0\n", r"microbatch 0 has 0 F on stage 1, not 1, of 3 stages"),
        (",\n", r"no compute actions"),
    ],
)
def test_malformed_text_says_where(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_csv(text)


def test_two_copies_have_no_text() -> None:
    with pytest.raises(ValueError, match="2 copies of the model"):
        write_csv(compute_order("dualpipe", 2, 4))
