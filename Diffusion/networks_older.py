"""Two older networks, kept for comparison; shape comments give 128^3."""
import torch
import torch.nn as nn

from Diffusion.blocks import (
    ConvBlock,
    FieldScale,
    TimeEmbedding,
    UpsampleConv,
    conv,
    crop,
    pad_to_multiple,
    recurse,
    start_at_zero,
    unit_embedding,
)
from Diffusion.om_net import OM_net


class TransposedConv(nn.Module):
    """The older upsampling by a transposed convolution whose kernel equals its stride."""

    def __init__(self, dims, inputs, outputs, factor=2):
        super().__init__()
        layer = nn.ConvTranspose3d if dims == 3 else nn.ConvTranspose2d
        self.up = layer(inputs, outputs, kernel_size=factor, stride=factor)

    def forward(self, x, size):
        return self.up(x)


class RecMulModMutAttnNet(OM_net):
    """OM_net with the older decoder of transposed convolutions; for comparison and for the leak diagnostics."""

    def make_upsampling(self, inputs, outputs):
        return TransposedConv(self.dims, inputs, outputs)

    def make_coarse_head(self, inputs):
        head = TransposedConv(self.dims, inputs, self.dims, self.multiple // self.stride)
        start_at_zero(head.up)
        return head


class AtrousBlock(nn.Module):
    """Residual block of two dilated convolutions: a wide view without losing resolution."""

    def __init__(self, dims, channels, time_width, dilation):
        super().__init__()
        self.first = ConvBlock(dims, channels, channels, time_width, dilation=dilation)
        self.second = ConvBlock(dims, channels, channels, time_width, dilation=1)

    def forward(self, x, time):
        return x + self.second(self.first(x, time), time)


class RecResACNet(nn.Module):
    """The plain recursive atrous network of the earlier method: no attention, the condition is just more channels."""

    def __init__(self, *, dims, timesteps, typical_norm, conditioned, rec_num, detach, embedding_width):
        super().__init__()
        widths, time_width = (10, 20, 40), 64
        self.dims, self.conditioned, self.rec_num, self.detach = dims, conditioned, rec_num, detach
        self.time = TimeEmbedding(timesteps, time_width)
        self.field_scale = FieldScale(typical_norm)
        inputs = 3 if self.conditioned else 1
        self.down = nn.ModuleList(ConvBlock(dims, a, b, time_width, stride=s)
                                  for a, b, s in zip((inputs, *widths), widths, (1, 2, 2)))
        self.atrous = nn.ModuleList(AtrousBlock(dims, w, time_width, d) for w in widths for d in (2, 4))
        self.up = nn.ModuleList(UpsampleConv(dims, a, b) for a, b in ((40, 20), (20, 10)))
        self.join = nn.ModuleList(ConvBlock(dims, 2 * w, w, time_width) for w in (20, 10))
        self.out = start_at_zero(conv(dims, 10, dims))
        self.embedding = nn.Linear(widths[-1], embedding_width)

    def features(self, image, condition, time):
        x, found = image if condition is None else torch.cat([image, condition], dim=1), []
        for level, down in enumerate(self.down):
            x = down(x, time)
            for block in self.atrous[2 * level:2 * level + 2]:
                x = block(x, time)
            found.append(x)                                  # (B, 10, 128^3) (B, 20, 64^3) (B, 40, 32^3)
        return found

    def one_pass(self, image, time, condition):
        *skips, x = self.features(pad_to_multiple(image, 4), condition, time)
        for up, join, skip in zip(self.up, self.join, reversed(skips)):
            x = join(torch.cat([up(x, skip.shape[2:]), skip], dim=1), time)
        return crop(self.out(x).float(), image.shape[2:])

    def forward(self, image, t, condition=None, keep=None, embed=False):
        time = self.time(torch.zeros_like(t) if embed else t)
        if self.conditioned:
            empty = image.new_zeros(len(image), 2, *image.shape[2:])
            condition = empty if condition is None else condition
            if keep is not None:
                condition = torch.where(keep.view(-1, *[1] * (self.dims + 1)), condition, empty)
            condition = pad_to_multiple(condition, 4)
        if embed:
            own = self.features(pad_to_multiple(image, 4), torch.zeros_like(condition) if self.conditioned else None,
                                time)[-1]
            other = self.features(torch.zeros_like(pad_to_multiple(image, 4)), condition, time)[-1] \
                if self.conditioned else own
            return [unit_embedding(self.embedding, f.flatten(2).mean(2)) for f in (own, other)]
        def one_pass(x):
            return self.field_scale(self.one_pass(x, time, condition), t, image.shape[2:])
        return recurse(one_pass, image, self.rec_num, self.detach)
