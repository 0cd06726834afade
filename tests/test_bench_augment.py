"""The counting of tests/bench/bench_augment.py: whose volumes have labels, what a gain is worth."""
import json

import bench_augment as bench
import numpy as np
import pytest
from scipy import stats

from Runtime.errors import STOP, InputError

VOLUMES = [(f"v{number:02d}",) for number in range(12)]


def test_more_labelled_volumes_contain_the_fewer_and_orders_do_not_depend_on_that_of_the_files():
    orders = bench.orders_of(VOLUMES, 8)
    assert orders == bench.orders_of(VOLUMES[::-1], 8) and orders[:3] == bench.orders_of(VOLUMES, 3)
    assert all(sorted(order) == VOLUMES for order in orders)
    assert len({order[0] for order in orders}) == 8, "with one labelled volume no subset is there twice"
    with pytest.raises(InputError, match="only 12 volumes"):
        bench.orders_of(VOLUMES, 13)


def test_a_gain_is_that_of_a_paired_test():
    ours, other = [0.71, 0.74, 0.69, 0.75], [0.70, 0.71, 0.66, 0.74]
    mean, low, high = bench.gain(ours, other)
    wanted = stats.ttest_rel(ours, other)
    assert mean == pytest.approx(0.02) and (low, high) == pytest.approx(wanted.confidence_interval(0.95))
    assert bench.gain([0.7], [0.6])[1:] == (None, None)


def test_ours_is_compared_with_the_best_of_the_others_alone(capsys):
    args = bench.parse_arguments(["--shots", "1", "--subsets", "2", "--seeds", "2", "--ours", "transferred"])
    scores = {"none": (0.5, 0.6), "elastic": (0.4, 0.4), "random": (0.9, 0.9), "transferred": (0.7, 0.7)}
    results = {method: {"1": {str(number): [value - 0.01, value + 0.01] for number, value in enumerate(values)}}
               for method, values in scores.items()}
    bench.publish(results, args, [None] * 3)
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last["shots"]["1"] == {"none": 0.55, "elastic": 0.4, "random": 0.9, "transferred": 0.7}
    assert last["gain"]["1"]["best_other"] == "none" and last["gain"]["1"]["mean"] == pytest.approx(0.15)
    assert last["ci_low"] == last["gain"]["1"]["ci_low"] < 0.15 < last["ci_high"]


def test_a_method_that_needs_a_network_is_never_left_out_in_silence(capsys):
    assert bench.main(["--methods", "none", "towards"]) == STOP
    assert capsys.readouterr().err == "error: --methods towards needs a network: name one with --checkpoint.\n"
    assert "towards" in bench.methods_of(bench.parse_arguments(["--checkpoint", "universal", "--methods", "towards"]))
    assert "towards" not in bench.methods_of(bench.parse_arguments([]))
    assert "recovered, towards, network are left out" in capsys.readouterr().out


def test_what_was_drawn_with_other_settings_is_drawn_anew(tmp_path):
    bench.keep(tmp_path / "copies/v.npz", "one", images=np.ones(3))
    assert np.array_equal(bench.kept(tmp_path / "copies/v.npz", "one", True)["images"], np.ones(3))
    assert bench.kept(tmp_path / "copies/v.npz", "another", True) is None
    assert bench.kept(tmp_path / "copies/v.npz", "one", False) is None
