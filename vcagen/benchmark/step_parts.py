"""Where the time of a training step goes, in a run that reads a latent cache and notes every step."""

import contextlib
import sys
import tempfile
from pathlib import Path

from torch.profiler import ProfilerActivity, profile, record_function

from vcagen.bad_steps import BadSteps
from vcagen.benchmark.data import random_cache, tiny_vae
from vcagen.config import RunConfig
from vcagen.devices import Dtype
from vcagen.metrics import LossWindow, MetricsFile
from vcagen.run import prepare_run
from vcagen.training import micro_batches
from vcagen.updates import Updates

PARTS = ("passes", "optimiser", "data", "EMA", "logging")  # the names that `vcagen.updates` gives them
NOT_THE_MODEL = ("data", "EMA", "logging")
NUM_LATENTS = 1024


def shares_of_a_step(variant: str, batch: int, dtype: Dtype, steps: int) -> dict[str, float]:
    """Percent of the host's time in each part of the steps of a real run with softmax attention; one step warms up."""
    with tempfile.TemporaryDirectory(prefix="vcagen-benchmark-") as name, contextlib.ExitStack() as stack:
        folder = Path(name)
        vae = tiny_vae()
        vae.save_pretrained(folder / "vae")
        random_cache(folder / "cache", NUM_LATENTS, vae, str(folder / "vae"))
        settings = {
            "run_dir": str(folder / "run"),
            "data": {"name": "latent_cache", "root": str(folder / "cache")},
            "autoencoder": {"name": "kl", "source": str(folder / "vae")},
            "model": {"variant": variant, "attention": {"name": "mhsa"}},
            "train": {"max_steps": steps + 1, "global_batch_size": batch, "precision": dtype, "trackers": []},
        }
        with contextlib.redirect_stdout(sys.stderr):  # what a run says of itself
            run, _ = prepare_run(RunConfig.model_validate(settings), stack)
        window, metrics = LossWindow(run.accelerator), MetricsFile(folder / "run/metrics.jsonl", 0, run.accelerator)
        updates, batches = Updates(run, window, BadSteps(run)), micro_batches(run, first_step=0)
        updates.update(1, batches)
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for step in range(2, steps + 2):
                updates.update(step, batches)
                updates.settle()
                with record_function("logging"):
                    metrics.write(window.close(step, run.config.train.learning_rate, run.config.train.ema_decay))
        times = {event.key: event.cpu_time_total for event in profiler.key_averages() if event.key in PARTS}
    shares = {part: 100 * times[part] / sum(times.values()) for part in PARTS}
    found = {f"share of a step, mhsa, {dtype}: {part}, %": share for part, share in shares.items()}
    not_the_model = sum(shares[part] for part in NOT_THE_MODEL)
    return found | {f"not the model ({', '.join(NOT_THE_MODEL)}), mhsa, {dtype}, %": not_the_model}
