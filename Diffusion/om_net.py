"""OM_net, the network that the project trains; shape comments give 128^3 with the channels of config_om.yaml."""
import itertools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from Diffusion.blocks import (
    ConvBlock,
    FieldScale,
    TimeEmbedding,
    UpsampleConv,
    conv,
    crop,
    pad_to_multiple,
    recurse,
    sinusoids,
    start_at_zero,
    unit_embedding,
)
from Diffusion.diffuser import image_count, label_count
from Diffusion.fields import affine_field, identity, resize_field, side_lengths, warp


def recomputed(wanted, function, *inputs):
    """function(*inputs); where wanted, the backward pass computes its activations once more instead of keeping them."""
    if wanted and torch.is_grad_enabled():
        return checkpoint(function, *inputs, use_reentrant=False)
    return function(*inputs)


class Encoder(nn.Module):
    """Features at full, half, quarter, ... resolution, one block of two convolutions each (one at full resolution)."""

    def __init__(self, dims, inputs, channels, time_width, use_checkpoint):
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.first = ConvBlock(dims, inputs, channels[0], time_width)
        self.down = nn.ModuleList(ConvBlock(dims, a, b, time_width, stride=2) for a, b in zip(channels, channels[1:]))
        self.same = nn.ModuleList(ConvBlock(dims, b, b, time_width) for b in channels[1:])

    def level(self, index, x, time):
        if index == 0:
            return self.first(x, time)
        return self.same[index - 1](self.down[index - 1](x, time), time)

    def forward(self, x, time=None):
        features = []
        for index in range(len(self.down) + 1):
            # The three finest levels hold nearly all of the activations.
            x = recomputed(self.use_checkpoint and index < 3, self.level, index, x, time)
            features.append(x)  # (B, 16, 128^3) (B, 32, 64^3) (B, 64, 32^3) (B, 128, 16^3) (B, 256, 8^3)
        return features


class Join(nn.Module):
    """Features of several kinds into those of one level.

    What is joined has up to five times as many channels as what comes out. Mixed voxel by voxel to twice as many first,
    they need half the work of a 3x3x3 convolution of them all.
    """

    def __init__(self, dims, inputs, outputs, time_width):
        super().__init__()
        self.mix = conv(dims, inputs, 2 * outputs, kernel=1, bias=False)
        self.block = ConvBlock(dims, 2 * outputs, outputs, time_width)

    def forward(self, parts, time):
        return self.block(self.mix(torch.cat(parts, dim=1)), time)


