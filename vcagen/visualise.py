"""What a model's attention looks at, in one picture: python -m vcagen.visualise runs/demo --label 3 --out maps.png."""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vcagen.commands import exit_code

if TYPE_CHECKING:
    import numpy as np
    import torch

    from vcagen.attention.maps import AttentionMaps
    from vcagen.generation import LoadedModel

# More queries than this a side cannot be told apart in the picture; one of each cell is shown then.
MOST_QUERIES_A_SIDE = 8


@dataclass(frozen=True)
class Captured:
    """What one layer does at one timestep of one sampled image.

    Attributes:
        image: the sample, uint8 (H, W, C).
        noised_image: what the model sees, decoded.
        maps: of one image, (1, heads, queries, keys) each, by stage.
        grid_size: of the patches.
        contrast_grid: of the contrast tokens; None where the attention has none.
    """

    image: "np.ndarray"
    noised_image: "np.ndarray"
    maps: dict[str, "AttentionMaps"]
    grid_size: tuple[int, int]
    contrast_grid: tuple[int, int] | None


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m vcagen.visualise",
        description="Sample an image, noise it as training does, and draw what one head of one layer attends to: for "
        "VCA, where each contrast token looks (stage I) and which patches use it (stage II), positive, negative and "
        "difference; for other attentions, where patches look.",
    )
    parser.add_argument("checkpoint", type=Path, help="run folder, one checkpoints/step_N of it, or a pipeline folder")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="sampler.*, guidance.* and decoding.* settings of the sample"
    )
    parser.add_argument("--label", default="id:0", help="class id or name of the image (default: id:0)")
    parser.add_argument(
        "--timestep",
        type=float,
        help="SiT: 0 is noise and 1 data (default: 0.5); DiT: 0 to 999, 999 is noise (default: 300)",
    )
    parser.add_argument("--layer", type=int, help="from 0 (default: the middle one)")
    parser.add_argument("--head", type=int, default=0, help="from 0 (default: 0)")
    parser.add_argument("--seed", type=int, default=0, help="of the image and its noise (default: 0)")
    parser.add_argument("--weights", choices=["ema", "raw"], default="ema", help="EMA or raw weights")
    parser.add_argument("--out", type=Path, default=Path("maps.png"), help="PNG to write (default: maps.png)")
    return parser.parse_intermixed_args()  # overrides may stand on either side of options


def capture(model: "LoadedModel", label: int, timestep: float, layer: int, seed: int) -> Captured:
    """Samples the image of a seed and label, noises it with the noise it began with, and calls the model once.

    The maps are made from the tokens that the layer's attention was called with.
    """
    import torch

    from vcagen import interpolants
    from vcagen.autoencoder import to_numpy
    from vcagen.generation import labels_and_generators, plan_samples
    from vcagen.objectives import DiffusionConfig, DiffusionObjective
    from vcagen.seeds import normal

    maker = model.maker
    samples = plan_samples([label], seed, len(model.class_names))
    latents = maker.latents(*labels_and_generators(samples))
    noise = normal(latents, labels_and_generators(samples)[1])  # the first that a sample's generator draws is its start
    objective = model.config.objective
    if isinstance(objective, DiffusionConfig):
        timesteps = torch.tensor([int(timestep)], device=latents.device)
        noised = DiffusionObjective(objective, latents.device).add_noise(latents, noise, timesteps)
    else:
        timesteps = torch.tensor([timestep], dtype=torch.float32, device=latents.device)
        c = interpolants.coefficients(objective.path, timesteps, latents)
        noised = c.alpha * latents + c.sigma * noise
    attention: Any = maker.model.blocks[layer].attn
    seen: list[torch.Tensor] = []
    handle = attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        maker.model(noised.to(maker.model.dtype), timesteps, torch.tensor([label], device=latents.device))
        handle.remove()
        maps = attention.maps(seen[0])
    image, noised_image = to_numpy(maker.autoencoder.decode(torch.cat([latents, noised])))
    grid_size = maker.model.grid_size
    return Captured(image, noised_image, maps, grid_size, getattr(attention, "contrast_grid", None))


