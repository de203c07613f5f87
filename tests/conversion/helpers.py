from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.conftest import DATA, tiny_model
from vcagen.conversion.model import ConversionChoices, ConvertedModel
from vcagen.conversion.read import read_model
from vcagen.conversion.source import Tensors

# 4 heads of 16: no published model's width, so the number of heads has to be given.
ORACLE_HEADS = 4


def oracle_weights(family: str) -> Tensors:
    """Weights written by the official code."""
    return load_file(DATA / f"{family}_weights.safetensors")


def tiny_weights(**settings: Any) -> Tensors:
    """Official names and shapes, 32 wide, 2 heads."""
    return {name: tensor.clone() for name, tensor in tiny_model(**settings).state_dict().items()}


def read(path: Path, **choices: Any) -> ConvertedModel:
    foreign = path.is_file()  # folders say themselves how many heads there are
    return read_model(path, ConversionChoices(**({"num_heads": 2 if foreign else None} | choices)))


def file_of(tmp_path: Path, tensors: Tensors, name: str = "DiT.safetensors") -> Path:
    path = tmp_path / name
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    return path


def same(first: Tensors, second: Tensors) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
