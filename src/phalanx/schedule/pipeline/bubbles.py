"""How long ranks are idle and how many activations they hold under each schedule, as formulas. Pure.

They take messages to be free and all stages to be equal. Times are of one microbatch through all layers of one rank,
activations are counted in microbatches of a rank's layers. Idle time is what a span has beyond the m (tF+tI+tW) in which a rank
computes. A formula that its paper states for some costs only is written here for all, where one is known; `times` of the order
itself is always right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from phalanx.schedule.pipeline import SCHEDULES

Span = Literal["step", "rank"]
"""The span idle time is counted in: from the first compute of any rank to the last of any, which is what a step takes if all
ranks wait for each other at its end; or from a rank's own first compute to its own last, the longest of them, which is what
the zero-bubble papers count."""


class RankTimes(NamedTuple):
    """Of one microbatch through all layers of one rank, in any unit: forward, input gradient, weight gradient."""

    forward: float
    input_grad: float
    weight_grad: float


@dataclass(frozen=True)
class Formulas:
    step: Callable[[int, int, RankTimes], float]
    """(pp, chunks, times) to the idle time of the whole step."""
    rank: Callable[[int, int, RankTimes], float]
    """The same from a rank's own first compute to its own last."""
    peak: Callable[[int, int, int, int], float]
    """(pp, microbatches, chunks, rank) to the activations that a rank holds at most."""
    source: str
    least: Callable[[int], int] = lambda pp: 1
    """Microbatches from which on the idle times hold."""
    equal: bool = False
    """Whether the idle times hold for tF = tI = tW only."""


def idle(name: str, pp: int, microbatches: int, times: RankTimes, chunks: int | None = None, span: Span = "step") -> float:
    """Idle time of a rank in one step, in the unit of `times`. Raises ValueError where there is no formula."""
    formulas, chunks = FORMULAS[name], chunks or SCHEDULES[name].chunks
    if pp == 1:
        return 0.0
    if microbatches < formulas.least(pp):
        raise ValueError(
            f"the bubble of {name} has a formula from {formulas.least(pp)} microbatches on with pp={pp}, not for {microbatches}"
        )
    if name == "interleaved" and microbatches % pp:
        raise ValueError(
            f"the bubble of interleaved has a formula for a multiple of pp={pp} microbatches, not for {microbatches}"
        )
    if formulas.equal and len(set(times)) > 1:
        raise ValueError(f"the bubble of {name} has a formula for tF = tI = tW, not for {tuple(times)}: time its order instead")
    return (formulas.step if span == "step" else formulas.rank)(pp, chunks, times)


def idle_fraction(
    name: str, pp: int, microbatches: int, times: RankTimes, chunks: int | None = None, span: Span = "step"
) -> float:
    """Of the span: idle / (idle + m (tF+tI+tW)). Raises ValueError where there is no formula."""
    bubble = idle(name, pp, microbatches, times, chunks, span)
    return bubble / (bubble + microbatches * sum(times))


def peak(name: str, pp: int, microbatches: int, rank: int, chunks: int | None = None) -> float:
    """Activations that a rank holds at most, in microbatches of its layers: a forward adds, a B or W frees.

    From 2p-1 microbatches on exactly, and of schedules without chunks always; a rank may hold less of fewer.
    """
    if pp == 1:
        return 1.0
    return FORMULAS[name].peak(pp, microbatches, chunks or SCHEDULES[name].chunks, rank)


def _flush(pp: int, chunks: int, times: RankTimes) -> float:
    """The way to the last rank and back, in stages."""
    return (pp - 1) * sum(times) / chunks


def _one_f_one_b(pp: int, microbatches: int, chunks: int, rank: int) -> float:
    return min(microbatches, pp - rank)


def _interleaved(pp: int, microbatches: int, chunks: int, rank: int) -> float:
    """The warm-up and one forward."""
    if chunks == 1:
        return _one_f_one_b(pp, microbatches, chunks, rank)
    return min(microbatches, (2 * (pp - 1 - rank) + (chunks - 1) * pp + 1) / chunks)


def _zb_h1_step(pp: int, chunks: int, times: RankTimes) -> float:
    """Published: (p-1)(tF+tI-tW), of costs for which no other path is longer: all forwards down, or all input gradients up."""
    return (pp - 1) * max(times.forward, _zb_h1_rank(2, chunks, times))


def _zb_h1_rank(pp: int, chunks: int, times: RankTimes) -> float:
    return (pp - 1) * max(times.input_grad, times.forward + times.input_grad - times.weight_grad)


