from __future__ import annotations

import ast
import importlib
import inspect
import subprocess
import sys
from dataclasses import fields
from itertools import pairwise

from onroute.environments.catalog import ENVIRONMENTS


def test_reading_the_catalogue_imports_neither_torch_nor_the_task_library():
    code = (
        "import sys, onroute.environments.catalog as c; "
        "print([m for m in ('torch', 'transformers', 'reasoning_gym') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


def test_every_target_exists_and_has_the_methods_of_an_environment():
    for entry in ENVIRONMENTS.values():
        module, attribute = entry.target.split(":")
        implementation = getattr(importlib.import_module(module), attribute)
        assert callable(implementation.prompt)
        assert inspect.iscoroutinefunction(implementation.rollout)
        if "demonstrates" in entry.properties:
            assert callable(implementation.demonstration)


def test_every_option_is_explained_by_the_string_under_it():
    for entry in ENVIRONMENTS.values():
        body = ast.parse(inspect.getsource(entry.options)).body[0].body
        explained = {
            field.target.id
            for field, text in pairwise(body)
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
        }
        assert explained == {field.name for field in fields(entry.options)}
