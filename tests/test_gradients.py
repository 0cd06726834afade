"""Sums of gradients over batches: the mean, and the same bits in any order."""
import torch

from Diffusion.optim import new_gradients, put_together, set_aside


def mean_of(batches, exact=True):
    """The gradient that a parameter has after these batches, the last one left for put_together."""
    parameter, unused = torch.nn.Parameter(torch.zeros(500)), torch.nn.Parameter(torch.zeros(3))
    gradients = new_gradients({"run.exact_sums": exact, "run.bf16_sums": False})
    gradients.parts = len(batches)
    for number, batch in enumerate(batches, 1):
        parameter.grad = batch.clone()
        if number < len(batches):
            set_aside(gradients, [parameter, unused])
            assert parameter.grad is None
    put_together(gradients, [parameter, unused])
    assert unused.grad is None, "Adam leaves a parameter alone that no batch has used"
    assert parameter.grad.dtype == torch.float32 and not gradients.totals
    return parameter.grad


def test_the_mean_has_the_same_bits_in_any_order():
    # Large terms that nearly cancel, as the gradients of a bias before a normalisation do.
    batches = [torch.randn(500, generator=torch.Generator().manual_seed(seed)) * 10.0 ** seed for seed in range(5)]
    batches += [-batch * (1 + 1e-6) for batch in batches]
    orders = [torch.randperm(10, generator=torch.Generator().manual_seed(seed)).tolist() for seed in range(5)]
    exact = [mean_of([batches[i] for i in order]) for order in orders]
    assert all(torch.equal(exact[0], other) for other in exact)
    plain = [mean_of([batches[i] for i in order], exact=False) for order in orders]
    assert not all(torch.equal(plain[0], other) for other in plain), "float32 would not do"
    truth = torch.stack(batches).double().mean(0)
    assert torch.equal(exact[0], truth.float())


def test_one_batch_is_its_own_mean():
    batch = torch.randn(500)
    assert torch.equal(mean_of([batch]), batch)