def _zb_h2_step(pp: int, chunks: int, times: RankTimes) -> float:
    """The last rank starts p-1 forwards late."""
    return (pp - 1) * max(times.forward, _zb_h2_rank(2, chunks, times))


def _zb_h2_rank(pp: int, chunks: int, times: RankTimes) -> float:
    """Published: (p-1)(tF+tI-2tW), of costs for which it is positive and tF is no less than the gradients' wait."""
    forward, input_grad, weight_grad = times
    return (pp - 1) * max(0.0, forward + input_grad - 2 * weight_grad, input_grad - forward)


def _half(pp: int, chunks: int, times: RankTimes) -> float:
    return (pp - 1) * times.forward / 2


def _none(pp: int, chunks: int, times: RankTimes) -> float:
    return 0.0


def _v_half(pp: int) -> int:
    """Activations that a rank holds, in stages."""
    return pp + 2 - pp % 2


def _v_min(pp: int) -> int:
    """Activations that a rank holds, in stages."""
    return 2 * ((pp + 1) // 3) + 2


def _v(pp: int, stages_held: int, times: RankTimes, least: int) -> float:
    """6p-1-3k steps of a stage, if a rank may hold the activations of k stages: each that it may not costs three steps.

    `least` steps are left on two ranks, where the V is so short that another path is longer.
    """
    return max(least, 6 * pp - 1 - 3 * stages_held) * times.forward / 2


_ZERO_BUBBLE = "Qi et al. 2023, sections 2 and 6"
_CONTROLLABLE = "fitted to the orders of Qi et al. 2024: `repeated` gives them for p of 3 to 16"
_READ = "DeepSeek's table, half of it because forward and backward are two steps"

FORMULAS: Mapping[str, Formulas] = {
    "gpipe": Formulas(_flush, _flush, lambda pp, m, chunks, rank: m, "Huang et al. 2019"),
    "1f1b": Formulas(_flush, _flush, _one_f_one_b, "Narayanan et al. 2021, section 2.2.1"),
    "looped-bfs": Formulas(_flush, _flush, lambda pp, m, chunks, rank: m, "Lamy-Poirier 2022", least=lambda pp: pp),
    "interleaved": Formulas(_flush, _flush, _interleaved, "Narayanan et al. 2021, section 2.2.2", least=lambda pp: pp),
    "zb-h1": Formulas(_zb_h1_step, _zb_h1_rank, lambda pp, m, chunks, rank: min(m, pp), _ZERO_BUBBLE, least=lambda pp: pp),
    "zb-h2": Formulas(
        _zb_h2_step,
        _zb_h2_rank,
        lambda pp, m, chunks, rank: min(m, 2 * pp - 1),
        _ZERO_BUBBLE,
        least=lambda pp: 2 * pp - 1,
    ),
    "zb-v": Formulas(
        _half, _none, lambda pp, m, chunks, rank: min(m, pp), _ZERO_BUBBLE, least=lambda pp: 2 * pp - 1, equal=True
    ),
    "v-half": Formulas(
        lambda pp, chunks, times: _v(pp, _v_half(pp), times, 1),
        lambda pp, chunks, times: _v(pp, _v_half(pp), times, 0),
        lambda pp, m, chunks, rank: min(m, _v_half(pp) / 2),
        _CONTROLLABLE,
        least=lambda pp: max(pp, 3),
        equal=True,
    ),
    "v-min": Formulas(
        lambda pp, chunks, times: _v(pp, _v_min(pp), times, 1),
        lambda pp, chunks, times: _v(pp, _v_min(pp), times, 1),
        lambda pp, m, chunks, rank: min(m, _v_min(pp) / 2),
        _CONTROLLABLE,
        least=lambda pp: pp,
        equal=True,
    ),
    "dualpipe-v": Formulas(
        _half,
        _half,
        lambda pp, m, chunks, rank: min(m, pp + 0.5, (m + 1 + rank) / 2),
        _READ,
        least=lambda pp: 2 * pp,
        equal=True,
    ),
    "dualpipe": Formulas(
        lambda pp, chunks, times: (pp / 2 - 1) * times.forward,
        lambda pp, chunks, times: (pp / 2 - 1) * times.forward,
        lambda pp, m, chunks, rank: pp + 1,
        _READ,
        least=lambda pp: 2 * pp,
        equal=True,
    ),
}
"""By the name of the schedule."""
