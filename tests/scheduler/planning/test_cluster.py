import json

import pytest
import yaml

from rlinf_plugins.core.errors import ClusterError, ConfigError
from rlinf_plugins.scheduler.cluster import Cluster, Node, from_ray_nodes


def test_uniform_numbers_devices_by_node():
    cluster = Cluster.uniform(16, per_node=8)
    assert cluster.size == 16
    assert [list(devices) for _, _, devices in cluster.machines()] == [list(range(8)), list(range(8, 16))]
    assert [name for name, _, _ in cluster.machines()] == ["node/0", "node/1"]


def test_kinds_keep_their_global_numbers():
    cluster = Cluster(nodes=(Node(name="a", kind="x", devices=2), Node(name="b", kind="y", devices=1, count=2)))
    assert cluster.numbers("y") == (2, 3)
    assert cluster.kinds == ("x", "y")


@pytest.mark.parametrize("devices", [0, -1])
def test_zero_devices_are_refused(devices):
    with pytest.raises(ClusterError, match="nothing can be placed"):
        Cluster.uniform(devices)


def test_no_devices_at_all():
    with pytest.raises(ClusterError, match="zero devices"):
        Cluster(nodes=(Node(name="a", devices=0),))


def test_half_filled_nodes_are_refused():
    with pytest.raises(ClusterError, match="12 devices do not fill nodes of 8"):
        Cluster.uniform(12, per_node=8)


def test_nodes_of_one_kind_must_be_alike():
    with pytest.raises(ClusterError, match="differ"):
        Cluster(nodes=(Node(name="a", devices=4), Node(name="b", devices=8)))


def test_file_round_trip(tmp_path):
    cluster = Cluster(
        nodes=(Node(name="a", devices=8, memory_gib=80.0, count=2), Node(name="c", kind="cpu", devices=4))
    )
    path = tmp_path / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster.to_mapping()))
    assert Cluster.read(path) == cluster
    path.write_text(json.dumps(cluster.to_mapping()))
    assert Cluster.read(path) == cluster


def test_bad_files_are_named(tmp_path):
    with pytest.raises(ClusterError, match=r"absent\.yaml"):
        Cluster.read(tmp_path / "absent.yaml")
    path = tmp_path / "bad.yaml"
    path.write_text("nodes: [{name: a, gpus: 8}]")
    with pytest.raises(ConfigError, match="gpus"):
        Cluster.read(path)


def test_wrong_node_size_is_found():
    with pytest.raises(ClusterError, match="8 gpu devices a node, the machines have 4"):
        Cluster.uniform(8, per_node=8).check_actual(Cluster.uniform(8, per_node=4))
    with pytest.raises(ClusterError, match="16 gpu devices, only 8"):
        Cluster.uniform(16, per_node=8).check_actual(Cluster.uniform(8, per_node=8))
    with pytest.raises(ClusterError, match="GiB"):
        Cluster.uniform(8, memory_gib=80).check_actual(Cluster.uniform(8, memory_gib=40))
    with pytest.raises(ClusterError, match="'tpu'"):
        Cluster.uniform(8, kind="tpu").check_actual(Cluster.uniform(8))
    Cluster.uniform(8, memory_gib=40).check_actual(Cluster.uniform(16, memory_gib=80))


def test_ray_records_are_read_without_ray():
    records = [
        {"NodeID": "b", "Alive": True, "NodeManagerAddress": "10.0.0.2", "Resources": {"GPU": 4.0, "CPU": 16.0}},
        {"NodeID": "a", "Alive": True, "NodeManagerAddress": "10.0.0.1", "Resources": {"GPU": 4.0, "CPU": 16.0}},
        {"NodeID": "c", "Alive": False, "NodeManagerAddress": "10.0.0.3", "Resources": {"GPU": 4.0}},
        {"NodeID": "d", "Alive": True, "NodeManagerAddress": "10.0.0.4", "Resources": {"CPU": 4.0}},
    ]
    cluster = from_ray_nodes(records, memory_gib=24.0)
    assert [node.name for node in cluster.nodes] == ["10.0.0.1", "10.0.0.2"]
    assert cluster.size == 8
    with pytest.raises(ClusterError, match="no living Ray node"):
        from_ray_nodes(records[2:])
