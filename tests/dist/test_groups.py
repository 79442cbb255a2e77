"""Which groups a rank makes, which it shares, and that Ulysses ranks of one find each other whatever else they are
in."""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ds_seqpar.base.errors import CommunicationError, ConfigError
from ds_seqpar.core.runtime import devices, interfaces, transport
from tests.dist.ranks import WRONG, attention_error, lacking, make, refusal
from tests.launch import on_each_of
from tests.launch import on_warm_ranks as on_ranks

WORLD = 4
# settings -> which of the groups are one, and which there are none of
CASES = {
    "one rank a sequence": {"size": 1},
    "ring of all": {"size": 4, "ulysses": 1},
    "ring of half": {"size": 2, "ulysses": 1},
    "Ulysses of all": {"size": 4, "ulysses": 4},
    "Ulysses of half": {"size": 2, "ulysses": 2},
    "both": {"size": 4, "ulysses": 2},
    "mesh": {"size": 4, "ulysses": 1, "schedule": "attention2d", "rows": 4, "cols": 1},
}


def of_case(config):
    """({name of a group: number of the group object}, how many were made, error of attention)."""
    with make(**config) as sp:
        groups = sp.groups
        named = {"world": dist.group.WORLD, "sp": groups.sp, "inner": groups.inner, "ulysses": groups.ulysses}
        named |= {
            "control": groups.control,
            **{f"Ulysses ranks {i}": c.group for i, c in enumerate(groups.collectives.values())},
        }
        numbers = {id(group): number for number, group in reversed(list(enumerate(named.values())))}
        same = {name: None if group is None else numbers[id(group)] for name, group in named.items()}
        names = sorted(group.group_name for group in groups.made)
        assert sp.device.type == "cpu"
        return same, names, attention_error(sp)


def all_cases():
    return {name: of_case(config) for name, config in CASES.items()}


@pytest.fixture(scope="module")
def found():
    return on_ranks(WORLD, all_cases, keep=None)


def test_equal_groups_are_one_and_a_rank_alone_has_none(found):
    for rank in found:
        same = {name: case[0] for name, case in rank.items()}
        nobody = {"sp": None, "inner": None, "ulysses": None, "control": None}
        assert same["one rank a sequence"] == {"world": 0, **nobody}
        # what attention sends does not meet what others send to all ranks
        assert same["ring of all"] == {"world": 0, "sp": 0, "inner": 2, "ulysses": None, "control": 0}
        assert same["ring of half"] == {"world": 0, "sp": 1, "inner": 1, "ulysses": None, "control": 1}
        assert same["Ulysses of all"] == {"world": 0, "sp": 0, "inner": None, "ulysses": 3, "control": 0}
        assert same["Ulysses of half"] == {"world": 0, "sp": 1, "inner": None, "ulysses": 1, "control": 1}
        assert same["both"] == {"world": 0, "sp": 0, "inner": 2, "ulysses": 3, "control": 0}
        assert same["mesh"]["Ulysses ranks 0"] == same["mesh"]["inner"] == 2
        assert max(error for _, _, error in rank.values()) < 1e-10
        made = {name: len(case[1]) for name, case in rank.items()}
        assert made == {name: {"one rank a sequence": 0, "both": 2}.get(name, 1) for name in CASES}


def test_no_name_comes_twice(found):
    for rank in found:
        names = [name for _, names, _ in rank.values() for name in names]
        assert len(names) == len(set(names))


@on_each_of(WORLD, keep=None)
def test_ranks_that_are_in_other_groups_too_find_each_other():
    """torch numbers a rank's groups: here ranks have made different numbers of them, and one freed them again."""
    mine = [dist.new_group([0, 1]), dist.new_group([0])]
    if dist.get_rank() == 0:
        dist.destroy_process_group(mine[1])
    for name in ("ring of half", "both", "ring of half"):
        assert attention_error(make(**CASES[name])) < 1e-10


@on_each_of(2, keep=None)
def test_the_default_device_is_not_that_of_numbers_for_the_host():
    """Where the script's tensors go elsewhere, those of a SequenceParallel's own do not."""
    torch.set_default_device("meta")
    sp = make(size=2)
    assert sp.mean_loss(torch.ones((), device="cpu")) == 1.0
    assert sp.position_ids(8).device.type == "cpu"
    torch.set_default_device("cpu")
    assert attention_error(sp) < 1e-10


@on_each_of(2, keep=None)
def test_a_rank_without_a_device_is_told_of_on_all():
    def nothing(group):
        raise ConfigError("every rank of a machine needs a device of its own; got LOCAL_RANK 1 and 1 devices")

    wrong = dist.get_rank() == WRONG
    if wrong:
        devices.bind_device = nothing
    kind = "ConfigError" if wrong else "DisagreementError"
    assert lacking(refusal(make, size=2), kind, "LOCAL_RANK 1") == []


def other_helper(size, rank, ranks, backend, store, name):
    raise AssertionError("called with arguments that it does not have")


@pytest.mark.parametrize("helper", [None, other_helper])
@on_each_of(2, keep=None)
def test_a_torch_with_another_private_function_is_refused_by_its_version(helper):
    """It is gone, or is another."""
    if helper is None:
        del distributed_c10d._new_process_group_helper
    else:
        distributed_c10d._new_process_group_helper = helper
    assert lacking(refusal(make, size=2), "ConfigError", torch.__version__.partition("+")[0]) == []


