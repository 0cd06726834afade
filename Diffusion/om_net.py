"""OM_net, the network that the project trains, and the layers that it alone has.

A U-Net (Ronneberger et al., MICCAI 2015) whose encoder sees image and condition with the same weights, whose bottleneck
is a transformer over the tokens of both, and whose decoder compares the two at every level. It runs rec_num times, each
time on the image as warped so far.

Shapes: B samples, C channels, N spatial axes. Shape comments give 128^3 with config_om.yaml: images of one channel,
channels 16, 32, 64, 128, 256 at 128^3 to 8^3, 8^3 = 512 tokens of width 1024, 16 heads, time embedding of 64.
"""
import itertools
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from Diffusion.blocks import (
    ConvBlock,
    FieldScale,
    TimeEmbedding,
    UpsampleConv,
    conv,
    crop,
    modulations,
    on_device_in_bfloat16,
    pad_to_multiple,
    recurse,
    sinusoids,
    start_at_zero,
    unit_embedding,
)
from Diffusion.descent import FINE_WIDTH, WIDTH, LearnedDescent, target_of
from Diffusion.device_ops import (
    SolvePositive,
    accelerated,
    constant,
    kernels_for,
    product_over_channels,
    weights_in_passes,
)
from Diffusion.diffuser import image_count, label_count, make_condition
from Diffusion.fields import affine_field, append_dims, identity, resize_field, side_lengths, warp
from Diffusion.losses import structure_shares


def checkpointed(use_checkpoint, function, *inputs):
    """function(*inputs), with gradient checkpointing (T. Chen et al., 2016) where it is wanted.

    The backward pass then computes the activations once more, so that they need not be kept.
    """
    if use_checkpoint and torch.is_grad_enabled():
        # Nothing here draws random numbers, whose state would be asked of the device.
        return checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
    return function(*inputs)


class Encoder(nn.Module):
    """Features at full, half, quarter, ... resolution: one block at full, two at each further level."""

    def __init__(self, dims, in_channels, channels, time_width, use_checkpoint):
        super().__init__()
        self.use_checkpoint = use_checkpoint
        self.first = ConvBlock(dims, in_channels, channels[0], time_width)
        self.down = nn.ModuleList(ConvBlock(dims, a, b, time_width, stride=2) for a, b in zip(channels, channels[1:]))
        self.same = nn.ModuleList(ConvBlock(dims, b, b, time_width) for b in channels[1:])

    def level(self, index, x, time):
        """Features of one level from those of the level above."""
        if index == 0:
            return self.first(x, time)                                                      # (B, 16, 128^3)
        x = self.down[index - 1](x, time)                                                   # (B, 32, 64^3) at level 1
        return self.same[index - 1](x, time)                                                # (B, 32, 64^3) at level 1

    def forward(self, x, time):
        """x: (B, 2, *spatial). Returns: a list of features, finest first."""
        features, time = [], modulations([self.first, *self.down, *self.same], time)
        for index in range(len(self.down) + 1):
            # The three finest levels hold nearly all of the activations.
            x = checkpointed(self.use_checkpoint and index < 3, self.level, index, x, time)
            features.append(x)  # (B, 16, 128^3), (B, 32, 64^3), (B, 64, 32^3), (B, 128, 16^3), (B, 256, 8^3)
        return features


class Join(nn.Module):
    """Joins the decoder's features with the skipped ones of its level.

    A 1x1x1 convolution first mixes them down to twice the output channels. They have up to five times as many, and the
    3x3x3 convolution that follows then takes half the work or less.
    """

    def __init__(self, dims, in_channels, out_channels, time_width):
        super().__init__()
        self.mix = conv(dims, in_channels, 2 * out_channels, kernel_size=1, bias=False)
        self.block = ConvBlock(dims, 2 * out_channels, out_channels, time_width)

    def forward(self, parts, time):
        """parts: features of equal size. Shapes are those of the last level, with skip, condition and correlation."""
        # The tensor cores take channels by eights.
        few = -self.mix.in_channels % 8 if on_device_in_bfloat16(parts[0]) else 0
        kernels = kernels_for(parts[0])
        if kernels and len({part.dtype for part in parts}) == 1:
            x = kernels.SideBySide.apply(few, *parts)                                       # (B, 80, 128^3)
        else:
            if few:
                parts = [*parts, parts[0].new_zeros(()).expand(len(parts[0]), few, *parts[0].shape[2:])]
            x = torch.cat(parts, dim=1)                                                     # (B, 3 * 16 + 27, 128^3)
        x = self.mix(x)                                                                     # (B, 32, 128^3)
        return self.block(x, time)                                                          # (B, 16, 128^3)


