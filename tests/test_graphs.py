"""Graphs of a mode and of the refinement, on a CPU, where operations are recorded and replayed like kernels."""
import contextlib
import threading

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import OM_train_3modes as om
from Dataloader.synthetic import make_subject
from Diffusion import graphs
from Inference import affine
from Inference.refine import refine
from tests.tiny import arguments, config, log_lines, make_data


class OperationGraph(TorchDispatchMode):
    """As torch.cuda.CUDAGraph: what is recorded is done again with the same tensors, into the same results."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.operations.append((function, args, kwargs or {}, result))
        return result

    def replay(self):
        with torch.no_grad():
            for function, args, kwargs, result in self.operations:
                again = function(*args, **kwargs)
                for old, new in zip(tree_leaves(result), tree_leaves(again)):
                    if isinstance(old, torch.Tensor) and old is not new:
                        old.copy_(new)

    def pool(self):
        return None


@contextlib.contextmanager
def recording(graph, **_):
    with graph:
        yield


@pytest.fixture
def graphs_of_operations(monkeypatch):
    """Has torch.cuda record operations. Returns: the graphs that are made, in that order."""
    monkeypatch.setattr(torch.cuda, "CUDAGraph", OperationGraph)
    monkeypatch.setattr(torch.cuda, "graph", recording)
    for name in ("synchronize", "empty_cache", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    made = []

    def graphs_on(*_):
        made.append({"calls": {}, "recorded": {}, "pool": None, "given_up": set()})
        return made[-1]
    monkeypatch.setattr(graphs, "graphs_on", graphs_on)
    return made


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"data__global_batchsize": 4}], ids=["one batch", "two batches"])
def test_a_training_by_graphs_has_the_losses_of_the_plain_one(tmp_path, graphs_of_operations, changes):
    """All modes, embeddings by averaged weights among them, one batch in a step and several."""
    words = {"run__epochs": 1, "run__amp": "off", "optim__average": 0.9, "run__exact_sums": False, **changes}
    steps = {}
    for way in ("plain", "graphs"):
        make_data(tmp_path / way)
        with pytest.MonkeyPatch.context() as patch:
            if way == "plain":
                patch.setattr(graphs, "graphs_on", lambda *_: None)
            assert om.main(arguments(tmp_path / way, **words)) == 0
        steps[way] = [line["terms"] for line in log_lines(tmp_path / way, "step")]
    assert len(steps["graphs"]) >= 3
    recorded, = graphs_of_operations
    assert set(recorded["recorded"]) == {"diffusion", "embeddings", "contrastive", "registration"}
    assert all(recorded["recorded"].values())
    for one, other in zip(*steps.values()):
        assert one == pytest.approx(other, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("more", ["", "masks", "structures"])
@pytest.mark.parametrize("kind", ["correlation", "mapped", "mind"])
def test_a_refinement_by_graphs_finds_the_field_of_the_plain_one(graphs_of_operations, monkeypatch, kind, more):
    """With graphs of its own for each level."""
    moving, fixed = (torch.from_numpy(make_subject(seed, (24, 28, 26))["image"])[None, None] for seed in (1, 2))
    mask = torch.ones_like(fixed)
    mask[..., :4] = 0
    masks = {"moving_mask": mask, "fixed_mask": mask} if more == "masks" else {"moving_mask": None, "fixed_mask": None}
    structures = (torch.cat([moving, fixed]) > 0.5).float() if more == "structures" else None
    pair = {"moving": moving, "fixed": fixed, "structures": structures, **masks}
    cfg = config(refine__levels=2, refine__window=5, refine__weight=1.0, refine__structures=1.0) | {
        "registration.similarity": kind}
    by_graphs, _ = refine(pair, None, 16, cfg)
    recorded = [each["recorded"]["a step of the refinement"] for each in graphs_of_operations]
    assert len(recorded) == 2 and all(recorded)
    monkeypatch.setattr(graphs, "graphs_on", lambda *_: None)
    plain, _ = refine(pair, None, 16, cfg)
    assert plain.abs().max() > 1
    torch.testing.assert_close(by_graphs, plain, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("similarity", ["correlation", "mind"])
def test_an_affine_part_by_graphs_finds_the_map_of_the_plain_one(graphs_of_operations, monkeypatch, similarity):
    """Each level has graphs of its own, one for each measure."""
    fixed, moving = (make_subject(seed, (24, 28, 26))["image"] for seed in (1, 2))
    header = np.diag([1.2, 1.0, 1.0, 1.0])

    def found():
        return affine.align_affine(fixed, np.eye(4), moving, header, similarity=similarity)
    (by_graphs, scores), recorded = found(), [each["recorded"] for each in graphs_of_operations]
    names = {name for each in recorded for name in each}
    assert names == {f"a comparison of the affine part ({'local' if similarity == 'correlation' else 'mutual'})"}
    assert sum(map(len, recorded)) >= 2 and all(made for each in recorded for made in each.values())
    monkeypatch.setattr(graphs, "graphs_on", lambda *_: None)
    plain, of_plain = found()
    assert abs(plain - np.eye(4)).max() > 0.1
    np.testing.assert_allclose(by_graphs, plain, rtol=0, atol=1e-6)
    assert scores == pytest.approx(of_plain, abs=1e-6)


def test_a_graph_of_the_affine_part_is_not_replayed_where_another_share_is_attainable(graphs_of_operations):
    """Fields of view that overlap in part: the headers' share first, then all, on the same level."""
    image = torch.from_numpy(make_subject(1, (24, 28, 26))["image"])
    same, frame = np.eye(4), np.eye(4)
    level, *_ = affine._levels(image.numpy(), None, same, image.numpy(), None, same, (frame, frame),
                               affine._basis(3, "affine"), 1.0, "cpu", "auto")
    start, still = torch.from_numpy(np.eye(4)[:3])[None], torch.zeros(1, 12, dtype=torch.float64)
    for attainable in (1.0, 1.0, 1.0, 4.0, 1.0):
        loss, _ = affine._slope(start, still, {**level, "attainable": attainable}, "local")
        assert float(loss) == pytest.approx(1 - 1 / max(attainable, 1), abs=0.02)
    assert level["graphs"]["recorded"]["a comparison of the affine part (local)"]


