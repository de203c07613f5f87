"""One run as frozen pydantic models, read from YAML and `key=value` overrides. Nothing is built here."""

import contextlib
import difflib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import BaseModel, Field, ValidationError, model_validator
from yaml import YAMLError

from vcagen.attention import AttentionConfig, MHSAConfig
from vcagen.data import DataConfig, FolderName
from vcagen.models.variants import parse_variant
from vcagen.protocols import SECTIONS, read_protocol
from vcagen.sampling_config import CONFIG_VERSION, PipelineConfig, SamplingConfig

# Sections with a `name` that decides which other keys there are.
NAMED_SECTIONS = ("data", "autoencoder", "model.attention", "objective", "sampler")

# Overrides whose value is a path, and not YAML, where '#' would start a comment.
VERBATIM = ("run_dir=", "data.root=", "autoencoder.source=", "train.init_from=")

# What describes a pipeline's model, and is no setting.
PIPELINE_TEXT = ("variant", "class_names", "weights", "provenance")

# What may be changed when a trained model is sampled.
SAMPLING_KEYS = ("protocol", *SECTIONS)

Config = TypeVar("Config", bound=SamplingConfig)
PositiveInt = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class ModelConfig(BaseModel, extra="forbid", frozen=True):
    """The backbone: a named variant, its attention, and sizes where they should differ from the variant's.

    Attributes:
        learn_sigma: whether the output has twice the latent channels; diffusion needs it, SiT has and ignores it, REPA
            has not.
    """

    variant: str = "SiT-S/2"
    attention: AttentionConfig = MHSAConfig()
    hidden_size: PositiveInt | None = None
    depth: PositiveInt | None = None
    num_heads: PositiveInt | None = None
    patch_size: PositiveInt | None = None
    learn_sigma: bool = True
    gradient_checkpointing: bool = False

    @model_validator(mode="after")
    def _variant_exists(self) -> "ModelConfig":
        parse_variant(self.variant)
        return self


class TrainConfig(BaseModel, extra="forbid", frozen=True, allow_inf_nan=False):
    """The loop; the defaults are the recipe of the DiT and SiT papers.

    Attributes:
        betas: of AdamW.
        tf32: lets a GPU multiply float32 matrices in TF32, three digits for speed, as the official scripts do.
        compile: compiles the transformer's blocks (torch.compile), which pays off in long runs.
        keep_checkpoints: so many of the newest are kept.
        keep_every: beside them, those whose step is a multiple of this.
        resume: `auto` goes on where there is a checkpoint, `must` refuses to start anew, `never` refuses to go on.
        init_from: a pipeline or checkpoint folder whose weights (EMA where it has them) training starts from.
        init_labels: `match`, the label table is taken and the class names must agree; `as_is`, it is taken and the
            classes are the same in another spelling, such as ImageNet's names and folders; `new`, it starts anew.
        init_positions: for latents of another size: `recompute` the codes, whose whole numbers then run on past those
            that were trained, or `interpolate` them over the same range. `match` refuses another size.
    """

    max_steps: PositiveInt = 400_000
    global_batch_size: PositiveInt = 256
    gradient_accumulation_steps: PositiveInt = 1
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    gradient_clip: Annotated[float, Field(gt=0)] | None = None
    ema_decay: Fraction = 0.9999
    label_dropout: Fraction = 0.1
    init_from: FolderName | None = None
    init_labels: Literal["match", "as_is", "new"] = "match"
    init_positions: Literal["match", "recompute", "interpolate"] = "match"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    tf32: bool = False
    compile: bool = False
    num_workers: Annotated[int, Field(ge=0)] = 0
    log_every: PositiveInt = 100
    preview_every: PositiveInt = 10_000
    preview_images: PositiveInt = 40
    checkpoint_every: PositiveInt = 10_000
    keep_checkpoints: PositiveInt = 2
    keep_every: PositiveInt | None = None
    resume: Literal["auto", "must", "never"] = "auto"
    max_bad_steps: PositiveInt = 10
    trackers: tuple[str, ...] = ("tensorboard",)


