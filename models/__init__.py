"""Architectures only: each model is an extractor and a head behind one interface, built by its name."""

from models import vision as vision  # registers the built-in vision models
from models.registry import ModelError, build, names, register
from models.split import SplitModel

__all__ = ["ModelError", "SplitModel", "build", "names", "register"]
