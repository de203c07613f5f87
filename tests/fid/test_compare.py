"""Results side by side: what may be compared, by how much they differ, and what is drawn."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from fid.__main__ import main as fid_main
from fid.compare import MUST_AGREE, SHOULD_AGREE, Side, difference, read_side, require_comparable, table
from fid.golden import EXPECTED, deviations
from fid.metrics import count
from vcagen.data.digits import Digits

RESULT: dict[str, Any] = {
    "scores": [
        {"metric": "fid", "name": "FID-1000", "value": 5.0, "note": ""},
        {"metric": "is", "name": "IS-1000", "value": 50.0, "note": ""},
    ],
    "generated": {
        "images": "/runs/mhsa/checkpoints/step_0000100",
        "num_images": 1000,
        "image_size": [32, 32],
        "pixels_sha256": "a0",
        "sampling": {
            "checkpoint": "/runs/mhsa/checkpoints/step_0000100",
            "variant": "SiT-S/2",
            "attention": {"name": "mhsa"},
            "seed": 0,
            "sampler": {"name": "heun", "num_steps": 50},
            "guidance": {"scale": 1.5},
            "autoencoder": {"name": "identity"},
            "decoding": {"dtype": "float32"},
            "label_mode": "random",
            "weights": "ema",
            "step": 100,
        },
    },
    "reference": {"file_sha256": "f0", "pixels_sha256": None, "statistics": "of the file"},
    "extractor": {"name": "inception-v3-compat", "weights_sha256": "w0", "resize": "TensorFlow 1"},
}


def result(seed: int = 0, attention: str = "mhsa", fid: float = 5.0, **changes: Any) -> dict[str, Any]:
    """One result; `changes` are by their place, with __ for dots."""
    made = copy.deepcopy(RESULT)
    made["scores"][0]["value"] = fid
    made["generated"]["pixels_sha256"] = f"{attention}{seed}"
    made["generated"]["sampling"] |= {
        "seed": seed,
        "attention": {"name": attention},
        "checkpoint": f"/runs/{attention}/checkpoints/step_0000100",
    }
    for place, value in changes.items():
        *folders, key = place.split("__")
        inner = made
        for folder in folders:
            inner = inner[folder]
        inner[key] = value
    return made


def written(folder: Path, **results: dict[str, Any]) -> list[str]:
    for name, content in results.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return [str(folder / f"{name}.json") for name in results]


def side(name: str, seeds: list[int], values: list[float], attention: str = "mhsa") -> Side:
    return Side(name, [result(seed, attention, value) for seed, value in zip(seeds, values, strict=True)])


def compare(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["fid", "compare", *map(str, arguments)])
    return fid_main()


# Differences


def test_a_difference_of_single_results_has_no_interval() -> None:
    found = difference(side("b", [0], [4.0]), side("a", [0], [5.0]), "FID-1000")
    assert (found.value, found.half_width) == (-1, None)
    found = difference(side("b", [0, 1, 2], [4.0, 5.0, 6.0]), side("a", [0], [5.0]), "FID-1000")
    assert (found.value, found.half_width) == (0, None)


def test_results_of_the_same_seeds_are_paired() -> None:
    mine, theirs = [4.1, 4.9, 6.2, 5.0], [4.6, 5.2, 6.9, 5.3]
    # In another order: it is the seed that pairs.
    found = difference(side("b", [3, 0, 2, 1], mine), side("a", [0, 1, 2, 3], [5.2, 5.3, 6.9, 4.6]), "FID-1000")
    interval = stats.ttest_rel(mine, theirs).confidence_interval(0.95)
    assert found.paired
    assert found.value == pytest.approx(-0.45)
    assert found.value - found.half_width == pytest.approx(interval.low)
    assert found.value + found.half_width == pytest.approx(interval.high)
    assert "paired by seed" in found.describe()
    assert "no difference" not in found.describe()
    # By hand: differences -1 and -2 with Student's 12.7062 for one degree of freedom.
    found = difference(side("b", [0, 1], [1, 2]), side("a", [0, 1], [2, 4]), "FID-1000")
    assert (found.value, found.half_width) == pytest.approx((-1.5, 12.7062 * 0.5), rel=1e-5)
    assert found.describe().endswith("(95%, paired by seed): no difference shown")


@pytest.mark.parametrize("seeds", [[5, 6, 7], [0, 1, 7], [0, 1, 1], [None, None, None]])
def test_results_of_other_seeds_are_not_paired(seeds: list[Any]) -> None:
    mine, theirs = [4.1, 4.9, 6.2], [5.1, 5.0, 5.2]
    interval = stats.ttest_ind(mine, theirs, equal_var=False).confidence_interval(0.95)
    for found, sign in (
        (difference(side("b", seeds, mine), side("a", [0, 1, 2], theirs), "FID-1000"), 1),
        (difference(side("a", [0, 1, 2], theirs), side("b", seeds, mine), "FID-1000"), -1),
    ):
        assert not found.paired
        assert found.value == pytest.approx(sign * (np.mean(mine) - np.mean(theirs)))
        assert found.half_width == pytest.approx((interval.high - interval.low) / 2)
        assert "unpaired" in found.describe()


def test_sides_of_other_numbers_of_seeds_are_not_paired() -> None:
    mine, theirs = [4.1, 4.9, 6.2, 7.0], [5.1, 5.0, 5.2]
    found = difference(side("b", [0, 1, 2, 3], mine), side("a", [0, 1, 2], theirs), "FID-1000")
    interval = stats.ttest_ind(mine, theirs, equal_var=False).confidence_interval(0.95)
    assert not found.paired
    assert found.half_width == pytest.approx((interval.high - interval.low) / 2)


@pytest.mark.parametrize("seeds", [[0, 1], [5, 6]])
def test_values_without_spread_have_an_interval_of_0(seeds: list[int]) -> None:
    found = difference(side("b", seeds, [2.0, 2.0]), side("a", [0, 1], [1.5, 1.5]), "FID-1000")
    assert (found.value, found.half_width) == (0.5, 0)
    assert found.is_shown
    assert not difference(side("b", seeds, [2.0, 2.0]), side("a", [0, 1], [2.0, 2.0]), "FID-1000").is_shown


# What compares


@pytest.mark.parametrize("place", [*MUST_AGREE, *SHOULD_AGREE])
def test_results_that_differ_where_they_must_not_are_refused(place: str) -> None:
    key = place.replace("sampling.", "generated.sampling.").replace(".", "__")
    sides = [Side("mhsa", [result()]), Side("vca", [result(0, "vca", **{key: "other"})])]
    with pytest.raises(ValueError, match=rf'^not comparable: {place} is .* for mhsa and "other" for vca') as raised:
        require_comparable(sides, [])
    if place in SHOULD_AGREE:
        assert str(raised.value).endswith(f"; if that is what you compare, add --varying {place}")
        require_comparable(sides, [place])
    else:
        with pytest.raises(ValueError, match=f"--varying {place}: choose of sampling.sampler, "):
            require_comparable(sides, [place])


def test_every_seed_is_looked_at_not_only_the_first() -> None:
    sides = [
        Side("mhsa", [result(0), result(1)]),
        Side("vca", [result(0, "vca"), result(1, "vca", extractor__name="x")]),
    ]
    with pytest.raises(ValueError, match=r'extractor\.name is "inception-v3-compat" for mhsa and "x" for vca'):
        require_comparable(sides, [])


def test_seed_and_model_may_differ() -> None:
    require_comparable([Side("mhsa", [result(0)]), Side("vca", [result(1, "vca")])], [])


def test_several_settings_may_vary() -> None:
    other = result(0, "vca", generated__sampling__guidance={"scale": 4}, generated__sampling__step=200)
    sides = [Side("mhsa", [result()]), Side("vca", [other])]
    with pytest.raises(ValueError, match=r"sampling.step is 100 for mhsa and 200 for vca"):
        require_comparable(sides, ["sampling.guidance"])
    require_comparable(sides, ["sampling.guidance", "sampling.step"])


def test_the_same_images_twice_are_no_two_seeds(tmp_path: Path) -> None:
    (one,) = written(tmp_path, a=result())
    with pytest.raises(ValueError, match="the same images twice; several results of one model are of several seeds"):
        read_side(f"{one},{one}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention": "vca"}, r'sampling.attention is {"name": "mhsa"} and {"name": "vca"}; commas join the seeds'),
        ({"generated__sampling__variant": "SiT-B/2"}, r'sampling.variant is "SiT-S/2" and "SiT-B/2"; commas join'),
    ],
)
def test_two_models_are_no_two_seeds(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    paths = written(tmp_path, a=result(0), b=result(1, **changes))
    with pytest.raises(ValueError, match=message):
        read_side(",".join(paths))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not a result of `python -m fid score` .*No such file"),
        ("text", "not a result of `python -m fid score` "),
        ("[1, 2]", "not a result"),
        ("3", "not a result"),
        ("{}", "not a result of `python -m fid score` .*scores"),
        ('{"scores": []}', "not a result"),
        ('{"scores": [], "generated": {"images": "a"}}', "no scores in it"),
        ('{"scores": [1], "generated": {"images": "a"}}', "not a result"),
        ('{"scores": [{"name": "FID", "value": "high"}], "generated": {"images": "a"}}', "not a result"),
        ('{"scores": [{"name": "FID-9", "value": 3}]}', "not a result"),
        ('{"scores": [{"name": "FID-9", "value": 3}], "generated": {"images": 3}}', "not a result"),
    ],
)
def test_files_that_are_no_results_are_named(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=rf"a\.json: {message}") as raised:
        read_side(str(path))
    assert "\n" not in str(raised.value)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(bytes(range(200, 256)))
    with pytest.raises(ValueError, match=r"a\.json: not a result"):
        read_side(str(tmp_path / "a.json"))


# Names, table and chart


def test_a_side_is_named_by_run_model_and_weights(tmp_path: Path) -> None:
    (path,) = written(tmp_path, a=result())
    assert read_side(path).name == "mhsa (SiT-S/2, mhsa, ema at step 100)"
    (path,) = written(
        tmp_path, a=result(generated__sampling__step=None, generated__sampling__checkpoint="/pipelines/p")
    )
    assert read_side(path).name == "p (SiT-S/2, mhsa, ema)"
    (path,) = written(tmp_path, a=result(generated__sampling=None, generated__images="/data/samples"))
    assert read_side(path).name == "samples"


def test_the_table_holds_what_all_share(tmp_path: Path) -> None:
    text = table([side("mhsa", [0, 1], [5, 6]), side("vca", [0, 1], [4, 5.5], "vca")], ["FID-1000", "IS-1000"])
    assert text.splitlines() == [
        "FID-1000",
        "  mhsa  5.5 +- 0.71 over 2 seeds",
        "  vca   4.75 +- 1.1 over 2 seeds   -0.75 +- 3.2 (95%, paired by seed): no difference shown",
        "IS-1000",
        "  mhsa  50 +- 0 over 2 seeds",
        "  vca   50 +- 0 over 2 seeds   +0 +- 0 (95%, paired by seed): no difference shown",
    ]


def test_the_command_prints_a_table_and_draws_a_chart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    only_fid = result(0, "vca", 4.0)
    only_fid["scores"] = only_fid["scores"][:1]
    written(tmp_path, a0=result(0, fid=5.0), a1=result(1, fid=5.4), b0=only_fid, c0=result(0, fid=5.1))
    assert compare("a0.json,a1.json", "b0.json", "--out", "charts/chart.png", monkeypatch=monkeypatch) == 0
    output = capsys.readouterr().out
    assert "IS-1000" not in output
    assert "5.2 +- 0.28 over 2 seeds" in output
    assert "vca (SiT-S/2, vca, ema at step 100)    4   -1.2" in output
    assert "one seed has no interval" in output
    assert output.endswith("charts/chart.png: bar chart\n")
    with Image.open("charts/chart.png") as chart:
        assert chart.format == "PNG"
        assert min(chart.size) > 100
    assert compare("a0.json", "c0.json", monkeypatch=monkeypatch) == 0  # two of one name
    output = capsys.readouterr().out
    assert "1. mhsa (" in output
    assert "2. mhsa (" in output
    assert Path("compare.png").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.json"], "one result alone; give at least two"),
        (
            ["a.json", "b.json", "--out", "chart.pdf"],
            "--out chart.pdf: the chart is a PNG; give a name that ends in .p",
        ),
        (["a.json", "b.json", "--varying", "sampling.seed"], "--varying sampling.seed: choose of sampling.sampler"),
        (["a.json", "is.json"], "no score in common; the first result has FID-1000, IS-1000"),
        (["a.json", "missing.json"], "missing.json: not a result of `python -m fid score`"),
        (["a.json", "fewer.json"], "not comparable: generated.num_images is 1000 for mhsa"),
    ],
)
def test_what_cannot_be_compared_is_one_line_and_draws_nothing(
    tmp_path: Path,
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    kid = result(0, "vca")
    kid["scores"] = [{"metric": "kid", "name": "KID-1000", "value": 0.1, "note": ""}]
    fewer = result(0, "vca", generated__num_images=999)
    written(tmp_path, **{"a": result(), "b": result(0, "vca"), "is": kid, "fewer": fewer})
    assert compare(*arguments, monkeypatch=monkeypatch) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
    assert not list(tmp_path.glob("*.p*"))


def test_real_results_of_more_or_fewer_metrics_compare_in_what_they_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    digits = Digits().images.transpose(0, 2, 3, 1).repeat(3, axis=-1)
    np.savez("real.npz", arr_0=digits[200:])
    options = ["--extractor", "digits-classifier", "--keep-images", "100", "--out", "ref.npz"]
    monkeypatch.setattr("sys.argv", ["fid", "reference", "real.npz", *options])
    assert fid_main() == 0
    for name, images in {"first": digits[:100], "second": digits[100:200], "more": digits[:101]}.items():
        np.savez(f"{name}.npz", arr_0=images)
    # Only precision and recall look at the reference's images.
    assert score("first.npz", "ref.npz", "--metrics", "fid", monkeypatch=monkeypatch) == 0
    assert score("second.npz", "ref.npz", "--metrics", "fid,pr", monkeypatch=monkeypatch) == 0
    assert score("second.npz", "ref.npz", "--metrics", "is", monkeypatch=monkeypatch) == 0  # joins
    assert score("more.npz", "ref.npz", monkeypatch=monkeypatch) == 0
    joined = json.loads(Path("second.score.json").read_text())
    assert [entry["metric"] for entry in joined["scores"]] == ["fid", "is", "pr", "pr"]
    capsys.readouterr()
    assert compare("first.score.json", "second.score.json", monkeypatch=monkeypatch) == 0
    output = capsys.readouterr().out
    assert "FD-digits-100\n" in output
    assert "precision" not in output
    assert compare("first.score.json", "more.score.json", monkeypatch=monkeypatch) == 1
    assert "generated.num_images is 100 for first.npz and 101 for more.npz" in capsys.readouterr().err
    assert score("second.npz", "ref.npz", "--metrics", "fid,pr", "--out", "pr.json", monkeypatch=monkeypatch) == 0
    assert compare("first.score.json", "pr.json", monkeypatch=monkeypatch) == 0


def score(source: str, reference: str, *options: str, monkeypatch: pytest.MonkeyPatch) -> int:
    command = ["fid", "score", source, "--reference", reference, "--extractor", "digits-classifier", *options]
    monkeypatch.setattr("sys.argv", command)
    return fid_main()


def test_joining_metrics_keeps_every_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    digits = Digits().images.transpose(0, 2, 3, 1).repeat(3, axis=-1)
    np.savez("few.npz", arr_0=digits[:20])
    np.savez("real.npz", arr_0=digits[20:])
    for metric, warned in (("fid", ["fid is unreliable"]), ("is", ["fid is unreliable", "is: 20 images"])):
        assert score("few.npz", "real.npz", "--metrics", metric, monkeypatch=monkeypatch) == 0
        warnings = json.loads(Path("few.score.json").read_text())["warnings"]
        assert [warning.startswith(start) for warning, start in zip(warnings, warned, strict=True)] == [True] * len(
            warned
        )


# Names of numbers, and the published ones


@pytest.mark.parametrize(
    ("n", "name"),
    [
        *[(50_000, "50K"), (10_000, "10K"), (5000, "5K"), (1_281_000, "1281K")],
        *[(49_999, "49999"), (50_001, "50001"), (50_176, "50176"), (5500, "5500"), (1000, "1000"), (60, "60")],
    ],
)
def test_only_whole_thousands_are_named_so(n: int, name: str) -> None:
    assert count(n) == name


def published(**changes: float) -> list[dict[str, Any]]:
    values = {name: expected.value for name, expected in EXPECTED.items()}
    return [{"name": name, "value": value} for name, value in {**values, **changes}.items()]


def test_published_numbers_agree_within_their_tolerance() -> None:
    assert deviations(published()) == []
    adms_own = {
        "FID-50K": 3.94256,
        "sFID-50K": 6.14043,
        "IS-50K": 215.837,
        "precision-50K": 0.8265,
        "recall-50K": 0.5309,
    }
    ported = {
        "FID-50K": 3.94103,
        "sFID-50K": 6.14049,
        "IS-50K": 215.976,
        "precision-50K": 0.82548,
        "recall-50K": 0.5285,
    }
    assert deviations(published(**adms_own)) == deviations(published(**ported)) == []
    assert deviations(published(**{"sFID-50K": 299.0, "IS-50K": 62.0})) == [
        "sFID-50K is 299.0000, expected 6.14 +- 0.005",
        "IS-50K is 62.0000, expected 215.9 +- 0.5",
    ]
    assert deviations(published(**{"FID-50K": 3.936})) == ["FID-50K is 3.9360, expected 3.942 +- 0.005"]


def test_other_images_than_the_published_ones_are_told() -> None:
    lines = deviations([{"name": "FID-10K", "value": 3.942}])
    assert len(lines) == 5
    assert lines[0] == "no FID-50K, but FID-10K: these are not the 50,000 published samples"
    assert len(deviations([{"name": "FID-50K", "value": float("nan")}])) == 5