class AttentionBlock(nn.Module):
    """Transformer block over all tokens it is given; two sets of tokens in one sequence attend to each other."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = start_at_zero(nn.Linear(width, width))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), start_at_zero(nn.Linear(4 * width, width)))

    def forward(self, x):
        b, n, width = x.shape                                                      # (B, 1024, width)
        q, k, v = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v)                            # (B, heads, 1024, width / heads)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, n, width))
        return x + self.mlp(self.norm2(x))


class MutualAttention(nn.Module):
    """Image tokens and condition tokens in one sequence of transformer blocks, at the bottleneck."""

    def __init__(self, channels, width, depth, heads, time_width):
        super().__init__()
        self.width = width
        self.enter = nn.Linear(channels, width)
        self.kind = nn.Parameter(torch.randn(2, width) * 0.02)
        self.by_time = nn.Linear(time_width, width)
        self.blocks = nn.ModuleList(AttentionBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.leave = start_at_zero(nn.Linear(width, channels))

    def tokens(self, features, kind):
        """Features (B, C, *size) to tokens (B, prod(size), width) that know their place and whose they are."""
        axes = [torch.arange(n, device=features.device) for n in features.shape[2:]]
        places = torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).flatten(0, -2)         # (512, 3)
        part = 2 * (self.width // (2 * len(axes)))
        place = sinusoids(places, part, 100.0).flatten(1)
        place = F.pad(place, (0, self.width - place.shape[1]))
        return self.enter(features.flatten(2).transpose(1, 2)) + self.kind[kind] + place

    def forward(self, features, condition, time):
        """Returns the features with what the tokens found out added to them."""
        tokens = self.tokens(features, 0)                                          # (B, 512, width)
        count = tokens.shape[1]
        if condition is not None:
            tokens = torch.cat([tokens, self.tokens(condition, 1)], dim=1)         # (B, 1024, width)
        tokens = tokens + self.by_time(time)[:, None]
        for block in self.blocks:
            tokens = block(tokens)
        found = self.leave(self.norm(tokens[:, :count]))
        return features + found.transpose(1, 2).reshape(features.shape)

    def pooled(self, features, kind):
        """Mean token of one image or condition on its own: (B, width)."""
        tokens = self.tokens(features, kind)
        for block in self.blocks:
            tokens = block(tokens)
        return self.norm(tokens).mean(1)


class AffineMatch(nn.Module):
    """Where the tokens of the condition are in the image, as one affine displacement field.

    Convolutions see a volume piece by piece and are slow to learn a shift, rotation or scaling of all of it. Here a
    token's place in the image is the mean of all places, weighted by the likeness of features and by nearness; where it
    would find itself among its own tokens is taken off, so that equal volumes give exactly zero. The affine map through
    all tokens is a weighted least-squares fit, in closed form, so that all of it can be learned.

    Features of a slice with nothing beside it are not those of the same place in a whole volume, and until that is
    learned their tokens are found many voxels off, where mode 1 at a small t asks for a hundredth of a voxel. So the
    field's size (root mean square over the volume) saturates at LIMIT times the displacement that is typical of t,
    field / sqrt(1 + (size / limit)^2), and counts as much as the condition shows of the volume. Registration, which
    sees all of it, is not limited.
    """

    RIDGE = 0.01  # towards no displacement, against mean squares of order one
    LIMIT = 2.0
    NO_LIMIT = 1e6  # sides of the image; finite, as all that a checkpoint holds

    def __init__(self, channels, width, typical_norm):
        super().__init__()
        timesteps = len(typical_norm) - 1
        self.project = nn.Linear(channels, width, bias=False)
        self.trust = start_at_zero(nn.Linear(channels, 1))
        self.log_sharpness = nn.Parameter(torch.full((1,), math.log(10.0)))
        self.log_reach = nn.Parameter(torch.full((1,), math.log(1.5)))  # of nearness, in tokens
        # Registration wants all of the way from the image to the condition, recovery the part to be undone at t.
        share = [label_count(t) / image_count(t) for t in range(timesteps)] + [1.0]
        self.register_buffer("share", torch.tensor(share))
        limit = [self.LIMIT * typical for typical in typical_norm[:-1]] + [self.NO_LIMIT]
        self.register_buffer("limit", torch.tensor(limit))                         # in sides of the image

    def features(self, tokens):
        return F.normalize(self.project(tokens - tokens.mean(1, keepdim=True)), dim=-1)

    def forward(self, image, condition, shown, t, size):
        """image, condition: bottleneck features (B, C, *tokens), zero where dropped. t: (B,). size: voxels per side.

        shown: (B,), the part of the volume that the condition shows, 0 where it is dropped.
        Returns: displacement (B, N, *size) in voxels.
        """
        with torch.autocast(image.device.type, enabled=False):
            grid = condition.shape[2:]
            image, condition = (part.float().flatten(2).transpose(1, 2) for part in (image, condition))  # (B, 512, C)
            places = identity(grid, image.device)[0].flatten(1).T                                        # (512, 3)
            near = (places[:, None] - places).square().sum(-1) / (-2 * torch.exp(2 * self.log_reach))
            asks, sharpness = self.features(condition), self.log_sharpness.exp()
            there, here = ((sharpness * asks @ others.transpose(1, 2) + near).softmax(-1) @ places
                           for others in (self.features(image), asks))                               # (B, 512, 3)
            side = side_lengths(size, image.device).flatten()
            step = side / side_lengths(grid, image.device).flatten()  # voxels between tokens; the first is at voxel 0
            x = F.pad((places * step - (side - 1) / 2) / (side / 2), (0, 1), value=1.0)                  # (512, 4)
            trust = F.softplus(self.trust(condition))                                                    # (B, 512, 1)
            weighted = (x * trust / trust.sum(1, keepdim=True)).transpose(1, 2)                          # (B, 4, 512)
            gram = weighted @ x + self.RIDGE * torch.eye(x.shape[1], device=x.device)
            found = torch.linalg.solve(gram, weighted @ ((there - here) * step))                         # (B, 4, 3)
            found = (found * self.share[t].view(-1, 1, 1)).transpose(1, 2)
            linear = found[:, :, :-1] / (side / 2) + torch.eye(len(side), device=x.device)
            field = affine_field(torch.cat([linear, found[:, :, -1:]], dim=2), size)
            mean_square = (field / side_lengths(size, image.device)).square().flatten(1).mean(1)         # (B,)
            part = shown * (1 + mean_square / self.limit[t] ** 2).rsqrt()
            return field * part.view(-1, *[1] * (field.dim() - 1))


def neighbours(dims):
    """Where the 3^N voxels around one are, itself at (1, 1, 1), in the order of LocalMatch's channels."""
    return list(itertools.product(range(3), repeat=dims))


def neighbourhoods(around, size):
    """Views of `around`, (B, *(size + 2), C), one for each of `neighbours`: 3^N times (B, *size, C)."""
    for place in neighbours(len(size)):
        yield around[(slice(None), *[slice(i, i + n) for i, n in zip(place, size)])]


