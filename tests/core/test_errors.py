from __future__ import annotations

import pickle

import pytest

from onroute.core.errors import CheckError, MachineError, UserError


@pytest.mark.parametrize(("kind", "code"), [(UserError, 2), (CheckError, 3), (MachineError, 4)])
def test_an_error_is_one_line_with_its_exit_code_and_survives_pickling(kind, code):
    error = pickle.loads(pickle.dumps(kind("routing-layers", "found 3 of 4 layers", "layer 2", "report it")))
    assert str(error) == "[routing-layers] found 3 of 4 layers; layer 2; report it"
    assert error.exit_code == code
