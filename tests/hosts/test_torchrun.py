"""torchrun on several hosts: one process's numbers. `make test-hosts`."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from doubles import two_learners
from hosts import Laboratory
from measure_hosts import ROOT, start_everywhere

pytestmark = pytest.mark.hosts
PATHS = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests")])


@pytest.mark.parametrize("hosts", [2, 3])
def test_numbers_are_those_of_one_process(hosts: int, tmp_path: Path) -> None:
    with Laboratory(hosts) as lab:
        programs = start_everywhere(lab, [two_learners.__file__], tmp_path, PYTHONPATH=PATHS)
        codes = [one.wait() for one in programs]
    said = "".join(one.said for one in programs)
    assert not any(codes), said
    assert json.dumps({"agree": hosts}) in said
