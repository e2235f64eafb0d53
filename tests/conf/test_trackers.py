"""Every key of the trackers says what it means."""

import ast
import inspect
from dataclasses import fields
from itertools import pairwise

import pytest

from penstock.conf.tracking import MlflowConfig, TrackingConfig, TrackioConfig, WandbConfig

SECTIONS = {"wandb", "mlflow", "trackio"}


@pytest.mark.parametrize("section", [TrackingConfig, WandbConfig, MlflowConfig, TrackioConfig])
def test_every_key_is_documented(section: type) -> None:
    (body,) = (node.body for node in ast.parse(inspect.getsource(section)).body if isinstance(node, ast.ClassDef))
    documented = {
        line.target.id
        for line, text in pairwise(body)
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(text, ast.Expr)
    }
    assert {field.name for field in fields(section)} - SECTIONS == documented
