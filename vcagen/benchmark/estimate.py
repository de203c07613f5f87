"""What training and sampling on ImageNet would take on 8 GPUs: arithmetic on counted operations, not a measurement."""

from dataclasses import dataclass

from tqdm import tqdm

from vcagen.benchmark.cost import STEP_OVER_FORWARD
from vcagen.benchmark.model import ATTENTIONS, forward_flops

# SiT on 32x32x4 latents, which are images of 256x256; a DiT costs the same.
MODELS = ("S/2", "B/2", "L/2", "XL/2")
BATCH = 256
STEPS = 400_000
GPUS = 8
PEAK = 989e12  # FLOP/s of one H100 or H200 in dense bf16, as its maker states
SHARES = (0.2, 0.4)  # of the peak, kept up from the first step to the last: assumed, not measured
NUM_IMAGES = 50_000
SAMPLING_STEPS = 250
FORWARDS_PER_SAMPLING_STEP = 2  # with the label and without: guidance


@dataclass(frozen=True)
class Estimate:
    """Of one model with one attention; the pairs are for each of `SHARES`.

    Attributes:
        model: such as `S/2`.
        attention: its name.
        forward_flops: floating-point operations of one forward pass of one image, counted.
        step_flops: of a training step at `BATCH`, counted.
        training_gpu_hours: of `STEPS` steps.
        training_days: the same on `GPUS` GPUs.
        sampling_hours: of `NUM_IMAGES` guided samples on `GPUS` GPUs.
    """

    model: str
    attention: str
    forward_flops: int
    step_flops: int
    training_gpu_hours: list[float]
    training_days: list[float]
    sampling_hours: list[float]


def estimates(vca_over_mhsa: float) -> list[Estimate]:
    """An estimate for each of `MODELS` with mhsa and vca.

    Args:
        vca_over_mhsa: measured time of a training step with vca over that with mhsa. vca's times are mhsa's times
            this, whatever its counted operations are.
    """
    found = []
    for model in tqdm(MODELS, desc="counting", unit="model", delay=2):
        base = forward_flops(f"SiT-{model}", "mhsa")
        for attention in ATTENTIONS:
            counted = forward_flops(f"SiT-{model}", attention)
            ratio = vca_over_mhsa if attention == "vca" else 1.0
            training = [ratio * gpu_hours(STEP_OVER_FORWARD * base * BATCH * STEPS, share) for share in SHARES]
            forwards = NUM_IMAGES * SAMPLING_STEPS * FORWARDS_PER_SAMPLING_STEP
            sampling = [ratio * gpu_hours(forwards * base, share) / GPUS for share in SHARES]
            found.append(
                Estimate(
                    model,
                    attention,
                    forward_flops=counted,
                    step_flops=STEP_OVER_FORWARD * counted * BATCH,
                    training_gpu_hours=training,
                    training_days=[hours / GPUS / 24 for hours in training],
                    sampling_hours=sampling,
                )
            )
    return found


def gpu_hours(flops: float, share: float) -> float:
    """Hours that one GPU takes for so many floating-point operations at a share of its peak."""
    return flops / (PEAK * share) / 3600
