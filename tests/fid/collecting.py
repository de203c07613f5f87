"""Collects 1,003 samples of a run into a folder, in this process or in one of several under torchrun.

The model is float64, so that images do not depend on the batch to the bit: what is tested is who takes which sample,
not how a matrix product of seven rows rounds.
"""

import sys
import time
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState

from fid.collection import Collected, Collection, Process, Wanted
from fid.features import DIGITS, build_extractor
from fid.sampled import SampledImages
from vcagen.generation import load_model

NUM_IMAGES = 1003


def collect(run: Path, folder: Path, batch_size: int, process: Process, seconds_a_batch: float = 0) -> Collected | None:
    model = load_model(run)
    model.maker.model.double()
    images = SampledImages(model, NUM_IMAGES, 0, folder, None)
    if seconds_a_batch:
        batch = images.batch
        images.batch = lambda indices: (time.sleep(seconds_a_batch), batch(indices))[1]  # type: ignore[method-assign]
    collection = Collection(images, build_extractor(DIGITS), Wanted(features=True), folder, "generated images")
    if process.is_main_process:
        collection.prepare()
    process.wait_for_everyone()
    collection.run(batch_size, process)
    return collection.result() if process.is_main_process else None


def main() -> None:
    run, folder, batch_size, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    process = PartialState(cpu=True)
    collected = collect(Path(run), Path(folder), int(batch_size), process, float(seconds))
    if collected is not None:
        moments = collected.part.pooled()
        np.savez(
            Path(folder) / "result.npz", mean=moments.mean(), cov=moments.covariance(), features=collected.features
        )
    process.destroy_process_group()


if __name__ == "__main__":
    main()
