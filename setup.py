"""Packages of the wheel: `rlkernel`, and those under `consistency/` and `integrations/`, each a top-level package.

`csrc/` travels inside as `rlkernel/_csrc`; the sources are compiled on first use. An editable install reads `csrc/` in
the checkout and puts the folders on the path: setuptools' import hook would lose to a folder called `rlkernel` in the
working directory.
"""

import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command import editable_wheel

ROOT = Path(__file__).resolve().parent
FOLDERS = ("consistency", "integrations")


class EditableWheel(editable_wheel.editable_wheel):
    """An editable install whose `.pth` file names every folder that holds packages."""

    def _select_strategy(self, name, tag, build_lib):  # type: ignore[no-untyped-def]
        paths = [ROOT, *(ROOT / folder for folder in FOLDERS)]
        return editable_wheel._StaticPth(self.distribution, name, paths)


packages = find_packages(include=["rlkernel", "rlkernel.*"])
package_dir = {}
for folder in FOLDERS:
    for package in find_packages(folder):
        packages.append(package)
        if "." not in package:
            package_dir[package] = f"{folder}/{package}"
if "editable_wheel" not in sys.argv:
    packages += ["rlkernel._csrc", "rlkernel._csrc.cpu", "rlkernel._csrc.cuda"]
    package_dir["rlkernel._csrc"] = "csrc"

setup(
    packages=packages,
    package_dir=package_dir,
    package_data={
        "": ["py.typed"],
        "rlkernel.contract": ["*.json"],
        "rlkernel.training.pages": ["*.css"],
        "rlkernel_drift.report": ["*.css", "*.js"],
        "rlkernel._csrc.cpu": ["*.cpp", "*.h"],
        "rlkernel._csrc.cuda": ["*.cpp", "*.cu", "*.cuh"],
    },
    include_package_data=False,
    cmdclass={"editable_wheel": EditableWheel},
)
