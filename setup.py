"""Packages of the wheel. `csrc/` travels inside as `rlkernel/_csrc`; the sources are compiled on first use."""

from setuptools import find_packages, setup

setup(
    packages=[
        *find_packages(include=["rlkernel", "rlkernel.*"]),
        "rlkernel._csrc",
        "rlkernel._csrc.cpu",
        "rlkernel._csrc.cuda",
    ],
    package_dir={"rlkernel._csrc": "csrc"},
    package_data={
        "rlkernel": ["py.typed"],
        "rlkernel.contract": ["*.json"],
        "rlkernel.training": ["*.html", "*.css", "*.js"],
        "rlkernel._csrc.cpu": ["*.cpp", "*.h"],
        "rlkernel._csrc.cuda": ["*.cpp"],
    },
    include_package_data=False,
)
