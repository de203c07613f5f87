"""Named evaluation protocols: a YAML each, with the published figure in its header."""

from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

FOLDER = Path(__file__).parent

# What a protocol fixes; every one of its files has these sections, in full.
SECTIONS = ("sampler", "guidance", "decoding", "label_mode")


def protocol_names() -> list[str]:
    """All protocols there are."""
    return sorted(path.stem for path in FOLDER.glob("*.yaml"))


@cache
def _read(name: str) -> str:
    return (FOLDER / f"{name}.yaml").read_text()


def read_protocol(name: str) -> dict[str, Any]:
    """The settings of a protocol, by section.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in protocol_names():
        raise ValueError(f"protocol: {name!r} does not exist; there are {', '.join(protocol_names())}")
    settings = OmegaConf.to_container(OmegaConf.create(_read(name)))
    assert isinstance(settings, dict)
    return {str(section): value for section, value in settings.items()}
