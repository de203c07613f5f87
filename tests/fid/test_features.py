import hashlib
import pickle
import warnings
from pathlib import Path
from urllib.error import URLError

import pytest
import torch
import torch_fidelity
from PIL import Image
from torch import nn
from torch_fidelity.feature_extractor_clip import CLIPVisual
from torch_fidelity.utils import create_feature_extractor

from fid import digits_classifier, features
from fid.features import CLIP, DIGITS, DINO, DINO_FILE, INCEPTION, INCEPTION_FILE, build_extractor
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
    assert inception.network.fc.bias.abs().max() > 0.01  # it is left out, as by ADM
    torch.testing.assert_close(output.logits, output.pooled @ inception.network.fc.weight.T)
    assert (inception.name, inception.dimension) == (INCEPTION, 2048)
    assert inception.weights_sha256 == hashlib.sha256(inception_path.read_bytes()).hexdigest()
    assert not output.pooled.requires_grad
    assert not inception.network.training


def test_spatial_features_are_adms_in_adms_order(inception):
    layer, seen = inception.network.Mixed_6d.branch1x1, []
    hook = layer.register_forward_hook(lambda _, __, output: seen.append(output))
    spatial = inception(random_images(2, 3, 40, 24)).spatial
    hook.remove()
    (hooked,) = seen  # (2, 192, 17, 17)
    assert spatial.shape == (2, 2023)
    assert spatial.min() == 0 < spatial.max()  # after the ReLU
    for row, column, channel in [(0, 0, 0), (0, 0, 6), (0, 1, 0), (1, 0, 0), (5, 11, 3), (16, 16, 6)]:
        assert torch.equal(spatial[:, row * 17 * 7 + column * 7 + channel], hooked[:, channel, row, column])
    assert torch.equal(spatial, hooked[:, :7].permute(0, 2, 3, 1).flatten(1))
    assert not layer._forward_hooks


@pytest.mark.parametrize(("height", "width"), [(64, 510), (256, 256)])
def test_images_are_resized_by_tensorflows_first_rule(inception, height, width):
    columns, rows = torch.arange(width).expand(height, -1), torch.arange(height)[:, None].expand(-1, width)
    channels = columns.clamp(max=255), (columns - 255).clamp(min=0), rows  # the first two add up to the column
    seen = []
    hook = inception.network.Conv2d_1a_3x3.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0]))
    inception(torch.stack(channels)[None].to(torch.uint8))
    hook.remove()
    resized = 128 + 128 * seen[0]
    place = torch.arange(299)
    expected_columns = (place * width / 299).clamp(max=width - 1)
    expected_rows = (place * height / 299).clamp(max=height - 1)
    torch.testing.assert_close(resized[0] + resized[1], expected_columns.expand(299, -1), rtol=0, atol=1e-4)
    torch.testing.assert_close(resized[2], expected_rows[:, None].expand(-1, 299), rtol=0, atol=1e-4)


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


@pytest.mark.parametrize("content", ["tensor", "list", "text", "bytes", "nothing", "directory"])
def test_other_files_are_no_weights(tmp_path, content):
    path = tmp_path / "weights.pth"
    if content == "directory":
        path.mkdir()
    elif content in ("text", "bytes", "nothing"):
        path.write_bytes({"text": b"text", "bytes": bytes(range(200, 256)), "nothing": b""}[content])
    else:
        torch.save(torch.zeros(3) if content == "tensor" else [1, 2], path)
    for name in (INCEPTION, CLIP):
        with pytest.raises(ValueError, match=r"weights\.pth"):
            build_extractor(name, path)


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
    with pytest.raises(ValueError, match="32x32; the digits classifier takes 8x8 or 16x16 only"):
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
        torch.testing.assert_close(pooled, output.pooled, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(logits, output.logits, rtol=1e-5, atol=1e-5)
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


def write_hub(folder: Path, num_features: int = 1024) -> Path:
    """A torch.hub folder with code and weights where DINOv2's would be; the feature is a projection of 7x7 means."""
    code = folder / "facebookresearch_dinov2_main"
    code.mkdir(parents=True)
    (code / "hubconf.py").write_text(
        f"""
import torch

dependencies = ["torch"]


class Tiny(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.head = torch.nn.Linear(3 * 7 * 7, {num_features})

    def forward(self, images):
        return self.head(torch.nn.functional.avg_pool2d(images, 32).flatten(1))


def dinov2_vitl14():
    model = Tiny()
    model.load_state_dict(torch.load(torch.hub.get_dir() + "/checkpoints/{DINO_FILE}", weights_only=True))
    return model
"""
    )
    torch.manual_seed(0)
    (folder / "checkpoints").mkdir()
    torch.save(nn.Linear(3 * 7 * 7, num_features).state_dict(prefix="head."), folder / "checkpoints" / DINO_FILE)
    return folder


@pytest.fixture
def own_hub(tmp_path, monkeypatch):
    """torch.hub with an empty folder and no network."""

    def no_network(*_, **__):
        raise URLError("no network")

    monkeypatch.setattr(torch.hub, "_hub_dir", None)  # what a test sets is undone
    monkeypatch.setattr("torch.hub.urlopen", no_network)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "home"))
    return tmp_path / "home/hub"


