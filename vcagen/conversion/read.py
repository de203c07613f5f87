"""Reads a model from anywhere, with all that sampling must know."""

from pathlib import Path

from vcagen.conversion.model import ConversionChoices, ConvertedModel
from vcagen.conversion.ours import is_ours, read_ours
from vcagen.conversion.source import read_source
from vcagen.conversion.theirs import read_theirs
from vcagen.generation import require_consistent


def read_model(path: Path, choices: ConversionChoices) -> ConvertedModel:
    """Reads a file or folder that others wrote, or a run, checkpoint or pipeline folder.

    Raises:
        ValueError: it cannot be read, something must be chosen that is not, tensors do not fit (all are listed), or
            the settings cannot sample the model.
    """
    if choices.num_heads is not None and choices.num_heads < 1:
        raise ValueError(f"--num-heads {choices.num_heads}: must be at least 1")
    theirs = not is_ours(path)
    model = read_theirs(read_source(path, choices.weights), choices) if theirs else read_ours(path, choices)
    require_consistent(model.skeleton(), model.config, None, str(path))
    return model
