"""sp.device_mesh is a mesh of torch's, whose coordinates are this rank's, and over which FSDP2 shards."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard

from tests.dist.ranks import attention_error, lacking, make, refusal
from tests.launch import on_each_of

WORLD = 4
CASES = [
    {"size": 1},
    {"size": 2, "ulysses": 1},
    {"size": 2, "ulysses": 2},
    {"size": 4, "ulysses": 2},
    {"size": 4, "ulysses": 1, "schedule": "attention2d", "rows": 2, "cols": 2},
]


def dim_groups(sp):
    return [dist.get_process_group_ranks(group) for group in sp.device_mesh.get_all_groups()]


@pytest.mark.parametrize("config", CASES, ids=str)
@on_each_of(WORLD)
def test_coordinates_are_those_of_the_rank(config):
    known = len(distributed_c10d._world.pg_map)
    with make(**config) as sp:
        ulysses_rank = sp.topology.index(dist.get_rank(), "ulysses")
        mesh = sp.device_mesh
        assert mesh is sp.device_mesh
        assert mesh.mesh_dim_names == ("dp", "cp", "ulysses")
        assert tuple(mesh.shape) == (sp.data_size, sp.size // sp.config.ulysses, sp.config.ulysses)
        assert tuple(mesh.get_coordinate()) == (sp.data_rank, sp.groups.cp_rank, ulysses_rank)
        assert [mesh.get_local_rank(name) for name in mesh.mesh_dim_names] == list(mesh.get_coordinate())
        for dim, ranks in enumerate(dim_groups(sp)):
            assert (
                ranks
                == mesh.mesh.movedim(dim, -1)[*(x for i, x in enumerate(mesh.get_coordinate()) if i != dim)].tolist()
            )
        assert attention_error(sp) < 1e-10
    assert len(distributed_c10d._world.pg_map) == known


def averaged(mesh):
    """(gradient of an FSDP2 model over the mesh, what each rank's gradient is without it)."""
    torch.manual_seed(0)
    model = nn.Linear(3, 4)
    x = torch.full((1, 3), dist.get_rank() + 1.0)
    fully_shard(model, mesh=mesh)
    model(x).sum().backward()
    return model.weight.grad.full_tensor(), x.expand(4, 3)


@on_each_of(WORLD)
def test_fsdp_shards_over_the_dims_that_it_is_given():
    with make(size=2, ulysses=2) as sp:
        grad, own = averaged(sp.device_mesh["dp"])
        partner = own + 2 - 4 * sp.data_rank  # the rank of the same number in the other group
        assert torch.equal(grad, (own + partner) / 2)
        for all_ranks in (sp.device_mesh["dp", "ulysses"], sp.device_mesh._flatten("ranks")):
            grad, _ = averaged(all_ranks)
            assert torch.equal(grad, torch.full((4, 3), 2.5))


@on_each_of(WORLD)
def test_another_order_of_ranks_is_refused():
    with make(size=2, ulysses=2, rank_order=["data", "ulysses", "ring"]) as sp:
        said = refusal(lambda: sp.device_mesh)
        assert lacking(said, "ConfigError", "rank_order") == []
