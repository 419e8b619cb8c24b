"""The job that the environment describes, and where its coordinator listens."""

import subprocess
import sys

import jax
import pytest

import crossshard
from crossshard.distributed import PROCESS_LOST
from crossshard.distributed.job import (
    ALL_INTERFACES,
    Job,
    bind_address,
    find_job,
    listen,
    split_address,
)
from crossshard.distributed.watch import PROGRESS
from crossshard.errors import ArgumentError, ArgumentTypeError, DistributedError
from tests.distributed.jobs import PATIENCE
from tests.quick import deep

# As prterun of Open MPI 5.0.11 sets them, on one host and on two.
OPEN_MPI_5 = {
    "PMIX_NAMESPACE": "prterun-node-a-7340@1",
    "PMIX_RANK": "1",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}
ON_TWO_HOSTS = OPEN_MPI_5 | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
LAUNCHED = {
    "JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234",
    "JAX_NUM_PROCESSES": "8",
    "JAX_PROCESS_ID": "3",
}
SLURM = {
    "SLURM_JOB_ID": "4097",
    "SLURM_STEP_NODELIST": "node[001-002]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "2",
}
OPEN_MPI_4 = {
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch):
    """Sets the variables of a launcher, and none of another."""

    def set_to(variables: dict[str, str]) -> None:
        for name in (*OPEN_MPI_5, *LAUNCHED, *SLURM, *OPEN_MPI_4, "JAX_LOCAL_DEVICE_IDS"):
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    set_to({})
    return set_to


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Job()),
        (LAUNCHED, Job(8, 3, "10.0.0.1:1234", None, "environment variables")),
        (
            LAUNCHED | {"JAX_LOCAL_DEVICE_IDS": "2,3"},
            Job(8, 3, "10.0.0.1:1234", (2, 3), "environment variables"),
        ),
        # One host: nobody else needs to reach it.
        (OPEN_MPI_5, Job(4, 1, "127.0.0.1:64684", (1,), "Open MPI 5")),
        (ON_TWO_HOSTS, Job(4, 1, "node-a:64684", (1,), "Open MPI 5")),
        (
            ON_TWO_HOSTS | {"JAX_COORDINATOR_PORT": "900"},
            Job(4, 1, "node-a:900", (1,), "Open MPI 5"),
        ),
        (SLURM, Job(4, 2, "node001:61441", (0,), "slurm")),
        (SLURM | {"SLURM_STEP_NUM_NODES": "1"}, Job(4, 2, "127.0.0.1:61441", (0,), "slurm")),
        (SLURM | {"JAX_LOCAL_DEVICE_IDS": "3"}, Job(4, 2, "node001:61441", (3,), "slurm")),
        (OPEN_MPI_4, Job(4, 3, "10.96.0.1:62624", (1,), "ompi")),
    ],
)
def test_a_job_is_found_in_the_environment(environment, variables, expected):
    environment(variables)
    assert find_job(10) == expected


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_NUM_PROCESSES": "4"}, "JAX_COORDINATOR_ADDRESS and JAX_PROCESS_ID is not"),
        (LAUNCHED | {"JAX_PROCESS_ID": "-1"}, "JAX_PROCESS_ID must be a number from 0; got '-1'"),
        (LAUNCHED | {"JAX_LOCAL_DEVICE_IDS": "a"}, "numbers with commas"),
        # torchrun sets these: every process would train alone.
        ({"WORLD_SIZE": "4", "RANK": "1"}, "WORLD_SIZE=4 says that there are several processes"),
    ],
)
def test_half_a_description_is_refused(environment, variables, message):
    environment(variables)
    with pytest.raises(ArgumentError, match=message):
        crossshard.distributed.initialize()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("10.0.0.1:1", 2), ArgumentError, "or none of them"),
        ((None, 2), ArgumentError, "got None, 2 and None"),
        (("10.0.0.1:1", 2, 2), ArgumentError, "from 0 to num_processes - 1; got 2 of 2"),
        (("10.0.0.1", 2, 0), ArgumentError, "must be host:port"),
        (("10.0.0.1:99999", 2, 0), ArgumentError, "must be host:port"),
        (
            (b"10.0.0.1:1", 2, 0),
            ArgumentTypeError,
            "must be a string; got b'10",
        ),
        (("10.0.0.1:1", "2", 0), ArgumentTypeError, "num_processes must be an int; got '2'"),
        (("10.0.0.1:1", 2, True), ArgumentTypeError, "process_id must be an int; got True"),
    ],
)
def test_wrong_arguments_are_refused(environment, arguments, error, message):
    with pytest.raises(error, match=message):
        crossshard.distributed.initialize(*arguments)


@pytest.mark.parametrize("name", ["timeout", "stall_timeout"])
def test_a_time_is_at_least_a_second(environment, name):
    with pytest.raises(ArgumentError, match=f"{name} must be at least one second; got 0"):
        crossshard.distributed.initialize(**{name: 0})
    with pytest.raises(ArgumentTypeError, match=f"{name} must be a number; got '2'"):
        crossshard.distributed.initialize(**{name: "2"})


