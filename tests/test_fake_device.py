"""The rules of autocast on an accelerator, against torch's own: on tensors that only say that they are on one."""
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode

import OM_train_3modes as om
from Diffusion import device_ops
from Diffusion.cost import mode_costs
from Diffusion.fake_device import TO_BFLOAT16, TO_FLOAT32, TO_WIDEST, AliveBytes, DeviceAutocast
from tests.tiny import config

# What a network or a loss may call, with the operands x and w of shapes that fit.
VOLUME, MATRIX = (1, 16, 6, 6, 6), (16, 16)
CALLS = {
    "conv3d": (VOLUME, lambda x, w: F.conv3d(x, w.new_empty(4, 16, 3, 3, 3))),
    "conv_transpose3d": (VOLUME, lambda x, w: F.conv_transpose3d(x, w.new_empty(16, 4, 2, 2, 2))),
    "linear": (MATRIX, F.linear), "matmul": (MATRIX, torch.matmul), "__matmul__": (MATRIX, lambda x, w: x @ w),
    "bmm": ((2, 4, 4), torch.bmm),
    "scaled_dot_product_attention": ((1, 2, 8, 8), lambda x, w: F.scaled_dot_product_attention(x, w, w)),
    "group_norm": (VOLUME, lambda x, w: F.group_norm(x, 2)),
    "layer_norm": (MATRIX, lambda x, w: F.layer_norm(x, (16,))),
    "interpolate": (VOLUME, lambda x, w: F.interpolate(x, scale_factor=2, mode="trilinear")),
    "softmax": (MATRIX, lambda x, w: x.softmax(1)), "sum": (MATRIX, lambda x, w: x.sum()),
    "logsumexp": (MATRIX, lambda x, w: torch.logsumexp(x, 1)), "norm": (MATRIX, lambda x, w: x.norm()),
    "exp": (MATRIX, lambda x, w: x.exp()), "rsqrt": (MATRIX, lambda x, w: x.rsqrt()),
    "pow": (MATRIX, lambda x, w: x.pow(2.0)), "mse_loss": (MATRIX, F.mse_loss),
    "cat": (MATRIX, lambda x, w: torch.cat([x, w])), "stack": (MATRIX, lambda x, w: torch.stack([x, w])),
    "addcmul": (MATRIX, lambda x, w: torch.addcmul(x, x, w)),
    "silu": (MATRIX, lambda x, w: F.silu(x)), "gelu": (MATRIX, lambda x, w: F.gelu(x)),
    "leaky_relu": (MATRIX, lambda x, w: F.leaky_relu(x)), "mean": (MATRIX, lambda x, w: x.mean()),
    "add": (MATRIX, torch.add), "mul": (MATRIX, torch.mul), "avg_pool3d": (VOLUME, lambda x, w: F.avg_pool3d(x, 2)),
}


def operands(shape, device):
    for first in (torch.float32, torch.bfloat16):
        for second in (torch.float32, torch.bfloat16):
            yield [torch.empty(shape, dtype=dtype, device=device) for dtype in (first, second)]


def types_on(kind, shape, call):
    """The types of the results under torch's autocast for that kind of device, and under ours on the CPU."""
    torch.set_autocast_dtype(kind, torch.bfloat16)
    torch.set_autocast_enabled(kind, True)
    try:
        wanted = [result_type(call, pair) for pair in operands(shape, torch.device(kind, 0))]
    finally:
        torch.set_autocast_enabled(kind, False)
        torch.clear_autocast_cache()
    with torch.autocast("cpu", torch.bfloat16), DeviceAutocast():
        ours = [result_type(call, pair) for pair in operands(shape, "cpu")]
    return wanted, ours


def result_type(call, pair):
    try:
        return call(*pair).dtype
    except RuntimeError as error:
        assert "dtype" in str(error) or "scalar type" in str(error), error  # operands of two types
        return "refused"


# Of these a torch with CUDA in it asks the driver, also on fake tensors.
ASKING = ("conv3d", "conv_transpose3d", "scaled_dot_product_attention")


# On a fake XPU torch looks for a real one before it computes attention.
@pytest.mark.parametrize("kind, name", [(kind, name) for kind in ("cuda", "xpu") for name in CALLS
                                        if (kind, name) != ("xpu", "scaled_dot_product_attention")])
def test_casts_are_those_of_the_device(kind, name):
    if kind == "cuda" and name in ASKING and torch.version.cuda and not torch.cuda.is_available():
        pytest.skip("this torch asks the CUDA driver, and there is none")
    with FakeTensorMode():
        wanted, ours = types_on(kind, *CALLS[name])
    assert ours == wanted and wanted.count("refused") < 3


def test_lists_do_not_overlap_and_each_kind_of_cast_is_tried():
    lists = (TO_BFLOAT16, TO_FLOAT32, TO_WIDEST)
    assert len(set.union(*lists)) == sum(map(len, lists))
    assert all(len(set(CALLS) & names) >= 3 for names in lists)


def test_outside_autocast_nothing_is_cast():
    x = torch.ones(2, 8, dtype=torch.bfloat16)
    with DeviceAutocast():
        assert F.layer_norm(x, (8,)).dtype == torch.bfloat16
        assert torch.ones(8, 8).matmul(torch.ones(8)).dtype == torch.float32


def test_each_weight_is_cast_once_and_gets_its_gradient():
    layer, x = torch.nn.Linear(8, 8), torch.ones(2, 8)
    with DeviceAutocast() as rules:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                layer(x)
            y = layer(layer(x))
        assert len(rules.cast_weights) == 4, "weight and bias, with gradient and without"
        y.float().sum().backward()
    assert y.dtype == torch.bfloat16 and layer.weight.grad.abs().sum() > 0


def test_a_cast_is_not_kept_for_what_dies_and_leaves_its_id_to_another():
    with DeviceAutocast() as rules, torch.autocast("cpu", torch.bfloat16):
        for n in (4, 8):
            assert F.linear(torch.ones(2, n), torch.ones(8, n, requires_grad=True)).dtype == torch.bfloat16
        assert not rules.cast_weights


def test_bytes_are_counted_while_something_holds_them():
    with FakeTensorMode(), AliveBytes() as alive:
        x = torch.zeros(1000, requires_grad=True)
        y = x.exp().view(10, 100)
        assert alive.now == 8000
        loss = y.square().sum()
        del y
        assert alive.now >= 8000, "the graph holds it"
        loss.backward()
        del loss
        assert alive.now == 8000 and alive.peak >= 12000, "x and its gradient are left"


def test_all_modes_are_counted_by_the_rules_of_the_device_also_where_a_part_is_computed_again():
    """Each mode has a backward pass, within which the rules hold as well, and after which they go on to hold."""
    costs = [mode_costs(config(run__amp="bf16", model__use_checkpoint=again), 1, om.MODES, DeviceAutocast())[1]
             for again in ("false", "true")]
    for name in om.MODES:
        assert costs[1][name]["kept"] < costs[0][name]["kept"] and costs[1][name]["flops"] > costs[0][name]["flops"]
    assert device_ops.SETTINGS["as on a device"] is None
