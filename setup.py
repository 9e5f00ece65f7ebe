"""A wheel has the recipes and launch files inside the package; a checkout has them next to it."""

from setuptools import find_packages, setup

BESIDE = {"drafttrain.recipes": "recipes", "drafttrain.launch": "launch"}

setup(packages=[*find_packages(include=["drafttrain*"]), *BESIDE], package_dir=BESIDE)
