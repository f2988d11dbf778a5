"""The training loop: batches in, metrics and checkpoints out, the same loss curve on every mesh and over every restart.

It knows nothing of ranks beyond which slice of a batch is this one's and who writes the files.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from os import environ
from pathlib import Path
from shlex import quote
from typing import Any

from rich.console import Console

from phalanx.comm.launch import launch_from
from phalanx.comm.local import LocalWorld
from phalanx.comm.world import World
from phalanx.run.executor import Out
from phalanx.run.initialize import deferred_init
from phalanx.run.replicas import ReplicaError, check_replicas
from phalanx.train.assembly import parallel_step
from phalanx.train.batches import Batches
from phalanx.train.beginning import Beginning, Progress, beginning, check_same_data, progress_of, said
from phalanx.train.checkpoint import Checkpoints, Saved, find
from phalanx.train.config import TrainConfig
from phalanx.train.environment import describe
from phalanx.train.folder import RunFolder
from phalanx.train.guard import GO, Guard
from phalanx.train.metrics import Recorder, StepMetrics, tell, traffic_lines
from phalanx.train.models import build
from phalanx.train.settings import dump
from phalanx.train.signals import Request, asked_to_stop
from phalanx.train.sinks import sinks
from phalanx.train.trace import tracing


@dataclass(frozen=True)
class Summary:
    """What a run came to. `traffic` is {(axis, operation): (calls, bytes)} of rank 0 over the steps of this process."""

    first: StepMetrics
    last: StepMetrics
    traffic: Mapping[tuple[str, str], tuple[int, int]]
    held_out: float | None
    """Mean loss on the batches of --held-out after training; None without them."""
    folder: Path | None
    """The run folder; None on ranks other than the first."""
    stopped: int | None = None
    """The signal after which the run ended before its last step; 0 if another rank got it."""
    paused_seconds: float = 0.0
    """For which training has stood still while checkpoints were begun."""


def train(config: TrainConfig, world: World | LocalWorld, console: Console | None = None) -> Summary:
    """Train as `config` says; every rank calls this. Rank 0 writes the run folder and tells `console`.

    Raises ValueError for what the user got wrong, before the first step, and FloatingPointError when a loss or gradient is not
    finite, or another step is one that --on-spike stops at.
    """
    here = world if isinstance(world, World) else world.worlds[0]
    if here.rank != 0:
        console = None
    with ExitStack() as stack:
        request = stack.enter_context(asked_to_stop())
        folder = None
        if here.rank == 0:
            folder = RunFolder.create(config)
            stack.enter_context(folder.lock())
        run = _Run(config, world, folder, console, stack)
        request.watched_by(run.step)
        try:
            return run.train(request)
        except (FloatingPointError, ReplicaError):
            # Every rank raises it: what is being written is of a step before, and can be written.
            if run.checkpoints is not None:
                run.checkpoints.finish()
            raise


class _Run:
    """One run, from where it begins to where it ends."""

    def __init__(
        self,
        config: TrainConfig,
        world: World | LocalWorld,
        folder: RunFolder | None,
        console: Console | None,
        stack: ExitStack,
    ) -> None:
        model = build(config.model, config.dtype, dropout=config.dropout, documents=config.mask_documents)
        config = replace(config, batch=config.batch or model.batch, seq=config.seq or model.seq)
        self.config, self.world, self.folder, self._console = config, world, folder, console
        start = beginning(config, world)
        module = deferred_init(model.factory)
        self.step = parallel_step(config, world, model, module, start.values(module))
        self.batches = Batches(config, model, self.step)
        stack.callback(self.batches.close)
        self.progress = Progress()
        self._model_facts = {}
        if config.model.startswith("hf:"):  # for `phalanx export`, should the folder be gone by then
            folder_of_model = Path(config.model.removeprefix("hf:"))
            self._model_facts["hf_config"] = json.loads((folder_of_model / "config.json").read_bytes())
        self.guards = [Guard(config) for _ in self.step.executors]
        self.verdict = GO
        """On the last step."""
        if start.note:
            self.tell(f"WARNING: {start.note}")
        saved = start.fill(self.step, config, self.tell)
        parameters = sum(p.numel() for p in module.parameters())
        on = f"mesh {config.mesh}" if config.mesh else "one rank"
        self.tell(f"{config.model}: {parameters:,} parameters on {on}, learning from {self.batches.source}")
        resumed = saved if start.kind == "resume" else None
        if resumed is not None:
            check_same_data(resumed, self.batches.fingerprint)
            self._go_on_from(resumed)
        if config.on_non_finite != "stop" or config.on_spike != "ignore":
            for executor, guard in zip(self.step.executors, self.guards, strict=True):
                executor.judge = lambda loss, norm, guard=guard: self._judge(guard, loss, norm)
        self.checkpoints: Checkpoints | None = None
        place = config.checkpoints or ("" if folder is None else folder.checkpoints)
        if config.checkpoint_every == 0 and (resumed is not None or not Path(place).is_dir()):
            place = ""
        if place := self._agreed(place):
            mine = Checkpoints(
                self.step,
                place,
                keep=config.keep,
                begins="" if resumed is None else resumed.address,
                told=self._checkpoint_is_complete,
            )
            # A run that keeps none takes the folder over all the same: those in it are not its own.
            self.checkpoints = mine if config.checkpoint_every != 0 else None
        # After the checkpoints are this run's: killed in between, it does not take those of another run for its own.
        self._begin_folder(start, saved)

    def train(self, request: Request) -> Summary:
        config, step = self.config, self.step
        ledger = (self.world if isinstance(self.world, World) else self.world.worlds[0]).ledger
        traffic: Counter[tuple[str, str, str]] = Counter()
        taken: deque[tuple[int, Out, float]] = deque()
        """Steps that are not recorded yet: number, result and seconds."""
        path, first = None if self.folder is None else self.folder.path, self.progress.step + 1
        ledger.start()
        recorder = Recorder(
            config.steps,
            path,
            self._console,
            first_step=first,
            sinks=[] if path is None else sinks(config, path, first_step=first),
        )
        held_out, stopped = None, None
        with recorder:
            while self.progress.step < config.steps and stopped is None:
                number = self.progress.step + 1
                self.verdict = GO
                with tracing(step, self.world, number, path) if number == config.trace else nullcontext():
                    began = time.perf_counter()
                    out = step(self.batches.training(self.progress.cursor), local=self.batches.is_local)
                    taken.append((number, out, time.perf_counter() - began))
                self.progress.step, self.progress.cursor = number, self.progress.cursor + self.batches.size
                # Without a barrier the next step is started before the numbers of this one are asked for.
                while len(taken) > (0 if config.barrier else 1):
                    stopped = self._record(recorder, request, *taken.popleft())
                # Emptied every step: a ledger that is left alone remembers every call of the run.
                for (axis, operation), (calls, moved) in ledger.totals().items():
                    traffic[axis, operation, "calls"] += calls
                    traffic[axis, operation, "bytes"] += moved
                ledger.clear()
                if self.verdict.action in ("rewind", "stop"):
                    self._go_back(recorder)
                    stopped = None  # the next step tells it again
                    continue
                last = number == config.steps or stopped is not None
                due = last or self._is_due(number)
                if due:  # a checkpoint holds what the steps before it came to
                    step.settle()
                    while taken:
                        self._record(recorder, request, *taken.popleft())
                # What is loaded is equal everywhere: a checkpoint of copies that differ would hide that they did.
                if config.check_replicas is not None and (due or number % config.check_replicas == 0):
                    step.each(check_replicas)
                if config.held_out and (number == config.steps or (config.eval_every and number % config.eval_every == 0)):
                    held_out = self._evaluate(recorder, number)
                self._keep(number, due)
            if self.checkpoints is not None:
                self.checkpoints.wait()
        ledger.stop()
        if self.progress.step == config.steps:
            stopped = None  # there was nothing left to stop
        assert recorder.first is not None and recorder.last is not None
        totals = {
            (axis, op): (calls, traffic[axis, op, "bytes"]) for (axis, op, what), calls in traffic.items() if what == "calls"
        }
        paused = 0.0 if self.checkpoints is None else self.checkpoints.paused_seconds
        summary = Summary(recorder.first, recorder.last, totals, held_out, path, stopped, paused)
        self._end(summary)
        return summary

    # Steps

    def _record(self, recorder: Recorder, request: Request, number: int, out: Out, seconds: float) -> int | None:
        """Tell what a step came to; returns the signal that ends the run after it, if there is one."""
        recorder.record(metrics(number, out, seconds))
        self.progress.tokens += int(out.tokens)
        if out.skipped and self.verdict.action != "go":
            self._event("skip", number, why=self.verdict.reason)
            self.tell(f"WARNING: step {number}: {self.verdict.reason}")
        return (request.number or 0) if out.stop else None

    def _judge(self, guard: Guard, loss: float, norm: float) -> str:
        verdict = guard.verdict(loss, norm)
        if guard is self.guards[0]:
            self.verdict = verdict
        return verdict.action

    def _go_back(self, recorder: Recorder) -> None:
        """Take the newest checkpoint, and the samples after those of the step that was wrong."""
        wrong, number = self.verdict, self.progress.step
        if wrong.action == "stop":
            raise FloatingPointError(f"step {number}: {wrong.reason}")
        assert self.checkpoints is not None
        self.checkpoints.wait()
        saved = Beginning("resume", self._newest()).fill(self.step, self.config, self.tell)
        decisions = [
            guard.rewind(*((None, None) if saved is None else (saved.step, saved.facts["guard"]))) for guard in self.guards
        ]
        if saved is None or decisions[0].action == "stop":
            raise FloatingPointError(f"step {number}: {wrong.reason}; {decisions[0].reason}")
        cursor = self.progress.cursor
        self.progress = progress_of(saved.facts)
        self.progress.cursor = cursor
        self.checkpoints.forget_after(saved.manifest.order)
        why = f"{wrong.reason}; {decisions[0].reason}"
        recorder.rewind(saved.step, why=why, from_step=number)
        self.tell(f"WARNING: step {number}: {why}")

    def _evaluate(self, recorder: Recorder, number: int) -> float:
        parts = [self.step.evaluate(self.batches.held_out(k), local=self.batches.is_local) for k in range(self.config.held_out)]
        tokens = sum(part.tokens for part in parts)
        loss = sum(part.loss * part.tokens for part in parts) / tokens
        recorder.record_evaluation(number, loss, tokens)
        return loss

    # Checkpoints

    def _is_due(self, number: int) -> bool:
        every = self.config.checkpoint_every
        return bool(every) and number % (every or 1) == 0

    def _keep(self, number: int, due: bool) -> None:
        """Write a checkpoint if one is due, and raise what writing the one before has met."""
        if self.checkpoints is None:
            return
        if due:
            self.checkpoints.save(number, self._facts())
        self.checkpoints.poll()

    def _facts(self) -> dict[str, Any]:
        config = dump(replace(self.config, out=None, resume=None))
        run = {"config": config, "data": self.batches.fingerprint, "guard": self.guards[0].state_dict()}
        return {**run, **self._model_facts, **asdict(self.progress)}

    def _go_on_from(self, saved: Saved) -> None:
        self.progress = progress_of(saved.facts)
        for guard in self.guards:
            guard.load_state_dict(saved.facts["guard"])

    def _newest(self) -> tuple[str, ...]:
        """The checkpoints of this run, the newest first, the same on every rank."""
        assert self.checkpoints is not None
        try:
            addresses, _ = find(self.checkpoints.place.address)
        except ValueError:
            addresses = []
        return tuple(filter(None, self._agreed("\0".join(addresses)).split("\0")))

    def _agreed(self, text: str) -> str:
        """What rank 0 says, on every rank."""
        return said(self.world, text) if isinstance(self.world, World) and self.world.mesh.size > 1 else text

    def _checkpoint_is_complete(self, number: int, name: str, seconds: float) -> None:
        self._event("checkpoint", number, name=name, seconds=round(seconds, 3))

    # The run folder

    def _begin_folder(self, start: Beginning, saved: Saved | None) -> None:
        folder, config = self.folder, self.config
        if folder is None:
            return
        if start.kind != "resume" and (before := folder.steps()):
            self.tell(
                f"WARNING: {folder.path} has a run of {before} steps: its metrics are replaced now, and checkpoints of it that are "
                "there go as new ones come"
            )
        changed = folder.write_config(config)
        launcher = launch_from(environ)
        folder.write_environment(
            describe(argv=sys.argv, env=environ, mesh=config.mesh, launcher=None if launcher is None else launcher.launcher)
        )
        if start.kind == "resume":
            assert saved is not None
            taken = folder.steps()
            folder.rewind(saved.step, why="the run goes on from there")
            settings = {name: list(values) for name, values in changed.items()}
            self._event("resume", saved.step, checkpoint=saved.address, changed=settings)
            what = "".join(f", {name} {_said(was)} → {_said(now)}" for name, (was, now) in changed.items())
            self.tell(f"going on after step {saved.step} of {saved.address}{what}{_dropped(saved.step + 1, taken)}")
        else:
            weights = start.addresses[0] if saved is None and start.kind == "hf" else None if saved is None else saved.address
            self._event("start", 0, **({} if weights is None else {"weights": weights}))
            if weights is not None:
                after = "" if saved is None else f", after its step {saved.step}"
                self.tell(f"beginning with the weights of {weights}{after}")

    def _event(self, kind: str, number: int, **facts: Any) -> None:
        if self.folder is not None:
            self.folder.event(kind, number, **facts)

    def _end(self, summary: Summary) -> None:
        number = self.progress.step
        if summary.stopped is not None:
            self._event("signal", number, signal=summary.stopped)
            again = (
                f"`phalanx train --resume {quote(str(summary.folder))}` goes on"
                if self.checkpoints is not None
                else "no checkpoint was asked for"
            )
            self.tell(f"stopped after step {number} of {self.config.steps}, as asked by a signal; {again}")
        self._event("end", number, **({"why": "signal"} if summary.stopped is not None else {}))
        trace = self.config.trace
        if trace is not None and summary.first.step <= trace <= number:
            self.tell(f"step {trace} is recorded; `phalanx schedule --run {quote(str(summary.folder))}` shows it")
        for line in closing_lines(summary, summary.last.step - summary.first.step + 1):
            self.tell(line)

    def tell(self, line: str) -> None:
        if self._console is not None:
            tell(self._console, line)


def _said(value: Any) -> str:
    return "none" if value in (None, "", []) else str(value)


def _dropped(first: int, last: int) -> str:
    """What metrics.jsonl no longer tells of, as the end of a sentence."""
    if last <= first:
        return f"; step {last} of metrics.jsonl is dropped" if last == first else ""
    return f"; steps {first} {'and' if last == first + 1 else 'to'} {last} of metrics.jsonl are dropped"


def metrics(number: int, out: Out, seconds: float) -> StepMetrics:
    return StepMetrics(
        step=number,
        loss=float(out.loss),
        grad_norm=float(out.grad_norm),
        lr=float(out.lr),
        tokens=int(out.tokens),
        tokens_per_second=int(out.tokens) / seconds,
        seconds=seconds,
        skipped=bool(out.skipped),
    )


def closing_lines(summary: Summary, steps: int) -> list[str]:
    first, last = summary.first, summary.last
    lines = [f"loss {first.loss:.4f} at step {first.step} → {last.loss:.4f} at step {last.step}"]
    if summary.held_out is not None:
        lines.append(f"held-out loss {summary.held_out:.4f}")
    moved = traffic_lines(summary.traffic, steps)
    lines += ["bytes moved by rank 0, by mesh axis:", *moved] if moved else ["no bytes moved: one rank"]
    return [*lines, f"run folder: {summary.folder}"]
