import numpy as np

from vcagen.data import DigitsConfig, build_data


def test_digits_are_there_at_8_and_enlarged_at_16() -> None:
    small, large = build_data(DigitsConfig()), build_data(DigitsConfig(image_size=16))
    assert (small.image_shape, large.image_shape) == ((1, 8, 8), (1, 16, 16))
    assert len(small) == len(large) == 1797
    assert small.fingerprint != large.fingerprint
    for index in (0, 500, 1796):
        assert small.label(index) == large.label(index)
        means = large.image(index).reshape(1, 8, 2, 8, 2).mean(axis=(2, 4))
        assert np.corrcoef(means.flat, small.image(index).flat)[0, 1] > 0.98  # the same digit, a little smoother
        assert large.image(index).dtype == np.uint8
