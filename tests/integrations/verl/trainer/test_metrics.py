from rlinf_verl.trainer.metrics import reward_info_metrics


def test_the_last_row_of_a_trajectory_counts_once_and_padding_never():
    keys = ["u_0_0", "u_0_1", "u_1_0", "v_0_10", "v_0_9", "u_0_0"]
    tags = [{}, {}, {}, {}, {}, {"is_padding": True}]
    infos = [{"acc": 0.0}, {"acc": 1.0}, {"acc": 0.0}, {"acc": 1.0, "note": "x"}, {"acc": 0.0}, {"acc": 0.0}]
    assert reward_info_metrics(keys, tags, infos) == {"rollout/acc/mean": 2 / 3}


def test_no_information_no_metrics():
    assert reward_info_metrics(["u_0_0"], [{}], [{}]) == {}
