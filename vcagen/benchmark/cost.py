"""What an attention costs, counted on tensors without data: parameters, multiply-adds and activation memory."""

import argparse
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from tqdm import tqdm

from vcagen.attention import AttentionConfig, DifferentialConfig, MHSAConfig, VCAConfig, build_attention
from vcagen.attention.vca import resolve_contrast_grid
from vcagen.benchmark.measure import markdown_table
from vcagen.files import require_file_name, write_json, write_text
from vcagen.models.transformer import DiffusionTransformer
from vcagen.models.variants import SHAPES

# The first is what the others are compared with.
ATTENTIONS: dict[str, AttentionConfig] = {
    "softmax": MHSAConfig(),
    "softmax + conv": MHSAConfig(value_conv=True),
    "VCA": VCAConfig(),
    "VCA, no conv": VCAConfig(value_conv=False),
    "VCA, separate": VCAConfig(stage2_softmax="separate"),
    "differential": DifferentialConfig(),
}
MODELS = tuple(f"{shape}/{patch}" for patch in (2, 4, 8) for shape in ("S", "B", "L", "XL"))
PIXELS = (256, 512, 1024)
PIXELS_PER_LATENT = 8
STEP_OVER_FORWARD = 3  # the backward pass has two products of matrices for each one of the forward pass

INTRODUCTION = """\
# What each attention costs

Written by `python -m vcagen.benchmark cost --markdown docs/cost.md`. Everything is counted and nothing is timed, so
it does not depend on the machine.

One image, one forward pass of DiT or SiT, whose costs are the same; in brackets: against softmax attention. N tokens
and n contrast tokens: half the token grid a side, at most 8 x 8 (DeiT: the released 7 x 7). `VCA` is the default,
with one softmax over both streams in stage II and the depth-wise 3x3 convolution of v; `separate` has two softmaxes;
`conv` is that convolution."""
ON_MULTIPLY_ADDS = """\
Half the flops of torch's counter, with attention as plain matrix products, because it counts nothing inside fused
kernels. Softmax, norms and pooling are not counted. Where n is N / 4, VCA without its convolution has exactly what
softmax attention has, and less where n is smaller; the convolution adds 9 N C in each layer of width C. Differential
attention has 4 N^2 C where its equations have 3 N^2 C: its queries and keys are widened with zeros to the width of
its values, which fused kernels want."""
ON_MEMORY = """\
What a forward pass in float32 keeps for the backward pass, without checkpointing: each piece of memory once, weights
left out, with the kernels that torch chooses on a CPU. Fused attention keeps no maps."""

# DeiT (arXiv 2012.12877): 14 x 14 patches, 12 layers, 7 x 7 contrast tokens in the authors' released module.
DEIT_GRID, DEIT_CONTRAST_GRID, DEIT_DEPTH = (14, 14), (7, 7), 12
DEIT_ATTENTIONS = ("softmax", "softmax + conv", "VCA", "VCA, no conv")  # DeiT-Tiny's 3 heads make no pairs


@dataclass(frozen=True)
class DeiT:
    """Width and heads of a DeiT, its parameters in millions (arXiv 2012.12877), and what arXiv 2511.00833 claims."""

    hidden_size: int
    num_heads: int
    parameters: float
    claim: str


DEITS = {
    "DeiT-Tiny": DeiT(192, 3, 5.72, "5.7 M -> 6.0 M, less than 0.3 M more"),
    "DeiT-Small": DeiT(384, 6, 22.05, "22.1 M -> 22.6 M"),
}


@dataclass(frozen=True)
class Cost:
    """Of one module and one sample.

    Attributes:
        parameters: scalars, frozen ones included.
        multiply_adds: of a forward pass; convolutions and products of matrices, not softmax, norms and pooling.
        activation_bytes: float32 tensors that a forward pass keeps for the backward pass, weights left out.
    """

    parameters: int
    multiply_adds: int
    activation_bytes: int


@dataclass(frozen=True)
class Row:
    """The cost of one attention in one place.

    Attributes:
        model: `S/2`, or `DeiT-Tiny`, of which the attention layers alone are counted.
        pixels: side of the image.
        tokens: N.
        contrast_tokens: n of VCA there.
        attention: key of `ATTENTIONS`.
    """

    model: str
    pixels: int
    tokens: int
    contrast_tokens: int
    attention: str
    cost: Cost


def cost_of(build: Callable[[], nn.Module], build_inputs: Callable[[], tuple[torch.Tensor, ...]]) -> Cost:
    """The cost of the module that `build` returns for the inputs of one sample; neither takes memory.

    Multiply-adds are half of what torch's counter finds; it counts nothing of fused attention kernels, so they are
    counted under `SDPBackend.MATH`. Memory is that of the kernels that torch chooses on a CPU.
    """
    with FakeTensorMode():
        module, inputs = build(), build_inputs()
        counter = FlopCounterMode(display=False)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
            module(*inputs)
        kept: dict[StorageWeakRef, torch.UntypedStorage] = {}
        weights = {StorageWeakRef(parameter.untyped_storage()) for parameter in module.parameters()}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            kept[StorageWeakRef(storage)] = storage  # held, so that no other gets its place
            return tensor

        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            module(*inputs)
        return Cost(
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            multiply_adds=counter.get_total_flops() // 2,
            activation_bytes=sum(storage.nbytes() for key, storage in kept.items() if key not in weights),
        )


