"""Node configs, run configs and fleets that broke other systems: each works, or is one error that names the key and the cure."""

import json

import pytest

import strategies
from client_app.profile import NodeProfile, ProfileError
from server_app.settings import SettingsError
from strategies.fleet import FleetError
from tests.fleet_fixture import config, defaults, grid, pictures, rows, run


@pytest.mark.parametrize(
    ("node_config", "words"),
    [
        ({}, "no name.*--node-config"),
        ({"name": "pi"}, "neither data nor partition-id.*--node-config"),
        ({"name": "pi", "data": "/x", "modell": "cnn1"}, "modell.*did you mean 'model'"),
        ({"name": "a/../b", "data": "/x"}, "name = 'a/../b': type 1 to 64 letters"),
        ({"name": "pi", "data": "/x", "rank-ratio": 0}, "rank-ratio = 0"),
        ({"name": "pi", "data": "/x", "rank-ratio": 1.5}, "rank-ratio = 1.5"),
        ({"name": "pi", "data": "/x", "device": "tpu"}, "device = 'tpu': type auto, cpu or cuda"),
        ({"partition-id": -1, "num-partitions": 2}, "partition-id = -1"),
    ],
)
def test_a_wrong_node_config_shows_the_line_to_type(node_config, words):
    settings, _ = strategies.settings_of(defaults())
    with pytest.raises(ProfileError, match=words):
        NodeProfile.of(node_config, settings)


def test_node_config_comes_before_the_run_config():
    settings, _ = strategies.settings_of({**defaults(), "fleet.models": "cnn1,cnn2", "fleet.rank-ratios": "0.5"})
    profile = NodeProfile.of({"name": "pi", "partition-id": 1, "num-partitions": 4, "model": "mlp", "rank-ratio": 0.25}, settings)
    assert (profile.node_name, profile.model, profile.rank_ratio, profile.simulated) == ("pi", "mlp", 0.25, False)
    simulated = NodeProfile.of({"partition-id": 3, "num-partitions": 4}, settings)
    assert (simulated.node_name, simulated.model, simulated.rank_ratio, simulated.simulated) == ("partition-3", "cnn2", 0.5, True)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("fleet.rank-ratios", "0.25, ,0.5", "fleet.rank-ratios.*empty item"),
        ("fleet.rank-ratios", "0.25,0", r"fleet.rank-ratios.1 = '0'.*greater than 0"),
        ("fleet.rank-ratios", "-0.5", r"^fleet.rank-ratios.0 = '-0.5': Input should be greater than 0$"),
        ("fleet.rank-ratios", "1.5", "less than or equal to 1"),
        ("fleet.rank-ratios", "half", "fleet.rank-ratios.*number"),
        ("fleet.models", "", "fleet.models is empty: name at least 1"),
        ("fleet.rank-ratios", "", "fleet.rank-ratios is empty: name at least 1"),
        ("seed", 2**63, "seed = 9223372036854775808: .*less than or equal to"),
        ("strategy", "fedmlr", "did you mean 'fedmrl'"),
        ("train.batch-size", 0, "train.batch-size = 0.*greater than or equal to 1"),
        ("train.learning-rate", float("nan"), "train.learning-rate"),
        ("train.learning-rate", "fast", "train.learning-rate = 'fast'"),
        ("train.batchsize", 3, "train.batchsize is not a setting.*did you mean 'batch-size'"),
        ("numrounds", 3, "numrounds is not a setting.*did you mean 'num-rounds'"),
        (
            "data.partitioner",
            "dirichelet",
            r"data.partitioner = 'dirichelet' \(did you mean 'dirichlet'\?\); choose one of iid, dirichlet, ",
        ),
        ("fedmrl.projector-start", "zero", "fedmrl.projector-start = 'zero'; choose one of random, shared, aligned, split"),
        ("fedmrl.shared-dims", 3, "fedmrl.shared-dims is not a setting.*did you mean 'shared-dim'"),
        ("fleet.quorum", 0.0, "fleet.quorum"),
        ("transport.dtype", "int8", "transport.dtype = 'int8'"),
    ],
)
def test_a_wrong_setting_is_refused_before_round_one_with_key_value_and_cure(key, value, words):
    with pytest.raises(SettingsError, match=words):
        strategies.settings_of({**defaults(), key: value})


def test_lists_may_have_spaces_and_duplicates():
    settings, _ = strategies.settings_of({**defaults(), "fleet.rank-ratios": " 0.25 , 0.5,0.5 ", "fleet.models": "cnn1, cnn1"})
    assert settings.fleet.rank_ratios == (0.25, 0.5, 0.5)
    assert settings.fleet.models == ("cnn1", "cnn1")


def test_the_pyproject_defaults_are_the_models_defaults():
    settings, method = strategies.settings_of(defaults())
    assert settings == type(settings)(method=settings.method)
    assert method == type(method)()


