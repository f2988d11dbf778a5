"""The shm backend of torch.distributed, with 2 and 4 real processes: the cases of cases.py."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("phalanx.comm.shm._core", reason="the compiled core is missing")

from tests.comm.shm.cases import CASES
from tests.comm.shm.rank_set import RankSet, rank_set

HERE = Path(__file__).parent
LIMIT_SECONDS = 60.0


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankSet]:
    with rank_set(HERE / "cases.py", tmp_path_factory.mktemp("ranks"), request.param) as started:
        yield started


@pytest.mark.parametrize("name", CASES)
def test_case(name: str, ranks: RankSet) -> None:
    answers = ranks.ask(name, LIMIT_SECONDS)
    assert answers.complete, answers.complaint


def test_importing_needs_torch_only_and_does_not_load_the_core() -> None:
    code = (
        "import sys, torch.distributed as dist\n"
        "before = set(sys.modules)\n"
        "import phalanx.shm\n"
        "assert 'phalanx.comm.shm._core' not in sys.modules or phalanx.shm.available() is None\n"
        "roots = {name.partition('.')[0] for name in set(sys.modules) - before}\n"
        "assert roots <= set(sys.stdlib_module_names) | {'phalanx', 'torch'}, roots\n"
        "assert dist.is_backend_available('shm')\n"
    )
    source = str(HERE.parents[2] / "src")
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": source}
    )
    assert ended.returncode == 0, ended.stderr


def test_without_the_core_it_says_so() -> None:
    code = (
        "import sys\n"
        "sys.modules['phalanx.comm.shm._core'] = None\n"
        "import torch.distributed as dist, phalanx.shm\n"
        "assert 'compiled core is missing' in phalanx.shm.available()\n"
        "for use in (lambda: dist.init_process_group('shm', store=dist.HashStore(), rank=0, world_size=1),\n"
        "            lambda: phalanx.shm.empty(3)):\n"
        "    try:\n"
        "        use()\n"
        "    except phalanx.shm.Unavailable as error:\n"
        "        assert 'compiled core is missing' in str(error)\n"
        "    else:\n"
        "        sys.exit('no error')\n"
    )
    source = str(HERE.parents[2] / "src")
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env={**os.environ, "PYTHONPATH": source}
    )
    assert ended.returncode == 0, ended.stderr
