"""Two older networks, kept for comparison. Shape comments give 128^3."""
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
    """Upsampling by a transposed convolution whose kernel equals its stride."""

    def __init__(self, dims, in_channels, out_channels, factor=2):
        super().__init__()
        layer = nn.ConvTranspose3d if dims == 3 else nn.ConvTranspose2d
        self.up = layer(in_channels, out_channels, kernel_size=factor, stride=factor)

    def forward(self, x, size):
        """x: (B, in_channels, *spatial). size: what UpsampleConv takes; here the factor decides."""
        return self.up(x)                                                            # (B, out_channels, *size)


class RecMulModMutAttnNet(OM_net):
    """OM_net with a decoder of transposed convolutions: for comparison, and to diagnose a leak of theirs."""

    def make_upsampling(self, in_channels, out_channels):
        return TransposedConv(self.dims, in_channels, out_channels)

    def make_coarse_head(self, in_channels):
        head = TransposedConv(self.dims, in_channels, self.dims, self.multiple // self.stride)
        start_at_zero(head.up)
        return head


class AtrousBlock(nn.Module):
    """Two convolutions with a residual connection, the first one dilated: y = x + g(f(x)).

    Atrous convolutions see further without losing resolution (Chen et al., "DeepLab", TPAMI 2018).
    """

    def __init__(self, dims, channels, time_width, dilation):
        super().__init__()
        self.first = ConvBlock(dims, channels, channels, time_width, dilation=dilation)
        self.second = ConvBlock(dims, channels, channels, time_width, dilation=1)

    def forward(self, x, time):
        """x: (B, channels, *spatial). Shapes are those of the first level."""
        return x + self.second(self.first(x, time), time)                            # (B, 10, 128^3)


class RecResACNet(nn.Module):
    """The recursive atrous network of the earlier method: no attention, and the condition is two more channels."""

    def __init__(self, *, dims, image_channels, timesteps, typical_norm, conditioned, rec_num, detach,
                 embedding_width):
        super().__init__()
        channels, time_width = (10, 20, 40), 64
        self.dims, self.conditioned, self.rec_num, self.detach = dims, conditioned, rec_num, detach
        self.multiple = 4  # two levels halve the sides
        self.time = TimeEmbedding(timesteps, time_width)
        self.field_scale = FieldScale(typical_norm)
        self.shown_channels = image_channels + 1  # of the condition: values and mask
        in_channels = image_channels + (self.shown_channels if conditioned else 0)
        self.down = nn.ModuleList(ConvBlock(dims, a, b, time_width, stride=stride)
                                  for a, b, stride in zip((in_channels, *channels), channels, (1, 2, 2)))
        self.atrous = nn.ModuleList(AtrousBlock(dims, c, time_width, dilation)
                                    for c in channels for dilation in (2, 4))
        self.up = nn.ModuleList(UpsampleConv(dims, a, b) for a, b in ((40, 20), (20, 10)))
        self.join = nn.ModuleList(ConvBlock(dims, 2 * c, c, time_width) for c in (20, 10))
        self.out = start_at_zero(conv(dims, 10, dims))
        self.embedding = nn.Linear(channels[-1], embedding_width)

    def features(self, image, condition, time):
        """Features at full, half and quarter resolution."""
        x = image if condition is None else torch.cat([image, condition], dim=1)     # (B, 3, 128^3)
        features = []
        for level, down in enumerate(self.down):
            x = down(x, time)                                                        # (B, 10, 128^3) at level 0
            for block in self.atrous[2 * level:2 * level + 2]:
                x = block(x, time)                                                   # (B, 10, 128^3) at level 0
            features.append(x)                                # (B, 10, 128^3), (B, 20, 64^3), (B, 40, 32^3)
        return features

    def one_pass(self, image, condition, t, time):
        """The field of one pass, in voxels. condition: padded as the features need it."""
        *skips, x = self.features(pad_to_multiple(image, self.multiple), condition, time)  # x: (B, 40, 32^3)
        for up, join, skip in zip(self.up, self.join, reversed(skips)):
            x = torch.cat([up(x, skip.shape[2:]), skip], dim=1)                      # (B, 40, 64^3), (B, 20, 128^3)
            x = join(x, time)                                                        # (B, 20, 64^3), (B, 10, 128^3)
        field_norm = crop(self.out(x).float(), image.shape[2:])                      # (B, 3, 128^3)
        return self.field_scale(field_norm, t, image.shape[2:])                      # (B, 3, 128^3)

    def masked(self, image, condition, keep):
        """The condition, padded; zeros where there is none or it is dropped. None for a network without one."""
        if not self.conditioned:
            return None
        empty = image.new_zeros(len(image), self.shown_channels, *image.shape[2:])   # (B, 2, 128^3)
        condition = empty if condition is None else condition                        # (B, 2, 128^3)
        if keep is not None:
            keep = keep.view(-1, *[1] * (self.dims + 1))                             # (B, 1, 1^3)
            condition = torch.where(keep, condition, empty)                          # (B, 2, 128^3)
        return pad_to_multiple(condition, self.multiple)                             # (B, 2, 128^3)

    def embeddings(self, image, condition, time):
        """Unit vectors of the image and of the condition, each encoded with zeros in the other's channels."""
        image = pad_to_multiple(image, self.multiple)                                # (B, 1, 128^3)
        if not self.conditioned:
            of_image = of_condition = self.features(image, None, time)[-1]           # (B, 40, 32^3)
        else:
            of_image = self.features(image, torch.zeros_like(condition), time)[-1]   # (B, 40, 32^3)
            of_condition = self.features(torch.zeros_like(image), condition, time)[-1]  # (B, 40, 32^3)
        return [unit_embedding(self.embedding, features.flatten(2).mean(2)) for features in (of_image, of_condition)]

    def forward(self, image, t, condition=None, keep=None, embed=False):
        """As every network, see Diffusion/networks.py."""
        # Embeddings use t = 0; otherwise pairs could be matched by time instead of subject.
        time = self.time(torch.zeros_like(t) if embed else t)                        # (B, 64)
        condition = self.masked(image, condition, keep)                              # (B, 2, 128^3)
        if embed:
            return self.embeddings(image, condition, time)                           # (B, 128) each

        def one_pass(warped):
            return self.one_pass(warped, condition, t, time)                         # (B, 3, 128^3)

        return recurse(one_pass, image, self.rec_num, self.detach)                   # (B, 3, 128^3)
