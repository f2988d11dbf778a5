"""The table of nccl-tests, column for column, with ours behind it; and its JSON, with the same keys.

Lines that begin with # are for people. A form that an operation does not have is `nan` and its #wrong N/A, so that the columns stay
where parsers look for them.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from phalanx.bench.busbw import FORMS, Form
from phalanx.bench.collectives import Refused
from phalanx.bench.results import Measured, Row
from phalanx.bench.sweep import Effort

JSON_VERSION = 1
"""Of nccl-tests' file format."""


@dataclass(frozen=True)
class Device:
    """Where a rank runs. group: number of its group in the mesh."""

    rank: int
    group: int
    pid: int
    hostname: str
    device: int
    device_hex: str
    device_info: str

    def __str__(self) -> str:
        place = f"{self.hostname:>10} device {self.device:2} [{self.device_hex}]"
        return f"#  Rank {self.rank:2} Group {self.group:2} Pid {self.pid:6} on {place} {self.device_info}"


@dataclass(frozen=True)
class Setting:
    """What holds for the whole run and is told with it."""

    args: tuple[str, ...]
    versions: str
    ranks: int
    mesh: str
    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    factor: int
    baseline: str
    pool_bytes: int
    last_level_cache: int
    effort: Effort
    devices: tuple[Device, ...]
    started: str
    """ISO 8601"""


def header(setting: Setting) -> str:
    effort = setting.effort
    how = "latency of one call" if effort.pipelined == 1 else f"mean of {effort.pipelined} calls back to back"
    empty = "".join(f"{'':>{width}}  " for width in (10, 12, 8, 6, 6)).rstrip(" ")
    lines = [
        f"# {setting.versions}",
        f"# Collective test starting: {' '.join(setting.args)}",
        f"# ranks: {setting.ranks} mesh: {setting.mesh} axis: {'+'.join(setting.axes)} minBytes {setting.sizes[0]} "
        f"maxBytes {setting.sizes[-1]} step: {setting.factor}(factor) warmup iters: {effort.warm_up} iters: {effort.iterations} "
        f"agg iters: {effort.pipelined} validation: {int(effort.check)}",
        f"# time: median over iterations of the slowest rank, {how}, all ranks starting together off the clock",
        "# p50, p95, spread and ratio: of the form that callers use most (in place for all_reduce, broadcast and reduce); "
        "spread: (p75 - p25) / p50",
        f"# ratio: speed relative to {setting.baseline} in the same iterations; (A/A) is {setting.baseline} against itself: "
        "nothing closer to 1 than that means anything; low and high: 95% interval, by bootstrap",
        "# out of place, torch's all_reduce, reduce and broadcast are a copy and the operation in place, both on the clock",
        f"# buffers: {setting.pool_bytes / 2**20:.0f} MiB per rank; the last-level cache has {setting.last_level_cache / 2**20:.0f} MiB",
        "#",
        "# Using devices",
        *map(str, setting.devices),
        "#",
        f"# {empty:<56}           out-of-place                       in-place",
        "# "
        + _columns("size", "count", "type", "redop", "root", *(("time", "algbw", "busbw", "#wrong") * 2))
        + _ours("p50", "p95", "spread", "ratio", "low", "high", "buffers", "op", "backend"),
        "# "
        + _columns("(B)", "(elements)", "", "", "", *(("(us)", "(GB/s)", "(GB/s)", "") * 2))
        + _ours("(us)", "(us)", "(%)", "", "", "", "", "", ""),
    ]
    return "\n".join(line.rstrip() for line in lines)


def line(row: Row, baseline: str) -> str:
    case = row.case
    figures = [figure for form in FORMS for figure in _figures(row, form)]
    samples = row.usual.samples
    return (
        "  "
        + _columns(str(case.size), str(case.count), case.dtype, case.redop, str(case.root), *figures)
        + _ours(
            _number(samples.quantile(0.5) * 1e6, 7),
            _number(samples.quantile(0.95) * 1e6, 7),
            _number(samples.spread * 100, 6),
            *_compared(row, baseline),
            case.buffers,
            case.op,
            case.label,
        )
    )


def refusal(refused: Refused) -> str:
    form = refused.form.replace("_", " ")
    return f"# not measured: {refused.case.op} {form} on {refused.case.backend}: {refused.reason}"


def footer(setting: Setting, rows: Sequence[Row], late_fraction: float) -> str:
    wrong = sum(row.wrong for row in rows)
    lines = [
        f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}",
        f"# {'Avg bus bandwidth':<20} : {average_busbw(rows):g} ",
    ]
    if late_fraction > 0.05:
        lines.append(
            f"# {late_fraction:.0%} of the starts came late on rank 0: more ranks than free cores, so times of small sizes include waiting"
        )
    return "\n".join([*lines, "#", f"# Collective test concluded: {' '.join(setting.args)}"])


def average_busbw(rows: Sequence[Row]) -> float:
    """Over all rows and both forms, as nccl-tests averages: of one size only is it a figure of anything. A/A rows are left out."""
    found = [row.bandwidths(form)[1] for row in rows if not row.case.again for form in row.forms]
    return statistics.fmean(found) if found else 0.0


