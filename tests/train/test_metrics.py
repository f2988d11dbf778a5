"""Every step leaves its line, at once, and whoever watches sees one line that says how far the run is."""

from __future__ import annotations

import io
import json
from pathlib import Path

from rich.console import Console

from phalanx.train.metrics import Recorder, StepMetrics, bytes_text, progress_line, traffic_lines


def metrics(step: int) -> StepMetrics:
    return StepMetrics(step=step, loss=1 / step, grad_norm=0.5, lr=1e-3, tokens=256, tokens_per_second=1024.0, seconds=0.25)


def test_a_line_per_step_is_on_disk_before_the_next_one(tmp_path: Path) -> None:
    with Recorder(3, tmp_path, None) as recorder:
        for step in (1, 2, 3):
            recorder.record(metrics(step))
            lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
            assert [line["step"] for line in lines] == list(range(1, step + 1))
            assert list(lines[-1]) == ["step", "loss", "grad_norm", "lr", "tokens", "tokens_per_second", "seconds"]
    assert recorder.first == metrics(1)
    assert recorder.last == metrics(3)


def test_plain_lines_when_nobody_watches() -> None:
    stream = io.StringIO()
    with Recorder(100, None, Console(file=stream, force_terminal=False)) as recorder:
        for step in range(1, 101):
            recorder.record(metrics(step))
    lines = stream.getvalue().splitlines()
    assert len(lines) == 21  # the first and every fifth
    assert lines[-1] == "step 100/100 · loss 0.0100 · 1,024 tokens/s · 0:00:00 left"


def test_one_line_on_a_terminal() -> None:
    stream = io.StringIO()
    with Recorder(2, None, Console(file=stream, force_terminal=True, width=80)) as recorder:
        recorder.record(metrics(1))
        recorder.record(metrics(2))
    assert "step 1/2" in stream.getvalue()
    assert stream.getvalue().count("\n") == 1


def test_time_left() -> None:
    assert progress_line(metrics(10), 130, 61.0).endswith("2:02:00 left")


def test_traffic_by_axis() -> None:
    totals = {("tp", "all_reduce"): (10, 4096), ("dp", "all_reduce"): (2, 100), ("tp", "all_gather"): (1, 1024)}
    assert traffic_lines(totals, 2) == [
        "  dp: 100 B, 50 B a step (all_reduce 100 B in 2 calls)",
        "  tp: 5.0 KiB, 2.5 KiB a step (all_gather 1.0 KiB in 1 calls, all_reduce 4.0 KiB in 10 calls)",
    ]
    assert bytes_text(3 * 2**40) == "3.0 TiB"
