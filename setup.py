"""The installed package: the folders and programs of the repository under one name, `omnimorph`.

In the repository they lie at its top, and a program finds them in the folder it lies in. In site-packages such names
(Runtime, Dataloader) would meet those of other projects. So the build puts all of them into omnimorph/, and there each
import names the whole way: `from Runtime.errors import STOP` becomes `from omnimorph.Runtime.errors import STOP`.
Nothing else differs, and lines keep their numbers. pyproject.toml has the rest.
"""
import re
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDERS = ("Runtime", "Supervisor", "Report", "Dataloader", "Diffusion", "Inference", "Study")
DATA = ("Report/*.css", "Report/*.js", "Config/*.yaml", "Inference/*.safetensors", "Inference/*.md", "docs/messages.md")
IMPORT = re.compile(rf"^( *)(from|import) (?=({'|'.join(FOLDERS)}|OM_\w+)\b)", re.M)


def code_files():
    """The Python files that become part of the package, relative to the repository."""
    return sorted([*Path().glob("OM_*.py"), *(path for folder in FOLDERS for path in Path(folder).rglob("*.py"))])


def data_files():
    return sorted(path for pattern in DATA for path in Path().glob(pattern))


class BuildUnderOneName(build_py):
    """Copies the modules that setuptools does not treat as a package, and rewrites their imports."""

    def run(self):
        target = Path(self.build_lib, "omnimorph")
        if not self.editable_mode:
            shutil.rmtree(target, ignore_errors=True)  # files of an earlier build that are gone from the repository
        super().run()
        if self.editable_mode:
            return  # the repository's own folder is imported from, as its programs do
        for path in [*code_files(), *data_files()]:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target / path)
        for path in target.rglob("*.py"):
            text = IMPORT.sub(r"\1\2 omnimorph.", path.read_text(encoding="utf-8"))
            path.write_text(text, encoding="utf-8")

    def get_source_files(self):
        """The files that a source distribution must contain."""
        return [*super().get_source_files(), *map(str, [*code_files(), *data_files()])]


setup(cmdclass={"build_py": BuildUnderOneName})