class NeighbourProducts(torch.autograd.Function):
    """Scalar product of each voxel's features with those of the 3^N voxels around it in another volume.

    Autograd would write a whole gradient of `around` for each of the 3^N views, and then add them up; here each view
    adds its part in place, which takes less than half the time.
    """

    @staticmethod
    def forward(ctx, image, around):
        """image: (B, *size, C). around: (B, *(size + 2), C). Returns: (B, 3^N, *size)."""
        ctx.save_for_backward(image, around)
        return torch.stack([(image * view).sum(-1) for view in neighbourhoods(around, image.shape[1:-1])], dim=1)

    @staticmethod
    def backward(ctx, grad):
        image, around = ctx.saved_tensors
        of_image, of_around = torch.zeros_like(image), torch.zeros_like(around)
        size = image.shape[1:-1]
        views = zip(neighbourhoods(around, size), neighbourhoods(of_around, size), grad.unsqueeze(-1).unbind(1))
        for view, of_view, part in views:
            of_image.addcmul_(view, part)
            of_view.addcmul_(image, part)
        return of_image, of_around


class LocalMatch(nn.Module):
    """How alike each voxel's features are to the condition's at the same place and at the neighbouring ones.

    Convolutions would have to learn to compare before they can measure a displacement; here the comparison is given, as
    in networks for optical flow. Its reach is one voxel of its level: the field of the coarser levels brings together
    what is further apart, and the next pass, which sees the image warped, measures what is left.
    """

    WIDTH = 16  # channels that are compared

    def __init__(self, dims, channels):
        super().__init__()
        # No bias: a dropped condition is like nothing.
        self.project = conv(dims, channels, self.WIDTH, kernel=1, bias=False)
        self.sharpness = nn.Parameter(torch.full((1,), 10.0))

    def features(self, x):
        return F.normalize(self.project(x), dim=1, eps=1e-3).movedim(1, -1)        # (B, *size, 16)

    def forward(self, image, condition):
        """image, condition: (B, C, *size). Returns: (B, 3^N, *size), cosines less their mean, sharpened."""
        size, kind = image.shape[2:], image.dtype
        with torch.autocast(image.device.type, enabled=False):  # neighbours' cosines differ by less than bf16 can tell
            image, condition = self.features(image.float()), self.features(condition.float())
            likeness = NeighbourProducts.apply(image, F.pad(condition, [0, 0] + [1, 1] * len(size)))
            return (self.sharpness * (likeness - likeness.mean(1, keepdim=True))).to(kind)


