"""Packages of the wheel. `csrc/` travels inside as `rlkernel/_csrc`; the sources are compiled on first use.

An editable install reads `csrc/` in the checkout. It maps no folder then, so that setuptools adds the checkout to the
path; its import hook would lose to a folder called `rlkernel` in the working directory.
"""

import sys

from setuptools import find_packages, setup

packages = find_packages(include=["rlkernel", "rlkernel.*"])
package_dir = {}
if "editable_wheel" not in sys.argv:
    packages += ["rlkernel._csrc", "rlkernel._csrc.cpu", "rlkernel._csrc.cuda"]
    package_dir = {"rlkernel._csrc": "csrc"}

setup(
    packages=packages,
    package_dir=package_dir,
    package_data={
        "rlkernel": ["py.typed"],
        "rlkernel.contract": ["*.json"],
        "rlkernel.training": ["*.html", "*.css", "*.js"],
        "rlkernel._csrc.cpu": ["*.cpp", "*.h"],
        "rlkernel._csrc.cuda": ["*.cpp", "*.cu"],
    },
    include_package_data=False,
)
