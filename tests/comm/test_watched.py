# ruff: noqa: E501 - a verdict is one line
"""`watched:gloo` on three real processes: every way to go wrong gets its verdict, on every survivor, long before the timeout."""

from __future__ import annotations

import json
import multiprocessing
import re
import runpy
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SIZE = 3
TIMEOUT = 20.0  # of the backend, in watched_cases.py: a verdict that waited for it is no verdict

# Who looks while others are still on their way sees fewer ranks, and a group whose description is not there yet.
GROUP = r"group '0'(?: \(default_pg\))?"
THEY = r"ranks? (?:0 and 2|0|2)"
AT = r"watched_cases\.py:\d+ in \w+"
# {case: (the ranks that must raise, what whoever raises says)}
FATAL = {
    "operation": ((0, 1, 2), rf"different operations in call 1 of {GROUP}: (?=.*{THEY} called all_reduce\(sum\) of 4 float32 at {AT}).*rank 1 called broadcast of 4 float32 with root 0 at {AT}"),
    "size": ((0, 1, 2), rf"size mismatch in call 1 of {GROUP}: (?=.*{THEY} called all_reduce\(sum\) of 1,000 float32 at {AT}).*rank 1 called .* of 2,000 float32 at {AT}"),
    "dtype": ((0, 1, 2), rf"dtype mismatch in call 1 of {GROUP}: (?=.*{THEY} called all_reduce\(sum\) of 4 float32 at {AT}).*rank 1 called .* of 4 int32 at {AT}"),
    "reduction": ((0, 1, 2), rf"reduce op mismatch in call 1 of {GROUP}: (?=.*{THEY} called all_reduce\(sum\) .* at {AT}).*rank 1 called all_reduce\(max\) .* at {AT}"),
    # Ranks 0 and 2 may be through with their broadcast before rank 1 comes.
    "root": ((1,), rf"root mismatch in call 1 of {GROUP}: (?=.*{THEY} called broadcast of 4 float32 with root 0 at {AT}).*rank 1 called .* with root 1 at {AT}"),
    "order": ((0, 1), rf"deadlock, group '1' and group '2' are used in different orders: rank 0 waits in all_reduce.* at {AT}, rank 1 waits"),
    "order_elsewhere": ((0, 1), rf"deadlock, group '1' and group '2' are used in different orders: rank 0 waits in all_reduce.* at {AT}, rank 1 waits"),
    "send_without_receive": ((0, 1, 2), r"deadlock, rank 0 sends but rank 1 never receives: rank 0 waits in send of 16,777,216 .*, rank 1 waits in all_reduce"),
    "receive_without_send": ((0, 1, 2), r"deadlock, rank 1 receives but rank 0 never sends: rank 0 waits in all_reduce.*, rank 1 waits in recv of 4 float32 from rank 0"),
    "ring_of_sends": ((0, 1, 2), r"deadlock, every rank sends first and none receives: rank 0 .* to rank 1 .*, rank 1 .* to rank 2 .*, rank 2 .* to rank 0"),
    "ring_of_receives": ((0, 1, 2), r"deadlock, every rank receives first and none sends: rank 0 .* from rank 2 .*, rank 2 .* from rank 1 .*, rank 1 .* from rank 0"),
    "tag": ((0, 1, 2), r"tag mismatch, 5 and 6: rank 0 called send .* with tag 5 at .*; rank 1 called recv .* with tag 6"),
    "crossed": ((0, 1, 2), r"message size mismatch: rank 0 called send of 4 float32 to rank 1 at .*; rank 1 called recv of 2 float32 from rank 0"),
    "uneven": ((0, 2), rf"uneven: rank 1 made 3 calls of all_reduce at {AT} and destroyed its process group; ranks? .* waits? in .*, call 4 there"),
    "branch": ((0,), rf"rank [12] destroyed its process group without all_reduce 1 of {GROUP}: rank 0 waits in .* stands under `if r.rank == 0:`"),
    "new_group": ((0, 1, 2), r"new_group disagreement about group '1': ranks 1 and 2 asked for ranks \[1, 2\] at .*; rank 0 asked for ranks \[0, 1\] at"),
    "destroyed": ((0,), rf"rank 1 destroyed group '1' at {AT}: rank 0 waits in all_reduce"),
    "raised": ((0, 2), rf"rank 1 raised in all_reduce\(max\) of 4 float32 at {AT}: \w+Error: .*; ranks? (?:0|2|0 and 2) waits? for its part"),
    "died": ((0, 1), rf"rank 2 is gone.*: ranks? .* waits? in all_reduce.* at {AT}; its last operation was all_reduce"),
}  # fmt: skip
# {case: (the ranks that say it, what they say)}; the run goes on.
SAID = {
    "missing": ((0, 1), rf"rank 2 has not called all_reduce 1 of {GROUP}: ranks 0 and 1 wait in .*; rank 2 is at {AT[:-3]}"),
    "missing_elsewhere": (
        (0, 1),
        rf"rank 2 has not called all_reduce 1 of {GROUP}: ranks 0 and 1 wait in .*; rank 2 is at {AT[:-3]}",
    ),
    "straggler": ((0,), r"ranks? (?:1|2|1 and 2) (?:is|are) late but makes progress at .*: rank 0 waits in all_reduce"),
    "store": ((0,), rf"rank 1 is blocked in a store or rendezvous at {AT}: ranks? .* waits? in all_reduce"),
    "never_waited": (
        (0, 1, 2),
        r"never waited for its all_reduce\(sum\) of 4 float32 at .*: its result may not have been there",
    ),
    "unreceived": ((1,), rf"rank 1 never received what rank 0 sent: send of 1 float32 to rank 1 at {AT}"),
}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    """{case: what each rank says of it}; one set of processes for all cases."""
    folder = tmp_path_factory.mktemp("watched")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "torch.testing", "pytest"])
    processes = [
        context.Process(target=runpy.run_path, args=(str(HERE / "watched_cases.py"), {"JOB": (rank, str(folder))}, "__rank__"))
        for rank in range(SIZE)
    ]
    until = time.monotonic() + 100
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
    found = {}
    for case in (folder / "cases").iterdir():
        paths = [case / f"told.{rank}" for rank in range(SIZE)]
        found[case.name] = [json.loads(path.read_text()) if path.exists() else {} for path in paths]
    return found