class ScoreConfig(BaseModel, extra="forbid", frozen=True):
    """A Frechet distance of few EMA samples now and then: a curve to watch, not a result to report.

    Attributes:
        every: steps between scores; the last step is scored too.
        reference: `digits`, or a file of statistics, such as `python -m fid reference` writes.
        num_images: sampled as the run's own settings say, with seed 0.
        extractor_weights: file with the extractor's weights, for machines offline.
    """

    every: PositiveInt
    reference: FolderName
    num_images: Annotated[int, Field(ge=2)] = 1000
    extractor_weights: FolderName | None = None


class RunConfig(SamplingConfig, extra="forbid", frozen=True):
    """A whole run. `objective` and `sampler` follow from the variant's family where they are not given."""

    run_dir: FolderName
    seed: int = 0
    data: DataConfig
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    score: ScoreConfig | None = None

    @model_validator(mode="before")
    @classmethod
    def _family_defaults(cls, settings: Any) -> Any:
        """DiT means diffusion and DDPM, SiT flow and Euler-Maruyama: the papers' own."""
        model = settings.get("model") or {} if isinstance(settings, dict) else {}
        variant = model.get("variant", ModelConfig().variant) if isinstance(model, dict) else ""
        if not isinstance(settings, dict) or not isinstance(variant, str):
            return settings
        is_diffusion = variant.startswith("DiT")
        defaults = {
            "objective": "diffusion" if is_diffusion else "flow",
            "sampler": "ddpm" if is_diffusion else "euler_maruyama",
        }
        settings = dict(settings)
        for section, name in defaults.items():
            given = settings.get(section)
            if given is None or (isinstance(given, dict) and "name" not in given):
                settings[section] = {"name": name} | (given or {})
        return settings

    def _require_fitting_parts(self) -> None:
        is_diffusion = parse_variant(self.model.variant).family == "DiT"
        if is_diffusion != (self.objective.name == "diffusion"):
            raise ValueError(
                f"model.variant={self.model.variant} and objective.name={self.objective.name} contradict each "
                "other; DiT variants are trained with diffusion, SiT variants with flow"
            )
        if is_diffusion and not self.model.learn_sigma:
            raise ValueError("model.learn_sigma=false: diffusion learns its variance in these channels; use true")
        if self.guidance.scale != 1 and not self.train.label_dropout:
            raise ValueError(
                f"guidance.scale={self.guidance.scale:g} needs a null label, which train.label_dropout=0 does not "
                "train; use guidance.scale=1"
            )
        super()._require_fitting_parts()


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Reads a YAML file and merges `key=value` overrides over it.

    A `base` in the file is the path of another, from the file's own folder, over whose keys the file's are merged; a
    base has none itself. A `protocol` gives its sampler, guidance, decoding and label_mode; what the file or the
    overrides say beside it wins. Where an override changes the `name` of a section, the file's other keys of that
    section go: they belong to what was named before. So do the base's where the file changes it.

    Raises:
        ValueError: a line for each wrong key, type or value, naming the file (or the override), the key, and what
            is expected.
    """
    settings, source = _read(path), str(path)
    with _faults_named(source):
        base = settings.pop("base", None)
        if base is not None:
            below = _read_base(path, base)
            source = f"{path} over {path.parent / base}"
            settings = _merged_over(below, settings, source, source)
    return _merged(settings, overrides, source, RunConfig)


@contextlib.contextmanager
def _faults_named(source: str) -> Iterator[None]:
    """What OmegaConf and YAML find wrong as a `ValueError` in one line that begins with the source."""
    try:
        yield
    except (OmegaConfBaseException, YAMLError) as error:
        raise ValueError(f"{source}: {' '.join(str(error).split())}") from error


def _read_base(path: Path, base: Any) -> DictConfig:
    """The keys of the file that `path` names as its base; a `ValueError` that names both where they cannot be had."""
    if not isinstance(base, str):
        raise ValueError(f"{path}: base: expected the path of a config file (got {base!r})")
    try:
        below = _read(path.parent / base)
    except ValueError as error:
        raise ValueError(f"{path}: base: {error}") from error
    if "base" in below:
        raise ValueError(f"{path}: base: {path.parent / base} has a base itself; only one level is read")
    return below


def _read(path: Path) -> DictConfig:
    """The keys of one YAML file; a `ValueError` that names it where there are none."""
    if not path.is_file():
        raise ValueError(f"{path}: no such config file")
    try:
        settings = OmegaConf.load(path)
    except (YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, DictConfig):
        raise ValueError(f"{path}: expected keys and values, such as 'seed: 0', at the top level")
    return settings


def override_sampling(config: PipelineConfig, overrides: Sequence[str]) -> PipelineConfig:
    """The same model sampled otherwise: another protocol, sampler.*, guidance.*, decoding.* or label_mode.

    Raises:
        ValueError: a wrong setting, as `load_config`, or one that the model has fixed.
    """
    for override in overrides:
        if override.split("=")[0].split(".")[0] not in SAMPLING_KEYS:
            raise ValueError(
                f"{override!r} cannot be changed here: only {', '.join(SAMPLING_KEYS)} can, the rest is fixed by the "
                "checkpoint"
            )
    return complete_pipeline_config(config.model_dump(mode="json"), overrides, "the checkpoint's model_index.json")


def complete_pipeline_config(settings: dict[str, Any], overrides: Sequence[str], source: str) -> PipelineConfig:
    """The config of a pipeline from plain settings with `key=value` overrides; errors as `load_config`."""
    fixed = [override for override in overrides if override.split("=")[0].split(".")[0] in PIPELINE_TEXT]
    if fixed:
        raise ValueError(f"{fixed[0]!r} cannot be set: it describes the model")
    # Class names and provenance are anyone's text, in which ${...} is not for OmegaConf.
    text = {key: value for key, value in settings.items() if key in PIPELINE_TEXT}
    base = OmegaConf.create({key: value for key, value in settings.items() if key not in PIPELINE_TEXT})
    return _merged(base, overrides, source, PipelineConfig, text)


def _merged(
    base: DictConfig, overrides: Sequence[str], source: str, kind: type[Config], text: dict[str, Any] | None = None
) -> Config:
    """Base and overrides as a config; `text` joins them untouched."""
    for override in overrides:
        if "=" not in override or override.startswith(("-", "=")):
            raise ValueError(f"{override!r} is not an override; write key=value, such as train.max_steps=10")
    with _faults_named(source):
        from_line = OmegaConf.from_dotlist([o for o in overrides if not o.startswith(VERBATIM)])
        for key, value in (o.split("=", 1) for o in overrides if o.startswith(VERBATIM)):
            OmegaConf.update(from_line, key, value)
        settings = OmegaConf.to_container(_merged_over(base, from_line, source, "command line"), resolve=True)
    assert isinstance(settings, dict)
    return parse_config(settings | (text or {}), source, kind, {override.split("=", 1)[0] for override in overrides})


def _merged_over(base: DictConfig, upper: DictConfig, base_source: str, upper_source: str) -> DictConfig:
    """The settings of `upper` over those of `base`, which lose what belongs to a protocol or name that upper changes.

    The sources serve the error messages.
    """
    base = _over_protocol(OmegaConf.select(base, "protocol"), base, base_source)
    if "protocol" in upper:  # another protocol, or none: what the one before fixed goes
        for section in SECTIONS:
            base.pop(section, None)
        base = OmegaConf.merge(base, _over_protocol(upper.protocol, OmegaConf.create(), upper_source))
    for section in NAMED_SECTIONS:
        name = OmegaConf.select(upper, f"{section}.name")
        if name is not None and name != OmegaConf.select(base, f"{section}.name"):
            OmegaConf.update(base, section, {}, merge=False)
    merged = OmegaConf.merge(base, upper)
    assert isinstance(merged, DictConfig)
    return merged


def _over_protocol(protocol: Any, settings: DictConfig, source: str) -> DictConfig:
    """The settings merged over those of the protocol; a sampler of another name replaces the protocol's wholly."""
    if protocol is None:
        return settings
    try:
        base = OmegaConf.create(read_protocol(str(protocol)))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from error
    name = OmegaConf.select(settings, "sampler.name")
    if name is not None and name != base.sampler.name:
        base.pop("sampler")
    merged = OmegaConf.merge(base, settings)
    assert isinstance(merged, DictConfig)
    return merged


