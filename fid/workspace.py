"""Where a command keeps what it has collected until its result is written."""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from fid.collection import Collected, Collection, Part, Process, Wanted, identity
from fid.features import Extractor
from fid.images import Images
from vcagen.files import locked, require_writable


class Workspace:
    """The folder `NAME.parts` beside a result `NAME.json` or `NAME.npz`; the same command finds its parts there.

    Args:
        out: the result.
        extractor: takes all features.
        batch_size: images at a time.
        process: this one.
    """

    def __init__(self, out: Path, extractor: Extractor, batch_size: int, process: Process) -> None:
        self.folder = out.with_suffix(".parts")
        self.extractor, self.batch_size, self.process = extractor, batch_size, process
        self.used: list[Path] = []

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Holds the folder for this command alone.

        Raises:
            ValueError: another command holds it, or it cannot be written.
        """
        if not self.process.is_main_process:
            yield
            return
        require_writable(self.folder)
        with locked(self.folder, "another command is writing the same result; wait for it or choose another --out"):
            yield

    def folder_of(self, images: Images, wanted: Wanted, what: str) -> Path:
        """Where the parts of a set lie."""
        return self.folder / f"{what}-{identity(images, self.extractor, wanted)}"

    def collect(
        self, images: Images, wanted: Wanted, what: str, estimate: Callable[[Part], str] | None = None
    ) -> Collected | None:
        """All of a set, by all processes; what earlier runs have collected is not taken again.

        Returns:
            What the main process needs; None on the others.
        """
        folder = self.folder_of(images, wanted, what)
        collection = Collection(images, self.extractor, wanted, folder, f"{what} images")
        self.used.append(folder)
        if self.process.is_main_process:
            collection.prepare()
        self.process.wait_for_everyone()
        collection.run(self.batch_size, self.process, estimate)
        return collection.result() if self.process.is_main_process else None

    def remove(self) -> None:
        """Deletes what this command has used, after its result is written."""
        for folder in self.used:
            shutil.rmtree(folder, ignore_errors=True)
        if {path.name for path in self.folder.iterdir()} <= {".lock"}:
            shutil.rmtree(self.folder, ignore_errors=True)
