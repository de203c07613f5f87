import hashlib
import pickle
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
import torch_fidelity
from PIL import Image
from torch import nn
from torch_fidelity.utils import create_feature_extractor

from fid import digits_classifier, features
from fid.features import DIGITS, INCEPTION, INCEPTION_FILE, build_extractor
from fid.frechet import frechet_distance
from fid.moments import FeatureMoments


@pytest.fixture(scope="module")
def digits_images():
    split = digits_classifier.load_split()
    return split.held_out_images.expand(-1, 3, -1, -1)


@pytest.fixture(scope="module")
def inception(inception_path):
    return build_extractor(INCEPTION, inception_path)


def random_images(*shape):
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def test_inception_gives_pooled_features_and_unbiased_logits(inception, inception_path):
    output = inception(random_images(2, 3, 32, 32))
    assert output.pooled.shape == (2, 2048)
    assert output.logits.shape == (2, 1008)
    torch.testing.assert_close(output.logits, output.pooled @ inception.network.fc.weight.T)
    assert (inception.name, inception.dimension) == (INCEPTION, 2048)
    assert inception.weights_sha256 == hashlib.sha256(inception_path.read_bytes()).hexdigest()
    assert not output.pooled.requires_grad
    assert not inception.network.training


def test_inception_features_do_not_depend_on_the_batch(inception):
    images = random_images(3, 3, 16, 16)
    together, alone = inception(images).pooled, inception(images[:1]).pooled
    torch.testing.assert_close(together[:1], alone, rtol=1e-5, atol=1e-5)


def test_digits_features_do_not_depend_on_the_batch(digits_images):
    extractor = build_extractor(DIGITS)
    together = extractor(digits_images[:100])
    for size in (1, 7):
        parts = [extractor(batch) for batch in digits_images[:100].split(size)]
        assert torch.equal(torch.cat([part.pooled for part in parts]), together.pooled)
        assert torch.equal(torch.cat([part.logits for part in parts]), together.logits)


@pytest.mark.parametrize("name", [INCEPTION, DIGITS])
def test_images_must_be_uint8_with_three_channels(name, inception):
    extractor = inception if name == INCEPTION else build_extractor(name)
    with pytest.raises(ValueError, match=r"images are torch.float32 .* expected uint8 \(B, 3, H, W\)"):
        extractor(torch.zeros(2, 3, 8, 8))
    with pytest.raises(ValueError, match=r"\(2, 1, 8, 8\); expected uint8 \(B, 3, H, W\)"):
        extractor(torch.zeros(2, 1, 8, 8, dtype=torch.uint8))


def test_weights_that_are_missing_or_not_inceptions_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"no Inception weights at .*missing\.pth; pass --extractor-weights PATH"):
        build_extractor(INCEPTION, tmp_path / "missing.pth")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "other.pth")
    with pytest.raises(ValueError, match=r"other\.pth does not hold Inception weights; expected weights"):
        build_extractor(INCEPTION, tmp_path / "other.pth")


def test_weights_that_run_code_are_refused(tmp_path):
    ran = tmp_path / "ran"

    class Malicious:
        def __reduce__(self):
            return Path.touch, (ran,)

    (tmp_path / "code.pth").write_bytes(pickle.dumps(Malicious(), protocol=2))
    with pytest.raises(ValueError, match="does not hold Inception weights"):
        build_extractor(INCEPTION, tmp_path / "code.pth")
    assert not ran.exists()


def test_without_a_network_one_line_says_what_to_do(tmp_path, monkeypatch):
    def no_network(*_, **__):
        raise URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    with pytest.raises(ValueError, match=f"pass --extractor-weights PATH to {INCEPTION_FILE}$") as raised:
        build_extractor(INCEPTION)
    assert INCEPTION_FILE == "weights-inception-2015-12-05-6726825d.pth"
    assert "\n" not in str(raised.value)


def test_downloaded_weights_are_checked_and_used(tmp_path, monkeypatch, inception_path, inception):
    def download(url, destination, hash_prefix):
        assert url.endswith(INCEPTION_FILE)
        assert hash_prefix == "6726825d"
        Path(destination).symlink_to(inception_path)

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", download)
    assert build_extractor(INCEPTION).weights_sha256 == inception.weights_sha256


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ValueError, match="'vgg16'; known: inception-v3-compat, digits-classifier"):
        build_extractor("vgg16")


def test_digits_extractor_is_the_classifier(digits_images):
    extractor = build_extractor(DIGITS)
    output = extractor(digits_images[:4])
    expected = digits_classifier.load_digits_classifier()(digits_images[:4])
    torch.testing.assert_close(output.pooled, expected.features, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(output.logits, expected.logits, rtol=1e-5, atol=1e-5)
    assert (extractor.name, extractor.dimension) == (DIGITS, 64)
    assert len(extractor.weights_sha256) == 64
    with pytest.raises(ValueError, match="32x32; the digits classifier takes 8x8 only"):
        extractor(random_images(1, 3, 32, 32))
    with pytest.raises(ValueError, match="brings its own weights; leave out --extractor-weights"):
        build_extractor(DIGITS, "inception.pth")


def test_tf32_is_off_during_extraction_and_restored_after(digits_images, monkeypatch):
    seen = []

    class Spy(nn.Module):
        def forward(self, images):
            seen.append((torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()))
            return images.float().flatten(1), None

    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        features.Extractor("spy", 192, "", Spy(), torch.device("cpu"))(digits_images[:1])
        after = (torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == [(False, "highest")]
    assert after == (True, "high")


def test_torch_fidelitys_own_path_agrees(digits_images, tmp_path):
    features.register()
    features.register()  # torch-fidelity itself refuses a second registration
    theirs = create_feature_extractor(DIGITS, ["logits", "64"], cuda=False, verbose=False)
    extractor = build_extractor(DIGITS)
    parts = {"real": digits_images[:150], "other": 255 - digits_images[150:]}
    moments = {}
    for name, images in parts.items():
        moments[name] = FeatureMoments(extractor.dimension)
        output = extractor(images)
        moments[name].update(output.pooled)
        logits, pooled = theirs(images)
        assert torch.equal(pooled, output.pooled)
        assert torch.equal(logits, output.logits)
        (tmp_path / name).mkdir()
        for index, image in enumerate(images):
            Image.fromarray(image.permute(1, 2, 0).numpy()).save(tmp_path / name / f"{index:04d}.png")
    metrics = torch_fidelity.calculate_metrics(
        input1=str(tmp_path / "real"),
        input2=str(tmp_path / "other"),
        feature_extractor=DIGITS,
        fid=True,
        cuda=False,
        cache=False,
        save_cpu_ram=True,
        verbose=False,
    )
    real, other = moments["real"], moments["other"]
    distance = frechet_distance(real.mean(), real.covariance(), other.mean(), other.covariance())
    assert distance == pytest.approx(metrics[torch_fidelity.KEY_METRIC_FID], rel=1e-4)
    assert distance > 1
