"""The equations of the attention backends, one token at a time; slow on purpose.

Everything is a loop over images, heads, queries and keys; only sums over channels are vector operations.
Inputs are float64 tensors and `params` maps the modules' parameter names to tensors, so autograd gives the
reference gradients.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Params = Mapping[str, Tensor]
Grid = tuple[int, int]


def linear(token: Tensor, params: Params, name: str) -> Tensor:
    """y_o = sum_i W_oi x_i + b_o for one token."""
    return (params[f"{name}.weight"] * token).sum(dim=1) + params[f"{name}.bias"]


def query_key_value(tokens: Tensor, params: Params) -> list[list[Tensor]]:
    """The lists of q, k and v, each of width C, of the tokens (N, C) of one image."""
    width = tokens.shape[1]
    fused = [linear(token, params, "qkv") for token in tokens]
    return [[each[part * width : (part + 1) * width] for each in fused] for part in range(3)]


def head(vectors: Sequence[Tensor], index: int, size: int) -> list[Tensor]:
    """Channels index*size to (index+1)*size of every vector."""
    return [vector[index * size : (index + 1) * size] for vector in vectors]


def softmax(scores: Sequence[Tensor]) -> list[Tensor]:
    """exp(s_j) / sum_j exp(s_j)."""
    exponentials = [torch.exp(score) for score in scores]
    total = exponentials[0]
    for each in exponentials[1:]:
        total = total + each
    return [each / total for each in exponentials]


def attention_map(query: Tensor, keys: Sequence[Tensor]) -> list[Tensor]:
    """softmax_j(q . k_j / sqrt(d)), one row of the map."""
    return softmax([(query * key).sum() / math.sqrt(query.shape[0]) for key in keys])


def weighted_sum(weights: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """sum_j w_j v_j."""
    out = torch.zeros_like(values[0])
    for weight, value in zip(weights, values, strict=True):
        out = out + weight * value
    return out


def rms_norm(vector: Tensor, gain: Tensor) -> Tensor:
    """gain_c x_c / sqrt(mean(x^2) + 1e-5)."""
    return gain * vector / torch.sqrt((vector * vector).sum() / vector.shape[0] + 1e-5)


def start_lambda(layer_index: int) -> float:
    """lambda_init = 0.8 - 0.6 exp(-0.3 l), layers l from 0."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer_index)


def lambda_weight(params: Params, name: str, layer_index: int) -> Tensor:
    """exp(lq1 . lk1) - exp(lq2 . lk2) + lambda_init."""
    first = torch.exp((params[f"{name}.q1"] * params[f"{name}.k1"]).sum())
    second = torch.exp((params[f"{name}.q2"] * params[f"{name}.k2"]).sum())
    return first - second + start_lambda(layer_index)


def pool(vectors: Sequence[Tensor], grid: Grid, contrast_grid: Grid) -> list[Tensor]:
    """Means over windows floor(i H / h) <= row < ceil((i+1) H / h), columns alike; row by row."""
    (height, width), (pooled_height, pooled_width) = grid, contrast_grid
    means = []
    for i in range(pooled_height):
        rows = range(math.floor(i * height / pooled_height), math.ceil((i + 1) * height / pooled_height))
        for j in range(pooled_width):
            columns = range(math.floor(j * width / pooled_width), math.ceil((j + 1) * width / pooled_width))
            total = torch.zeros_like(vectors[0])
            for row in rows:
                for column in columns:
                    total = total + vectors[row * width + column]
            means.append(total / (len(rows) * len(columns)))
    return means


def depthwise_convolution(vectors: Sequence[Tensor], grid: Grid, params: Params) -> list[Tensor]:
    """y[r, c] = b + sum over the 3x3 taps of w[a, b] x[r + a - 1, c + b - 1], zero outside; per channel."""
    height, width = grid
    weight, bias = params["value_conv.weight"], params["value_conv.bias"]
    out = []
    for row in range(height):
        for column in range(width):
            total = bias
            for a in range(3):
                for b in range(3):
                    r, c = row + a - 1, column + b - 1
                    if 0 <= r < height and 0 <= c < width:
                        total = total + weight[:, 0, a, b] * vectors[r * width + c]
            out.append(total)
    return out


def project(
    heads: Sequence[Sequence[Tensor]], values: Sequence[Tensor], grid: Grid, value_conv: bool, params: Params
) -> Tensor:
    """Concatenates the heads of each token, adds the convolution of v if asked, and projects."""
    tokens = [torch.cat([one_head[n] for one_head in heads]) for n in range(len(values))]
    if value_conv:
        tokens = [a + b for a, b in zip(tokens, depthwise_convolution(values, grid, params), strict=True)]
    return torch.stack([linear(token, params, "proj") for token in tokens])


