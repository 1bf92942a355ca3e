"""Models of the benchmarks that are not chains of layers, as one would write them in PyTorch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class CharLSTM(nn.Module):
    """Embedding 8, LSTM 256, next character."""

    def __init__(self, classes):
        super().__init__()
        self.embedding = nn.Embedding(classes, 8)
        self.lstm = nn.LSTM(8, 256, batch_first=True)
        self.output = nn.Linear(256, classes)

    def forward(self, characters):
        outputs, _ = self.lstm(self.embedding(characters))
        return self.output(outputs[:, -1])


class Block(nn.Module):
    """A residual block with group norm."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.GroupNorm(32, outputs), nn.GroupNorm(32, outputs)
        same = stride == 1 and inputs == outputs
        self.short = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(out)) + self.short(x))


class ResNet18(nn.Module):
    """ResNet-18 for small images: 3x3 stem without pooling, group norm."""

    def __init__(self, classes):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.GroupNorm(32, 64)
        widths = (64, 64, 128, 128, 256, 256, 512, 512)
        strides = (1, 1, 2, 1, 2, 1, 2, 1)
        inputs = (64, *widths[:-1])
        self.blocks = nn.Sequential(*map(Block, inputs, widths, strides))
        self.head = nn.Linear(512, classes)

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

    def __init__(self, classes):
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 4, 4)
        self.token = nn.Parameter(torch.zeros(1, 1, 192))
        self.place = nn.Parameter(0.02 * torch.randn(1, 65, 192))
        self.blocks = nn.Sequential(*(Encoder(192, 3) for _ in range(12)))
        self.norm, self.head = nn.LayerNorm(192), nn.Linear(192, classes)

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.place
        return self.head(self.norm(self.blocks(x))[:, 0])


MODELS = {"char-lstm": CharLSTM, "resnet18": ResNet18, "vit-tiny": ViTTiny}
