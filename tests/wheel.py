"""The package as a user gets it: built, and unpacked beside nothing of this repository."""

import contextlib
import functools
import tarfile
import tempfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

from hatchling.build import build_sdist, build_wheel

REPOSITORY = Path(__file__).parents[1]


class Built:
    """The archives of one build, in a folder that ends with the process.

    Attributes:
      sdist: the source archive.
      wheel: made from it.
      site: the wheel unpacked, to be put on a path.
      names: the wheel's files.
      metadata: the wheel's.
    """

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="jaxcoll-wheel-")
        folder = Path(self._folder.name)
        with contextlib.chdir(REPOSITORY):
            self.sdist = folder / build_sdist(str(folder))
        with tarfile.open(self.sdist) as archive:
            archive.extractall(folder, filter="data")
        with contextlib.chdir(folder / self.sdist.name.removesuffix(".tar.gz")):
            self.wheel = folder / build_wheel(str(folder))
        self.site = folder / "site"
        with zipfile.ZipFile(self.wheel) as archive:
            self.names = archive.namelist()
            archive.extractall(self.site)
        (described,) = self.site.glob("*.dist-info/METADATA")
        self.metadata: Message = Parser().parsestr(described.read_text("utf8"))


@functools.cache
def built() -> Built:
    """The package, built once in a process."""
    return Built()
