"""Sums of gradients over the batches of a step and over the ranks, in float64.

Rounded once at the end, a sum of float32 gradients in float64 is the same in any order. So a step has the same bits for
any number of ranks, as long as the batches of a forward are the same.

`sums` is a dict: dtype, totals {parameter: sum so far}, and parts, the number of batches of all ranks in this step;
of this rank alone with run.strategy fsdp, which takes the mean over the ranks after each batch.
"""
import torch
import torch.distributed as dist

from Runtime.errors import InputError


def new_gradients(exact, device="cpu"):
    """exact: float64, which is tried once; otherwise float32. Raises InputError for a device that has no float64."""
    if exact:
        try:
            torch.ones(2, dtype=torch.float64, device=device).sum().item()
        except RuntimeError as error:  # some Intel GPUs
            raise InputError(f"run.exact_sums: {device} has no float64 ({str(error).splitlines()[0]}); set it to "
                             "false, and sums depend a little on the number of ranks.") from error
    return {"dtype": torch.float64 if exact else torch.float32, "totals": {}, "parts": 1}


def set_aside(sums, parameters):
    """Add the gradients of one batch to the totals, and clear them."""
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad.to(sums["dtype"])
            before = sums["totals"].get(parameter)
            sums["totals"][parameter] = gradient if before is None else before.add_(gradient)
            parameter.grad = None


def put_together(sums, parameters):
    """The mean over all batches as the gradient, where no communication hook makes it."""
    if sums["parts"] > 1:
        set_aside(sums, parameters)
        for parameter, total in sums["totals"].items():
            parameter.grad = (total / sums["parts"]).to(parameter.dtype)
    sums["totals"].clear()


def sum_over_ranks(sums, bucket):
    """Communication hook of DDP: the mean over all batches of all ranks, of a bucket of gradients and their totals."""
    buffer = bucket.buffer()
    total = buffer.to(sums["dtype"], copy=True)
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
        if (before := sums["totals"].pop(parameter, None)) is not None:
            # In the buffer a gradient lies as its parameter does, channels last too, whatever bucket.gradients() says.
            place = gradient.storage_offset() - buffer.storage_offset()
            total.as_strided(parameter.size(), parameter.stride(), place).add_(before)

    def mean(future):
        return buffer.copy_(future.value()[0].div_(sums["parts"]))
    return dist.all_reduce(total, async_op=True).get_future().then(mean)
