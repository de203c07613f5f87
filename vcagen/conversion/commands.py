"""What the command line of conversion does."""

import argparse
import shlex

from vcagen.class_names import read_class_names
from vcagen.conversion.export import require_new, write_diffusers, write_official, write_pipeline
from vcagen.conversion.grafting import graft_attention, write_fine_tuning_config
from vcagen.conversion.model import ConversionChoices, ConvertedModel
from vcagen.conversion.read import read_model


def convert(arguments: argparse.Namespace) -> None:
    """Converts and prints what was found, assumed and written."""
    names = None if arguments.class_names is None else read_class_names(arguments.class_names)
    choices = ConversionChoices(
        weights=arguments.weights,
        family=arguments.family,
        num_heads=arguments.num_heads,
        trained_by=arguments.trained_by,
        class_names=names,
        overrides=tuple(arguments.overrides),
    )
    require_new(arguments.target)
    model = read_model(arguments.source, choices)
    print("\n".join([_describe(model), *model.notes]), flush=True)  # before the seconds that writing takes
    notes: list[str] = []
    if arguments.to == "official":
        write_official(model, arguments.target, str(arguments.source))
    elif arguments.to == "diffusers":
        notes = write_diffusers(model, arguments.target, str(arguments.source))
    else:
        write_pipeline(model, arguments.target, str(arguments.source))
    print("\n".join([*notes, f"{arguments.target}: written"]))


def graft(arguments: argparse.Namespace) -> None:
    """Grafts and prints what was copied and what is new."""
    choices = ConversionChoices(
        weights=arguments.weights,
        family=arguments.family,
        num_heads=arguments.num_heads,
        trained_by=arguments.trained_by,
        class_names=None if arguments.class_names is None else read_class_names(arguments.class_names),
    )
    require_new(arguments.target)
    model = read_model(arguments.source, choices)
    grafted, report = graft_attention(
        model, arguments.attention, arguments.overrides, arguments.seed, str(arguments.source)
    )
    write_pipeline(grafted, arguments.target, str(arguments.source))
    config = write_fine_tuning_config(grafted, arguments.source, arguments.target)
    print("\n".join([_describe(grafted), *model.notes, *report.lines()]))
    print(f"{arguments.target}: written; fine-tune it with\n  python train.py {shlex.quote(str(config))}")


def _describe(model: ConvertedModel) -> str:
    settings = model.settings
    channels, (height, width) = settings["in_channels"], settings["latent_size"]
    num_parameters = sum(tensor.numel() for tensor in model.tensors.values())
    null_label = "and a null label" if settings["has_null_label"] else "without null label"
    return (
        f"{model.config.variant}: {num_parameters:,} parameters, latents {channels} x {height} x {width}, "
        f"{settings['num_classes']} classes {null_label}"
    )