def as_json(setting: Setting, rows: Sequence[Row], refused: Sequence[Refused], finished: str) -> dict[str, Any]:
    """nccl-tests' file, with booleans and roots as strings as it writes them. Ours: op, backend, buffers, p50, p95, spread and
    ratio in a result, and what was refused."""
    effort, wrong = setting.effort, sum(row.wrong for row in rows)
    return {
        "version": JSON_VERSION,
        "start_time": setting.started,
        "args": list(setting.args),
        "phalanx": setting.versions,
        "config": {
            "nthreads": 1,
            "ngpus": 1,
            "minimum_bytes": setting.sizes[0],
            "maximum_bytes": setting.sizes[-1],
            "step_factor": setting.factor,
            "warmup_iters": effort.warm_up,
            "iterations": effort.iterations,
            "aggregated_iterations": effort.pipelined,
            "validation": int(effort.check),
            "graph": 0,
            "blocking_collectives": "false",
            "per_iter_timing": "true",
            "per_iter_skip": 0,
            "parallel_init": "false",
            "ranks": setting.ranks,
            "mesh": setting.mesh,
            "axis": list(setting.axes),
            "baseline": setting.baseline,
            "pool_bytes": setting.pool_bytes,
            "last_level_cache_bytes": setting.last_level_cache,
            "devices": [asdict(device) for device in setting.devices],
        },
        "results": [_result(row, effort) for row in rows],
        "refused": [
            {"op": each.case.op, "backend": each.case.backend, "form": each.form, "reason": each.reason} for each in refused
        ],
        "out_of_bounds": {"count": wrong, "okay": "false" if wrong else "true"},
        "average_bus_bandwidth": {"bandwidth": average_busbw(rows), "okay": "unchecked"},
        "end_time": finished,
    }


def _result(row: Row, effort: Effort) -> dict[str, Any]:
    case, usual = row.case, row.usual
    result: dict[str, Any] = {
        "size": case.size,
        "count": case.count,
        "type": case.dtype,
        "redop": case.redop,
        "root": str(case.root),
        "op": case.op,
        "backend": case.backend,
        "resident": case.resident,
        "a_a": case.again,
        "buffers": case.buffers,
        "group": case.group,
        "p50_us": usual.samples.quantile(0.5) * 1e6,
        "p95_us": usual.samples.quantile(0.95) * 1e6,
        "spread_pct": usual.samples.spread * 100,
        **_relative(usual),
    }
    for form in FORMS:
        measured = row.forms.get(form)
        result[form] = None if measured is None else _placed(row, form, measured)
        if measured is not None:
            result[f"{form}_per_iter"] = _per_iteration(measured)
    return {**result, "actual_iterations": effort.iterations, "experiment_name": case.op}


def _placed(row: Row, form: Form, measured: Measured) -> dict[str, Any]:
    algbw, busbw = row.bandwidths(form)
    time = measured.samples.quantile(0.5) * 1e6
    return {"time": time, "alg_bw": algbw, "bus_bw": busbw, "nwrong": measured.wrong, **_relative(measured)}


def _relative(measured: Measured) -> dict[str, Any]:
    ratio = measured.ratio
    if ratio is None:
        return {"ratio": None}
    return {"ratio": ratio.median, "ratio_low": ratio.low, "ratio_high": ratio.high}


def _per_iteration(measured: Measured) -> dict[str, Any]:
    samples = measured.samples
    times = samples.slowest
    mean, deviation = statistics.fmean(times), statistics.pstdev(times)
    return {
        "skipped_iterations": 0,
        "min_us": min(times) * 1e6,
        "max_us": max(times) * 1e6,
        "avg_us": mean * 1e6,
        "p50_us": samples.quantile(0.5) * 1e6,
        "p95_us": samples.quantile(0.95) * 1e6,
        "p99_us": samples.quantile(0.99) * 1e6,
        "stdev_us": deviation * 1e6,
        "cv_pct": deviation / mean * 100,
        "times_us": [time * 1e6 for time in times],
        "per_process_max_times_us": [[time * 1e6 for time in rank] for rank in samples.by_rank],
    }


def _figures(row: Row, form: Form) -> tuple[str, str, str, str]:
    """time, algbw, busbw and #wrong of one form."""
    measured = row.forms.get(form)
    if measured is None:
        return "nan", "nan", "nan", "N/A"
    algbw, busbw = row.bandwidths(form)
    time = _number(measured.samples.quantile(0.5) * 1e6, 7)
    return time, _number(algbw, 6), _number(busbw, 6), "N/A" if measured.wrong is None else str(measured.wrong)


def _compared(row: Row, baseline: str) -> tuple[str, str, str]:
    """ratio with the ends of its 95% interval; nan where the baseline was not measured."""
    ratio = row.usual.ratio
    if ratio is None:
        return "1.000" if row.case.backend == baseline and not row.case.again else "nan", "nan", "nan"
    return f"{ratio.median:.3f}", f"{ratio.low:.3f}", f"{ratio.high:.3f}"


def _columns(*cells: str) -> str:
    return "  ".join(f"{cell:>{width}}" for cell, width in zip(cells, (10, 12, 8, 6, 6, *((7, 6, 6, 6) * 2)), strict=True))


def _ours(*cells: str) -> str:
    """p50, p95, spread, ratio with its interval, buffers, op and backend, behind nccl-tests' columns."""
    widths = (">7", ">7", ">6", ">7", ">7", ">7", ">7", "<14", "")
    return "".join(f"  {cell:{width}}" for cell, width in zip(cells, widths, strict=True))


def _number(value: float, width: int) -> str:
    """With two decimals, or as many as fit."""
    for decimals in (2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:.{1 if width >= 7 else 0}e}"