def model_row(model: str, pixels: int, attention: str) -> Row:
    """The cost of a whole DiT, which is that of a SiT, such as `S/2`."""
    shape, patch = model.split("/")
    hidden_size, depth, num_heads = SHAPES[shape]
    side = pixels // PIXELS_PER_LATENT
    tokens = side // int(patch)

    def build() -> nn.Module:
        return DiffusionTransformer(
            latent_size=(side, side),
            patch_size=int(patch),
            hidden_size=hidden_size,
            depth=depth,
            num_heads=num_heads,
            attention=ATTENTIONS[attention].model_dump(mode="json"),
        )

    def inputs() -> tuple[torch.Tensor, ...]:
        return torch.zeros(1, 4, side, side), torch.zeros(1), torch.zeros(1, dtype=torch.long)

    height, width = resolve_contrast_grid(None, (tokens, tokens))
    return Row(model, pixels, tokens**2, height * width, attention, cost_of(build, inputs))


def deit_row(name: str, attention: str) -> Row:
    """The cost of a DeiT's attention layers, whose patch tokens alone are counted."""
    deit, config = DEITS[name], ATTENTIONS[attention]
    if isinstance(config, VCAConfig):
        config = config.model_copy(update={"contrast_grid": DEIT_CONTRAST_GRID})
    tokens = DEIT_GRID[0] * DEIT_GRID[1]

    def build() -> nn.Module:
        return nn.Sequential(
            *(build_attention(config, deit.hidden_size, deit.num_heads, DEIT_GRID, i) for i in range(DEIT_DEPTH))
        )

    def inputs() -> tuple[torch.Tensor, ...]:
        return (torch.zeros(1, tokens, deit.hidden_size),)

    num_contrast = DEIT_CONTRAST_GRID[0] * DEIT_CONTRAST_GRID[1]
    return Row(name, 224, tokens, num_contrast, attention, cost_of(build, inputs))


def benchmark_cost(arguments: argparse.Namespace) -> None:
    """Counts, prints tables, and writes JSON and Markdown if asked. See `python -m vcagen.benchmark cost --help`."""
    for path in (arguments.json, arguments.markdown):
        if path:
            require_file_name(path)
    deits = [deit_row(name, attention) for name in DEITS for attention in DEIT_ATTENTIONS]
    places = [(model, pixels) for model in MODELS for pixels in PIXELS]
    models = [
        model_row(model, pixels, attention)
        for model, pixels in tqdm(places, desc="counting", unit="model")
        for attention in ATTENTIONS
    ]
    text = describe(models, deits)
    print(text)
    if arguments.json:
        write_json(arguments.json, {"torch": torch.__version__, "rows": [asdict(row) for row in [*models, *deits]]})
    if arguments.markdown:
        write_text(arguments.markdown, text + "\n")


def describe(models: list[Row], deits: list[Row]) -> str:
    """The counts as Markdown: what the paper claims beside them, then a table for each quantity."""
    return "\n\n".join(
        [
            INTRODUCTION,
            "## The paper's claims",
            markdown_table(["claim", "counted"], _claims(models, deits)),
            "DeiT's own parameters are the published ones. Its attention layers are counted on patch tokens alone.",
            "## Parameters, millions",
            _quantity(models, lambda cost: cost.parameters / 1e6),
            "## Multiply-adds, billions",
            ON_MULTIPLY_ADDS,
            _quantity(models, lambda cost: cost.multiply_adds / 1e9),
            "## Activation memory, MB",
            f"{ON_MEMORY}\nCounted with torch {torch.__version__.split('+')[0]}.",
            _quantity(models, lambda cost: cost.activation_bytes / 1e6),
        ]
    )


def _claims(models: list[Row], deits: list[Row]) -> Iterable[list[str]]:
    costs = {(row.model, row.attention): row.cost for row in deits}
    for name, deit in DEITS.items():
        for attention in ("VCA", "VCA, no conv"):
            added = (costs[name, attention].parameters - costs[name, "softmax"].parameters) / 1e6
            sum_ = f"{deit.parameters:.2f} M + {added:.3f} M = {deit.parameters + added:.2f} M"
            yield [f"{name}: {deit.claim}", f"{attention}: {sum_}"]
    for attention in ("VCA", "VCA, no conv"):
        ratios = [costs[n, attention].multiply_adds / costs[n, "softmax"].multiply_adds for n in DEITS]
        shown = ", ".join(f"{ratio:.4f} ({name})" for ratio, name in zip(ratios, DEITS, strict=True))
        yield ["DeiT: no extra FLOPs", f"{attention}: attention layers have {shown} times the multiply-adds"]
    base = {(row.model, row.pixels): row.cost.multiply_adds for row in models if row.attention == "softmax"}
    for pixels in sorted({row.pixels for row in models}):
        for attention in ("VCA", "VCA, no conv"):
            rows = [row for row in models if (row.attention, row.pixels) == (attention, pixels)]
            ratios = [row.cost.multiply_adds / base[row.model, pixels] for row in rows]
            shown = f"{min(ratios):.4f} to {max(ratios):.4f}"
            yield [f"DiT at {pixels} pixels: no extra FLOPs", f"{attention}: {shown} times the multiply-adds"]


def _quantity(rows: list[Row], value: Callable[[Cost], float]) -> str:
    """A table of one quantity: a line for each model and size, a column for each attention."""
    costs = {(row.model, row.pixels, row.attention): value(row.cost) for row in rows}
    places = {(row.model, row.pixels): row for row in rows}
    lines = []
    for (model, pixels), row in places.items():
        first, *others = (costs[model, pixels, attention] for attention in ATTENTIONS)
        cells = [_digits(first), *(f"{_digits(other)} ({other / first:.3f})" for other in others)]
        lines.append([model, str(pixels), str(row.tokens), str(row.contrast_tokens), *cells])
    return markdown_table(["model", "pixels", "N", "n", *ATTENTIONS], lines)


def _digits(value: float) -> str:
    """Four digits, trailing zeros kept."""
    return f"{value:#.4g}".removesuffix(".") if value < 1e4 else f"{value:.0f}"