def test_a_failed_run_says_so_in_its_status(tmp_path, monkeypatch):
    from types import SimpleNamespace

    import server_app.app

    monkeypatch.setenv("HETEROFLEET_HOME", str(tmp_path / "home"))
    context = SimpleNamespace(run_config={**defaults(), "strategy": "nope", "out-dir": str(tmp_path / "out")}, run_id=1)
    with pytest.raises(SettingsError):
        server_app.app.main(None, context)
    status = json.loads((tmp_path / "out/status.json").read_text())
    assert status["state"] == "failed"
    assert "'nope' is unknown" in status["reason"]


def test_simulated_nodes_may_have_other_sources_each_divided_among_its_own_nodes(tmp_path):
    for name, classes in (("a", 3), ("b", 2)):
        pictures(tmp_path / name, count=60, classes=classes)
    sources = f"{tmp_path / 'a'}, {tmp_path / 'b'}, {tmp_path / 'a'}"
    settings, _ = strategies.settings_of({**config(tmp_path), "fleet.data": sources})
    profiles = [NodeProfile.of({"partition-id": i, "num-partitions": 5}, settings) for i in range(5)]
    assert [p.node_name for p in profiles] == [f"partition-{i}" for i in range(5)]
    assert [(p.data[-1], p.partition, p.num_partitions) for p in profiles] == [
        ("a", 0, 3), ("b", 0, 2), ("a", 1, 3), ("a", 2, 3), ("b", 1, 2)
    ]  # fmt: skip
    assert {p.fleet_size for p in profiles} == {5}
    run(config(tmp_path, strategy="local", num_rounds=1, fleet__data=sources), tmp_path / "out", nodes=5)
    counts = {r["node"]: r["num_examples"] + r["test_samples"] for r in rows(tmp_path / "out", "node")}
    assert counts == {"partition-0": 20, "partition-1": 30, "partition-2": 20, "partition-3": 20, "partition-4": 30}


def test_a_real_node_keeps_its_own_data_whatever_the_fleet_table_says(tmp_path):
    settings, _ = strategies.settings_of({**config(tmp_path), "fleet.data": "x,y"})
    profile = NodeProfile.of({"name": "pi", "data": "/srv/pictures"}, settings)
    assert (profile.data, profile.partition, profile.num_partitions, profile.fleet_size) == ("/srv/pictures", None, None, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": "fixed", "peers": 7}, r"fedmuscle\.\*: fixed temperatures 0.2, 0.15 with 7 peers"),
        ({"tau-prev": 0.3, "temperature": "fixed"}, r"fedmuscle\.\*: temperatures tau = 0.2, tau-prev = 0.3"),
        ({"public-items": 16}, r"fedmuscle\.\*: public-batch = 32 exceeds public-items = 16"),
        ({"evaluator": "naive", "peers": 5}, r"naive evaluator would build 34.4 GB for 5 peers"),
        ({"evaluator": "exact", "peers": 9}, r"exact evaluator would need 1.1e\+15"),
        ({"prefixes": "8,512"}, r"fedmuscle\.\*: prefixes = 8,512: need different numbers from 1 to dim = 256"),
        ({"prefixes": "8,x"}, r"fedmuscle.prefixes.1 = 'x'"),
        ({"objective": "gramian", "prefixes": "8"}, "prefixes are for the muscle objective"),
        ({"steps": 0}, "fedmuscle.steps = 0"),
    ],
)
def test_settings_of_fedmuscle_that_would_fail_in_mid_run_are_refused_before_it(changes, words):
    with pytest.raises(SettingsError, match=words):
        strategies.settings_of({**defaults(), "strategy": "fedmuscle", **{f"fedmuscle.{k}": v for k, v in changes.items()}})


def test_a_late_node_with_other_classes_is_named_and_the_others_go_on(tmp_path):
    settings = config(tmp_path, num_rounds=3)
    the_grid = grid(settings, 2)
    for index, context in enumerate(the_grid.contexts.values()):
        context.node_config["name"] = f"real-{index}"
    pictures(tmp_path / "odd", 20, classes=2)

    def join(kind, node, content):
        if kind == "evaluate" and len(the_grid.contexts) == 2:
            the_grid.join({"name": "odd", "data": str(tmp_path / "odd"), "model": "mlp", "state-dir": str(tmp_path / "s")})
        return content

    the_grid.tamper = join
    run(settings, tmp_path / "out", the_grid)
    assert [r["sampled"] for r in rows(tmp_path / "out", "round")] == [2, 2, 2]
    (reason,) = [f["reason"] for f in rows(tmp_path / "out", "failure")]
    assert "node 'odd' has input 1,8,8 and 2 classes (class-0,class-1)" in reason
    assert "data.num-classes" in reason


def test_nodes_of_which_no_two_learn_the_same_end_the_run_with_the_reason(tmp_path):
    settings = config(tmp_path, fleet__join_timeout=0.2)
    the_grid = grid(settings, 0)
    for index, classes in enumerate((2, 3)):
        pictures(tmp_path / f"own-{index}", 20, classes=classes)
        the_grid.join({"name": f"n{index}", "data": str(tmp_path / f"own-{index}"), "model": "mlp", "state-dir": str(tmp_path / "s")})
    with pytest.raises(FleetError, match=r"1 usable nodes.*\n- node 'n1' has input 1,8,8 and 3 classes"):
        run(settings, tmp_path / "out", the_grid)
