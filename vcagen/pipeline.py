"""A diffusers pipeline over the same parts as sample.py, for people who only want images."""

import operator
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, DiffusionPipeline, ImagePipelineOutput
from huggingface_hub import create_repo, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from PIL import Image

from vcagen.autoencoder import KLConfig, build_autoencoder, load_vae, to_numpy
from vcagen.config import override_sampling, parse_config
from vcagen.files import write_grid
from vcagen.generation import ImageMaker, class_id, labels_and_generators, load_model, plan_samples, require_consistent
from vcagen.model_card import GRID_FILE, SCORE_FILE, write_model_card
from vcagen.models.transformer import DiffusionTransformer
from vcagen.pipeline_folder import Weights
from vcagen.sampling_config import PipelineConfig


class ClassConditionalPipeline(DiffusionPipeline):
    """Images from class labels.

    Args:
        transformer: the model.
        vae: its autoencoder; None for pixels, and to load the one that the settings name.
        settings: a `PipelineConfig` as plain data: objective, sampler, guidance, class names and all else that
            sampling must know.

    Raises:
        ValueError: the parts do not belong together, or the autoencoder cannot be loaded.
    """

    _optional_components = ["vae"]  # noqa: RUF012, diffusers reads it so
    model_cpu_offload_seq = "transformer->vae"

    def __init__(
        self,
        transformer: DiffusionTransformer,
        vae: AutoencoderKL | None = None,
        settings: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if settings is None:
            raise ValueError("settings are missing; load a folder with ClassConditionalPipeline.from_pretrained")
        sampling = parse_config(settings, "settings", PipelineConfig)
        if vae is None and isinstance(sampling.autoencoder, KLConfig):
            vae = load_vae(sampling.autoencoder.source, "autoencoder.source")
        require_consistent(
            transformer, sampling, build_autoencoder(sampling.autoencoder, sampling.decoding, vae), "pipeline"
        )
        self.register_modules(transformer=transformer, vae=vae)
        self.register_to_config(settings=sampling.model_dump(mode="json"))
        self.folders: tuple[Path, ...] = ()

    @property
    def sampling(self) -> PipelineConfig:
        """How the model is read and sampled unless a call says otherwise."""
        return parse_config(dict(self.config.settings), "settings", PipelineConfig)

    @classmethod
    def from_pretrained(
        cls, source: str | Path, weights: Weights = "ema", torch_dtype: torch.dtype | None = None, **hub: Any
    ) -> "ClassConditionalPipeline":
        """Loads a run folder (its newest checkpoint), a checkpoint or pipeline folder, or a hub id.

        Args:
            source: which.
            weights: `ema`, or `raw` where a checkpoint has them.
            torch_dtype: of model and autoencoder; the sampler's state stays float32.
            **hub: for a hub id, what `huggingface_hub.snapshot_download` takes: revision, token, cache_dir, ...

        Raises:
            ValueError: what is there cannot be loaded; the line says which file or tensor is wrong.
        """
        folder = Path(source)
        if weights not in ("ema", "raw"):
            raise ValueError(f"weights={weights!r}: expected ema or raw")
        if folder.exists() and hub:
            raise ValueError(f"{', '.join(hub)}: for hub ids only, but {source} is a folder; leave it out")
        if not folder.exists():
            try:
                folder = Path(snapshot_download(str(source), **hub))
            except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
                reason = str(error).strip().splitlines()[0]
                raise ValueError(f"{source}: neither a folder nor a hub id that can be fetched ({reason})") from error
        loaded = load_model(folder, weights, device="cpu")
        sampling = loaded.config.model_copy(update={"weights": loaded.weights_record})
        vae = getattr(loaded.maker.autoencoder, "vae", None)
        pipeline = cls(loaded.maker.model, vae, sampling.model_dump(mode="json"))
        if weights == "ema":  # grids and scores are of these
            pipeline.folders = (loaded.checkpoint, loaded.folder)
        return pipeline if torch_dtype is None else pipeline.to(torch_dtype)

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | str | Sequence[int | str],
        guidance_scale: float | None = None,
        num_inference_steps: int | None = None,
        generator: torch.Generator | Sequence[torch.Generator] | None = None,
        seed: int | None = None,
        overrides: Sequence[str] = (),
        batch_size: int = 64,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> Any:
        """One image per label.

        Args:
            class_labels: class ids and names.
            guidance_scale: s in uncond + s (cond - uncond); 1 is off. None: the settings'.
            num_inference_steps: the sampler's num_steps. None: the settings'.
            generator: one, from which a seed is drawn; or one per image, which draws all of that image's noise.
            seed: image i depends on this, i and its label alone, and equals sample.py's image i of the same seed and
                sampling. Without seed and generator, torch's global generator draws one.
            overrides: `key=value` as on the command line: `protocol=sit-paper-sde`, `sampler.form=linear`.
            batch_size: changes memory and speed, not the images.
            output_type: `pil`; `np`, float32 (B, H, W, C) in [0, 1]; `latent`, float32 tensor (B, C, h, w).
            return_dict: False returns `(images,)`.

        Returns:
            An `ImagePipelineOutput` with `images`.

        Raises:
            ValueError: a label or setting that does not exist, or settings that contradict each other.
        """
        if output_type not in ("pil", "np", "latent"):
            raise ValueError(f"output_type={output_type!r}: expected pil, np or latent")
        if batch_size < 1:
            raise ValueError(f"batch_size={batch_size}: must be at least 1")
        settings = list(overrides)
        settings += [] if guidance_scale is None else [f"guidance.scale={guidance_scale}"]
        settings += [] if num_inference_steps is None else [f"sampler.num_steps={num_inference_steps}"]
        config = override_sampling(self.sampling, settings)
        labels = self._label_ids(class_labels)
        generators = self._generators(labels, generator, seed)
        autoencoder = build_autoencoder(config.autoencoder, config.decoding, self.vae).to(self.transformer.device)
        require_consistent(self.transformer, config, autoencoder, "pipeline")
        maker = ImageMaker(self.transformer.eval(), config, autoencoder)
        found: list[Any] = []
        starts = range(0, len(labels), batch_size)
        for start in self.progress_bar(starts):
            batch = slice(start, start + batch_size)
            latents = maker.latents(labels[batch], generators[batch])
            found.append(latents.cpu() if output_type == "latent" else to_numpy(autoencoder.decode(latents)))
        images: Any
        if output_type == "latent":
            images = torch.cat(found)
        elif output_type == "np":
            images = np.concatenate(found).astype(np.float32) / 255
        else:
            images = [
                Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image) for image in np.concatenate(found)
            ]
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _label_ids(self, class_labels: int | str | Sequence[int | str]) -> list[int]:
        given: list[Any]
        try:
            given = list(class_labels) if not isinstance(class_labels, str | dict) else [class_labels]  # type: ignore[arg-type]
        except TypeError:  # one number, of any library
            given = [class_labels]
        if not given:
            raise ValueError("class_labels is empty; give at least one class id or name")
        names = self.sampling.class_names
        labels = [class_id(label, names) if isinstance(label, str) else _whole_number(label) for label in given]
        return [sample.label for sample in plan_samples(labels, 0, len(names))]

    def _generators(
        self, labels: list[int], generator: torch.Generator | Sequence[torch.Generator] | None, seed: int | None
    ) -> list[torch.Generator]:
        if generator is not None and seed is not None:
            raise ValueError("give a generator or a seed, not both")
        if generator is not None and not isinstance(generator, torch.Generator):
            if len(generator) != len(labels):
                raise ValueError(f"{len(generator)} generators for {len(labels)} labels; give one per label, or one")
            if not all(isinstance(one, torch.Generator) for one in generator):
                raise ValueError("generator: expected one torch.Generator, or a list of them")
            return list(generator)
        if seed is None:
            device = "cpu" if generator is None else generator.device
            seed = int(torch.randint(2**62, (), generator=generator, device=device))
        return labels_and_generators(plan_samples(labels, seed, len(self.sampling.class_names)))[1]

    def save_pretrained(self, save_directory: str | Path) -> None:
        """Writes the folder that `from_pretrained` and sample.py read, with a model card.

        The autoencoder is written along. A grid and a score that lie with the folder this was loaded from go into
        the card.

        Args:
            save_directory: where to.

        Raises:
            ValueError: that is a run or a checkpoint, in which other weights would be lost.
        """
        folder = Path(save_directory)
        if (folder / "checkpoints").exists() or (folder / "state.json").exists():
            raise ValueError(f"{folder}: a run or a checkpoint, which this would damage; choose another folder")
        super().save_pretrained(folder)
        for name in (GRID_FILE, SCORE_FILE):
            found = [place / name for place in self.folders if (place / name).is_file()]
            if found and found[0].resolve() != (folder / name).resolve():
                shutil.copyfile(found[0], folder / name)
        write_model_card(folder, self.sampling, self.transformer)

    def push_to_hub(
        self,
        repo_id: str,
        commit_message: str | None = None,
        private: bool | None = None,
        token: str | None = None,
        create_pr: bool = False,
        grid: bool = True,
    ) -> str:
        """Uploads the folder with its model card; returns the commit's address.

        Args:
            repo_id: where to, `owner/name`; made if it does not exist.
            commit_message: of the upload.
            private: whether a new repository is.
            token: of the hub account; None takes the one of this machine.
            create_pr: opens a pull request instead of committing.
            grid: sample a grid for the card where none lies with the folder this was loaded from.
        """
        repo_id = create_repo(repo_id, private=private, token=token, exist_ok=True).repo_id
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            if grid and not any((place / GRID_FILE).is_file() for place in self.folders):
                labels = [label for label in range(min(4, len(self.sampling.class_names))) for _ in range(4)]
                (images,) = self(labels, seed=0, batch_size=4, output_type="np", return_dict=False)
                write_grid(folder / GRID_FILE, (images * 255).round().astype(np.uint8), columns=4)
            self.save_pretrained(folder)
            message = commit_message or "Upload ClassConditionalPipeline"
            return self._upload_folder(folder, repo_id, token=token, commit_message=message, create_pr=create_pr)


def _whole_number(label: Any) -> int:
    """An id from any library's integer; a `ValueError` for what is none, rather than rounding."""
    try:
        if isinstance(label, bool):
            raise TypeError
        return operator.index(label)
    except TypeError as error:
        raise ValueError(f"class_labels: {label!r} is neither a class id nor a name") from error