def weighted_sum(batch, weight):
    loss = (batch["x"] * weight).square().sum()
    return loss, {"loss": loss}, batch["x"] + 1


def test_results_are_not_overwritten_and_another_shape_goes_the_plain_way(graphs_of_operations):
    weight, state = torch.ones(3, requires_grad=True), graphs.graphs_on()
    for number in range(1, 8):
        x = torch.full((3,), float(number))
        loss, terms, kept = graphs.run(state, "f", lambda batch: weighted_sum(batch, weight), {"x": x}, [weight])
        loss.backward()
        assert loss.item() == terms["loss"].item() == 3 * number ** 2 and torch.equal(kept, x + 1)
        assert torch.equal(weight.grad, 2 * x.square())
        weight.grad = None
        if number == 6:
            first = loss, kept
            assert type(loss.grad_fn).__name__ == "ReplayedBackward"
    assert first[0].item() == 108 and torch.equal(first[1], torch.full((3,), 7.0))
    longer = {"x": torch.ones(1, 3)}
    loss, *_ = graphs.run(state, "f", lambda batch: weighted_sum(batch, weight), longer, [weight])
    assert type(loss.grad_fn).__name__ != "ReplayedBackward"


def test_one_sentence_where_recording_fails_and_where_a_graph_is_wrong(graphs_of_operations, monkeypatch, capsys):
    weight, calls = torch.ones(3, requires_grad=True), []

    def fails(batch):
        calls.append(0)
        if len(calls) == 4:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return weighted_sum(batch, weight)

    def is_wrong(batch):
        calls.append(0)
        return weighted_sum({"x": batch["x"] * (1 + (len(calls) == 4))}, weight)
    for function, words in ((fails, "recording it failed (RuntimeError: operation not permitted"),
                            (is_wrong, "its graphs differ from it by")):
        state = graphs.graphs_on()
        calls.clear()
        for _ in range(5):
            loss, *_ = graphs.run(state, f"what {function.__name__}", function, {"x": torch.ones(3)}, [weight])
            assert loss.item() == 3
        said = capsys.readouterr().err
        assert said.count("\n") == 1 and words in said
        assert f"graphs: what {function.__name__} runs operation by operation" in said


def test_a_batch_whose_loss_is_not_finite_is_not_recorded_but_the_next(graphs_of_operations, capsys):
    weight, state = torch.ones(3, requires_grad=True), graphs.graphs_on()
    for value in (1.0, 1.0, float("nan"), 1.0):
        graphs.run(state, "f", lambda batch: weighted_sum(batch, weight), {"x": torch.full((3,), value)}, [weight])
    assert state["recorded"]["f"] is not None and not capsys.readouterr().err


def test_graphs_are_recorded_on_the_current_device_by_the_main_thread(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = {}

    def look(where, index):
        found[where] = graphs.graphs_on(torch.device("cuda", index), "auto", {"one"})
    look("here", 0)
    look("another device", 1)
    thread = threading.Thread(target=look, args=("another thread", 0))
    thread.start()
    thread.join()
    assert found.pop("here")["given_up"] == {"one"} and set(found.values()) == {None}
    assert graphs.graphs_on(torch.device("cuda", 0), "off") is None
    assert graphs.graphs_on(torch.device("cpu"), "auto") is None
