"""Sums of gradients over the batches of a step and over the ranks: in float64, or, by key, in float32 or bf16.

float32 gradients summed in float64 and rounded once at the end give the same float32 in any order. So a step has the
same bits for any number of ranks, as long as the batches of a forward are the same. DDP hands over one bucket after the
other, while the backward pass goes on: the ranks exchange the first sums while the last gradients are computed.
"""
import dataclasses

import torch
import torch.distributed as dist

from Runtime.errors import InputError, first_line


@dataclasses.dataclass
class GradientSums:
    """Gradients of the batches of a step."""

    dtype: torch.dtype  # of the sums
    wire: torch.dtype   # in which the ranks exchange them
    totals: dict = dataclasses.field(default_factory=dict)  # {parameter: sum so far}
    # Batches in this step, of all ranks. With fsdp those of this rank: it takes the mean over the ranks after each.
    parts: int = 1


def new_gradients(cfg, device="cpu"):
    """The GradientSums of a run.

    cfg: run.exact_sums (true: in float64; false: in float32; auto: in float64 on a CPU) and run.bf16_sums (the ranks
    exchange half of the bytes of float32).

    On an accelerator, where other operations do not repeat bit for bit either, float64 doubles what is communicated.
    Raises InputError for both kinds at once, and for exact sums on a device that has no float64, which is tried once.
    """
    exact, bf16 = cfg["run.exact_sums"], cfg["run.bf16_sums"]
    if exact == "auto":
        exact = torch.device(device).type == "cpu" and not bf16
    if exact and bf16:
        raise InputError("run.exact_sums and run.bf16_sums are both true, and sums cannot be both: set one to false.")
    if exact:
        try:
            torch.ones(2, dtype=torch.float64, device=device).sum().item()
        except RuntimeError as error:  # some Intel GPUs
            raise InputError(f"run.exact_sums: {device} has no float64 ({first_line(error)}); set it to "
                             "false, and sums depend a little on the number of ranks.") from error
    dtype = torch.float64 if exact else torch.float32
    return GradientSums(dtype, wire=torch.bfloat16 if bf16 else dtype)


def set_aside(sums, parameters):
    """Add the gradients of one batch to the totals, and clear the gradients."""
    for parameter in parameters:
        if parameter.grad is not None:
            gradient = parameter.grad.to(sums.dtype, copy=True)  # a graph overwrites its own
            before = sums.totals.get(parameter)
            sums.totals[parameter] = gradient if before is None else before.add_(gradient)
            parameter.grad = None


def put_together(sums, parameters):
    """Make the mean over all batches the gradient. Without DDP there is no communication hook that does it."""
    if sums.parts > 1:
        set_aside(sums, parameters)
        for parameter, total in sums.totals.items():
            parameter.grad = (total / sums.parts).to(parameter.dtype)
    sums.totals.clear()


def sum_over_ranks(sums, bucket):
    """Communication hook of DDP: the mean over all batches of all ranks, for one bucket of gradients.

    Returns: a future of the bucket's buffer, which then holds the means.
    """
    buffer = bucket.buffer()
    total = buffer.to(sums.dtype, copy=True)
    for parameter, gradient in zip(bucket.parameters(), bucket.gradients()):
        before = sums.totals.pop(parameter, None)
        if before is not None:
            # In the buffer a gradient has the strides of its parameter, channels last too; bucket.gradients() does not
            # show that.
            place = gradient.storage_offset() - buffer.storage_offset()
            total.as_strided(parameter.size(), parameter.stride(), place).add_(before)

    def mean(future):
        return buffer.copy_(future.value()[0].to(sums.dtype).div_(sums.parts))
    return dist.all_reduce(total.to(sums.wire), async_op=True).get_future().then(mean)