def parse_config(
    settings: dict[Any, Any], source: str, kind: type[Config], overridden: set[str] | None = None
) -> Config:
    """Validates plain settings; `source` and the overridden keys serve the error messages. See `load_config`."""
    version = settings.get("config_version", CONFIG_VERSION)
    if isinstance(version, int) and version > CONFIG_VERSION:
        raise ValueError(
            f"{source}: config_version {version} is newer than this vcagen reads ({CONFIG_VERSION}); update vcagen"
        )
    try:
        return kind.model_validate(settings)
    except ValidationError as error:
        by_key: dict[str, list[str]] = {}  # a value that fits none of several types gives an error for each
        for fault in error.errors():
            where, message = _explain(dict(fault), source, kind, overridden or set())
            by_key.setdefault(where, []).append(message)
        lines = [f"{where}: {', or '.join(dict.fromkeys(messages))}" for where, messages in by_key.items()]
        raise ValueError("\n".join(lines)) from error


def dump_config(config: RunConfig) -> str:
    """The resolved run as YAML, every default written out; `load_config` reads it back equal."""
    return OmegaConf.to_yaml(OmegaConf.create(config.model_dump(mode="json")))


def _explain(error: dict[str, Any], source: str, kind: type[BaseModel], overridden: set[str]) -> tuple[str, str]:
    """The place and the message of one pydantic error."""
    keys, parent = _locate(error["loc"], kind)
    key = ".".join(keys)
    is_override = any(given == key or given.startswith(f"{key}.") for given in overridden) and key
    where = f"command line: {key}" if is_override else f"{source}: {key}" if key else source
    if not key and overridden:  # settings that contradict each other
        where += f" with {', '.join(sorted(overridden))} from the command line"
    if error["type"] == "extra_forbidden":
        known = list(parent.model_fields)
        close = difflib.get_close_matches(keys[-1], known, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return where, f"unknown key; {hint}known keys here: {', '.join(known)}"
    if error["type"] == "missing":
        return where, "missing; this key must be given"
    if error["type"] == "union_tag_invalid":
        return f"{where}.name", f"{error['ctx']['tag']!r} does not exist; there are {error['ctx']['expected_tags']}"
    if error["type"] == "union_tag_not_found":
        return where, "expected a section with a name"
    message = error["msg"].removeprefix("Value error, ")
    given = "" if isinstance(error["input"], dict | BaseModel) else f" (got {error['input']!r})"
    return where, f"{message}{given}"


def _locate(location: Sequence[str | int], kind: type[BaseModel]) -> tuple[list[str], type[BaseModel]]:
    """The keys of a pydantic location, without the tags of unions, and the model that the last one belongs to."""
    keys: list[str] = []
    parent: type[BaseModel] = kind
    choices: list[type[BaseModel]] = [kind]
    for part in location:
        tagged = [c for c in choices if len(choices) > 1 and c.model_fields["name"].default == part]
        if tagged:
            choices = tagged
            continue
        if len(choices) == 1:
            parent = choices[0]
        if not choices:  # a position in a list, or pydantic's name of a branch
            continue
        keys.append(str(part))
        field = parent.model_fields.get(str(part))
        choices = _models_in(field.annotation) if field else []
    return keys, parent


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if get_origin(annotation) is Annotated:
        return _models_in(get_args(annotation)[0])
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models_in(argument)]
