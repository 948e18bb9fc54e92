"""Build of the installed package; pyproject.toml has everything else."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithData(build_py):
    """Copy the files that a checkout has beside the packages into `farfield/data/` (`megatron/utils/project.py`)."""

    def run(self) -> None:
        if not self.editable_mode:  # else modules of an earlier build that have moved since come along
            shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()
        if not self.editable_mode:
            data = Path(self.build_lib) / "farfield" / "data"
            shutil.copytree("configs", data / "configs", dirs_exist_ok=True)
            shutil.copy("CITATION.cff", data)


setup(cmdclass={"build_py": BuildWithData})
