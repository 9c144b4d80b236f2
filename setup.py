"""Lets old installers work; the package's metadata is in pyproject.toml."""

from setuptools import setup

setup()