def test_a_run_without_mistakes_is_undisturbed(told: dict[str, list[dict]]) -> None:
    """Collectives, messages with and without tags and from anybody, sub-groups, DDP: all of them through the watch."""
    for rank in told["fine"]:
        assert rank["error"] == ""
        assert not [text for text in rank["said"] if "has not called" not in text and "have not" not in text]  # a slow machine


@pytest.mark.parametrize("case", FATAL)
def test_every_survivor_raises_the_verdict(case: str, told: dict[str, list[dict]]) -> None:
    ranks, pattern = FATAL[case]
    for rank, answer in enumerate(told[case]):
        if rank not in ranks and not answer.get("error"):
            continue
        assert re.match(rf"CommError: rank {rank}: {pattern}", answer["error"]), answer
        assert answer["seconds"] < TIMEOUT / 2
        verdicts = [text.splitlines()[0] for text in answer["said"]]
        assert verdicts.count(f"[rank {rank}] {answer['error'].split(': ', 2)[2]}") == 1, "told once"


@pytest.mark.parametrize("case", SAID)
def test_what_is_not_fatal_is_said_and_the_run_goes_on(case: str, told: dict[str, list[dict]]) -> None:
    ranks, pattern = SAID[case]
    for rank in range(SIZE):
        assert told[case][rank]["error"] == ""
        matching = [text for text in told[case][rank]["said"] if re.search(pattern, text.splitlines()[0])]
        assert len(matching) == 1 or rank not in ranks, told[case][rank]
