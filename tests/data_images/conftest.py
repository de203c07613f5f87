from pathlib import Path

import pytest

from tests.data_images.image_helpers import OddFiles, write_odd_files


@pytest.fixture
def odd_files(tmp_path: Path) -> OddFiles:
    return write_odd_files(tmp_path / "odd")
