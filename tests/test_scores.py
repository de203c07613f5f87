"""Scores during training."""

import json
from pathlib import Path

import pytest

from fid.__main__ import main as fid_main
from fid.scorer import TrainingScorer
from tests.tiny_runs import run_train, tensors_of, tiny_config
from vcagen.config import ScoreConfig
from vcagen.curves import plot_losses
from vcagen.files import write_json
from vcagen.training import train

SCORE = ("score.every=4", "score.reference=digits", "score.num_images=20", "train.max_steps=10")


def rows(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / "scores.jsonl").read_text().splitlines()]


def train_scored(run_dir: Path, *overrides: str) -> None:
    config = tiny_config(run_dir, *SCORE, *overrides)
    assert config.score is not None
    train(config, TrainingScorer(config.score))


def test_scores_are_those_of_the_command_and_change_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    train_scored(tmp_path / "scored")
    train(tiny_config(tmp_path / "plain", "train.max_steps=10"))
    scored, plain = (tensors_of(tmp_path / name / "checkpoints/step_0000010") for name in ("scored", "plain"))
    assert scored.keys() == plain.keys()
    assert all((scored[name] == plain[name]).all() for name in scored)
    found = rows(tmp_path / "scored")
    assert [row["step"] for row in found] == [4, 8, 10]
    monkeypatch.chdir(tmp_path)
    for row in (found[1], found[2]):
        checkpoint = f"scored/checkpoints/step_{row['step']:07d}"
        options = ["--reference", "digits", "--num-images", "20", "--out", "score.json"]
        monkeypatch.setattr("sys.argv", ["fid", "score", checkpoint, *options])
        assert fid_main() == 0
        (score,) = json.loads(Path("score.json").read_text())["scores"]
        assert row[score["name"]] == pytest.approx(score["value"], rel=1e-6)
    assert not (tmp_path / "scored/score.parts").exists()
    plot_losses([tmp_path / "scored"], tmp_path / "curve.png", "FD-digits-20")
    assert (tmp_path / "curve.png").stat().st_size > 1000


def test_a_resumed_run_goes_on_with_its_scores_and_may_change_how_it_scores(tmp_path: Path) -> None:
    train_scored(tmp_path / "run", "train.max_steps=6")
    assert [row["step"] for row in rows(tmp_path / "run")] == [4, 6]
    before = rows(tmp_path / "run")
    train_scored(tmp_path / "run", "score.every=5")
    assert [row["step"] for row in rows(tmp_path / "run")] == [4, 6, 10]
    assert rows(tmp_path / "run")[:2] == before


def test_scores_of_other_settings_do_not_join_the_curve(tmp_path: Path) -> None:
    train_scored(tmp_path / "run", "train.max_steps=6")
    with pytest.raises(ValueError, match=r"scores.jsonl: its scores were made with guidance.scale=1.5, now it is 3"):
        train_scored(tmp_path / "run", "guidance.scale=3")
    (tmp_path / "run/scores.jsonl").unlink()
    train_scored(tmp_path / "run", "guidance.scale=3")
    assert [row["step"] for row in rows(tmp_path / "run")] == [8, 10]


def test_two_processes_share_the_work_and_give_the_same_score(tmp_path: Path) -> None:
    result = run_train(tmp_path / "two", *SCORE, "score.every=6", processes=2)
    assert result.returncode == 0, result.stderr
    train_scored(tmp_path / "one", "score.every=6")
    two, one = rows(tmp_path / "two"), rows(tmp_path / "one")
    assert [row["step"] for row in two] == [6, 10]
    for first, second in zip(two, one, strict=True):
        assert first["FD-digits-20"] == pytest.approx(second["FD-digits-20"], rel=1e-3)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("missing.npz", "missing.npz does not exist"),
        ("folder", "folder: is a folder; write its statistics once by `python -m fid reference folder"),
        ("other.json", "other.json: not a reference"),
    ],
)
def test_what_cannot_be_scored_ends_the_run_before_its_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    write_json(Path("other.json"), {})
    config = tiny_config(tmp_path / "run", f"score.reference={reference}", "score.every=2")
    with pytest.raises(ValueError, match=message):
        train(config, TrainingScorer(ScoreConfig(every=2, reference=reference)))
    assert not (tmp_path / "run/metrics.jsonl").exists()