class Segmenter(nn.Module):
    """Segments each volume by itself: a U-Net of the layers above, at full resolution and without a time.

    It learns from label maps (model.structures) what intensities do not show, such as a border that experts draw by
    convention.
    """

    def __init__(self, dims, in_channels, structures, channels, use_checkpoint):
        super().__init__()
        levels = range(len(channels) - 2, -1, -1)                                           # 3, 2, 1, 0
        self.multiple = 2 ** (len(channels) - 1)
        self.encoder = Encoder(dims, in_channels, channels, None, use_checkpoint)
        self.up = nn.ModuleList(UpsampleConv(dims, channels[i + 1], channels[i], smooth=False) for i in levels)
        self.join = nn.ModuleList(Join(dims, 2 * channels[i], channels[i], None) for i in levels)
        self.head = conv(dims, channels[0], structures + 1, kernel_size=1)

    def forward(self, image):
        """image: (B, C, *spatial). Returns: logits (B, K + 1, *spatial), float32, of background and K structures."""
        *skips, x = self.encoder(pad_to_multiple(image, self.multiple), None)               # x: (B, 256, 8^3)
        for up, join, skip in zip(self.up, self.join, reversed(skips)):
            x = join([up(x, skip.shape[2:]), skip], None)                                   # (B, 128, 16^3), ...
        return crop(self.head(x), image.shape[2:]).float()                                  # (B, K + 1, 128^3)


class AttentionBlock(nn.Module):
    """Transformer block (Vaswani et al., NeurIPS 2017) with the norm before each branch (Xiong et al., ICML 2020).

    x = x + W softmax(Q K^T / sqrt(d)) V, with Q, K, V from LayerNorm(x); x = x + MLP(LayerNorm(x)).
    Both branches start at zero, so that a new block is the identity.
    """

    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = start_at_zero(nn.Linear(width, width))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), start_at_zero(nn.Linear(4 * width, width)))

    def forward(self, x, branch=None):
        """x: (B, tokens, width). branch: output of the previous block, not yet added to x, same shape; or None.

        Returns: x and the output of this block, not yet added to it.
        """
        b, n, width = x.shape                                                               # B, 1024, 1024
        x, normed = normed_sum(self.norm1, x, branch)                                       # (B, 1024, 1024) each
        qkv = self.qkv(normed)                                                              # (B, 1024, 3072)
        # Cut along the third axis, the gradients of the three are put together as the product's was, in one copy.
        q, k, v = qkv.view(b, n, 3, self.heads, -1).unbind(2)                               # (B, 1024, 16, 64) each
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))                              # (B, 16, 1024, 64) each
        mixed = F.scaled_dot_product_attention(q, k, v)                                     # (B, 16, 1024, 64)
        branch = self.out(mixed.transpose(1, 2).reshape(b, n, width))                       # (B, 1024, 1024)
        x, normed = normed_sum(self.norm2, x, branch)                                       # (B, 1024, 1024) each
        return x, self.mlp(normed)                                                          # (B, 1024, 1024) each


def normed_sum(norm, x, branch):
    """x + branch, and the norm of it. branch: None for nothing."""
    kernels = kernels_for(x)
    if kernels and on_device_in_bfloat16(x) and x.dtype == torch.float32:
        return kernels.NormedSum.apply(x, branch, norm.weight, norm.bias, norm.eps)
    x = x if branch is None else x + branch
    return x, norm(x)


