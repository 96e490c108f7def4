import os
import subprocess
import sys

import pytest

from service import cores
from twinpool.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"), [("0", {0}), ("0-3,8", {0, 1, 2, 3, 8}), (" 1 , 2-2", {1, 2}), ("5,5", {5})]
)
def test_a_list_of_cores_is_read_as_taskset_reads_it(text, expected):
    assert cores.parse(text) == expected


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1-", "1,,2", "0-9999999999", "٣", "1.5"])
def test_what_is_no_list_of_cores_is_refused(text):
    with pytest.raises(ConfigError, match='no list of cores such as "0-3,8"'):
        cores.parse(text)


def test_cores_that_this_process_may_not_use_are_named():
    with pytest.raises(ConfigError, match=r"asks for \[8191\]"):
        cores.pin("8191")


def test_a_pinned_process_stays_on_its_core():
    core = min(os.sched_getaffinity(0))
    program = f"import os; from service import cores; cores.pin('{core}'); print(os.sched_getaffinity(0))"
    child = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert child.stdout == f"{{{core}}}\n"


def test_nothing_is_changed_by_an_empty_list():
    before = os.sched_getaffinity(0)
    cores.pin("")
    assert os.sched_getaffinity(0) == before
