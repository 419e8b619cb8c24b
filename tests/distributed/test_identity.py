"""Deaths of real processes, as their machine tells them."""

import os
import subprocess
import sys

import pytest

from crossshard.distributed.identity import is_gone, machine, own_identity


def test_a_process_is_gone_once_it_is_killed_even_if_nobody_has_asked_for_its_code():
    module = "crossshard.distributed.identity"
    tell = f"import {module} as n; print(n.own_identity(), flush=True)"
    words = [sys.executable, "-c", f"{tell}; import time; time.sleep(600)"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        identity = process.stdout.readline().strip()
        assert identity.startswith(f"{process.pid} ")
        assert not is_gone(identity)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert is_gone(identity)
    assert is_gone(identity)


def test_another_process_with_its_number_is_not_it():
    pid, began = own_identity().split()
    assert not is_gone(f"{pid} {began}")
    assert is_gone(f"{pid} {int(began) + 1}")


@pytest.mark.parametrize("text", ["", "1 0", "0 0", "-1 0", "x y", "1" * 50, "999999999999 1"])
def test_what_is_no_identity_is_not_gone(text: str):
    assert not is_gone(text)


def test_the_name_of_the_machine_is_the_same_in_all_its_processes():
    tell = "from crossshard.distributed import identity; print(identity.machine())"
    ran = subprocess.run([sys.executable, "-c", tell], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == machine()
