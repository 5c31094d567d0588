"""All metadata stand in setup.cfg; only the .pth line, which has to lie beside the packages, needs code."""

from setuptools import setup
from setuptools.command.build_py import build_py

PTH = "lora_fastpath.pth"


class BuildWithPth(build_py):
    def run(self):
        super().run()
        self.copy_file(PTH, self.build_lib)

    def get_source_files(self):
        return [*super().get_source_files(), PTH]


setup(cmdclass={"build_py": BuildWithPth})