class OM_net(nn.Module):
    """The recursive network: one encoder for image and condition, mutual attention, one decoder that both join.

    The image enters the encoder as a condition that is fully known: values and a mask of ones. With the same weights
    for both, equal anatomy has equal features from the first step on, and only their places have to be compared.
    """

    def __init__(self, *, dims, channels, timesteps, typical_norm, conditioned, rec_num, detach, field_stride,
                 attention_width, attention_depth, attention_heads, affine_match, local_match, embedding_width,
                 use_checkpoint):
        super().__init__()
        time_width = 4 * channels[0]
        self.dims, self.conditioned, self.rec_num, self.detach = dims, conditioned, rec_num, detach
        self.first_is_detached = detach and rec_num > 1
        self.stride, self.multiple = field_stride, 2 ** (len(channels) - 1)
        self.time = TimeEmbedding(timesteps, time_width)
        self.field_scale = FieldScale(typical_norm)
        self.encoder = Encoder(dims, 2, channels, time_width, use_checkpoint)
        self.attention = MutualAttention(channels[-1], attention_width, attention_depth, attention_heads, time_width)
        self.embedding = nn.Linear(attention_width, embedding_width)
        self.match = AffineMatch(channels[-1], attention_width, typical_norm) if affine_match and conditioned else None
        self.make_decoder(channels, time_width, local_match and conditioned)

    def make_decoder(self, channels, time_width, matched):
        dims, joined = self.dims, 3 if self.conditioned else 2
        levels = range(len(channels) - 2, -1 if self.stride == 1 else 0, -1)       # 3, 2, 1, 0
        self.up = nn.ModuleList(self.make_upsampling(channels[i + 1], channels[i]) for i in levels)
        self.join = nn.ModuleList(Join(dims, joined * channels[i] + matched * 3 ** dims, channels[i], time_width)
                                  for i in levels)
        self.local = self.middle = None
        if matched:
            self.local = nn.ModuleList(LocalMatch(dims, channels[i]) for i in levels)
            self.middle = nn.ModuleList(start_at_zero(conv(dims, channels[i], dims)) for i in levels[:-1])
        self.fine = start_at_zero(conv(dims, channels[levels[-1]], dims))
        self.coarse = self.make_coarse_head(channels[-1])

    def make_upsampling(self, inputs, outputs):
        """From one level of the decoder to the next finer one."""
        return UpsampleConv(self.dims, inputs, outputs, smooth=False)

    def make_coarse_head(self, inputs):
        """From the bottleneck to a field on the output grid."""
        head = UpsampleConv(self.dims, inputs, self.dims)
        start_at_zero(head.conv)
        return head

    def as_known(self, image):
        """An image as a condition that shows all of it: values and a mask of ones."""
        image = pad_to_multiple(image, self.multiple)
        return torch.cat([image, torch.ones_like(image)], dim=1)                   # (B, 2, 128^3)

    def encode(self, image, condition, keep, time, together):
        """Features at every level, of the image and of the condition (None without one).

        together: both in one batch, which takes less time than one after the other; otherwise those of the image are
        left to the passes, and None here. keep: (B,) bool, where it is False the condition's features are zero.
        """
        image = self.as_known(image)                                               # (B, 2, 128^3)
        if not self.conditioned or condition is None:
            return self.encoder(image, time), None
        condition, features = pad_to_multiple(condition, self.multiple), None      # (B, 2, 128^3)
        if together:
            both = self.encoder(torch.cat([image, condition]), torch.cat([time, time]))
            features, encoded = zip(*[level.chunk(2) for level in both])
        else:
            encoded = self.encoder(condition, time)
        if keep is not None:
            keep = keep.view(-1, *[1] * (self.dims + 1))
            encoded = [torch.where(keep, f, torch.zeros((), dtype=f.dtype, device=f.device)) for f in encoded]
        return features, encoded

    def shown_part(self, image, condition, keep):
        """The part of the volume that each sample's condition shows: (B,), 0 where there is none or it is dropped."""
        if condition is None:
            return image.new_zeros(len(image))
        part = condition[:, 1].flatten(1).mean(1)
        return part if keep is None else part * keep

    def one_pass(self, image, features, condition, shown, t, time):
        """The field of one pass. features: of the image; condition: features of the condition, None without one."""
        if self.conditioned and condition is None:
            condition = [torch.zeros_like(f) for f in features]
        x = self.attention(features[-1], condition[-1] if self.conditioned else None, time)      # (B, 256, 8^3)
        coarse = self.coarse(x, features[self.stride - 1].shape[2:])             # (B, 3, 128^3)
        size = tuple(features[0].shape[2:])
        affine = self.match(features[-1], condition[-1], shown, t, size) if self.match is not None else None
        found = coarse.float()
        for step, (up, join) in enumerate(zip(self.up, self.join)):
            skip = features[-2 - step]
            if self.local is not None:
                # What is found so far brings the features together; only the rest is left to be measured.
                ahead = self.field_scale(resize_field(found, skip.shape[2:], align="cells"), t, image.shape[2:])
                ahead = ahead if affine is None else ahead + resize_field(affine, skip.shape[2:], align="cells")
                skip = warp(skip, ahead * (skip.shape[2] / size[0]), padding="border").to(skip.dtype)
            x = up(x, skip.shape[2:])                                              # 16^3 32^3 64^3 128^3
            parts = [x, skip, condition[-2 - step]] if self.conditioned else [x, skip]
            if self.local is not None:
                parts.append(recomputed(self.encoder.use_checkpoint, self.local[step], skip, condition[-2 - step]))
            x = join(parts, time)
            if self.local is not None and step < len(self.up) - 1:
                found = found + resize_field(self.middle[step](x).float(), found.shape[2:], align="cells")
        field = self.field_scale(self.fine(x).float() + found, t, image.shape[2:])               # (B, 3, 128^3)
        if self.stride > 1:
            # Both heads speak in voxels of the full grid; only the sampling is coarser.
            field = resize_field(field, size, align="cells")
        field = field if affine is None else field + affine
        return crop(field, image.shape[2:])

    def forward(self, image, t, condition=None, keep=None, embed=False):
        time = self.time(torch.zeros_like(t) if embed else t)
        features, encoded = self.encode(image, condition, keep, time, together=embed or not self.first_is_detached)
        if embed:
            own = self.attention.pooled(features[-1], 0)
            other = self.attention.pooled(encoded[-1], 1) if encoded is not None else own
            return [unit_embedding(self.embedding, pooled) for pooled in (own, other)]

        shown = self.shown_part(image, condition, keep)

        def one_pass(seen):
            known = features if seen is image and features else self.encoder(self.as_known(seen), time)
            return self.one_pass(seen, known, encoded, shown, t, time)

        return recurse(one_pass, image, self.rec_num, self.detach)