def test_dino_comes_from_a_copied_hub_folder(tmp_path, own_hub):
    hub = write_hub(tmp_path / "copied")
    extractor = build_extractor(DINO, hub)
    assert torch.hub.get_dir() == str(own_hub)
    images = random_images(3, 3, 20, 30)
    output = extractor(images)
    assert (output.pooled.shape, output.pooled.dtype) == ((3, 1024), torch.float32)
    assert output.logits is output.spatial is None
    assert (extractor.name, extractor.dimension) == (DINO, 1024)
    weights = hub / "checkpoints" / DINO_FILE
    assert extractor.weights_sha256 == hashlib.sha256(weights.read_bytes()).hexdigest()
    torch.testing.assert_close(extractor(images[:1]).pooled, output.pooled[:1], rtol=1e-5, atol=1e-5)
    assert not extractor.network.training


def test_dino_is_found_where_torch_hub_keeps_it(own_hub):
    write_hub(own_hub)
    assert build_extractor(DINO)(random_images(1, 3, 8, 8)).pooled.shape == (1, 1024)


def test_dino_that_cannot_be_had_is_one_line(tmp_path, own_hub):
    with pytest.raises(ValueError, match=rf"empty: no checkpoints/{DINO_FILE} in it; give a torch\.hub folder"):
        build_extractor(DINO, tmp_path / "empty")
    advice = "pass --extractor-weights FOLDER$"
    with pytest.raises(ValueError, match=rf"^cannot load DINOv2 .*not be found in the cache.*{advice}"):
        build_extractor(DINO)
    hub = write_hub(tmp_path / "hub")
    (hub / "checkpoints" / DINO_FILE).write_bytes(b"damaged")
    with pytest.raises(ValueError, match=rf"^cannot load DINOv2 .*{advice}"):
        build_extractor(DINO, hub)
    assert torch.hub.get_dir() == str(own_hub)


class TinyClip(nn.Module):
    """OpenAI's layout with one narrow block; the text half is there only for its width."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        shape = {"image_resolution": 224, "vision_layers": 1, "vision_width": 64, "vision_patch_size": 112}
        self.visual = CLIPVisual(num_features, **shape).visual
        self.text_projection = nn.Parameter(torch.zeros(4, num_features))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.visual(images)


def write_clip(path: Path, num_features: int = 768) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.trace(TinyClip(num_features).eval(), torch.zeros(1, 3, 224, 224)).save(path)
    return path


def test_clip_is_read_from_openais_kind_of_file(tmp_path):
    path = write_clip(tmp_path / "ViT-L-14.pt")
    extractor = build_extractor(CLIP, path)
    images = random_images(3, 3, 20, 30)
    output = extractor(images)
    assert (output.pooled.shape, output.pooled.dtype) == ((3, 768), torch.float32)
    assert output.logits is output.spatial is None
    assert (extractor.name, extractor.dimension) == (CLIP, 768)
    assert extractor.weights_sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    torch.testing.assert_close(extractor(images[:1]).pooled, output.pooled[:1], rtol=1e-4, atol=1e-4)
    assert output.pooled.std() > 0.1


def test_clip_weights_that_are_missing_or_others_are_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"no CLIP weights at .*missing\.pt; pass --extractor-weights PATH to https"):
        build_extractor(CLIP, tmp_path / "missing.pt")
    torch.save(nn.Linear(2, 2).state_dict(), tmp_path / "other.pt")
    with pytest.raises(ValueError, match=r"other\.pt does not hold CLIP weights; expected https"):
        build_extractor(CLIP, tmp_path / "other.pt")

    def no_network(*_, **__):
        raise URLError("no network")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr(torch.hub, "download_url_to_file", no_network)
    with pytest.raises(ValueError, match=r"cannot download the CLIP weights .*pass --extractor-weights PATH"):
        build_extractor(CLIP)