@pytest.mark.parametrize(
    ("count", "chosen", "local_rank", "visible", "expected"),
    [
        (4, 0, 3, None, 3),
        (4, 0, 3, "0,1,2,3", 3),
        (4, 2, 1, None, 2),  # what the script has set
        (1, 0, 3, "3", 0),  # the only one that its launcher lets it see
        (1, 0, 3, None, 0),
        (1, 0, 0, "0,1,2,3", 0),
        (1, 0, 1, "0,1,2,3", None),  # `deepspeed --num_gpus 4` where there is one
        (2, 0, 2, "0,1,2,3", None),
        (4, 2, None, None, 2),
        (1, 0, None, "3", 0),
        (4, 0, None, None, None),  # srun without a variable: all ranks would take the first
    ],
)
def test_a_rank_takes_its_own_device_or_is_refused(count, chosen, local_rank, visible, expected, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "4")
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    if expected is None:
        with pytest.raises(ConfigError, match=f"{count} devices"):
            devices._index(count, chosen, local_rank)
    else:
        assert devices._index(count, chosen, local_rank) == expected


def test_members_that_are_connected_agree_on_it():
    """Else one would wait for a byte that the other does not send."""
    for size in range(2, 3 * transport.PAIRS):
        peers = [transport.connected_to(rank, size) for rank in range(size)]
        assert all(rank in peers[peer] for rank in range(size) for peer in peers[rank])
        assert all((rank + size // 2) % size in peers[rank] != [rank] for rank in range(size))
        assert len(peers[0]) == (size - 1 if size <= transport.PAIRS else 3 + size % 2)


# launcher -> what it sets, this rank's number on its machine, and how many ranks that has
LAUNCHERS = {
    "torchrun": ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8"}, 3, 8),
    "deepspeed": ({"LOCAL_RANK": "3", "LOCAL_SIZE": "8"}, 3, 8),
    "srun": ({"SLURM_LOCALID": "3", "SLURM_STEP_TASKS_PER_NODE": "8(x2)"}, 3, 8),
    "srun, nodes of several sizes": ({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "8,4"}, 0, 8),
    "Open MPI in a script of slurm's": (
        {"SLURM_LOCALID": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "OMPI_COMM_WORLD_LOCAL_SIZE": "8"}, 3, 8,
    ),
    "Intel MPI": ({"MPI_LOCALRANKID": "3", "MPI_LOCALNRANKS": "8"}, 3, 8),
    "torchrun under srun": ({"LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "8", "SLURM_LOCALID": "0"}, 3, 8),
    "none": ({"LOCAL_WORLD_SIZE": ""}, None, 16),
}  # fmt: skip


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_what_a_launcher_says_of_a_machine(launcher, monkeypatch):
    given, number, count = LAUNCHERS[launcher]
    for name in (*devices.LOCAL_RANKS, *devices.LOCAL_SIZES):
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert devices.local_rank() == number
    assert devices.ranks_per_node(16) == count


@on_each_of(2, keep=None)
def test_a_script_that_has_set_the_first_device_is_not_refused():
    """Its first rank looks as if it had set none; another rank there would share that one."""
    if dist.get_rank() == 0:
        assert devices._index(4, 0, None) == 0
    else:
        assert lacking(refusal(devices._index, 4, 0, None), "ConfigError", "set LOCAL_RANK", "4 devices") == []


# what is set -> the interface that gloo takes, of a job on several hosts
INTERFACES = {
    "nothing": ({}, "lo"),  # by which the first rank's host is reached here
    "NCCL's": ({"NCCL_SOCKET_IFNAME": "=lo", "MASTER_ADDR": "no-such-host.invalid"}, "lo"),
    "several of NCCL's": ({"NCCL_SOCKET_IFNAME": "^docker0"}, "lo"),
    "no way to the first rank": ({"MASTER_ADDR": "no-such-host.invalid"}, None),
    "gloo's own, on one rank": ({"GLOO_SOCKET_IFNAME": "lo"}, "lo"),
}


def of_interfaces(name, hosts):
    """(the interface in which gloo's group is made, the one after it, what is said where none joins the hosts)."""
    os.environ.update({"MASTER_ADDR": "127.0.0.1", **INTERFACES[name][0]})
    if dist.get_rank():
        os.environ.pop(interfaces.GLOO, None)
    interfaces.host_name = lambda: f"host {dist.get_rank() % hosts}"
    with interfaces.gloo_meets_hosts():
        inside = os.environ.get(interfaces.GLOO)
        dist.all_reduce(torch.ones(1), group=dist.new_group(backend="gloo"))
    after = os.environ.pop(interfaces.GLOO, None)
    interfaces._found[dist.group.WORLD] = "none0"
    with pytest.raises(CommunicationError) as raised, interfaces.gloo_meets_hosts():
        dist.new_group(backend="gloo")
    return inside, after, str(raised.value)


@pytest.mark.parametrize(("name", "hosts"), [("nothing", 1), *((name, 2) for name in INTERFACES)])
def test_gloo_takes_an_interface_that_joins_the_hosts(name, hosts):
    """It takes the address of the host's name by itself, which many hosts resolve to 127.0.1.1."""
    given, expected = INTERFACES[name]
    for rank, (inside, after, told) in enumerate(on_ranks(3, of_interfaces, name, hosts, keep=None)):
        assert inside == (expected if hosts > 1 else None)
        assert after == (None if rank else given.get(interfaces.GLOO))
        assert lacking(("CommunicationError", told), "CommunicationError", "none0", interfaces.GLOO) == []


@on_each_of(1)
def test_gloo_has_nothing_on_a_device():
    world = dist.group.WORLD
    assert devices.backends(world)["cpu"] == "gloo"
    assert devices.communicator_device(world) is devices.bind_device(world) is None