def test_a_step_has_a_plain_name():
    with (
        pytest.raises(ArgumentError, match="small letters and underscores"),
        crossshard.distributed.entering("step 7"),
    ):
        raise AssertionError


def test_a_step_that_fails_is_not_entered():
    before = PROGRESS.now.calls
    with crossshard.distributed.entering("step"):
        assert PROGRESS.now.calls == before + 1
    with pytest.raises(ValueError, match="wrong"), crossshard.distributed.entering("step"):
        raise ValueError("wrong")
    assert PROGRESS.now.calls == before + 1


def test_it_is_refused_once_jax_runs(environment):
    assert len(jax.devices()) == 8
    with pytest.raises(DistributedError, match="before the first JAX operation"):
        crossshard.distributed.initialize("127.0.0.1:1234", 2, 0)


ALONE_OF_TWO = """
import sys
import crossshard

try:
    crossshard.distributed.initialize(sys.argv[1], 2, int(sys.argv[2]), timeout=2)
except crossshard.errors.DistributedError as error:
    print(error)
    sys.exit(3)
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("own", "why"),
    [
        deep((0, "process 0 is there, and another one has not called initialize with this addre")),
        (1, "nothing listens there. Process 0 has not called initialize, or has another address"),
    ],
)
def test_who_does_not_meet_the_others_says_so_and_goes_on(own: int, why: str):
    address = f"127.0.0.1:{listen('127.0.0.1', 0)}"
    words = [sys.executable, "-c", ALONE_OF_TWO, address, str(own)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=120)
    # JAX itself would abort the process, with a stack of C++.
    assert (ran.returncode, ran.stderr) == (3, "")
    met = f"Process {own} of 2 did not meet the others at {address} in 2 seconds: {why}"
    assert ran.stdout.startswith(met)


CONNECTED = """
import os, sys, time
import jax
import crossshard

address, own = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, own, coordinator_bind_address=address)
for given in ({"bind": "127.0.0.1"}, {"local_device_ids": (0,)}):
    try:
        crossshard.distributed.initialize(**given)
    except crossshard.errors.DistributedError as error:
        print(error)
print(crossshard.distributed.initialize(stall_timeout=20))
try:
    crossshard.distributed.initialize()
except crossshard.errors.DistributedError as error:
    print(error, flush=True)
with crossshard.distributed.entering("step"):
    jax.device_count()
    if own:
        os._exit(7)
    time.sleep(60)
"""


@pytest.mark.multiprocess
def test_a_job_to_which_jax_is_connected_already_is_watched():
    address = f"127.0.0.1:{listen('127.0.0.1', 0)}"
    start = lambda own: subprocess.Popen(
        [sys.executable, "-c", CONNECTED, address, str(own)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    running = [start(own) for own in range(2)]
    said = [each.communicate(timeout=PATIENCE) for each in running]
    assert [each.returncode for each in running] == [PROCESS_LOST, 7]
    for own, (printed, _) in enumerate(said):
        job = Job(2, own, address, None, "jax.distributed")
        again, alike, found, second = printed.splitlines()
        assert again == alike
        assert again.startswith("JAX is connected already, by Ray's JaxTrainer or jax.distributed")
        assert found == str(job)
        assert second == "initialize is called once in a process; this is the second time."
    assert "crossshard: process 1 died. Process 0 leaves." in said[0][1]


def test_the_coordinator_listens_where_it_is_named():
    assert bind_address("127.0.0.1:80", None) == "127.0.0.1:80"
    assert bind_address("localhost:80", None) in ("127.0.0.1:80", "[::1]:80")
    # The others call a name of a proxy, say, and process 0 listens behind it.
    assert bind_address("192.0.2.1:80", "127.0.0.1") == "127.0.0.1:80"
    assert bind_address("192.0.2.1:80", ALL_INTERFACES) == "[::]:80"


@pytest.mark.parametrize(
    ("address", "bind", "message"),
    [
        # An address for documentation, which nobody has.
        ("192.0.2.1:80", None, "cannot listen at '192.0.2.1', which must be an interface"),
        ("no.such.host.invalid:80", None, "cannot listen at 'no.such.host.invalid'"),
        ("127.0.0.1:80", "0.0.0.0", "listens on every interface"),
        ("127.0.0.1:80", "::", "listens on every interface"),
    ],
)
def test_it_listens_nowhere_else(address, bind, message):
    with pytest.raises(ArgumentError, match=message):
        bind_address(address, bind)


def test_an_address_has_a_host_and_a_port():
    assert split_address("node-1.cluster:8476") == ("node-1.cluster", 8476)
    assert split_address("[::1]:8476") == ("::1", 8476)
    for wrong in ("node", "node:", ":80", "node:0", "::1:80", "a b:80", "node:80:80"):
        with pytest.raises(ArgumentError, match="host:port"):
            split_address(wrong)
