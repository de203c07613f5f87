"""The walls of the house: who may import whom."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# What a module may import of ours, beside its own package.
ALLOWED = {
    "vcagen.attention": set(),
    "vcagen.callables": set(),
    "vcagen.seeds": {"vcagen.devices"},
    "vcagen.files": set(),
    "vcagen.commands": set(),
    "vcagen.interpolants": set(),
    "vcagen.noise_schedule": set(),
    "vcagen.autoencoder": {"vcagen.seeds"},
    "vcagen.protocols": set(),
    "vcagen.data.images": set(),
    "vcagen.guidance": {"vcagen.callables", "vcagen.seeds"},
    "vcagen.models": {"vcagen.attention"},
    "vcagen.objectives": {"vcagen.interpolants", "vcagen.noise_schedule", "vcagen.callables", "vcagen.seeds"},
    "vcagen.samplers": {
        *("vcagen.interpolants", "vcagen.noise_schedule", "vcagen.callables", "vcagen.seeds", "vcagen.devices"),
    },
    "vcagen.data": {"vcagen.seeds", "vcagen.autoencoder"},
    "vcagen.data.latent_format": {"vcagen.autoencoder", "vcagen.files"},
    "vcagen.data.latent_cache": {"vcagen.autoencoder", "vcagen.data"},
    "vcagen.cache": {
        *("vcagen.autoencoder", "vcagen.data.images", "vcagen.data.latent_format"),
        *("vcagen.class_names", "vcagen.devices", "vcagen.files", "vcagen.commands"),
    },
    "vcagen.class_names": set(),
    "vcagen.devices": set(),
}
THIRD_PARTY = {
    "torch_fidelity": ("fid",),
    "accelerate": (
        *("vcagen.run", "vcagen.metrics", "vcagen.signals", "vcagen.cache.commands", "sample"),
        *("fid.score", "fid.make_reference", "fid.benchmark", "fid.experiment.measure"),
    ),
    "datasets": ("vcagen.cache.hugging_face",),
}
SOURCES = [*ROOT.glob("vcagen/**/*.py"), *ROOT.glob("fid/**/*.py"), ROOT / "train.py", ROOT / "sample.py"]


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            ours = node.module in ("vcagen", "fid")
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if ours else {node.module}
    return found


def within(module: str, packages: object) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)  # type: ignore[attr-defined]


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_rooms_import_only_what_they_may(path: Path) -> None:
    name = module_name(path)
    ours = {module for module in imports(path) if module.split(".")[0] in ("vcagen", "fid", "train", "sample")}
    if name.startswith("vcagen"):
        assert not within("fid", ours)
        assert not any(within(module, ["fid", "train", "sample"]) for module in ours)
    rooms = [room for room in ALLOWED if within(name, [room])]
    if rooms:
        room = max(rooms, key=len)
        for module in ours:
            assert within(module, [room, *ALLOWED[room]]), f"{name} imports {module}"


@pytest.mark.parametrize("path", SOURCES, ids=module_name)
def test_third_party_edges(path: Path) -> None:
    for library, users in THIRD_PARTY.items():
        if within(library, {module.split(".")[0] for module in imports(path)}):
            assert within(module_name(path), users), f"{module_name(path)} imports {library}"


CONVERT = ["-m", "vcagen.conversion"]
GRAFT = [*CONVERT, "graft"]
BUILD = ["-m", "vcagen.cache", "build"]
MEASURE = ["-m", "vcagen.benchmark", "data"]
MEASURE_FID = ["-m", "vcagen.benchmark", "fid"]
MEASURE_SPEED = ["-m", "vcagen.benchmark", "attention"]
COUNT = ["-m", "vcagen.benchmark", "cost"]
SHOW = ["-m", "vcagen.visualise"]
DRAW = ["-m", "vcagen.curves"]


@pytest.mark.parametrize(
    "command",
    [
        *(["train.py"], ["sample.py"], ["-m", "fid"], ["-m", "fid", "score"], ["-m", "fid", "reference"]),
        *(CONVERT, GRAFT, BUILD, MEASURE, MEASURE_FID, MEASURE_SPEED, COUNT, DRAW, SHOW),
    ],
)
def test_help_imports_nothing_heavy(command: list[str]) -> None:
    result = subprocess.run(
        [sys.executable, "-X", "importtime", *command, "--help"], cwd=ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0
    assert "usage" in result.stdout
    loaded = {line.split("|")[-1].strip() for line in result.stderr.splitlines()}
    assert not loaded & {"torch", "numpy", "diffusers", "accelerate", "pydantic", "torch_fidelity"}