def tiles_of(maps: "torch.Tensor", stage: str, captured: Captured) -> "np.ndarray":
    """One head's map (queries, keys) as (rows, columns, H, W): a tile of all patches for each token, where it lies.

    VCA's tokens are the contrast tokens in both stages: stage II is turned round, and a tile has the weight that each
    patch gives to one of them. Without contrast tokens they are the queries, of which a few are taken.
    """
    import torch

    if captured.contrast_grid is not None:
        per_token = maps.T if stage == "stage2" else maps  # (n, N)
        tiles = per_token.unflatten(1, captured.grid_size).unflatten(0, captured.contrast_grid)
    else:
        rows, columns = (torch.tensor(_centres(side)) for side in captured.grid_size)
        tiles = maps.unflatten(1, captured.grid_size).unflatten(0, captured.grid_size)[rows][:, columns]
    return tiles.float().cpu().numpy()


def _centres(side: int) -> list[int]:
    """Middle positions of at most `MOST_QUERIES_A_SIDE` cells of a side."""
    count = min(side, MOST_QUERIES_A_SIDE)
    return [(2 * index + 1) * side // (2 * count) for index in range(count)]


def draw(captured: Captured, head: int, title: str, out: Path) -> None:
    """Draws the image, and for each stage one head's positive, negative and difference maps, into one PNG."""
    # Imported here, so that --help does not wait; a figure of its own, not pyplot: no display and no global state.
    from matplotlib.figure import Figure

    from vcagen.files import written_aside

    stages = captured.maps
    width = 15 if any(stage.negative is not None for stage in stages.values()) else 8
    figure = Figure(figsize=(width, 4 + 5.4 * len(stages)), dpi=80, layout="constrained")
    figure.suptitle(title)
    parts: Any = figure.subfigures(1 + len(stages), 1, height_ratios=[3.4, *[5.4] * len(stages)])
    images = {"the sample": captured.image, "noised: what the model sees": captured.noised_image}
    for axes, (said, image) in zip(parts[0].subplots(1, 2), images.items(), strict=True):
        axes.imshow(image if image.shape[-1] == 3 else image[..., 0], cmap="gray", vmin=0, vmax=255)
        axes.set(title=said, xticks=[], yticks=[])
    for part, (name, stage) in zip(parts[1:], stages.items(), strict=True):
        part.suptitle(_heading(name, captured))
        if stage.negative is None or stage.weight is None:
            _panel(part, part.subplots(), "A, the map", tiles_of(stage.positive[0, head], name, captured))
            continue
        positive, negative, difference = (
            tiles_of(maps[0, head], name, captured) for maps in (stage.positive, stage.negative, stage.difference())
        )
        bound = max(positive.max(), negative.max())
        left, middle, right = part.subplots(1, 3)
        _panel(part, left, "A+, positive", positive, bound)
        _panel(part, middle, "A-, negative", negative, bound)
        _panel(part, right, f"A+ - lambda A-, lambda = {float(stage.weight):.3f}", difference, is_signed=True)
    with written_aside(out) as aside:
        figure.savefig(aside)


def _heading(stage: str, captured: Captured) -> str:
    height, width = captured.grid_size
    if captured.contrast_grid is None:
        rows, columns = (len(_centres(side)) for side in captured.grid_size)
        return f"attention: a tile for each of {rows}x{columns} patches, its weights over all {height}x{width} patches"
    tile = "a tile for each of {}x{} contrast tokens".format(*captured.contrast_grid)
    if stage == "stage1":
        return f"stage I, where contrast tokens look: {tile}, its weights over {height}x{width} patches"
    return f"stage II, which patches use them: {tile}, the weight that each of {height}x{width} patches gives it"


def _panel(
    figure: Any, axes: Any, title: str, tiles: "np.ndarray", bound: float | None = None, is_signed: bool = False
) -> None:
    """Tiles (rows, columns, H, W) side by side with a colour bar, from 0 or -bound to bound, by default the largest."""
    import numpy as np

    rows, columns, height, width = tiles.shape
    bound = float(np.abs(tiles).max()) if bound is None else bound
    apart = np.full((rows, height + 1, columns, width + 1), np.nan, dtype=np.float32)  # nan stays white
    apart[:, :height, :, :width] = tiles.transpose(0, 2, 1, 3)
    picture = axes.imshow(
        apart.reshape(rows * (height + 1), columns * (width + 1))[:-1, :-1],
        cmap="RdBu_r" if is_signed else "viridis",
        vmin=-bound if is_signed else 0.0,
        vmax=bound,
        interpolation="nearest",
    )
    axes.set(title=title, xticks=[], yticks=[])
    figure.colorbar(picture, ax=axes, shrink=0.8)


def visualise(arguments: argparse.Namespace) -> None:
    """Loads, samples, draws; a `ValueError` in one line where something does not fit."""
    from vcagen.files import require_file_name
    from vcagen.generation import class_id, load_model

    require_file_name(arguments.out)
    model = load_model(arguments.checkpoint, arguments.weights, arguments.overrides)
    label = class_id(arguments.label, model.class_names)
    depth = len(model.maker.model.blocks)
    layer = depth // 2 if arguments.layer is None else arguments.layer
    if not 0 <= layer < depth:
        raise ValueError(f"--layer {layer} does not exist; this model has layers 0 to {depth - 1}")
    num_heads = _num_heads(model, layer)
    if not 0 <= arguments.head < num_heads:
        raise ValueError(f"--head {arguments.head} does not exist; its attention has heads 0 to {num_heads - 1}")
    timestep = _checked_timestep(arguments.timestep, model.config.objective.name)
    print(model.describe())
    captured = capture(model, label, timestep, layer, arguments.seed)
    name = model.class_names[label]
    title = (
        f"{model.config.variant}, layer {layer}, head {arguments.head}; class {name}, seed {arguments.seed}, "
        f"timestep {timestep:g}"
    )
    draw(captured, arguments.head, title, arguments.out)
    weights = {stage: float(maps.weight) for stage, maps in captured.maps.items() if maps.weight is not None}
    print(f"{arguments.out}: {title}" + "".join(f"; lambda of {stage} {w:.3f}" for stage, w in weights.items()))


def _num_heads(model: "LoadedModel", layer: int) -> int:
    """How many maps a stage has; differential attention's heads are half the model's."""
    import torch

    transformer = model.maker.model
    num_tokens = transformer.grid_size[0] * transformer.grid_size[1]
    tokens = torch.zeros(1, num_tokens, transformer.config.hidden_size, dtype=transformer.dtype)
    attention: Any = transformer.blocks[layer].attn
    with torch.no_grad():
        maps = attention.maps(tokens.to(transformer.device))
    return next(iter(maps.values())).positive.shape[1]


def _checked_timestep(timestep: float | None, objective: str) -> float:
    """The timestep, or the default of the objective; a `ValueError` where the model has none such."""
    if objective == "flow":
        timestep = 0.5 if timestep is None else timestep
        if not 0 <= timestep <= 1:
            raise ValueError(f"--timestep {timestep:g}: times of flow models lie within [0, 1], 0 is noise and 1 data")
        return timestep
    from vcagen.noise_schedule import NUM_TRAIN_TIMESTEPS

    timestep = 300 if timestep is None else timestep
    if timestep not in range(NUM_TRAIN_TIMESTEPS):
        raise ValueError(
            f"--timestep {timestep:g}: diffusion has whole timesteps 0 to {NUM_TRAIN_TIMESTEPS - 1}, the last is noise"
        )
    return timestep


def main() -> int:
    """Exit codes: 0 done; 1 it cannot be done, with the reason in one line; 130 Ctrl-C."""
    arguments = parse_arguments()
    return exit_code(lambda: visualise(arguments))


if __name__ == "__main__":
    sys.exit(main())
