"""The official DiT or SiT code, imported from the user's own checkout to be compared with."""

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch


def import_official(checkout: Path, module: str) -> ModuleType:
    """Imports `models`, `diffusion` or `transport` from a checkout.

    Raises:
        ValueError: it is not there, or needs a package that is not installed.
    """
    if not (checkout / f"{module}.py").is_file() and not (checkout / module / "__init__.py").is_file():
        raise ValueError(
            f"--official {checkout}: there is no {module} in it; expected a checkout of facebookresearch/DiT for "
            "DiT variants, or of willisma/SiT for SiT variants"
        )
    sys.path.insert(0, str(checkout))
    try:
        imported = importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        raise ValueError(
            f"--official {checkout}: its {module} needs the package {package}, which is not installed here; "
            f"pip install {package}"
        ) from error
    finally:
        sys.path.remove(str(checkout))
    found = Path(imported.__file__ or "").resolve()
    if not found.is_relative_to(checkout.resolve()):
        raise ValueError(f"--official {checkout}: {module} was imported from {found} already")
    return imported


def official_model(checkout: Path, variant: str, weights: dict[str, torch.Tensor], device: torch.device) -> Any:
    """The official model of a variant with 32x32 latents and these weights, in eval mode."""
    models = import_official(checkout, "models")
    table = getattr(models, f"{variant[:3]}_models", {})
    if variant not in table:
        raise ValueError(f"--official {checkout}: its models.py has no {variant}; choose another variant or checkout")
    model = table[variant]()
    model.load_state_dict(weights)
    return model.to(device).eval()