def mhsa(x: Tensor, params: Params, num_heads: int, grid: Grid, *, value_conv: bool) -> Tensor:
    """Softmax attention of x (B, N, C)."""
    size = x.shape[2] // num_heads
    images = []
    for tokens in x:
        q, k, v = query_key_value(tokens, params)
        heads = []
        for h in range(num_heads):
            keys, values = head(k, h, size), head(v, h, size)
            heads.append([weighted_sum(attention_map(query, keys), values) for query in head(q, h, size)])
        images.append(project(heads, v, grid, value_conv, params))
    return torch.stack(images)


def differential(
    x: Tensor, params: Params, num_heads: int, grid: Grid, layer_index: int, *, value_conv: bool
) -> Tensor:
    """Differential attention (arXiv 2410.05258) with num_heads / 2 heads."""
    size = x.shape[2] // num_heads
    weight = lambda_weight(params, "lambda_weight", layer_index)
    scale = 1 - start_lambda(layer_index)
    images = []
    for tokens in x:
        q, k, v = query_key_value(tokens, params)
        heads = []
        for h in range(num_heads // 2):
            q1, q2 = head(q, 2 * h, size), head(q, 2 * h + 1, size)
            k1, k2 = head(k, 2 * h, size), head(k, 2 * h + 1, size)
            values = head(v, h, 2 * size)
            outputs = []
            for first_query, second_query in zip(q1, q2, strict=True):
                first, second = attention_map(first_query, k1), attention_map(second_query, k2)
                difference = [a - weight * b for a, b in zip(first, second, strict=True)]
                outputs.append(scale * rms_norm(weighted_sum(difference, values), params["norm.weight"]))
            heads.append(outputs)
        images.append(project(heads, v, grid, value_conv, params))
    return torch.stack(images)


def stream(content: str, pooled: Sequence[Tensor], embedding: Tensor | None) -> list[Tensor]:
    """t+ or t-, of width C: the pooled queries, the learned tokens, or their sum."""
    if content == "pool":
        return list(pooled)
    assert embedding is not None
    if content == "embedding":
        return list(embedding)
    return [a + b for a, b in zip(pooled, embedding, strict=True)]


def vca(
    x: Tensor,
    params: Params,
    num_heads: int,
    grid: Grid,
    layer_index: int,
    *,
    contrast_grid: Grid | None,
    stage2_softmax: str,
    value_conv: bool,
    stage1_differential: bool,
    stage2_differential: bool,
    positive_stream: str,
    negative_stream: str,
) -> Tensor:
    """Visual-Contrast Attention (arXiv 2511.00833)."""
    if contrast_grid is None:
        contrast_grid = (min(8, max(1, grid[0] // 2)), min(8, max(1, grid[1] // 2)))
    size = x.shape[2] // num_heads
    scale = 1 - start_lambda(layer_index)
    images = []
    for tokens in x:
        q, k, v = query_key_value(tokens, params)
        pooled = pool(q, grid, contrast_grid)
        positive = stream(positive_stream, pooled, params.get("positive_embedding"))
        negative = []
        if stage1_differential or stage2_differential:
            negative = stream(negative_stream, pooled, params.get("negative_embedding"))
        heads = []
        for h in range(num_heads):
            queries, keys, values = head(q, h, size), head(k, h, size), head(v, h, size)
            positives, negatives = head(positive, h, size), head(negative, h, size)

            contrast_values = []
            for m in range(len(positives)):
                contrast = weighted_sum(attention_map(positives[m], keys), values)
                if stage1_differential:
                    subtracted = weighted_sum(attention_map(negatives[m], keys), values)
                    contrast = contrast - lambda_weight(params, "lambda1", layer_index) * subtracted
                contrast_values.append(scale * rms_norm(contrast, params["norm1.weight"]))

            outputs = []
            for query in queries:
                if not stage2_differential:
                    weights = attention_map(query, positives)
                else:
                    if stage2_softmax == "joint":
                        both = attention_map(query, positives + negatives)
                        first, second = both[: len(positives)], both[len(positives) :]
                    else:
                        first, second = attention_map(query, positives), attention_map(query, negatives)
                    weight = lambda_weight(params, "lambda2", layer_index)
                    weights = [a - weight * b for a, b in zip(first, second, strict=True)]
                outputs.append(scale * rms_norm(weighted_sum(weights, contrast_values), params["norm2.weight"]))
            heads.append(outputs)
        images.append(project(heads, v, grid, value_conv, params))
    return torch.stack(images)
