"""Models that are not chains of layers, as one would write them in PyTorch.

The benchmarks use them at their usual size, tests/modelstack/test_engines.py made small.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    """A residual block with group norm."""

    def __init__(self, inputs, outputs, stride, groups):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(groups, outputs), nn.GroupNorm(groups, outputs)
        same = stride == 1 and inputs == outputs
        self.short = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.short(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images: 3x3 stem without pooling, group norm."""

    def __init__(self, classes, width=64, groups=32):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.norm = nn.GroupNorm(groups, width)
        widths = [width * 2 ** (i // 2) for i in range(8)]
        strides = (1, 1, 2, 1, 2, 1, 2, 1)
        pairs = zip([width, *widths], widths, strides, strict=False)
        self.blocks = nn.Sequential(*(Block(*sizes, groups) for sizes in pairs))
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x):
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Encoder(nn.Module):
    """One block of a transformer."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, -1).unbind(2)
        mixed = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)))
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        return x + self.mlp(self.norm2(x))


class ViTTiny(nn.Module):
    """ViT-tiny (dim 192, 12 blocks, 3 heads) on patches of 4 x 4 pixels."""

    def __init__(self, classes, dim=192, depth=12, heads=3, side=32):
        super().__init__()
        self.patches = nn.Conv2d(3, dim, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.place = nn.Parameter(0.02 * torch.randn(1, (side // 4) ** 2 + 1, dim))
        self.blocks = nn.Sequential(*(Encoder(dim, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.norm(self.blocks(x))[:, 0])


MODELS = {"resnet18": ResNet18, "vit-tiny": ViTTiny}
