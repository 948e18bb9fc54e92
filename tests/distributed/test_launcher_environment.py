"""Rank and missing variables from launcher environments, with the variables that each launcher really sets."""

import pytest

from megatron.distributed.launcher_environment import (
    PORTS,
    RankInfo,
    describe_job,
    get_first_hostname,
    read_launcher_environment,
)
from megatron.utils.errors import UserError

TORCHRUN = RankInfo(3, 8, 1).to_environment("127.0.0.1", 2345)
SRUN = {  # task 5 of `srun` in a job of three nodes with 4, 4 and 1 tasks, SLURM 22.05
    **{"SLURM_JOB_ID": "17", "SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "9"},
    **{"SLURM_NTASKS": "9", "SLURM_LOCALID": "1", "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "4(x2),1"},
    **{"SLURM_STEP_NODELIST": "gpu[08-09,12]", "SLURM_JOB_NODELIST": "gpu[07-12]"},
}
BATCH = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
MPIRUN = {
    **{"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3"},
    **{"OMPI_COMM_WORLD_LOCAL_SIZE": "4", "PMIX_NAMESPACE": "1234567"},
}


def test_no_launcher_environment() -> None:
    assert read_launcher_environment({}) is None
    assert (
        read_launcher_environment({"RANK": "0", "WORLD_SIZE": "1"}) is None
    )  # left over from another program; a single process needs no rank
    assert read_launcher_environment(BATCH) is None
    assert RankInfo() == RankInfo(rank=0, world_size=1, local_rank=0)


@pytest.mark.parametrize("rank_info", [RankInfo(3, 8, 1), RankInfo(3, 8, 1, 2)])
def test_environment_variables_are_read_back(rank_info: RankInfo) -> None:
    started = read_launcher_environment(rank_info.to_environment("10.0.0.1", 2345))
    assert started is not None
    assert (started.rank_info, started.address, started.port) == (rank_info, "10.0.0.1", 2345)
    assert started.to_environment() == rank_info.to_environment("10.0.0.1", 2345)
    assert RankInfo.from_environment(started.to_environment()) == rank_info


def test_ranks_of_one_machine_use_its_loopback_interface(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    assert RankInfo().to_environment("127.0.0.1", 1)["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in RankInfo().to_environment("10.0.0.1", 1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    assert "GLOO_SOCKET_IFNAME" not in RankInfo().to_environment("127.0.0.1", 1)


def test_a_task_of_srun_knows_its_rank() -> None:
    started = read_launcher_environment(SRUN)
    assert started is not None
    assert started.rank_info == RankInfo(5, 9, 1, 4)
    assert started.address == "gpu08"
    assert started.port is None
    assert started.job_port in PORTS
    assert started == read_launcher_environment({**SRUN, "SLURM_PROCID": "5", "SLURM_JOB_NODELIST": "other"})
    last = read_launcher_environment({**SRUN, "SLURM_PROCID": "8", "SLURM_LOCALID": "0", "SLURM_NODEID": "2"})
    assert last is not None
    assert last.rank_info == RankInfo(8, 9, 0, 1)
    assert (last.address, last.job_port) == (started.address, started.job_port)
    another = read_launcher_environment({**SRUN, "SLURM_STEP_ID": "1"})
    assert another is not None
    assert another.job_port != started.job_port  # two steps of a job may run at once


def test_the_user_sets_the_rendezvous() -> None:
    started = read_launcher_environment({**SRUN, "MASTER_ADDR": "10.0.0.7", "MASTER_PORT": "4444"})
    assert started is not None
    assert (started.address, started.port) == ("10.0.0.7", 4444)
    assert started.to_environment(5555)["MASTER_PORT"] == "4444"
    started = read_launcher_environment(SRUN)
    assert started is not None
    assert started.to_environment(5555)["MASTER_PORT"] == "5555"
    assert started.to_environment()["MASTER_PORT"] == str(started.job_port)


def test_a_process_of_mpirun_knows_its_rank() -> None:
    started = read_launcher_environment(MPIRUN)
    assert started is not None
    assert (started.rank_info, started.address) == (RankInfo(3, 4, 3), "127.0.0.1")
    over_two = {**MPIRUN, "OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    with pytest.raises(UserError, match=r"but MASTER_ADDR .* is not; mpirun -x MASTER_ADDR=NAME"):
        read_launcher_environment(over_two)
    started = read_launcher_environment({**over_two, "MASTER_ADDR": "10.0.0.7"})
    assert started is not None
    assert (started.rank_info, started.address) == (RankInfo(3, 4, 1, 2), "10.0.0.7")


def test_a_single_launched_process_is_not_a_rank() -> None:
    alone = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    assert read_launcher_environment({**SRUN, **alone, "SLURM_STEP_TASKS_PER_NODE": "1"}) is None


def test_the_innermost_launcher_counts() -> None:
    """The innermost launcher wins: mpirun reaches machines through srun, and srun starts one torchrun on each of two
    machines.
    """
    inside = {**SRUN, "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "1(x2)"}
    inside["SLURM_LOCALID"] = "0"
    for inner, place in ((TORCHRUN, RankInfo(3, 8, 1)), (MPIRUN, RankInfo(3, 4, 3))):
        started = read_launcher_environment({**inside, **inner})
        assert started is not None
        assert started.rank_info == place
    numbered_anew = {**SRUN, **RankInfo(3, 9, 0).to_environment("a", 1), "TORCHELASTIC_RUN_ID": "none"}
    started = read_launcher_environment(numbered_anew)  # one torchrun per task numbers machines in order of arrival
    assert started is not None
    assert started.rank_info.rank == 3


@pytest.mark.parametrize(
    ("variables", "changes", "message"),
    [
        (TORCHRUN, {"MASTER_PORT": None}, r"RANK is set, but MASTER_PORT is not; start with ./deepy.py train, srun"),
        (TORCHRUN, {"MASTER_ADDR": None}, r"RANK is set, but MASTER_ADDR \(the first machine\) is not"),
        (TORCHRUN, {"LOCAL_RANK": None}, r"RANK is set, but LOCAL_RANK is not"),
        (TORCHRUN, {"RANK": "one"}, r"RANK is 'one'; it must be an integer"),
        (TORCHRUN, {"MASTER_PORT": "x"}, r"MASTER_PORT is 'x'; it must be an integer"),
        (TORCHRUN, {"RANK": "8"}, r"RANK is 8, but WORLD_SIZE is 8"),
        (TORCHRUN, {"RANK": "-1"}, r"RANK is -1, but WORLD_SIZE is 8"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "1"}, r"LOCAL_RANK is 1, but LOCAL_WORLD_SIZE is 1"),
        (TORCHRUN, {"LOCAL_WORLD_SIZE": "9"}, r"LOCAL_WORLD_SIZE is 9, but WORLD_SIZE is 8"),
        (SRUN, {"SLURM_LOCALID": None}, r"SLURM_STEP_ID is set, but SLURM_LOCALID is not"),
        (SRUN, {"SLURM_PROCID": "9"}, r"SLURM_PROCID is 9, but SLURM_STEP_NUM_TASKS is 9"),
        (SRUN, {"SLURM_NODEID": "3"}, r"SLURM_NODEID is 3, but SLURM_STEP_TASKS_PER_NODE is 4\(x2\),1"),
        (SRUN, {"WORLD_SIZE": "8"}, r"WORLD_SIZE is 8, but srun started 9 processes \(SLURM_STEP_NUM_TASKS\); unset"),
        (
            SRUN,
            RankInfo(0, 9, 0).to_environment("a", 1),  # exported by a batch script from its own SLURM_PROCID
            r"RANK is 0, but SLURM_PROCID is 5; unset RANK, because srun sets the rank of this process",
        ),
    ],
)
def test_incomplete_and_contradictory_variables_are_rejected(
    variables: dict[str, str], changes: dict[str, str | None], message: str
) -> None:
    environment = {name: value for name, value in {**variables, **changes}.items() if value is not None}
    with pytest.raises(UserError, match=rf"^environment: {message}"):
        read_launcher_environment(environment)
    assert read_launcher_environment({"WORLD_SIZE": "1", **({"RANK": "0"} if variables is TORCHRUN else {})}) is None


@pytest.mark.parametrize(
    ("hosts", "first"),
    [
        ("n1", "n1"),
        ("n1,n2", "n1"),
        ("n[1-4]", "n1"),
        ("gpu[08-11,20],login", "gpu08"),
        ("rack[2,4]-node[007-009]", "rack2-node007"),
        ("a-b.example.org,c", "a-b.example.org"),
        ("localhost,n2", "localhost"),
    ],
)
def test_first_host_of_slurms_list(hosts: str, first: str) -> None:
    assert get_first_hostname(hosts) == first


def test_a_job_and_its_restarts_are_one_line() -> None:
    assert describe_job({}) is None
    assert describe_job(BATCH) == "SLURM job 17"
    assert describe_job({"TORCHELASTIC_RUN_ID": "none"}) == "started by torchrun"
    assert describe_job({"TORCHELASTIC_RUN_ID": "7"}) == "torchrun 7"
    assert describe_job({**SRUN, "SLURM_RESTART_COUNT": "2"}) == "SLURM job 17, restart 2 (SLURM_RESTART_COUNT)"