def embedded_places(width, grid, device):
    """Sinusoids of the coordinates of each token of a grid: (tokens, width)."""
    places = identity(grid, device)[0].flatten(1).T.contiguous()                            # (512, 3)
    embedded = sinusoids(places, 2 * (width // (2 * len(grid))), 100.0).flatten(1)          # (512, 1020)
    return F.pad(embedded, (0, width - embedded.shape[1]))                                  # (512, 1024)


class MutualAttention(nn.Module):
    """Bottleneck: tokens of image and condition in one sequence, so that each attends to both.

    A token is W f(x) + place(x) + kind: a projected feature, sinusoids of its coordinates, and a learned vector that
    tells image from condition, like the segment embedding of BERT (Devlin et al., NAACL 2019).
    """

    def __init__(self, channels, width, depth, heads, time_width):
        super().__init__()
        self.width = width
        self.enter = nn.Linear(channels, width)
        self.kind = nn.Parameter(torch.randn(2, width) * 0.02)  # of the image, of the condition
        self.by_time = nn.Linear(time_width, width)
        self.blocks = nn.ModuleList(AttentionBlock(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.leave = start_at_zero(nn.Linear(width, channels))

    def block_weights(self, count, x):
        """The weights of all blocks for each of `count` passes over x; None for a pass that uses the blocks' own.

        On a device in bfloat16 they are copies (`weights_in_passes`), made block by block, so that each block's
        gradients arrive as soon as they are known.
        """
        blocks = [weights_in_passes(block, count) for block in self.blocks] if on_device_in_bfloat16(x) else [None]
        return [None if None in blocks else [passes[number] for passes in blocks] for number in range(count)]

    def tokens(self, features, kind):
        """Tokens of features (B, C, *grid). kind: 0 for the image, 1 for the condition."""
        places = constant(embedded_places, self.width, tuple(features.shape[2:]), device=features.device)  # (512, 1024)
        tokens = self.enter(features.flatten(2).transpose(1, 2))                            # (B, 512, 1024)
        return tokens + self.kind[kind] + places                                            # (B, 512, 1024)

    def forward(self, features, condition, time, weights):
        """features: (B, C, *grid) of the image. condition: the same of the condition, or None. weights: of one pass.

        Returns: the image's features, to which its tokens have added what they gathered.
        """
        tokens = self.tokens(features, 0)                                                   # (B, 512, 1024)
        count = tokens.shape[1]
        if condition is not None:
            tokens = torch.cat([tokens, self.tokens(condition, 1)], dim=1)                  # (B, 1024, 1024)
        tokens = tokens + self.by_time(time)[:, None]                                       # (B, 1024, 1024)
        tokens = self.through_blocks(tokens, weights)                                       # (B, 1024, 1024)
        update = self.leave(self.norm(tokens[:, :count]))                                   # (B, 512, 256)
        return features + update.transpose(1, 2).reshape(features.shape)                    # (B, 256, 8^3)

    def through_blocks(self, tokens, weights):
        """Tokens after all blocks. Each block adds the output of the one before it, in one operation with its norm."""
        branch = None
        for index, block in enumerate(self.blocks):
            if weights is None:
                tokens, branch = block(tokens, branch)                                      # (B, 1024, 1024) each
            else:
                tokens, branch = functional_call(block, weights[index], (tokens, branch))   # (B, 1024, 1024) each
        return tokens if branch is None else tokens + branch                                # (B, 1024, 1024)

    def pooled(self, features, weights):
        """Mean token of an image and, if it is given, of a condition, each by itself: (B, width) each.

        features: of the image, or of both: a list of (B, C, *grid). weights: of one pass.
        """
        tokens = [self.tokens(each, kind) for kind, each in enumerate(features)]            # (B, 512, 1024) each
        if accelerated(tokens[0]):  # side by side they take half as many operations
            tokens = [torch.cat(tokens)]                                                    # (2B, 512, 1024)
        tokens = [self.through_blocks(each, weights) for each in tokens]                    # (B, 512, 1024) each
        means = torch.cat([self.norm(each).mean(1) for each in tokens])                     # (2B, 1024)
        return means.chunk(len(features))                                                   # (B, 1024) each


def places_of_tokens(grid, size, device):
    """Geometry of tokens on a grid over a volume: their places in tokens, and with the volume's faces at -1 and 1,
    (512, 3) each; voxels per token (3,); half a side in voxels (3,); the unit matrix (3, 3)."""
    places = identity(grid, device)[0].flatten(1).T                                         # (512, 3)
    sides = side_lengths(size, device).flatten()                                            # (3,)
    spacing = sides / side_lengths(grid, device).flatten()                                  # (3,)
    places_norm = (places * spacing - (sides - 1) / 2) / (sides / 2)                        # the first token at voxel 0
    return places, places_norm, spacing, sides / 2, torch.eye(len(sides), device=device)


class AffineMatch(nn.Module):
    """Finds where the condition's tokens are in the image, and fits one affine displacement field to that.

    Convolutions see a volume piece by piece and are slow to learn a shift, rotation or scaling of all of it. All steps
    here are closed forms, so the features learn from the loss through them:

    1. A token x of the condition c is expected at p_I(x) = sum_y softmax_y(s <c(x), I(y)> - |x - y|^2 / (2 r^2)) y,
       over all tokens y of the image I. s is the learned sharpness, r the learned reach.
    2. Its displacement is d(x) = p_I(x) - p_c(x). Its place among its own tokens is subtracted, so that equal volumes
       give exactly zero.
    3. M minimises sum_x w(x) |M^T (x, 1) - d(x)|^2 + RIDGE |M|^2, with learned trust w that sums to one.
    4. The field is limited: field / sqrt(1 + (size / limit)^2), where size is its root mean square over the volume and
       limit is LIMIT times the displacement typical of t. It is weighted by the fraction of the volume that the
       condition shows.

    The limit is for slices: features of a slice with nothing beside it differ from those of the same place in a whole
    volume. Until the network has learned that, their tokens are matched many voxels off, where mode 1 at a small t asks
    for a hundredth of a voxel. Registration sees the whole volume and is not limited.
    """

    RIDGE = 0.01  # towards no displacement, against mean squares of order one
    LIMIT = 2.0
    NO_LIMIT = 1e6  # image sides; finite, as everything in a checkpoint is

    def __init__(self, channels, width, typical_norm):
        """typical_norm: typical displacement at t = 0 .. timesteps, in image sides."""
        super().__init__()
        times = range(len(typical_norm) - 1)
        self.project = nn.Linear(channels, width, bias=False)
        self.trust = start_at_zero(nn.Linear(channels, 1))
        self.log_sharpness = nn.Parameter(torch.full((1,), math.log(10.0)))
        self.log_reach = nn.Parameter(torch.full((1,), math.log(1.5)))  # in tokens
        # Registration goes all of the way from the image to the condition, recovery the part to be undone at t.
        undone = [label_count(t) / image_count(t) for t in times] + [1.0]
        limit_norm = [self.LIMIT * typical for typical in typical_norm[:-1]] + [self.NO_LIMIT]
        self.register_buffer("share", torch.tensor(undone))      # (81,); both are named as in the checkpoints
        self.register_buffer("limit", torch.tensor(limit_norm))  # (81,), in image sides

    def features(self, tokens):
        """Unit vectors to compare tokens by, (B, 512, 1024). What all tokens have in common is subtracted first."""
        return F.normalize(self.project(tokens - tokens.mean(1, keepdim=True)), dim=-1)

    def displacements(self, image, condition, places):
        """How far each token of the condition is from its place in the image, in tokens (steps 1 and 2).

        image, condition: (B, T, C). places: (T, N). Returns: (B, T, N).
        """
        distance = (places[:, None] - places).square().sum(-1)                              # (512, 512)
        log_nearness = distance / (-2 * torch.exp(2 * self.log_reach))                      # (512, 512)
        if accelerated(image):  # both at once, in half as many operations
            key, query = self.features(torch.cat([image, condition])).chunk(2)              # (B, 512, 1024) each
        else:
            query, key = self.features(condition), self.features(image)                     # (B, 512, 1024) each
        sharpness = self.log_sharpness.exp()                                                # (1,)

        def expected_place(keys):
            likeness = sharpness * query @ keys.transpose(1, 2)                             # (B, 512, 512)
            return (likeness + log_nearness).softmax(-1) @ places                           # (B, 512, 3)

        return expected_place(key) - expected_place(query)                                  # (B, 512, 3)

    def fit(self, places_norm, displacement, trust):
        """The affine map that fits the displacements best (step 3): weighted least squares with a ridge.

        M = (X^T W X + RIDGE)^-1 X^T W d.
        places_norm: (T, N). displacement: (B, T, N) in voxels. trust: (B, T, 1). Returns: (B, N + 1, N) in voxels.
        """
        x = F.pad(places_norm, (0, 1), value=1.0)                                           # (512, 4)
        weighted = (x * trust / trust.sum(1, keepdim=True)).transpose(1, 2)                 # (B, 4, 512)
        gram = weighted @ x + self.RIDGE * torch.eye(x.shape[1], device=x.device)           # (B, 4, 4)
        solve = SolvePositive.apply if accelerated(gram) else torch.linalg.solve
        return solve(gram, weighted @ displacement)                                         # (B, 4, 3)

    def limited(self, field, shown_fraction, t):
        """The field, limited by t and weighted by what the condition shows (step 4)."""
        sides = side_lengths(field.shape[2:], field.device)                                 # (1, 3, 1^3)
        mean_square_norm = (field / sides).square().flatten(1).mean(1)                      # (B,)
        factor = shown_fraction * (1 + mean_square_norm / self.limit[t] ** 2).rsqrt()       # (B,)
        return field * append_dims(factor, field)                                           # (B, 3, 128^3)

    def forward(self, image, condition, shown_fraction, t, size):
        """image, condition: bottleneck features (B, C, *grid), zero where dropped. t: (B,). size: N voxels.

        shown_fraction: (B,), how much of the volume the condition shows; 0 where it is dropped.
        Returns: displacement (B, N, *size) in voxels.
        """
        with torch.autocast(image.device.type, enabled=False):
            grid = condition.shape[2:]                                                      # 8^3
            image = image.float().flatten(2).transpose(1, 2)                                # (B, 512, 256)
            condition = condition.float().flatten(2).transpose(1, 2)                        # (B, 512, 256)
            places, places_norm, spacing, half, one = constant(places_of_tokens, tuple(grid), tuple(size),
                                                               device=image.device)
            displacement = self.displacements(image, condition, places)                     # (B, 512, 3)
            trust = F.softplus(self.trust(condition))                                       # (B, 512, 1)
            matrix = self.fit(places_norm, displacement * spacing, trust)                   # (B, 4, 3)
            matrix = (matrix * self.share[t].view(-1, 1, 1)).transpose(1, 2)                # (B, 3, 4)
            linear, shift = matrix[:, :, :-1], matrix[:, :, -1:]                            # (B, 3, 3), (B, 3, 1)
            # From normalised places to voxels, and from displacements to the map itself.
            linear = linear / half + one                                                    # (B, 3, 3)
            field = affine_field(torch.cat([linear, shift], dim=2), size)                   # (B, 3, 128^3)
            return self.limited(field, shown_fraction, t)                                   # (B, 3, 128^3)


def shifted_views(padded, size):
    """Views (B, *size, C) of `padded`, (B, *(size + 2), C): one for each of the 3^N neighbours of a voxel."""
    for offset in itertools.product(range(3), repeat=len(size)):
        yield padded[(slice(None), *[slice(i, i + n) for i, n in zip(offset, size)])]


class NeighbourProducts(torch.autograd.Function):
    """Scalar products y_k(x) = <f(x), g(x + k)> of each voxel's features with those of its 3^N neighbours k.

    Autograd would write a whole gradient of g for each of the 3^N views and then add them up. Here each view adds its
    part in place, which takes less than half the time.
    """

    @staticmethod
    def forward(ctx, f, padded):
        """f: (B, *size, C). padded: g with a border of one voxel, (B, *(size + 2), C). Returns: (B, 3^N, *size)."""
        ctx.save_for_backward(f, padded)
        products = [(f * view).sum(-1) for view in shifted_views(padded, f.shape[1:-1])]    # 27 times (B, 64^3)
        return torch.stack(products, dim=1)                                                 # (B, 27, 64^3)

    @staticmethod
    def backward(ctx, grad):
        """df(x) = sum_k dy_k(x) g(x + k), dg(x + k) += dy_k(x) f(x)."""
        f, padded = ctx.saved_tensors
        grad_f, grad_padded = torch.zeros_like(f), torch.zeros_like(padded)
        size = f.shape[1:-1]
        views = zip(shifted_views(padded, size), shifted_views(grad_padded, size), grad.unsqueeze(-1).unbind(1))
        for view, grad_view, grad_product in views:
            grad_f.addcmul_(view, grad_product)
            grad_view.addcmul_(f, grad_product)
        return grad_f, grad_padded


class CorrelationLayer(nn.Module):
    """Correlates each voxel's features with the condition's at the same place and at its neighbours.

    y_k(x) = sharpness x (cos(f(x), g(x + k)) - mean over k), a cost volume as in FlowNet (Dosovitskiy et al., ICCV
    2015) and PWC-Net (Sun et al., CVPR 2018). Without it, convolutions would have to learn to compare before they could
    measure a displacement. It reaches one voxel of its level: the coarser levels bring together what is further apart,
    and the next pass measures what is left.
    """

    WIDTH = 16  # channels that are compared

    def __init__(self, dims, channels):
        super().__init__()
        # No bias: a zeroed condition gives zero correlation.
        self.project = conv(dims, channels, self.WIDTH, kernel_size=1, bias=False)
        self.sharpness = nn.Parameter(torch.full((1,), 10.0))

    def features(self, x):
        """Unit vectors to compare, float32 and channels last."""
        kernels = kernels_for(x)
        if kernels:
            return kernels.UnitFeatures.apply(x.movedim(1, -1), self.project.weight.flatten(1), 1e-3)   # (B, 64^3, 16)
        if accelerated(x):
            return F.normalize(product_over_channels(x.float(), self.project.weight), dim=-1, eps=1e-3)
        return F.normalize(self.project(x.float()), dim=1, eps=1e-3).movedim(1, -1)         # (B, 64^3, 16)

    def forward(self, image, condition):
        """image, condition: (B, C, *size). Returns: (B, 3^N, *size). Shapes are those of the level of 64^3."""
        size, dtype = image.shape[2:], image.dtype
        with torch.autocast(image.device.type, enabled=False):  # bf16 rounds away how neighbours' cosines differ
            image = self.features(image)                                                    # (B, 64^3, 16)
            condition = self.features(condition)                                            # (B, 64^3, 16)
            kernels = kernels_for(image)
            if kernels and 3 ** len(size) * size.numel() < 2 ** 31:  # it counts in 32 bits
                return kernels.NeighbourContrast.apply(image, condition, self.sharpness, dtype)     # (B, 27, 64^3)
            condition = F.pad(condition, [0, 0] + [1, 1] * len(size))                       # (B, 66^3, 16)
            cosines = NeighbourProducts.apply(image, condition)                             # (B, 27, 64^3)
            cosines = cosines - cosines.mean(1, keepdim=True)                               # (B, 27, 64^3)
            return (self.sharpness * cosines).to(dtype)                                     # (B, 27, 64^3)


class OM_net(nn.Module):
    """The recursive network: one encoder for image and condition, mutual attention, one decoder.

    The image enters the encoder as a condition that shows everything: values, and a mask of ones. With the same weights
    for both, equal anatomy has equal features from the first step on, and only places remain to be compared.

    field = affine field + FieldScale(coarse head of the bottleneck + heads of the decoder's levels) + learned steps.

    With structures, all that sees a volume also sees, as further channels, how much of each structure a segmenter finds
    in each voxel. These channels carry no gradient: the segmenter learns from label maps alone.
    """

    def __init__(self, *, dims, image_channels, structures, channels, timesteps, typical_norm, conditioned, rec_num,
                 detach, field_stride, attention_width, attention_depth, attention_heads, affine_match, local_match,
                 descents, fine_descents, embedding_width, use_checkpoint):
        """See `network_arguments` in Diffusion/networks.py for what each of them means."""
        super().__init__()
        time_width = 4 * channels[0]
        self.dims, self.conditioned, self.rec_num, self.detach = dims, conditioned, rec_num, detach
        self.stride = field_stride
        self.multiple = 2 ** (len(channels) - 1)  # of which padded sides are multiples
        self.time = TimeEmbedding(timesteps, time_width)
        self.field_scale = FieldScale(typical_norm)
        self.image_channels, self.segmenter = image_channels, None
        if structures:
            self.segmenter = Segmenter(dims, image_channels, structures, channels, use_checkpoint)
        self.encoder = Encoder(dims, image_channels + structures + 1, channels, time_width, use_checkpoint)
        self.attention = MutualAttention(channels[-1], attention_width, attention_depth, attention_heads, time_width)
        self.embedding = nn.Linear(attention_width, embedding_width)
        self.match = AffineMatch(channels[-1], attention_width, typical_norm) if affine_match and conditioned else None

        # The decoder's levels, coarse to fine, and its heads. Heads start at zero: a new network moves nothing.
        levels = range(len(channels) - 2, -1 if self.stride == 1 else 0, -1)                # 3, 2, 1, 0
        sources = 3 if conditioned else 2                            # decoder, image and, with a condition, condition
        correlate = local_match and conditioned
        self.up = nn.ModuleList(self.make_upsampling(channels[i + 1], channels[i]) for i in levels)
        self.join = nn.ModuleList(Join(dims, sources * channels[i] + correlate * 3 ** dims, channels[i], time_width)
                                  for i in levels)
        self.local = self.middle = None
        if correlate:
            self.local = nn.ModuleList(CorrelationLayer(dims, channels[i]) for i in levels)
            self.middle = nn.ModuleList(start_at_zero(conv(dims, channels[i], dims)) for i in levels[:-1])
        self.fine = start_at_zero(conv(dims, channels[levels[-1]], dims))
        self.coarse = self.make_coarse_head(channels[-1])

        self.descent = self.fine_descent = None
        groups = [slice(0, image_channels)]
        if structures:
            groups.append(slice(image_channels, image_channels + structures))
        if conditioned and descents:
            self.descent = LearnedDescent(dims, channels[field_stride - 1], WIDTH, groups, descents, field_stride)
        if conditioned and fine_descents:
            self.fine_descent = LearnedDescent(dims, channels[field_stride - 1], FINE_WIDTH, groups, fine_descents, 1)

    def make_upsampling(self, in_channels, out_channels):
        """From one level of the decoder to the next finer one."""
        return UpsampleConv(self.dims, in_channels, out_channels, smooth=False)

    def make_coarse_head(self, in_channels):
        """From the bottleneck to a field on the output grid."""
        head = UpsampleConv(self.dims, in_channels, self.dims)
        start_at_zero(head.conv)
        return head

    def with_structures(self, image, condition, trained):
        """Image and condition with the shares of the structures in them, and the logits of those.

        Volumes that have these shares already, see `segmented` of Diffusion/predict.py, stay as they are.
        Logits (B, K + 1, *spatial): of the image, then, in a second half of the batch, of the condition, if there is
        one. trained: whether these carry a gradient.
        """
        if image.shape[1] != self.image_channels:
            return image, condition, None
        count, volumes = len(image), [image]
        if condition is not None:
            values, mask = condition[:, :-1], condition[:, -1:]                             # (B, 1, 128^3) each
            volumes.append(values)
        with torch.set_grad_enabled(trained and torch.is_grad_enabled()):
            logits = self.segmenter(torch.cat(volumes))                                     # (2B, K + 1, 128^3)
        shares = structure_shares(logits.detach())                                          # (2B, K, 128^3)
        image = torch.cat([image, shares[:count]], dim=1)                                   # (B, 1 + K, 128^3)
        if condition is not None:
            condition = torch.cat([values, mask * shares[count:], mask], dim=1)             # (B, 2 + K, 128^3)
        return image, condition, logits

    def fully_shown(self, image):
        """An image as a condition that shows all of it: values and a mask of ones, 0 where both are padded."""
        return pad_to_multiple(make_condition(image, "volume"), self.multiple)              # (B, 2, 128^3)

    def shown_fraction(self, image, condition, use_condition):
        """How much of the volume each sample's condition shows: (B,), 0 where there is none or it is dropped."""
        if condition is None:
            return image.new_zeros(len(image))                                              # (B,)
        fraction = condition[:, -1].flatten(1).mean(1)                                      # (B,)
        return fraction if use_condition is None else fraction * use_condition              # (B,)

    def encode(self, image, condition, use_condition, time, together):
        """Features at every level, of the image and of the condition (None without one).

        together: encode both in one batch, which takes less time than one after the other. Otherwise only the condition
        is encoded, and the image's features are None: the passes encode it themselves.
        use_condition: (B,) bool; where it is False, the condition's features are zero.
        """
        image = self.fully_shown(image)                                                     # (B, 2, 128^3)
        if not self.conditioned or condition is None:
            return self.encoder(image, time), None                                          # (B, 16, 128^3), ...
        condition = pad_to_multiple(condition, self.multiple)                               # (B, 2, 128^3)
        if together:
            both = self.encoder(torch.cat([image, condition]), torch.cat([time, time]))     # (2B, 16, 128^3), ...
            features, encoded = zip(*[level.chunk(2) for level in both])                    # (B, 16, 128^3), ...
        else:
            features, encoded = None, self.encoder(condition, time)                         # (B, 16, 128^3), ...
        if use_condition is not None:
            encoded = [torch.where(append_dims(use_condition, level), level, level.new_zeros(()))
                       for level in encoded]                                                # (B, 16, 128^3), ...
        return features, encoded

    def align(self, skip, field_norm, affine, t, image_size, padded_size):
        """Features of the image at a level, warped by the field so far: only the remaining displacement is measured.

        PWC-Net warps the features of every level in the same way. Shapes are those of the level of 64^3.
        """
        size = skip.shape[2:]                                                               # 64^3
        field_norm = resize_field(field_norm, size, align="cells")                          # (B, 3, 64^3)
        field = self.field_scale(field_norm, t, image_size)                                 # (B, 3, 64^3)
        if affine is not None:
            field = field + resize_field(affine, size, align="cells")                       # (B, 3, 64^3)
        # The field is in voxels of the full grid, `warp` takes voxels of this level.
        field = field * (size[0] / padded_size[0])                                          # (B, 3, 64^3)
        kernels = kernels_for(skip)
        if kernels and kernels.warps(skip):
            return kernels.Warp.apply(skip.movedim(1, -1).contiguous(), field).movedim(-1, 1)       # (B, 32, 64^3)
        return warp(skip, field, padding="border").to(skip.dtype)                           # (B, 32, 64^3)

    def descent_target(self, image, condition, use_condition):
        """What the learned steps compare the image with; None without such steps."""
        descent = self.descent or self.fine_descent
        if descent is None:
            return None
        if condition is None:  # as one that is hidden: its steps have no force, but a context
            condition = image.new_zeros(len(image), image.shape[1] + 1, *image.shape[2:])
        with torch.no_grad(), torch.autocast(condition.device.type, enabled=False):
            return target_of(pad_to_multiple(condition, self.multiple).float(), use_condition, descent.groups)

    def descend(self, descent, field, affine, x, image, target):
        """The field of a pass after the learned steps of `descent` (Diffusion/descent.py), on their grid.

        field: (B, N, *grid), in voxels of the full grid on any grid over the volume. affine: (B, N, *spatial), added to
        it when the image is warped, or None. x: the decoder's last features.
        """
        image, size = pad_to_multiple(image, self.multiple), target[0].shape[2:]            # (B, 1, 128^3)
        grid = [n // descent.stride for n in size]
        context = descent.context(x, grid)                                                  # (B, 16, 128^3)
        field = resize_field(field, grid, align="cells")                                    # (B, 3, 128^3)
        for _ in range(descent.count):
            with torch.no_grad(), torch.autocast(image.device.type, enabled=False):
                so_far = resize_field(field, size, align="cells")                           # (B, 3, 128^3)
                so_far = so_far if affine is None else so_far + affine                      # (B, 3, 128^3)
                force = descent.force(image, so_far, target)                                # (B, 3, 128^3)
            step = checkpointed(self.encoder.use_checkpoint, descent, context, force)       # (B, 3, 128^3)
            field = field + step                                                            # (B, 3, 128^3)
        return field

    def one_pass(self, weights, image, features, condition, shown_fraction, t, time, target):
        """The field of one pass, in voxels. features, condition: of the encoder; condition is None without one.

        weights: of `block_weights`. target: of `descent_target`.
        """
        image_size, padded_size = image.shape[2:], tuple(features[0].shape[2:])
        if self.conditioned and condition is None:
            condition = [torch.zeros_like(level) for level in features]                     # (B, 16, 128^3), ...
        x = self.attention(features[-1], condition[-1] if condition else None, time, weights)    # (B, 256, 8^3)
        field_norm = self.coarse(x, features[self.stride - 1].shape[2:]).float()            # (B, 3, 128^3)
        affine = None
        if self.match is not None:
            affine = self.match(features[-1], condition[-1], shown_fraction, t, padded_size)    # (B, 3, 128^3)
        time = modulations([join.block for join in self.join], time)
        for index, (up, join) in enumerate(zip(self.up, self.join)):                        # 16^3, 32^3, 64^3, 128^3
            skip = features[-2 - index]                                                     # (B, 128, 16^3), ...
            if self.local is not None:
                skip = self.align(skip, field_norm, affine, t, image_size, padded_size)     # (B, 128, 16^3), ...
            x = up(x, skip.shape[2:])                                                       # (B, 128, 16^3), ...
            parts = [x, skip]                                                               # (B, 128, 16^3) each, ...
            if self.conditioned:
                parts.append(condition[-2 - index])                                         # (B, 128, 16^3), ...
            if self.local is not None:
                parts.append(checkpointed(self.encoder.use_checkpoint, self.local[index], skip,
                                          condition[-2 - index]))                           # (B, 27, 16^3), ...
            x = join(parts, time)                                                           # (B, 128, 16^3), ...
            if self.local is not None and index < len(self.middle):
                update = self.middle[index](x).float()                                      # (B, 3, 16^3), ...
                field_norm = field_norm + resize_field(update, field_norm.shape[2:], align="cells")  # (B, 3, 128^3)
        field_norm = self.fine(x).float() + field_norm                                      # (B, 3, 128^3)
        field = self.field_scale(field_norm, t, image_size)                                 # (B, 3, 128^3)
        if target is not None:
            for descent in filter(None, (self.descent, self.fine_descent)):
                field = self.descend(descent, field, affine, x, image, target)              # (B, 3, 128^3)
        # With stride 2 the field may be sampled at 64^3 until here; its unit is voxels of the full grid in any case.
        field = resize_field(field, padded_size, align="cells")                             # (B, 3, 128^3)
        field = field if affine is None else field + affine                                 # (B, 3, 128^3)
        return crop(field, image_size)                                                      # (B, 3, 128^3)

    def forward(self, image, t, condition=None, use_condition=None, embed=False, segment=False):
        """As every network, see Diffusion/networks.py."""
        if segment == "alone":
            return self.segmenter(image)                                                    # (B, K + 1, 128^3)
        if self.segmenter is not None:
            image, condition, logits = self.with_structures(image, condition, segment)
        # Embeddings use t = 0; otherwise pairs could be matched by time instead of subject.
        time = self.time(torch.zeros_like(t) if embed else t)                               # (B, 64)
        # A first pass without gradient encodes the image itself; the condition, encoded once, keeps its gradient.
        together = embed or not (self.detach and self.rec_num > 1)
        features, encoded = self.encode(image, condition, use_condition, time, together)    # (B, 16, 128^3), ...
        if embed:
            weights, = self.attention.block_weights(1, image)
            coarsest = [levels[-1] for levels in (features, encoded) if levels]             # (B, 256, 8^3) each
            pooled = self.attention.pooled(coarsest, weights)                               # (B, 1024) each
            return [unit_embedding(self.embedding, pooled[kind]) for kind in (0, -1)]       # (B, 128) each
        shown_fraction = self.shown_fraction(image, condition, use_condition)               # (B,)
        target = self.descent_target(image, condition, use_condition)
        weights = iter(self.attention.block_weights(self.rec_num, image))

        def one_pass(warped):
            if warped is image and features:
                of_warped = features                                                        # (B, 16, 128^3), ...
            else:
                of_warped = self.encoder(self.fully_shown(warped), time)                    # (B, 16, 128^3), ...
            return self.one_pass(next(weights), warped, of_warped, encoded, shown_fraction, t, time, target)

        field = recurse(one_pass, image, self.rec_num, self.detach)                         # (B, 3, 128^3)
        return (field, logits) if segment else field
